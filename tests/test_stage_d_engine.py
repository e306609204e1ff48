"""Stage D: static batches and their memory, the size of the pool, the options, and stage C's operator."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace

import pytest
import torch
from contract.engines import GREEDY, MODEL, NOTHING, PROMPTS, ask, held, listener, one_by_one, sampler
from interrupts import interrupt_after

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive.checkpoints.loading import ModelSource
from stage_a_naive.checkpoints.presets import preset_config
from stage_c_fused_mlp.extension import ExtensionError
from stage_d_paged import LLM, SamplingParams, fused_mlp
from stage_d_paged.batch import largest_step
from stage_d_paged.kv_cache import CPU_POOL_BYTES, KVCache, PoolShape, blocks_that_fit, cpu_num_blocks
from stage_d_paged.options import EngineOptions
from stage_d_paged.runtime import Formats, load_runtime

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """One request after another through transformers."""
    return one_by_one(NaiveLLM(MODEL, device="cpu"))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, device="cpu")


def test_a_batch_may_fill_the_pool_to_its_last_slot(expected: list[list[int]]):
    llm = LLM(MODEL, device="cpu", num_kvcache_blocks=4, kvcache_block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)  # 3 + 6 tokens, the last one needs no slot
    assert ask(llm, [PROMPTS[0], PROMPTS[0][::-1]], params)[0] == expected[0][:6]
    assert (llm.memory.num_sequences, llm.memory.tokens, llm.memory.blocks) == (2, 16, 4)


def test_decode_steps_keep_to_the_tokens_of_a_step(expected: list[list[int]]):
    llm = LLM(MODEL, device="cpu", max_num_batched_tokens=4)
    rows: list[int] = []
    llm.runtime.model.register_forward_pre_hook(lambda model, given: rows.append(len(given[0])))
    assert ask(llm, PROMPTS) == expected
    assert max(rows) == 4


def test_a_batch_that_the_pool_cannot_hold_is_split_in_order(expected: list[list[int]]):
    llm = LLM(MODEL, device="cpu", num_kvcache_blocks=16, kvcache_block_size=4)
    order: list[int] = []
    assert ask(llm, PROMPTS, GREEDY, lambda index, piece: order.append(index)) == expected
    assert order.index(4) > max(place for place, index in enumerate(order) if index == 0)


def test_the_memory_report_shows_the_last_batch(llm: LLM):
    ask(llm, PROMPTS)
    assert llm.memory.num_sequences == 5
    assert llm.memory.tokens == sum(map(len, PROMPTS)) + 5 * 9  # the last token of each was never run
    assert llm.memory.block_waste < 0.5 < llm.memory.reservation_waste


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "stage_f_graph_tp"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer, 1 or more, got 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer, 1 or more, got True"),
        ({"enforce_eager": "no"}, "enforce_eager must be True or False, got 'no'"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be above 0"),
        ({"max_model_len": 1}, "max_model_len must be"),
        ({"gpu_memory_utilization": 1.5}, "at most 1, got 1.5"),
        ({"num_kvcache_blocks": 0}, "num_kvcache_blocks must be"),
        ({"kvcache_block_size": 0}, "kvcache_block_size must be"),
        ({"fused_mlp": "maybe"}, "fused_mlp must be 'auto', 'on' or 'off', got 'maybe'"),
        ({"attention_backend": "magic"}, "magic"),
        ({"attention_backend": "flash"}, "flash"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_honoured_is_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LLM(MODEL, device="cpu", **options)


def test_blocks_that_the_backend_cannot_read_are_refused_before_weights_are_loaded():
    source = ModelSource("no weights", preset_config("qwen2-tiny"), Path("nowhere"), Path("nowhere"))
    formats = Formats(backend=lambda *_: SimpleNamespace(name="flash", block_size_multiple=256))
    with pytest.raises(ValueError, match="kvcache_block_size=128: .*'flash' takes multiples of 256"):
        load_runtime(source, EngineOptions(kvcache_block_size=128), CPU, torch.float32, formats=formats)


@pytest.mark.compiler
@pytest.mark.parametrize("family", ["qwen2-tiny", "llama-tiny"])
def test_stage_cs_operator_in_the_mlp_changes_no_token(family: str):
    fused = LLM(f"random:{family}", device="cpu", fused_mlp="on")
    assert fused.runtime.model.layers[0].most_fused_rows == 2  # on a CPU
    plain = LLM(f"random:{family}", device="cpu")
    for some in (PROMPTS[:2], PROMPTS):
        assert ask(fused, some) == ask(plain, some)


def test_a_machine_that_cannot_build_the_operator_says_so_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    def cannot(device: torch.device) -> None:
        raise ExtensionError("no compiler here")

    monkeypatch.setattr(fused_mlp, "load_operators", cannot)
    with pytest.raises(ExtensionError, match="no compiler here"):
        LLM(MODEL, device="cpu", fused_mlp="on")


def test_the_pool_on_the_cpu_is_512_mib_or_one_full_sequence():
    assert cpu_num_blocks(block_bytes=2**20, block_size=16, max_model_len=4096) == CPU_POOL_BYTES // 2**20
    assert cpu_num_blocks(block_bytes=2**23, block_size=16, max_model_len=4096) == 256
    assert cpu_num_blocks(block_bytes=2**29, block_size=16, max_model_len=100) == 7


def test_a_pool_on_the_cpu_takes_memory_only_where_it_is_written():
    before = getrusage(RUSAGE_SELF).ru_minflt
    pool = KVCache(PoolShape(2, 4096, 16, 4, 64, torch.bfloat16, CPU))  # 64 MiB
    assert getrusage(RUSAGE_SELF).ru_minflt - before < 1000, "of 16384 pages"
    assert pool.tensor.shape == (2, 2, 4096, 16, 4, 64) and pool.tensor.dtype == torch.bfloat16
    assert not pool.tensor.any()


def test_the_largest_step_can_be_measured_in_a_pool_of_one_block(llm: LLM):
    step = largest_step(num_tokens=100, max_len=40, block_size=16, device=CPU)
    assert step.metadata.context_lens.tolist() == [40, 40, 20] and step.last_rows.tolist() == [39, 79, 99]
    hidden = llm.runtime.model(step.input_ids, step.positions, llm.runtime.make_pool(1), step.metadata)
    assert hidden.shape[0] == 100


def test_no_room_for_one_block_says_what_was_free_and_what_to_change():
    with pytest.raises(MemoryError, match=r"2\.00 MiB, 1\.00 MiB are left.*300 MiB of the GPU.*Raise gpu_memory_util"):
        blocks_that_fit(2**20, 2**21, 300 * 2**20, 0.9)
    assert blocks_that_fit(2**22 - 1, 2**21, 0, 0.9) == blocks_that_fit(2**21, 2**21, 0, 0.9) == 1


@pytest.mark.gpu
def test_on_the_gpu_the_pool_is_what_this_process_may_use():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.reset_peak_memory_stats()
    llm = LLM("random:qwen2.5-0.5b", device="cuda", gpu_memory_utilization=0.25)
    llm.generate([[1] * 4000] * 4, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert 0.1 * total < llm.kv_cache.num_bytes < 0.25 * total  # the rest is for the largest step
    assert torch.cuda.max_memory_allocated() < 0.26 * total


def test_a_request_that_has_finished_is_returned_after_a_step_that_fails(llm: LLM, expected: list[list[int]]):
    request = llm.add_request(PROMPTS[0], GREEDY)
    ask(llm, ["beside it"])
    with sampler(llm, lambda logits, params: logits):
        llm.add_request(PROMPTS[1], GREEDY)
        with pytest.raises(ValueError, match="sampling_fn must return"):
            llm.step()
    assert llm.step()[0] == [(request, expected[0])]
    assert llm.is_finished()


def test_a_call_that_a_second_interrupt_kept_from_dropping_its_requests_leaves_them_to_the_next(
    llm: LLM, expected: list[list[int]]
):
    with ExitStack() as second:

        def interrupted(*_: object) -> None:
            second.enter_context(interrupt_after(1, traced=("stage_d_paged/engine.py",)))  # as soon as it drops them
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ask(llm, PROMPTS[:3], GREEDY, interrupted)
    assert not llm.is_finished() or held(llm) != NOTHING, "they were not dropped"
    heard, listen = listener(1)
    [output] = llm.generate([PROMPTS[3]], GREEDY, False, listen)
    assert output["token_ids"] == expected[3] and heard == [output["text"]]
    assert llm.is_finished() and held(llm) == NOTHING
