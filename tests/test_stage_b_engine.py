"""Stage B gives stage A's tokens whatever is switched on or off, and cuts the surplus of its late checks exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stage_a_naive import LLM as NaiveLLM
from stage_a_naive import GenerationOutput, SamplingParams
from stage_b_decode_step import LLM
from stage_b_decode_step.token_log import TokenLog

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TINY = ["random:qwen2-tiny", "random:qwen3-tiny", "random:llama-tiny"]
PROMPTS = [[17], list(range(100, 130)), [7 * i % 4000 for i in range(290)]]  # one token; short; beyond 256
REQUESTS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=3, max_tokens=20),
    "penalties": replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5),
    "logprobs": replace(GREEDY, logprobs=2),
}


@pytest.fixture(scope="module")
def naive() -> NaiveLLM:
    return NaiveLLM("random:qwen2-tiny", device="cpu")


@pytest.fixture(scope="module")
def llm() -> LLM:
    """With a chunk size that divides none of the lengths asked for."""
    return LLM("random:qwen2-tiny", device="cpu", sync_every=3)


def ask(engine: NaiveLLM, prompts: object, params: object) -> list[GenerationOutput]:
    return engine.generate(prompts, params, use_tqdm=False)


def without_times(outputs: list[GenerationOutput]) -> list[dict[str, object]]:
    """The outputs with their measured times taken out and their log-probabilities rounded."""
    plain = []
    for output in outputs:
        numbers = {name: n for name, n in output["metrics"].items() if name.startswith("num_")}
        logprobs = [{i: round(p, 3) for i, p in step.items()} for step in output.get("logprobs", [])]
        plain.append({**output, "metrics": numbers, "logprobs": logprobs})
    return plain


@pytest.mark.parametrize("model", TINY)
def test_outputs_are_those_of_stage_a(model: str) -> None:
    naive, llm = NaiveLLM(model, device="cpu"), LLM(model, device="cpu", sync_every=8)
    for params in REQUESTS.values():
        assert without_times(ask(llm, PROMPTS, params)) == without_times(ask(naive, PROMPTS, params))


@pytest.mark.parametrize(
    "options",
    [
        {"static_cache": False},
        {"last_logits_only": False},
        {"pinned": False},
        {"buffers": False},
        {"async_eos": False},
        {"sync_every": 5},
        {"sdpa": False},
        {"matmul_precision": "highest"},
        {"warmup": False},
        {
            "static_cache": False,
            "last_logits_only": False,
            "pinned": False,
            "buffers": False,
            "async_eos": False,
            "sdpa": False,
            "matmul_precision": "highest",
            "warmup": False,
        },
    ],
    ids=lambda options: "-".join(options),
)
def test_every_idea_can_be_switched_off_alone_and_together(naive: NaiveLLM, options: dict[str, object]) -> None:
    llm = LLM("random:qwen2-tiny", device="cpu", **options)
    params = [GREEDY, REQUESTS["seeded"], REQUESTS["penalties"]]
    assert without_times(ask(llm, PROMPTS, params)) == without_times(ask(naive, PROMPTS, params))


def test_the_tutor_answers_as_in_stage_a() -> None:
    question = [{"role": "user", "content": "What is a KV cache?"}]
    params = SamplingParams(0.0, max_tokens=96)
    answers = [engine("tutor", device="cpu").chat(question, params, use_tqdm=False)[0] for engine in (NaiveLLM, LLM)]
    assert answers[0]["token_ids"] == answers[1]["token_ids"] and answers[1]["text"] == answers[0]["text"]


@pytest.mark.parametrize("sync_every", [1, 2, 8, 50])
@pytest.mark.parametrize("end", [0, 1, 7, 8, 18, 19])
def test_surplus_steps_are_cut_off_exactly_wherever_the_end_is(
    naive: NaiveLLM, llm: LLM, monkeypatch: pytest.MonkeyPatch, sync_every: int, end: int
) -> None:
    prompt = [[5, 6, 7]]
    ids = ask(naive, prompt, GREEDY)[0]["token_ids"]
    at = ids.index(ids[end])  # the first time that this token comes
    monkeypatch.setattr(llm, "sync_every", sync_every)
    monkeypatch.setattr(llm, "eos_token_ids", frozenset({ids[end]}))
    [output] = ask(llm, prompt, replace(GREEDY, ignore_eos=False))
    assert output["token_ids"] == ids[: at + 1] and output["finish_reason"] == "stop"
    assert output["metrics"]["num_generated_tokens"] == at + 1


def test_few_steps_are_computed_in_vain_and_none_where_the_end_is_known(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = llm._step
    ids = ask(llm, [[5, 6, 7]], GREEDY)[0]["token_ids"]

    def counted(token: torch.Tensor, cache: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return step(token, cache)

    monkeypatch.setattr(llm, "_step", counted)
    ask(llm, [[5, 6, 7]], GREEDY)
    assert steps == GREEDY.max_tokens - 1  # the first token is the prefill's
    steps = 0
    end = next(i for i in range(4, 20) if ids.index(ids[i]) == i)
    ask(llm, [[5, 6, 7]], replace(GREEDY, stop_token_ids=(ids[end],)))
    assert end <= steps < end + 2 * llm.sync_every


class Late:
    """The event of a copy that arrives only when it is waited for."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("buffers", [True, False])
def test_the_end_is_known_when_the_next_chunk_but_one_is_sent(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, buffers: bool
) -> None:
    params = replace(GREEDY, max_tokens=60)
    ids = ask(llm, [[5, 6, 7]], params)[0]["token_ids"]
    steps, step, send = [], llm._step, TokenLog.send

    def send_late(log: TokenLog) -> None:
        send(log)
        log._in_flight[-1] = (log._in_flight[-1][0], Late())

    monkeypatch.setattr(TokenLog, "send", send_late)
    monkeypatch.setattr(llm, "_work", {})
    monkeypatch.setattr(llm, "buffers", buffers)
    monkeypatch.setattr(llm, "sync_every", 4)
    end = next(i for i in range(5, 40) if ids.index(ids[i]) == i)  # chosen in step `end`
    monkeypatch.setattr(llm, "_step", lambda *inputs: steps.append(inputs) or step(*inputs))
    [output] = ask(llm, [[5, 6, 7]], replace(params, stop_token_ids=(ids[end],)))
    assert output["token_ids"] == ids[: end + 1]
    assert len(steps) == 4 * math.ceil(end / 4) + 4  # the chunk may stay in flight until the next one is sent


def test_a_stop_string_across_two_tokens_ends_the_text_before_it() -> None:
    naive, llm = NaiveLLM("tutor", device="cpu"), LLM("tutor", device="cpu", sync_every=4)
    ids = naive.tokenizer.encode("A KV cache")
    free = ask(naive, [ids], replace(GREEDY, max_tokens=24))[0]["token_ids"]
    tokenizer = naive.tokenizer
    pieces = [tokenizer.decode(free[i : i + 2]) for i in range(6, 16)]
    stop = next(p[1:-1] for p in pieces if len(p) > 3 and "\ufffd" not in p)
    params = replace(GREEDY, max_tokens=24, stop=stop)
    assert without_times(ask(llm, [ids], params)) == without_times(ask(naive, [ids], params))
    assert ask(llm, [ids], params)[0]["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt_length", [4090, 4094, 4095])
def test_generation_ends_where_the_model_does_and_never_writes_past_the_cache(llm: LLM, prompt_length: int) -> None:
    [output] = ask(llm, [[9] * prompt_length], replace(GREEDY, max_tokens=50))
    assert len(output["token_ids"]) == 4096 - prompt_length and output["finish_reason"] == "length"
    [cache] = {id(c): c for c, _ in llm._work.values() if c is not None and c.length >= 4096}.values()
    assert int(cache.position) == 4095  # the last token was never fed back
    assert cache.length == 4096  # and no room reserved for tokens past the model's length


def test_a_request_finds_nothing_of_the_one_before_in_the_cache(naive: NaiveLLM, llm: LLM) -> None:
    long, short = PROMPTS[2], PROMPTS[1]
    fresh = ask(naive, [short], replace(GREEDY, max_tokens=230))
    again = ask(llm, [long, short], replace(GREEDY, max_tokens=230))
    assert again[1]["token_ids"] == fresh[0]["token_ids"]
    with torch.inference_mode():
        for cache, _ in llm._work.values():
            for layer in cache.layers:
                layer.keys.fill_(float("nan"))  # as if a request had overflowed
    assert ask(llm, [short], replace(GREEDY, max_tokens=230))[0]["token_ids"] == fresh[0]["token_ids"]


def test_streamed_pieces_join_to_the_text() -> None:
    llm = LLM("tutor", device="cpu", sync_every=4)
    pieces = {0: [], 1: []}
    conversations = [[{"role": "user", "content": q}] for q in ("What is a KV cache?", "你好")]
    outputs = llm.chat(
        conversations, SamplingParams(0.0, max_tokens=40), use_tqdm=False, on_text=lambda i, p: pieces[i].append(p)
    )
    assert ["".join(pieces[0]), "".join(pieces[1])] == [o["text"] for o in outputs]
    assert len(pieces[0]) > 5  # as it becomes known, not at the end


def test_the_sampler_can_be_replaced_and_sees_what_it_sees_in_stage_a(naive: NaiveLLM) -> None:
    llm = LLM("random:qwen2-tiny", device="cpu", sync_every=3)

    def second_best(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        assert logits.shape == (1, 4096) and logits.dtype == torch.float32 and params == [asked]
        return logits.topk(2).indices[:, 1]

    naive.sampling_fn = llm.sampling_fn = second_best
    try:
        for asked in (GREEDY, REQUESTS["penalties"]):
            assert ask(llm, "abc", asked)[0]["token_ids"] == ask(naive, "abc", asked)[0]["token_ids"]
        half = LLM("random:qwen2-tiny", device="cpu", dtype="bfloat16")
        half.sampling_fn = second_best
        ask(half, "abc", asked)  # float32 there too
    finally:
        naive.sampling_fn = None
    llm.sampling_fn = lambda logits, params: logits
    with pytest.raises(ValueError, match=r"integer ids of shape \[1\]"):
        ask(llm, "abc", GREEDY)
    llm.sampling_fn = None
    assert ask(llm, "abc", GREEDY)[0]["token_ids"] == ask(naive, "abc", GREEDY)[0]["token_ids"]


def test_the_warm_up_of_a_prompt_that_nearly_fills_the_cache_stays_inside_it(naive: NaiveLLM) -> None:
    prompt, params = [[9] * 254], replace(GREEDY, max_tokens=2)
    llm = LLM("random:qwen2-tiny", device="cpu")
    assert ask(llm, prompt, params)[0]["token_ids"] == ask(naive, prompt, params)[0]["token_ids"]
    assert list(llm._work) == [256]


def test_a_sampler_may_keep_its_logits_although_a_graph_overwrites_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, buffer, kept = llm._step, torch.empty(1, 4096), []

    def replay(token: torch.Tensor, cache: object) -> torch.Tensor:
        return buffer.copy_(step(token, cache))  # as a CUDA graph: every output in the same memory

    monkeypatch.setattr(llm, "_step", replay)
    monkeypatch.setattr(llm, "sampling_fn", lambda logits, params: kept.append(logits) or logits.argmax(-1))
    ids = ask(llm, "abc", GREEDY)[0]["token_ids"]
    assert [int(logits.argmax()) for logits in kept[: len(ids)]] == ids and len(set(ids)) > 1


def test_an_exception_in_the_middle_leaves_the_engine_usable_and_the_settings_as_they_were(llm: LLM) -> None:
    before = ask(llm, "abc", GREEDY)
    settings = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled(), torch.is_grad_enabled()

    def interrupt(index: int, piece: str) -> None:
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", GREEDY, use_tqdm=False, on_text=interrupt)
    now = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled(), torch.is_grad_enabled()
    assert now == settings
    assert without_times(ask(llm, "abc", GREEDY)) == without_times(before)


def test_warm_up_is_done_once_a_cache_size_and_counts_as_build_time() -> None:
    llm = LLM("random:qwen2-tiny", device="cpu")
    calls = []
    warm_up = llm._warm_up
    llm._warm_up = lambda *args: (calls.append(args), warm_up(*args))
    built = llm.build_time
    ask(llm, [[1, 2]], replace(GREEDY, max_tokens=1))
    assert calls == [(256, 2, 0)]  # one token needs no decode step, so none is compiled for it
    ask(llm, [[1, 2], [3, 4]], GREEDY)
    assert calls[1:] == [(256, 2, 4)] and llm.build_time > built
    ask(llm, [[1, 2], [3, 4]], GREEDY)
    assert len(calls) == 2
    ask(llm, [[1] * 300], GREEDY)
    assert calls[2:] == [(512, 300, 4)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compile": True, "static_cache": False}, "needs static_cache=True"),
        ({"sync_every": 4, "async_eos": False}, "sync_every=4 needs async_eos=True"),
        ({"sync_every": 0}, "sync_every must be None or an integer, 1 or more, got 0"),
        ({"sync_every": "4"}, "sync_every must be None or an integer, 1 or more, got '4'"),
        ({"compile": "no"}, "compile must be True or False, got 'no'"),
        ({"sdpa": "no"}, "sdpa must be None, True or False, got 'no'"),
        ({"warmup": 1}, "warmup must be True or False, got 1"),
        ({"matmul_precision": "low"}, "got 'low'"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM("random:qwen2-tiny", device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "attention"),
    [
        ({}, "grouped_sdpa"),
        ({"compile": True}, "grouped_sdpa_for_prefill"),
        ({"compile": True, "sdpa": True}, "grouped_sdpa"),
        ({"compile": True, "sdpa": False}, "eager"),
        ({"sdpa": False}, "eager"),
    ],
)
def test_attention_is_a_fused_kernel_except_where_a_compiler_makes_its_own_or_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], attention: str
) -> None:
    monkeypatch.setattr("stage_b_decode_step.llm.compiled", lambda step, device: step)
    llm = LLM("random:qwen2-tiny", device="cpu", **options)
    assert llm.model.config._attn_implementation == attention


def test_an_unknown_option_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM("random:qwen2-tiny", max_num_seqs=4)


def test_the_prefill_computes_the_logits_of_its_last_position_only_unless_told_otherwise() -> None:
    for last_only, rows in ((True, 1), (False, 30)):
        llm = LLM("random:qwen2-tiny", device="cpu", last_logits_only=last_only, warmup=False)
        computed: list[int] = []
        llm.model.lm_head.register_forward_hook(lambda head, inputs, out, seen=computed: seen.append(out.shape[1]))
        ask(llm, [list(range(30))], replace(GREEDY, max_tokens=2))
        assert computed == [rows, 1]
