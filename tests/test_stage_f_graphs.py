"""Padding to recorded sizes changes no token and touches no page.

A CPU has no CUDA graphs, but the code around them is the same: `EagerRecorder` stands in for them. Tokens of
recorded engines under preemption, and of every kind of sampling, are in `contract/`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from contract.engines import GREEDY, MODEL, PROMPTS, ask, ids
from kernel_cases import CPU, CUDA
from stand_ins import EagerRecorder, FakeMegakernel, countdown, forwards_of, with_megakernel

import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp import step_input
from stage_f_graph_tp.cuda_graph import LARGEST_GRAPH, DecodeGraphs, capture_sizes
from stage_f_graph_tp.forward import StepOutput
from stage_f_graph_tp.head import Head
from stage_f_graph_tp.last_tokens import LastTokens
from stage_f_graph_tp.step_input import StepShape, TokenSource, attention_metadata, device_views

WARM = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


def build(
    sizes: list[int], model: str = MODEL, prefills: tuple[int, ...] = (), **options: object
) -> tuple[stage_f_graph_tp.LLM, Counter[int | str]]:
    """Build stage F with a recorded step for each of these sizes; return it with the count of their replays."""
    llm = stage_f_graph_tp.LLM(model, device="cpu", **options)
    recorder = EagerRecorder()
    llm.runner.capture(recorder, sizes, prefills)
    return llm, recorder.replays


@pytest.fixture(scope="module")
def stage_e() -> stage_e_batching.LLM:
    return stage_e_batching.LLM(MODEL, device="cpu", kvcache_block_size=4, num_kvcache_blocks=512)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 12, 17, 20, 100, 512, 513, 600])
def test_every_batch_size_has_a_graph_or_the_eager_way(max_num_seqs):
    sizes = capture_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(max_num_seqs, LARGEST_GRAPH)
    graphs = DecodeGraphs(sizes, table_width=4, max_model_len=64, padding_slot=max_num_seqs)
    for size in range(1, max_num_seqs + 1):
        shape = StepShape(size, size, size, 2, size, 1, 20)
        padded = graphs.takes(shape)
        if size > LARGEST_GRAPH:
            assert padded is None
        else:
            assert padded.num_seqs == min(s for s in sizes if s >= size)
            assert (padded.table_width, padded.max_context_len) == (4, 64)
            assert graphs.takes(padded) == padded


def test_a_step_with_prefill_is_left_to_the_eager_way():
    graphs = DecodeGraphs([1, 2, 4], table_width=4, max_model_len=64, padding_slot=4)
    for shape in (StepShape(1, 1, 1, 1, 0, 1, 1), StepShape(5, 3, 2, 2, 2, 3, 8)):
        assert graphs.takes(shape) is None


@pytest.mark.parametrize("overlap", [True, False])
def test_every_batch_size_from_forty_down_gives_stage_es_tokens(stage_e, overlap):
    pool = {"kvcache_block_size": 4, "num_kvcache_blocks": 512}
    llm, replays = build(capture_sizes(40), max_num_seqs=40, without="" if overlap else "overlap", **pool)
    prompts, params = countdown(40)
    assert ask(llm, prompts, params) == ask(stage_e, prompts, params)
    # The first token comes out of the prefill; 40 … 33 rows run in the graph of 40, 32 … 17 in that of 32, and so on.
    expected = {40: 8, 32: 16, 16: 8, 8: 4, 4: 2, 2: 1, 1: 1}
    assert replays == expected


@pytest.mark.parametrize("prefills", [(), (8, 64, 128)], ids=["decode", "prefill"])
def test_padding_writes_no_block(prefills):
    touched = {}
    for name in ("graphs", "eager"):
        llm = stage_f_graph_tp.LLM(MODEL, device="cpu", kvcache_block_size=4, num_kvcache_blocks=64, without="overlap")
        if name == "graphs":
            llm.runner.capture(EagerRecorder(), [8], prefills)
            assert not llm.kv_cache.tensor.any(), "recording wrote KV"
        llm.kv_cache.tensor.fill_(123.0)
        ask(llm, *countdown(5))
        ask(llm, PROMPTS)
        touched[name] = (llm.kv_cache.tensor != 123.0).any(-1).any(-1).any(0).any(0)  # [blocks, block_size]
    assert touched["eager"].any() and not touched["eager"].all()
    assert torch.equal(touched["graphs"], touched["eager"])


def test_rows_of_padding_hold_nothing_of_the_step_before():
    graphs = DecodeGraphs([8], table_width=6, max_model_len=24, padding_slot=8)
    exact = StepShape(3, 3, 3, 2, 3, 1, 8)
    shape = graphs.takes(exact)
    host = step_input.host_views(np.full(shape.num_bytes, 99, np.uint8), shape)  # as an earlier step may have left it
    graphs.pad(host, exact)
    arrays = [host.slot_mapping, host.context_lens, host.batch_slots, host.sample_slots]
    assert [array[3:].tolist() for array in arrays] == [[value] * 5 for value in (-1, 0, 8, 8)]
    assert (host.block_tables[3:] == -1).all() and host.cu_seqlens_q.tolist() == list(range(9))


@pytest.mark.parametrize("max_model_len", [32, 33, 34, 35, 36])
def test_an_answer_reaches_max_model_len_exactly(stage_e, max_model_len):
    llm, replays = build([1, 2], max_num_seqs=2, kvcache_block_size=4, max_model_len=max_model_len)
    prompts = [PROMPTS[2], PROMPTS[1][: max_model_len - 1]]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = llm.generate(prompts, params, False)
    assert [len(o["token_ids"]) + len(o["prompt_token_ids"]) for o in outputs] == [max_model_len] * 2
    assert {o["finish_reason"] for o in outputs} == {"length"}
    counts = [len(o["token_ids"]) for o in outputs]
    limits = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    assert ids(outputs) == ask(stage_e, prompts, limits)
    assert replays[1] > 0


def test_what_is_no_logprob_and_no_other_sampler_is_chosen_inside_the_step(stage_e):
    llm, _ = build([8], max_num_seqs=8)
    llm.runner.head.complete = lambda *args: pytest.fail("sampled behind the step")
    asked = {"top_p": 0.9}, {"repetition_penalty": 1.5}, {"top_k": 20, "presence_penalty": 0.5}, {}, {"min_p": 0.01}
    params = [SamplingParams(0.9 * (i % 4), seed=i, max_tokens=8, ignore_eos=True, **p) for i, p in enumerate(asked)]
    expected = ask(stage_e, PROMPTS, params)
    assert ask(llm, PROMPTS, params) == expected
    alone = [ask(llm, [prompt], [p])[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    assert alone == expected


def test_a_cpu_has_no_graphs_and_needs_none():
    llm = stage_f_graph_tp.LLM(MODEL, device="cpu", enforce_eager=False)
    assert llm.runner.forwards == [llm.runner.layers]


def build_with_megakernel(
    sizes: list[int], most_rows: int | None = None, **options: object
) -> tuple[stage_f_graph_tp.LLM, FakeMegakernel, Counter[int | str]]:
    """As `build`, with a megakernel for steps of up to `most_rows` requests."""
    llm = stage_f_graph_tp.LLM(MODEL, device="cpu", kvcache_block_size=4, num_kvcache_blocks=64, **options)
    runner, fake = with_megakernel(llm, most_rows)
    recorder = EagerRecorder()
    runner.capture(recorder, sizes)
    fake.sizes.clear()  # of the launches that load the kernel
    return llm, fake, recorder.replays


def strict(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    assert logits.isfinite().all(), "it is asked of what a step that gave up has left"
    return logits.argmax(-1)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("params", "sampling_fn"),
    [(GREEDY, None), (WARM, None), (dataclasses.replace(WARM, top_p=0.9, logprobs=2), None), (GREEDY, strict)],
    ids=["greedy", "sampled", "filtered", "a replaced sampler"],
)
def test_a_megakernel_that_gave_up_costs_the_calls_of_that_moment_and_nothing_after(overlap, params, sampling_fn):
    llm, fake, _ = build_with_megakernel([1, 2], max_num_seqs=2, without="" if overlap else "overlap")
    llm.sampling_fn = sampling_fn
    expected = llm.generate(PROMPTS[:2], params, False)
    assert fake.steps > 10
    for step in (1, 2, 7):
        fake.gives_up = fake.steps + step
        with pytest.raises(RuntimeError, match="waited longer than 2000 ms in layer 3, phase 2"):
            llm.generate(PROMPTS[:2], params, False)
        found = llm.generate(PROMPTS[:2], params, False)
        assert ids(found) == ids(expected)
        assert [output.get("logprobs") for output in found] == [output.get("logprobs") for output in expected]
        assert llm.calls.stats()["num_used_blocks"] == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_of_one_launch_and_graphs_take_over_each_others_tokens(stage_e, overlap):
    llm, fake, replays = build_with_megakernel(
        [1, 2, 4, 5], max_num_seqs=5, most_rows=4, without="" if overlap else "overlap"
    )
    params = [dataclasses.replace(GREEDY if i % 2 else WARM, max_tokens=2 + 5 * i) for i in range(5)]
    params[3] = dataclasses.replace(params[3], repetition_penalty=2.0)  # not the token that the kernel has chosen
    assert ask(llm, PROMPTS, params) == ask(stage_e, PROMPTS, params)
    assert fake.sizes == {1, 2, 3, 4}
    assert set(replays) == {5, 4, 3, 2}, "five rows, and the sampler behind the kernel while the penalised request runs"
    [graphs] = forwards_of(llm.runner, DecodeGraphs)
    assert [shape.num_seqs for shape in graphs.shapes] == [5]  # the smaller ones would never be replayed


def test_steps_of_ever_new_sizes_do_not_pile_up_views_of_the_input():
    buffers, views = step_input.StepBuffers(2**18, torch.device("cpu")), []
    for tokens in range(1, 2 * step_input.MAX_VIEWS):
        shape = StepShape(tokens, 1, 1, 1, 0, tokens, tokens)
        input_ids = buffers.next_host(shape).input_ids
        input_ids[:] = tokens
        views.append(weakref.ref(input_ids))
        assert (buffers.send().input_ids == tokens).all()
    first, second, third = (buffers.next_host(shape) for _ in range(3))
    assert first is third is not second, "views are made once for each buffer and layout"
    assert sum(view() is not None for view in views) <= step_input.MAX_VIEWS


def test_a_steps_input_is_not_written_where_the_copy_of_the_one_before_may_still_read():
    shape = StepShape(4, 1, 1, 1, 0, 4, 4)
    buffers = step_input.StepBuffers(4096, torch.device("cpu"))
    first, second, third = (buffers.next_host(shape).input_ids for _ in range(3))
    assert not np.shares_memory(first, second) and np.shares_memory(first, third)


def test_what_another_process_packed_is_sent_as_if_it_had_been_filled_in_here():
    shape = StepShape(4, 1, 1, 1, 0, 4, 4)
    here, there = (step_input.StepBuffers(4096, CPU) for _ in range(2))
    here.next_host(shape).input_ids[:] = [5, 6, 7, 2**40]
    there.unpack(shape, here.packed(shape))
    assert there.send().input_ids.tolist() == [5, 6, 7, 2**40]
    elsewhere = step_input.StepBuffers(4096, torch.device("meta"))
    elsewhere.next_host(shape)
    assert elsewhere.send().input_ids.is_meta, "on the model's device"


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)
def test_tokens_that_have_not_been_read_are_not_written_over(device):
    head, kept = Head(None, 8, torch.float32, None, LastTokens(4, device)), torch.zeros(4).long().to(device)
    steps = []
    for token_ids in ([1, 2], [3, 4, 5]):  # a replay leaves its tokens where the one before did
        row = kept[: len(token_ids)].copy_(torch.tensor(token_ids))
        steps.append(head.finish(StepOutput(ids=row, kept=row), None, None, np.zeros(len(row)), 0))
    assert [step.wait().token_ids for step in steps] == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize("shape", [StepShape(3, 2, 2, 4, 1, 2, 9), StepShape(5, 3, 1, 1, 0, 3, 3)])
def test_the_arrays_of_a_steps_input_are_aligned_side_by_side_and_as_long_as_their_shape_says(shape):
    buffer = torch.zeros(shape.num_bytes + 64, dtype=torch.uint8).numpy()
    *arrays, sampling, block_tables = step_input.host_views(buffer, shape)
    offset = 0
    for array in (*arrays, *sampling, block_tables):
        assert array.ctypes.data - buffer.ctypes.data == offset
        offset += array.nbytes + -array.nbytes % (4 * array.itemsize)  # the next one begins at a multiple of 16 bytes
    assert shape.num_bytes == offset
    tokens, seqs, samples, width = shape[:4]
    assert [len(array) for array in arrays] == [*[tokens] * 3, seqs, samples, samples, seqs + 1, seqs]
    assert [array.shape for array in sampling] == [(samples,), (samples,), (samples, 8), (samples,)]
    assert block_tables.shape == (seqs, width)
    assert step_input.largest_input(tokens, seqs, width) == shape._replace(num_samples=seqs).num_bytes


@pytest.mark.parametrize(
    ("shape", "surely"),
    [
        (StepShape(3, 3, 3, 2, 3, 1, 8), True),
        (StepShape(3, 3, 3, 2, 3, 1, 8, TokenSource.HOST), False),  # some may be rows of one sequence
        (StepShape(3, 3, 3, 2, 3, 1, 8, TokenSource.TABLE), False),
        (StepShape(3, 3, 3, 2, 2, 1, 8), False),  # the end of a prompt may share a block that is filled in this step
    ],
)
def test_only_in_a_step_of_plain_decodes_is_no_key_but_the_newest_new(shape, surely):
    inputs = device_views(torch.zeros(shape.num_bytes, dtype=torch.uint8), shape)
    assert attention_metadata(inputs, shape).one_new_key == surely
