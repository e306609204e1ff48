"""Stage E answers what stage A answers, whatever the engine does meanwhile, and survives what goes wrong."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stage_a_naive
import stage_e_batching
from stage_a_naive.cli import run
from stage_a_naive.outputs import Completion, Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.options import add_options

PRESETS = ["random:qwen2-tiny", "random:qwen3-tiny", "random:llama-tiny"]
PROMPTS = [[(i * 37 + n) % 4000 + 1 for i in range(n)] for n in (3, 33, 17, 9, 50)]
PROMPTS.append(PROMPTS[4][:40] + [7, 8, 9])  # shares a long prefix
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

VARIANTS = {
    "plain": {},
    "small chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "tiny pool": {"num_kvcache_blocks": 32, "kvcache_block_size": 2, "max_num_batched_tokens": 20, "max_num_seqs": 6},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_num_seqs": 3},
}


def ids(outputs) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def tiny(**options: object) -> stage_e_batching.LLM:
    return stage_e_batching.LLM("random:qwen2-tiny", device="cpu", **options)


@pytest.fixture(scope="module")
def llm() -> stage_e_batching.LLM:
    return tiny(num_kvcache_blocks=64, kvcache_block_size=4)


@pytest.fixture(scope="module")
def tutor() -> stage_e_batching.LLM:
    return stage_e_batching.LLM("tutor", device="cpu", max_num_batched_tokens=16, max_num_seqs=4)


@pytest.mark.parametrize("preset", PRESETS)
def test_greedy_answers_are_stage_as_in_every_variant(preset):
    expected = ids(stage_a_naive.LLM(preset, device="cpu").generate(PROMPTS, GREEDY, False))
    for name, options in VARIANTS.items():
        engine = stage_e_batching.LLM(preset, device="cpu", **options)
        if name == "tiny pool":
            engine.engine.scheduler.watermark = lambda sequence: 0  # whoever fits comes in, and has to go again
        assert ids(engine.generate(PROMPTS, GREEDY, False)) == expected, name
        assert engine.engine.stats()["num_used_blocks"] == 0
        if name == "tiny pool":
            assert engine.engine.counters.num_preemptions > 0
        if name == "plain":
            again = engine.generate(PROMPTS, GREEDY, False)
            assert ids(again) == expected
            assert again[4]["metrics"]["num_cached_tokens"] == 48, "all full blocks but the last token's"


def test_the_tutor_gives_stage_as_text(tutor):
    conversations = [
        [{"role": "user", "content": question}]
        for question in ("What is a KV cache?", "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？")
    ]
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = stage_a_naive.LLM("tutor", device="cpu").chat(conversations, params, False)
    found = tutor.chat(conversations, params, False)
    assert ids(found) == ids(expected)
    assert [o["text"] for o in found] == [o["text"] for o in expected]
    assert [o["finish_reason"] for o in found] == [o["finish_reason"] for o in expected]


def test_a_seeded_request_gives_the_same_tokens_alone_in_company_and_preempted(llm):
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=14, ignore_eos=True, repetition_penalty=1.2)
        for i in range(len(PROMPTS))
    ]
    alone = [ids(llm.generate([prompt], [p], False))[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    assert ids(llm.generate(PROMPTS, params, False)) == alone
    tight = tiny(num_kvcache_blocks=20, kvcache_block_size=4)
    tight.engine.scheduler.watermark = lambda sequence: 0
    assert ids(tight.generate(PROMPTS, params, False)) == alone
    assert tight.engine.counters.num_preemptions > 0


def test_logprobs_come_with_the_rows_that_ask_for_them(llm):
    params = [SamplingParams(temperature=0, max_tokens=4, logprobs=n) for n in (None, 2, None, 0, None, 1)]
    outputs = llm.generate(PROMPTS, params, False)
    assert ["logprobs" in output for output in outputs] == [False, True, False, True, False, True]
    for position, token_id in zip(outputs[1]["logprobs"], outputs[1]["token_ids"], strict=True):
        assert len(position) == 2 and max(position, key=position.get) == token_id


def test_streamed_pieces_join_to_the_text(tutor):
    params = SamplingParams(temperature=0, max_tokens=30)
    prompts = ["什么是 KV cache？", "What is prefill?"]
    expected = [output["text"] for output in tutor.generate(prompts, params, False)]
    pieces = list(tutor.stream(prompts[0], params))
    assert len(pieces) > 3
    assert "".join(pieces) == expected[0]
    joined = ["", ""]
    for index, piece in tutor.stream(prompts, params):
        joined[index] += piece
    assert joined == expected


def test_a_stream_tells_every_token_with_its_logprobs_also_before_its_text_is_certain(tutor):
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, stop="Value!")
    [request] = tutor.requests(["什么是 KV cache？"], params)
    mailbox = tutor.engine.new_mailbox()
    tutor.engine.add_request(request, mailbox)
    events = []
    while not events or events[-1].output is None:
        tutor.engine.advance(mailbox)
        events += mailbox.take()
    tokens = [token for event in events for token in event.tokens]
    output = events[-1].output
    assert [token.token_id for token in tokens] == output["token_ids"]
    assert [token.logprobs for token in tokens] == output["logprobs"]
    assert "".join(token.text for token in tokens) == output["text"]
    assert any(not token.text for token in tokens) and all(len(event.tokens) == 1 for event in events)


def test_text_made_at_the_end_is_the_text_made_on_the_way(tutor):
    heard: dict[int, str] = {}
    stops = [(), ("的", "e")] * 3
    params = [SamplingParams(temperature=1.3, seed=i, max_tokens=25, stop=stop) for i, stop in enumerate(stops)]
    prompts = ["什么是分页？"] * 6
    quiet = tutor.generate(prompts, params, False)
    loud = tutor.generate(prompts, params, False, lambda i, piece: heard.update({i: heard.get(i, "") + piece}))
    assert [o["text"] for o in quiet] == [o["text"] for o in loud] == [heard.get(i, "") for i in range(6)]


@settings(max_examples=60, deadline=None)
@given(token_ids=st.lists(st.integers(0, 4200), max_size=30), max_tokens=st.integers(1, 30))
def test_text_at_the_end_equals_text_on_the_way_for_any_tokens(tutor, token_ids, max_tokens):
    request = Request(0, [1], SamplingParams(max_tokens=max_tokens), seed=0)
    eos = frozenset({3})
    late, early = (Completion(request, tutor.tokenizer, eos, 4096, text_at_end) for text_at_end in (True, False))
    for token_id in token_ids:
        if late.finish_reason is None:
            late.append(token_id)
            early.append(token_id)
            assert late.finish_reason == early.finish_reason
    late.finish("length")
    early.finish("length")
    assert late.text == early.text


def test_a_stream_that_is_not_read_to_its_end_leaves_nothing(llm):
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    assert llm.engine.has_unfinished()
    stream.close()
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats()["num_used_blocks"] == 0


def test_a_stream_and_a_generate_share_the_engine(llm):
    expected = ids(llm.generate(PROMPTS, GREEDY, False))
    text = llm.generate(PROMPTS[:1], GREEDY, False)[0]["text"]
    stream = llm.stream(PROMPTS[:1], GREEDY)
    pieces = [next(stream)[1]]
    assert ids(llm.generate(PROMPTS, GREEDY, False)) == expected
    pieces += [piece for _, piece in stream]
    assert "".join(pieces) == text


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["listener", "sampler", "model"])
def test_an_error_leaves_no_request_of_the_call_behind(llm, monkeypatch, error, where):
    expected = ids(llm.generate(PROMPTS, GREEDY, False))
    calls = 0

    def fail(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error("stop here")
        return args[0].argmax(-1) if where == "sampler" else None

    with monkeypatch.context() as patch:
        if where == "sampler":
            patch.setattr(llm, "sampling_fn", fail)
        elif where == "model":
            model = llm.runner.model
            patch.setattr(model, "forward", lambda *args, forward=model.forward: fail() or forward(*args))
        with pytest.raises(error, match="stop here"):
            llm.generate(PROMPTS, GREEDY, False, fail if where == "listener" else None)
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats()["num_used_blocks"] == 0
    outputs = llm.generate(PROMPTS[:3], GREEDY, False)
    assert ids(outputs) == expected[:3]


def test_a_replaced_sampler_is_asked_with_float32_logits_and_one_parameter_a_row(llm, monkeypatch):
    seen = []

    def second_best(logits, params):
        seen.append((logits.dtype, len(logits) == len(params)))
        return logits.topk(2).indices[:, 1]

    monkeypatch.setattr(llm, "sampling_fn", second_best)
    other = ids(llm.generate(PROMPTS[:2], GREEDY, False))
    assert set(seen) == {(torch.float32, True)}
    monkeypatch.setattr(llm, "sampling_fn", None)
    assert ids(llm.generate(PROMPTS[:2], GREEDY, False)) != other
    monkeypatch.setattr(llm, "sampling_fn", lambda logits, params: logits)
    with pytest.raises(ValueError, match="must return a tensor of integer ids of shape"):
        llm.generate(PROMPTS[:2], GREEDY, False)


def test_one_bad_prompt_is_refused_before_anything_is_queued(llm):
    for bad, message in (([1] * 257, "257 tokens"), ([4096], "outside the vocabulary"), ([], "is empty")):
        with pytest.raises(ValueError, match=message):
            llm.generate([PROMPTS[0], bad], GREEDY, False)
        assert not llm.engine.has_unfinished()
    with pytest.raises(ValueError, match="3 prompts but 1 sampling parameters"):
        llm.generate(PROMPTS[:3], [GREEDY], False)


def test_a_prompt_that_the_pool_cannot_hold_is_named_with_the_limit():
    small = tiny(num_kvcache_blocks=4, kvcache_block_size=4)
    with pytest.raises(ValueError, match="prompt 1: 17 tokens take 5 blocks of 4 .* KV pool has 4; .*raise num_kvc"):
        small.generate([[1] * 16, [1] * 17], GREEDY, False)
    assert not small.engine.has_unfinished()


def test_every_part_agrees_on_the_block_size(llm):
    sizes = {llm.engine.scheduler.block_manager.block_size, llm.kv_cache.block_size}
    assert sizes == {llm.kv_cache.tensor.shape[3]} == {4}
    assert llm.engine.scheduler.block_manager.num_blocks == llm.kv_cache.tensor.shape[2] == 64


def test_a_trace_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OSError, match="trace cannot be written.*folder that exists.*nowhere"):
        tiny(trace=tmp_path / "nowhere" / "trace.jsonl")
    with pytest.raises(ValueError, match="trace must be None or the path of a file, got 7"):
        tiny(trace=7)


def test_a_string_is_one_prompt(llm):
    assert len(llm.generate("hello", GREEDY, False)) == 1


def test_an_answer_ends_at_the_pools_end_and_at_the_models(llm):
    [output] = llm.generate([[5] * 250], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), False)
    assert (len(output["token_ids"]), output["finish_reason"]) == (7, "length"), "256 slots, one token needs none"
    short = tiny(max_model_len=20)
    [output] = short.generate([[5] * 19], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), False)
    assert (len(output["token_ids"]), output["finish_reason"]) == (1, "length")


def test_options_are_refused_by_name():
    with pytest.raises(TypeError, match="max_num_seq'"):
        tiny(max_num_seq=3)
    with pytest.raises(ValueError, match="this stage runs on one GPU"):
        tiny(tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(100\) is less than max_num_seqs \(512\)"):
        tiny(max_num_batched_tokens=100)


def test_metrics_are_of_this_request(llm):
    outputs = llm.generate(PROMPTS, GREEDY, False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        metrics = output["metrics"]
        assert metrics["num_prompt_tokens"] == len(prompt)
        assert metrics["num_generated_tokens"] == 12
        assert 0 < metrics["prefill_time"] <= metrics["ttft"]
        assert metrics["decode_time"] > 0


def test_the_command_line_streams_an_answer_and_writes_a_trace(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    argv = ["--prompt", "What is a KV cache?", "--max-tokens", "8", "--device", "cpu", "--trace", str(trace)]
    assert run("stage_e_batching", "Stage E.", add_options, argv) == 0
    assert "[performance]" in capsys.readouterr().out
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(entry["samples"] for record in records for entry in record["sequences"]) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton", "flash"])
def test_the_tutor_gives_the_cpus_tokens_on_a_gpu(tutor, backend):
    if backend == "flash":
        pytest.importorskip("flash_attn")
    # Questions of the FAQ, as chat: only there are the tutor's margins wider than bfloat16's rounding.
    questions = ["What is a KV cache?", "What is prefill?", "用要点概述：如何从零实现一个迷你版 vLLM 推理循环？"]
    asked = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=40)
    engine = stage_e_batching.LLM(
        "tutor", device="cuda", dtype="bfloat16", attention_backend=backend, max_num_batched_tokens=16, max_num_seqs=4
    )
    assert ids(engine.chat(asked, params, False)) == ids(tutor.chat(asked, params, False))
