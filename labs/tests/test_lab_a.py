"""Judges lab A."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import stage_a_naive.llm as stage
from labs.tests.support import (
    GREEDY,
    DigitTokenizer,
    answers_of_transformers,
    check_whole_stage,
    noisy_argmax,
    one_hot,
    request_of,
)
from labs.variants import append, floors, parts, timed
from stage_a_naive import cache, chat, loop, sampling
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.contract.filters import filter_logits
from stage_a_naive.contract.noise import gumbel_noise
from stage_a_naive.contract.params import SamplingParams


def random_logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


def numbers(row: torch.Tensor) -> str:
    """The first numbers of a row, for a message."""
    return f"{', '.join(f'{value:.4f}' for value in row[:3].tolist())}, …"


class TestVariant:
    """A prompt in parts: the tokens of the whole prompt, every token of it run once."""

    @pytest.mark.parametrize("cuts", [(), (1,), (-7, -4, -1), range(1, 12)], ids=str)
    def test_the_answer_is_that_of_the_whole_prompt_and_each_part_ran_once(self, cuts: tuple[int, ...]):
        model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
        prompt, _, expected = answers_of_transformers()[0]
        ends = [cut % len(prompt) for cut in cuts]
        pieces = [prompt[i:j] for i, j in zip((0, *ends), (*ends, len(prompt)), strict=True)]
        run: list[int] = []
        model.get_input_embeddings().register_forward_hook(lambda module, ids, rows: run.append(ids[0].numel()))
        ids = parts.generate_in_parts(model, pieces, -1, 12)
        assert ids == expected[:12], f"{len(pieces)} parts: {expected[:6]}… expected, got {ids[:6]}…"
        wanted = [len(piece) for piece in pieces] + [1] * 11
        assert run == wanted, f"tokens run in each pass: {wanted} expected, got {run}"

    def test_it_ends_with_the_end_token(self):
        model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
        prompt, _, expected = answers_of_transformers()[0]
        ids = parts.generate_in_parts(model, [prompt[:3], prompt[3:]], expected[4], 20)
        end = expected.index(expected[4]) + 1
        assert ids == expected[:end], f"the answer ends with its end token: {expected[:end]} expected, got {ids}"
        assert len(parts.generate_in_parts(model, [prompt], -1, 1)) == 1, "max_tokens=1 is one token"
        ids = parts.generate_in_parts(model, [prompt], expected[0], 20)
        assert ids == expected[:1], f"the first token is the end token: expected {expected[:1]}, got {ids}"


class TestChatPrompt:
    def test_one_message(self):
        text = chat.chatml([{"role": "user", "content": "Hi"}])
        expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert text == expected, f"expected {expected!r}, got {text!r}"

    def test_several_messages_keep_their_order(self):
        text = chat.chatml([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "两行\nlines"}])
        expected = (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n两行\nlines<|im_end|>\n<|im_start|>assistant\n"
        )
        assert text == expected, f"expected {expected!r}, got {text!r}"

    @pytest.mark.parametrize("content", ["  def f():\n", "\tTabs and spaces \t ", "", "What does <|im_end|> mean?"])
    def test_the_content_is_kept_as_it_is(self, content: str):
        text = chat.chatml([{"role": "user", "content": content}])
        expected = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        assert text == expected, f"nothing of the content is changed: expected {expected!r}, got {text!r}"


class TestSample:
    def test_greedy_is_the_exact_argmax_with_the_first_of_equals(self):
        logits = torch.tensor([[0.1, 3.0, 3.0, -1.0], [5.0, 0.0, 1.0, 2.0]])
        ids = sampling.sample(logits, [SamplingParams(temperature=0.0)] * 2, [1, 2], [0, 0])
        assert isinstance(ids, torch.Tensor), f"ids are a tensor [rows], got a {type(ids).__name__}"
        assert ids.tolist() == [1, 0], f"greedy rows are argmax, expected [1, 0], got {ids.tolist()}"
        assert ids.dtype == torch.int64, f"ids are int64, got {ids.dtype}"

    def test_draws_follow_the_softmax(self):
        probs = torch.tensor([0.5, 0.3, 0.2])
        logits = probs.log().repeat(3000, 1)
        ids = sampling.sample(logits, [SamplingParams()] * 3000, list(range(3000)), [0] * 3000)
        shares = torch.bincount(ids, minlength=3) / 3000
        assert (shares - probs).abs().max() < 0.05, f"tokens of probability 0.5, 0.3, 0.2 came {shares.tolist()}"

    def test_a_draw_depends_on_seed_and_step_and_not_on_the_company(self):
        torch.manual_seed(0)
        logits = torch.randn(6, 500)
        params = [SamplingParams(temperature=5.0)] * 6
        together = sampling.sample(logits, params, [7, 8, 9, 7, 8, 9], [0, 1, 2, 3, 4, 5])
        alone = [sampling.sample(logits[i : i + 1], params[:1], [(7, 8, 9)[i % 3]], [i]).item() for i in range(6)]
        assert together.tolist() == alone, "a row samples the same token alone and in a batch"
        same = logits[:1].repeat(20, 1)
        steps = sampling.sample(same, params[:1] * 20, [7] * 20, list(range(20)))
        seeds = sampling.sample(same, params[:1] * 20, list(range(20)), [0] * 20)
        assert len(set(steps.tolist())) > 5, "another step must sample with other noise"
        assert len(set(seeds.tolist())) > 5, "another seed must sample with other noise"

    def test_a_row_is_the_argmax_of_filtered_logits_plus_the_noise_of_its_seed_and_step(self):
        torch.manual_seed(0)
        logits, seeds, steps = torch.randn(40, 300), list(range(40)), [i % 7 for i in range(40)]
        params = SamplingParams(temperature=1.3)
        ids = sampling.sample(logits, [params] * 40, seeds, steps).tolist()
        expected = [noisy_argmax(*row) for row in zip(logits, [params] * 40, seeds, steps, strict=True)]
        assert ids == expected, f"argmax(filtered + gumbel_noise(seed, step)) is {expected[:6]}…, got {ids[:6]}…"

    def test_each_row_has_its_own_parameters(self):
        torch.manual_seed(0)
        logits = torch.randn(1, 300).repeat(40, 1)
        params = [SamplingParams(temperature=(0.5, 1.0, 4.0)[i % 3], top_k=(0, 2)[i % 2]) for i in range(40)]
        ids = sampling.sample(logits, params, list(range(40)), [0] * 40).tolist()
        expected = [noisy_argmax(*row) for row in zip(logits, params, range(40), [0] * 40, strict=True)]
        assert ids == expected, (
            f"temperatures and top_k differ from row to row: {expected[:6]}… expected, got {ids[:6]}…"
        )

    @pytest.mark.parametrize(
        "filters", [{"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.9, "min_p": 0.1}], ids=str
    )
    def test_each_filter_leaves_the_likeliest_tokens(self, filters: dict[str, float]):
        params, logits = SamplingParams(temperature=1.5, **filters), random_logits(40, 300)
        ids = sampling.sample(logits, [params] * 40, list(range(40)), [0] * 40).tolist()
        noise = [gumbel_noise(seed, 0, 300, logits.device) for seed in range(40)]
        expected = [int((filter_logits(row, params) + n).argmax()) for row, n in zip(logits, noise, strict=True)]
        assert ids == expected, f"{filters}: argmax(filter_logits + noise) is {expected[:6]}…, got {ids[:6]}…"

    def test_greedy_and_random_rows_mix(self):
        logits = torch.tensor([[0.0, 1.0, 0.0]]).repeat(21, 1)
        params = [SamplingParams(temperature=0.0)] + [SamplingParams(top_k=1)] * 20
        ids = sampling.sample(logits, params, list(range(21)), [0] * 21).tolist()
        assert ids == [1] * 21, f"top_k=1 leaves only the likeliest, token 1: filter before the noise; got {ids}"


class TestAppend:
    """Keys and values of several tokens at once, behind those that are there."""

    def run(self, x: torch.Tensor, ends: list[int], spare: int) -> tuple[torch.Tensor, list[int]]:
        """What tokens get that come in parts, and how many rows of keys and values were computed in each."""
        keys, values = torch.full((2, len(x) + spare, cache.HEAD_DIM), math.nan)  # what is not filled may be anything
        cache.rows.clear()
        parts = zip([0, *ends], [*ends, len(x)], strict=True)
        outputs = [append.append_and_attend(x[i:j], keys, values, i) for i, j in parts]
        rows = list(cache.rows)
        assert keys[: len(x)].allclose(x @ cache.TO_KEY, atol=1e-5), "keys of all tokens, in their order, are stored"
        assert values[: len(x)].allclose(x @ cache.TO_VALUE, atol=1e-5), "values too"
        assert keys[len(x) :].isnan().all(), "the rows behind the last token are left alone"
        return torch.cat(outputs), rows

    @pytest.mark.parametrize("ends", [[], [1], [7], [3, 4], list(range(1, 8))], ids=str)
    @pytest.mark.parametrize("spare", [0, 3])
    def test_each_token_attends_to_all_before_it_and_to_itself(self, ends: list[int], spare: int):
        x = torch.randn(8, cache.HEAD_DIM)
        found, rows = self.run(x, ends, spare)
        scores = (x @ cache.TO_QUERY) @ (x @ cache.TO_KEY).T / cache.HEAD_DIM**0.5
        causal = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
        expected = causal.softmax(-1) @ (x @ cache.TO_VALUE)
        for token, (got, right) in enumerate(zip(found, expected, strict=True)):
            assert torch.allclose(got, right, atol=1e-5), (
                f"8 tokens whose parts end at {ends}: token {token}, which attends to {token + 1} rows, must get "
                f"{numbers(right)}, got {numbers(got)}"
            )
        assert sum(rows) == 16, f"8 tokens are 16 rows of keys and values, each computed once; got {sum(rows)}"


class TestTimed:
    """A device whose work takes known times, and a clock that only moves while somebody waits for it."""

    def run(self, durations: list[float], before: float = 0.0) -> tuple[float, int]:
        clock, queue, left = [100.0], [before], list(durations)

        def now() -> float:
            clock[0] += sum(queue)
            queue.clear()
            return clock[0]

        found = timed.milliseconds(lambda: queue.append(left.pop(0)), now, len(durations) - 1)
        return found, len(left)

    @pytest.mark.parametrize(
        ("durations", "median"), [([9, 1, 2, 30], 2), ([0.9, 0.003, 0.005, 0.004, 0.04], 0.0045), ([5, 7], 7)], ids=str
    )
    def test_it_is_the_median_of_all_calls_but_the_first(self, durations: list[float], median: float):
        found, left = self.run(durations)
        assert left == 0, f"{len(durations) - 1} calls are counted and one comes first, {left} did not run"
        assert found == pytest.approx(1000 * median), (
            f"a call of {durations[0]} s comes first, then those of {durations[1:]} s: "
            f"expected their median, {1000 * median:g} ms, got {found:g} ms"
        )

    def test_what_was_launched_before_is_not_counted(self):
        found, _ = self.run([1, 2], before=50)
        assert found == pytest.approx(2000), f"50 s of older work are nobody's: expected 2000 ms, got {found}"


class TestFloor:
    @pytest.mark.parametrize(
        ("weights", "kv", "prompt", "generated", "bandwidth", "seconds"),
        [
            (1000, 10, 3, 2, 1000.0, 1.04),
            (1000, 10, 3, 4, 1000.0, 3.15),
            (10, 1, 100, 3, 10.0, 22.3),
            (988_000_000, 12_288, 1000, 1, 4.2e12, 0.0),
            (7, 0, 5, 11, 2.0, 35.0),
        ],
    )
    def test_it_is_what_all_decode_steps_read(self, weights, kv, prompt, generated, bandwidth, seconds):
        found = floors.answer_floor(weights, kv, prompt, generated, bandwidth)
        assert found == pytest.approx(seconds), (
            f"weights of {weights} bytes, {kv} per token, prompt {prompt}, answer {generated}, {bandwidth} bytes/s: "
            f"expected {seconds} s, got {found}"
        )


class CountingModel:
    """A model that says last + 1. Its cache is transformers', changed in place, with the tokens that it has seen."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids, past_key_values=None, use_cache=True, **_):
        assert input_ids.shape[0] == 1, f"input_ids are [1, tokens], got {list(input_ids.shape)}"
        self.calls.append(input_ids[0].tolist())
        cache = DynamicCache() if past_key_values is None else past_key_values
        cache.seen = [*getattr(cache, "seen", []), *self.calls[-1]]
        first = self.calls[0][0]
        text = list(range(first, self.calls[-1][-1] + 1))
        assert cache.seen == text, f"cache and input together must be the text so far, {text}, got {cache.seen}"
        return SimpleNamespace(logits=one_hot(input_ids + 1, 100), past_key_values=cache)


class AnyModel:
    """A model whose scores are arbitrary numbers that follow from the last token."""

    @staticmethod
    def logits_after(token: int) -> torch.Tensor:
        return torch.randn(100, generator=torch.Generator().manual_seed(token))

    def __call__(self, input_ids, **_):
        rows = torch.stack([self.logits_after(int(token)) for token in input_ids[0]])
        return SimpleNamespace(logits=rows[None], past_key_values=object())


class TestLoop:
    def test_one_prefill_then_one_token_per_step(self):
        model = CountingModel()
        ids = loop.generate(model, [3, 4, 5], eos_id=99, max_tokens=4)
        assert ids == [6, 7, 8, 9], f"after 5, max_tokens=4: expected [6, 7, 8, 9], got {ids}"
        assert model.calls == [[3, 4, 5], [6], [7], [8]], (
            f"the whole prompt once, then one new token per call and none after the last, got {model.calls}"
        )

    def test_it_stops_after_the_end_of_sequence_token(self):
        model = CountingModel()
        assert loop.generate(model, [17], eos_id=20, max_tokens=40) == [18, 19, 20], "it ends with eos_id, 20"
        assert len(model.calls) == 3, "no step after the end"

    def test_nothing_comes_after_a_first_token_that_is_the_end(self):
        model = CountingModel()
        ids = loop.generate(model, [19], eos_id=20, max_tokens=40)
        assert ids == [20], f"after 19 comes the end, 20: expected [20], got {ids}"

    def test_one_token_needs_no_decode_step(self):
        model = CountingModel()
        assert loop.generate(model, [1, 2], eos_id=99, max_tokens=1) == [3], "max_tokens=1: the first token alone"
        assert len(model.calls) == 1, "the prefill's logits are the first token's"


class TestGenerateOne:
    def engine(self, **attributes: object) -> stage.LLM:
        engine = object.__new__(stage.LLM)
        vars(engine).update(
            model=CountingModel(),
            device=torch.device("cpu"),
            tokenizer=DigitTokenizer(),
            max_model_len=50,
            eos_token_ids=frozenset({20}),
            sampling_fn=None,
        )
        vars(engine).update(attributes)
        next_token = engine._next_token

        def checked(logits: torch.Tensor, *others: object) -> int:
            assert logits.shape == (1, 100), f"self._next_token takes logits [1, vocab], got {list(logits.shape)}"
            return next_token(logits, *others)

        engine._next_token = checked
        return engine

    def generate(
        self,
        engine: stage.LLM,
        prompt: list[int],
        max_tokens: int,
        arrival: float = 0.0,
        on_text: Callable[[int, str], object] | None = None,
        **params: object,
    ):
        return engine._generate_one(request_of(prompt, max_tokens, **params), arrival, on_text)

    def test_one_prefill_then_one_token_per_step(self):
        engine = self.engine()
        output = self.generate(engine, [3, 4, 5], 4)
        ids = output["token_ids"]
        assert ids == [6, 7, 8, 9], f"after 5, max_tokens=4: expected [6, 7, 8, 9], got {ids}"
        assert engine.model.calls == [[3, 4, 5], [6], [7], [8]], (
            f"the whole prompt once, then one new token per call and none after the last, got {engine.model.calls}"
        )
        assert output["finish_reason"] == "length"

    def test_it_stops_at_the_end_of_sequence_token(self):
        output = self.generate(self.engine(), [17], 40)
        ids, reason = output["token_ids"], output["finish_reason"]
        assert (ids, reason) == ([18, 19, 20], "stop"), f"expected 18, 19, 20 and 'stop', got {ids} and {reason!r}"

    def test_an_answer_of_one_token_needs_no_decode_step(self):
        engine = self.engine()
        assert self.generate(engine, [1, 2], 1)["token_ids"] == [3]
        assert len(engine.model.calls) == 1, "the prefill's logits are the first token's"

    def test_the_sampler_chooses(self):
        [prompt, params] = [3, 4, 5], {"temperature": 4.0}
        output = self.generate(self.engine(model=AnyModel()), prompt, 6, **params)
        expected = []
        for step in range(6):
            row = AnyModel.logits_after(([*prompt, *expected])[-1])
            expected.append(noisy_argmax(row, SamplingParams(**params), 0, step))
        assert output["token_ids"] == expected, f"sampled with seed 0: {expected} expected, got {output['token_ids']}"

    def test_ttft_counts_from_the_arrival(self):
        output = self.generate(self.engine(), [3, 4, 5], 4, arrival=time.perf_counter() - 60)
        ttft, prefill = output["metrics"]["ttft"], output["metrics"]["prefill_time"]
        assert 60 <= ttft < 120, f"the request came in 60 s ago, so its ttft is 60 s and a little, got {ttft:.6f} s"
        assert prefill < 30, f"the 60 s before the prefill are no part of its time, got {prefill:.1f} s"

    def test_text_goes_out_as_it_comes(self):
        pieces = []
        self.generate(self.engine(), [3, 4, 5], 4, on_text=lambda index, piece: pieces.append((index, piece)))
        assert "".join(piece for _, piece in pieces) == "6789", f"hand on_text to self._next_token; it got {pieces}"

    def test_a_stop_string_ends_the_answer(self):
        engine = self.engine(tokenizer=load_tokenizer(resolve("tutor")))
        output = self.generate(engine, [34], 12, stop=("CD",))  # tokens 35 to 38 are A to D
        found, expected = (
            (output["token_ids"], output["text"], output["finish_reason"]),
            ([35, 36, 37, 38], "AB", "stop"),
        )
        assert found == expected, f"the model says ABCDEF…, stop='CD': expected {expected}, got {found}"

    def test_each_time_is_between_the_right_moments(self, monkeypatch):
        clock = [10.0]  # a forward pass takes 4 s with a prompt and 1 s without, choosing a token 0.5 s

        class SlowModel(CountingModel):
            def __call__(self, input_ids, **options):
                clock[0] += 4 if input_ids.shape[1] > 1 else 1
                return super().__call__(input_ids, **options)

        engine = self.engine(model=SlowModel())
        choose = engine._next_token

        def slowly(*arguments: object) -> int:
            clock[0] += 0.5
            return choose(*arguments)

        engine._next_token = slowly
        monkeypatch.setattr(stage, "synchronized_time", lambda device: clock[0])
        metrics = self.generate(engine, [3, 4, 5], 4, arrival=7.0)["metrics"]
        found = {name: metrics[name] for name in ("ttft", "prefill_time", "decode_time")}
        expected = {"ttft": 7.5, "prefill_time": 4.5, "decode_time": 4.5}
        assert found == expected, (
            "a call at 7.0 s that starts at 10.0, its first token at 14.5 and its last at 19.0 s: "
            f"expected {expected}, got {found}"
        )

    def test_the_times_are_measured(self):
        metrics = self.generate(self.engine(), [3, 4, 5], 4)["metrics"]
        counts = metrics["num_prompt_tokens"], metrics["num_generated_tokens"]
        assert counts == (3, 4), f"3 prompt tokens and 4 generated ones, got {counts}"
        for name in ("prefill_time", "decode_time", "ttft"):
            assert metrics[name] > 0, f"{name} is the time between two moments, which are not the same: got 0 s"


class TestWholeStage:
    def test_the_tutor_answers(self):
        check_whole_stage(stage.LLM)

    def test_penalties_reach_the_sampler(self):
        llm = stage.LLM("tutor", device="cpu")
        params = SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=2.0, frequency_penalty=2.0)
        [plain, penalised] = llm.generate(["a a a a"] * 2, [GREEDY, params], use_tqdm=False)
        assert len(set(penalised["token_ids"])) >= len(set(plain["token_ids"][:12])), "penalties make tokens rarer"
        assert penalised["token_ids"] != plain["token_ids"][:12], "presence and frequency of 2 must change this answer"
