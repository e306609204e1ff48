"""The work that the benchmark gives out, and the floors under it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.floor import Ceilings, ModelCost, floors
from benchmarks.workloads import SIZES, Call, make_workload, workload_names
from stage_a_naive.checkpoints.presets import preset_config

pytestmark = pytest.mark.fast
H200 = Ceilings(copy_bytes_per_s=4.28e12, matmul_operations_per_s=710e12)
each_size = pytest.mark.parametrize("size", SIZES, ids="size_{}".format)  # an id "gpu" would be taken for the marker


def cost_of(preset: str, bytes_per_number: int = 2) -> ModelCost:
    return ModelCost(preset_config(preset), bytes_per_number)


def test_mixed_is_the_published_workload():
    [[call]] = make_workload("mixed", "gpu").rounds
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    assert [list(prompt) for prompt in call.prompts] == prompts
    assert list(call.max_tokens) == outputs
    assert (call.prompt_tokens, call.output_tokens) == (142_827, 133_966)
    assert call.context_tokens_read() == 120_938_031
    params = make_workload("mixed", "gpu").sampling_params(call)
    assert all(p.temperature == 0.6 and p.ignore_eos for p in params)


def test_hashes_are_those_of_the_published_results():
    """A changed hash makes every committed results file worthless, so it must change only on purpose."""
    assert {name: make_workload(name, "gpu").hash[:12] for name in workload_names()} == {
        "single": "3453730732d4",
        "decode32": "f13c9567b917",
        "chat32": "1d4f981cb00b",
        "chat": "5242bfb16127",
        "mixed": "12304789bba4",
        "prefix": "e972664b8d2f",
        "ttft": "5a47c857c279",
    }


@each_size
def test_no_prompt_begins_like_another_except_in_prefix(size):
    beginnings = []
    for name in workload_names():
        workload = make_workload(name, size)
        for call in [call for calls in workload.rounds for call in calls]:
            starts = {prompt[:8] for prompt in call.prompts}
            assert len(starts) == (1 if name == "prefix" else len(call.prompts))
            beginnings += starts
        beginnings += {prompt[:8] for call in workload.warm_up_round() for prompt in call.prompts}
    assert len(set(beginnings)) == len(beginnings)


def test_small_sizes_stay_inside_the_tutors_vocabulary_and_positions():
    for name in workload_names():
        workload = make_workload(name, "cpu")
        calls = [*workload.rounds[0], *workload.warm_up_round()]
        assert all(0 <= token < 4096 for call in calls for prompt in call.prompts for token in prompt)
        assert workload.longest <= 4096


def test_unknown_workload_and_size_are_refused_by_name():
    with pytest.raises(ValueError, match="no workload 'triple' of size 'cpu'; there are: single"):
        make_workload("triple", "cpu")
    with pytest.raises(ValueError, match="of size 'huge'; there are: .*; cpu, gpu, tiny"):
        make_workload("single", "huge")


@pytest.mark.parametrize("preset", ["qwen2-tiny", "qwen3-tiny", "llama-tiny"])
def test_counted_weights_are_those_of_the_model(preset):
    from transformers import AutoModelForCausalLM

    config = preset_config(preset)
    model = AutoModelForCausalLM.from_config(config)
    read = sum(p.numel() for p in model.parameters())  # a tied weight counts once
    if not config.tie_word_embeddings:
        read -= model.get_input_embeddings().weight.numel()  # of which a step reads single rows
    assert cost_of(preset, 4).weight_bytes == 4 * read


@pytest.mark.parametrize(
    ("preset", "single_ms", "decode32_ms", "mixed_s"),
    [("qwen2.5-0.5b", 0.232, 0.290, 0.74), ("qwen3-0.6b", 0.289, 0.827, 3.73)],
)
def test_floors_on_an_h200(preset, single_ms, decode32_ms, mixed_s):
    found = {name: floors(make_workload(name, "gpu"), cost_of(preset), H200) for name in workload_names()}
    assert found["single"]["tpot_ms"] == pytest.approx(single_ms, abs=5e-4)
    assert found["decode32"]["step_ms"] == pytest.approx(decode32_ms, abs=5e-4)
    assert found["mixed"]["seconds"] == pytest.approx(mixed_s, rel=0.01)
    assert all(value > 0 for floor in found.values() for value in floor.values())


def test_with_experts_a_step_reads_those_that_its_requests_touch():
    dense, sparse = cost_of("qwen3-tiny"), cost_of("qwen3-moe-tiny")  # 4 of 16 experts per token
    one, two, uneven = (Call("all", ((1, 2),) * len(out), out) for out in ((8,), (8, 8), (8, 2)))

    def weights(cost: ModelCost, call: Call) -> float:
        return cost.decode(call).num_bytes - call.context_tokens_read() * cost.kv_bytes_per_token

    assert weights(dense, one) == weights(dense, two) == 8 * dense.weight_bytes
    alone, both = weights(sparse, one) / 8, weights(sparse, two) / 8
    expert = 2 * 3 * sparse.config.moe_intermediate_size * sparse.config.hidden_size
    assert alone == sparse.weight_bytes
    assert both - alone == pytest.approx(sparse.config.num_hidden_layers * 3 * expert), "7 experts instead of 4"
    assert weights(sparse, uneven) == pytest.approx(2 * both + 6 * alone)
    assert sparse.prefill(one).num_bytes > alone, "two tokens"


def test_a_shared_prefix_is_computed_once():
    cost = cost_of("qwen2-tiny")
    shared = Call("all", ((1, 2, 3, 4), (1, 2, 3, 5)), (1, 1))
    apart = Call("all", ((1, 2, 3, 4), (2, 2, 3, 5)), (1, 1))
    saved = cost.prefill(apart).operations - cost.prefill(shared).operations
    assert saved == 3 * 2 * cost.matmul_parameters[0] + 6 * cost.attention_operations_per_pair


@given(length=st.integers(1, 40), output=st.integers(1, 40))
def test_context_tokens_read_counts_each_token_before(length, output):
    call = Call("all", (tuple(range(length)),), (output,))
    assert call.context_tokens_read() == sum(length + made for made in range(output))
    assert call.context_tokens_read(8) == sum(min(length + made, 8) for made in range(output))


def test_decode_reads_the_last_tokens_alone_in_layers_with_a_window():
    call = Call("all", ([1] * 1000, [1] * 20), (3, 2))
    cost = cost_of("gemma-3-270m")
    contexts = [1000, 1001, 1002, 20, 21]
    read = sum(3 * context + 15 * min(context, 512) for context in contexts) * cost.kv_bytes_per_token / 18
    assert cost.decode(call).num_bytes == pytest.approx(3 * cost.weight_bytes + read)
