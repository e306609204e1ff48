"""Drives lab A."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import torch
from transformers import DynamicCache

import stage_a_naive.llm as stage
from labs.driving import Compared, close, numbers
from labs.tests.support import (
    GREEDY,
    DigitTokenizer,
    Values,
    one_hot,
    random_prompt,
    request_of,
    some,
    tutor,
    whole_stage,
)
from labs.variants import append, floors, parts, timed
from stage_a_naive import cache, chat, loop, sampling
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.params import SamplingParams


class TestVariant:
    """A prompt in parts: the tokens of the whole prompt, every token of it run once."""

    def test_the_answer_is_that_of_the_whole_prompt_and_each_part_ran_once(self) -> Values:
        model, prompt = tutor(), random_prompt(24)
        run: list[int] = []
        model.get_input_embeddings().register_forward_hook(lambda module, ids, rows: run.append(ids[0].numel()))
        for cuts in ([], [1], [17, 20, 23], range(1, 12), sorted(numbers.sample(range(1, 24), 4))):
            pieces = [prompt[i:j] for i, j in zip((0, *cuts), (*cuts, 24), strict=True)]
            run.clear()
            yield f"{len(pieces)} parts, cut at {list(cuts)}: tokens", parts.generate_in_parts(model, pieces, -1, 12)
            yield f"{len(pieces)} parts, cut at {list(cuts)}: tokens run in each pass", run

    def test_it_ends_with_the_end_token(self) -> Values:
        model, prompt = tutor(), random_prompt(9)
        ids = parts.generate_in_parts(model, [prompt[:3], prompt[3:]], -1, 20)
        for number in (4, 0):
            found = parts.generate_in_parts(model, [prompt[:3], prompt[3:]], ids[number], 20)
            yield f"the end token is {ids[number]}, which comes as number {number}: the answer ends with it", found
        yield "max_tokens=1 is one token", parts.generate_in_parts(model, [prompt], -1, 1)


class TestChatPrompt:
    def test_one_message(self) -> Values:
        yield "one message of the user, 'Hi'", chat.chatml([{"role": "user", "content": "Hi"}])

    def test_several_messages_keep_their_order(self) -> Values:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "两行\nlines"}]
        yield "a system prompt and two lines of the user", chat.chatml(messages)

    def test_the_content_is_kept_as_it_is(self) -> Values:
        for content in ("  def f():\n", "\tTabs and spaces \t ", "", "What does <|im_end|> mean?"):
            yield f"nothing of the content {content!r} is changed", chat.chatml([{"role": "user", "content": content}])

    def test_random_messages(self) -> Values:
        for _ in range(20):
            roles = numbers.choices(("system", "user", "assistant"), k=numbers.randint(1, 5))
            texts = ["".join(numbers.choices(" \n\t<|>aé字.", k=numbers.randint(0, 12))) for _ in roles]
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            yield f"the messages {messages}", chat.chatml(messages)


def sampled(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], steps: list[int]) -> torch.Tensor:
    ids = sampling.sample(logits, params, seeds, steps)
    assert isinstance(ids, torch.Tensor), f"ids are a tensor [rows], got a {type(ids).__name__}"
    return ids


class TestSample:
    def test_greedy_is_the_exact_argmax_with_the_first_of_equals(self) -> Values:
        logits = torch.tensor([[0.1, 3.0, 3.0, -1.0], [5.0, 0.0, 1.0, 2.0]])
        yield (
            "greedy rows are the argmax, the first of equals, int64",
            sampled(logits, [SamplingParams(temperature=0.0)] * 2, [1, 2], [0, 0]),
        )
        logits = torch.randn(20, 50)
        yield (
            "greedy rows of random logits",
            sampled(logits, [SamplingParams(temperature=0.0)] * 20, *[some(20, 0, 9)] * 2),
        )

    def test_draws_follow_the_softmax(self) -> Values:
        logits, first = torch.tensor([0.5, 0.3, 0.2]).log().repeat(3000, 1), numbers.randrange(10**6)
        ids = sampled(logits, [SamplingParams()] * 3000, list(range(first, first + 3000)), [0] * 3000)
        shares = torch.bincount(ids, minlength=3) / 3000
        yield "how often tokens of probability 0.5, 0.3, 0.2 come", close(shares, atol=0.002)

    def test_a_draw_depends_on_seed_and_step_and_not_on_the_company(self) -> Values:
        logits, params, seeds = torch.randn(6, 500), [SamplingParams(temperature=5.0)] * 6, some(6, 0, 10**6)
        steps = [0, 1, 2, 3, 4, 5]
        yield "six rows in a batch", sampled(logits, params, seeds, steps)
        alone = [int(sampled(logits[i : i + 1], params[:1], seeds[i : i + 1], [i])) for i in range(6)]
        yield "a row samples the same token alone and in a batch", alone
        same = logits[:1].repeat(20, 1)
        yield "another step samples with other noise", sampled(same, params[:1] * 20, seeds[:1] * 20, list(range(20)))
        yield "another seed samples with other noise", sampled(same, params[:1] * 20, list(range(20)), [0] * 20)

    def test_a_row_is_the_argmax_of_filtered_logits_plus_the_noise_of_its_seed_and_step(self) -> Values:
        seeds, steps = some(40, 0, 10**6), some(40, 0, 7)
        ids = sampled(torch.randn(40, 300), [SamplingParams(temperature=1.3)] * 40, seeds, steps)
        yield "argmax(filtered + gumbel_noise(seed, step)) of 40 rows", ids

    def test_each_row_has_its_own_parameters(self) -> Values:
        logits = torch.randn(1, 300).repeat(40, 1)
        params = [SamplingParams(temperature=(0.5, 1.0, 4.0)[i % 3], top_k=(0, 2)[i % 2]) for i in range(40)]
        yield "temperatures and top_k differ from row to row", sampled(logits, params, some(40, 0, 999), [0] * 40)

    def test_each_filter_leaves_the_likeliest_tokens(self) -> Values:
        for filters in ({"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.9, "min_p": 0.1}):
            params, logits = SamplingParams(temperature=1.5, **filters), torch.randn(40, 300)
            found = sampled(logits, [params] * 40, some(40, 0, 999), [0] * 40)
            yield f"{filters}: argmax(filter_logits + noise)", found

    def test_greedy_and_random_rows_mix(self) -> Values:
        logits = torch.tensor([[0.0, 1.0, 0.0]]).repeat(21, 1)
        params = [SamplingParams(temperature=0.0)] + [SamplingParams(top_k=1)] * 20
        ids = sampled(logits, params, list(range(21)), [0] * 21)
        yield "top_k=1 leaves only the likeliest, token 1: filter before the noise", ids
        params = [SamplingParams(temperature=numbers.choice((0.0, 0.7, 2.0))) for _ in range(30)]
        yield "greedy rows beside sampled ones", sampled(torch.randn(30, 200), params, some(30, 0, 999), some(30, 0, 9))


class TestAppend:
    """Keys and values of several tokens at once, after the stored ones."""

    def test_each_token_attends_to_all_before_it_and_to_itself(self) -> Values:
        for ends in ([], [1], [7], [3, 4], list(range(1, 8)), sorted(numbers.sample(range(1, 8), 3))):
            for spare in (0, numbers.randint(1, 9)):
                x, given = torch.randn(8, cache.HEAD_DIM), f"8 tokens whose parts end at {ends}, {spare} rows to spare"
                keys, values = torch.full(
                    (2, 8 + spare, cache.HEAD_DIM), math.nan
                )  # unfilled rows may contain anything
                cache.rows.clear()
                pairs = zip([0, *ends], [*ends, 8], strict=True)
                outputs = [append.append_and_attend(x[i:j], keys, values, i) for i, j in pairs]
                rows = sum(cache.rows)
                yield (
                    f"{given}: what each token gets, which attends to all before it and to itself",
                    close(torch.cat(outputs)),
                )
                yield f"{given}: the keys of all tokens are stored in their order, and no row behind them", close(keys)
                yield f"{given}: values too", close(values)
                yield f"{given}: rows of keys and values computed, each once", rows


class TestTimed:
    """A device whose work takes known times, and a clock that only moves during a wait."""

    def run(self, durations: list[float], before: float = 0.0) -> tuple[float, int]:
        clock, queue, left = [100.0], [before], list(durations)

        def now() -> float:
            clock[0] += sum(queue)
            queue.clear()
            return clock[0]

        found = timed.milliseconds(lambda: queue.append(left.pop(0)), now, len(durations) - 1)
        return found, len(left)

    def test_it_is_the_median_of_all_calls_but_the_first(self) -> Values:
        random = [[numbers.randint(1, 1000) / 8 for _ in range(numbers.randint(2, 12))] for _ in range(20)]
        for durations in ([9, 1, 2, 30], [0.9, 0.003, 0.005, 0.004, 0.04], [5, 7], *random):
            found, left = self.run(durations)
            given = f"a call of {durations[0]} s comes first, then those of {durations[1:]} s"
            yield f"{given}: calls that did not run", left
            yield f"{given}: their median, in ms", found

    def test_what_was_launched_before_is_not_counted(self) -> Values:
        yield "50 s of older work are nobody's, then calls of 1 and 2 s: ms", self.run([1, 2], before=50)[0]


class TestFloor:
    def test_it_is_what_all_decode_steps_read(self) -> Values:
        cases = [
            (1000, 10, 3, 2, 1000.0),
            (1000, 10, 3, 4, 1000.0),
            (10, 1, 100, 3, 10.0),
            (988_000_000, 12_288, 1000, 1, 4.2e12),
            (7, 0, 5, 11, 2.0),
        ]
        cases += [(*(numbers.randint(1, most) for most in (10**6, 1000, 500, 60)), 64.0) for _ in range(50)]
        for weights, kv, prompt, generated, bandwidth in cases:
            yield (
                f"weights of {weights} bytes, {kv} per token, prompt {prompt}, answer {generated}, {bandwidth:g} B/s",
                close(floors.answer_floor(weights, kv, prompt, generated, bandwidth), 1e-12, 1e-9),
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

    def __call__(self, input_ids, **_):
        rows = [torch.randn(100, generator=torch.Generator().manual_seed(int(token))) for token in input_ids[0]]
        return SimpleNamespace(logits=torch.stack(rows)[None], past_key_values=object())


def prompts(count: int) -> list[tuple[list[int], int, int]]:
    """Prompts that count up, with the end token and the answer's limit: edge cases, then random ones."""
    found = [([3, 4, 5], 99, 4), ([17], 20, 40), ([19], 20, 40), ([1, 2], 99, 1)]
    for _ in range(count):
        first, length, eos, most = (numbers.randint(1, limit) for limit in (20, 9, 45, 12))
        found.append((list(range(first, first + length)), eos, most))
    return found


class TestLoop:
    def test_one_prefill_then_one_token_per_step_until_the_end(self) -> Values:
        for prompt, eos, most in prompts(20):
            model, given = (
                CountingModel(),
                f"a model that says last + 1, prompt {prompt}, eos_id {eos}, max_tokens {most}",
            )
            yield f"{given}: the answer", loop.generate(model, prompt, eos_id=eos, max_tokens=most)
            yield f"{given}: the model's calls, the whole prompt once, then one token each", model.calls


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

    def test_one_prefill_then_one_token_per_step_until_the_end(self) -> Values:
        for prompt, eos, most in prompts(20):
            engine = self.engine(eos_token_ids=frozenset({eos}))
            output = self.generate(engine, prompt, most)
            given = f"a model that says last + 1, prompt {prompt}, end {eos}, max_tokens {most}"
            yield f"{given}: tokens", output["token_ids"]
            yield f"{given}: finish_reason", output["finish_reason"]
            yield f"{given}: the model's calls, the whole prompt once, then one token each", engine.model.calls
            counts = output["metrics"]["num_prompt_tokens"], output["metrics"]["num_generated_tokens"]
            yield f"{given}: tokens of prompt and answer in the metrics", counts

    def test_the_sampler_chooses(self) -> Values:
        prompt, seed = some(3, 0, 99), numbers.randrange(10**6)
        output = self.generate(self.engine(model=AnyModel()), prompt, 6, temperature=4.0, seed=seed)
        yield f"sampled with temperature 4 behind {prompt}", output["token_ids"]

    def test_ttft_counts_from_the_arrival(self) -> Values:
        metrics = self.generate(self.engine(), [3, 4, 5], 4, arrival=time.perf_counter() - 60)["metrics"]
        yield "the request came in 60 s ago: ttft", Compared(metrics["ttft"], least=60, most=120)
        yield "the 60 s before the prefill are no part of its time", Compared(metrics["prefill_time"], least=0, most=30)

    def test_text_goes_out_as_it_comes(self) -> Values:
        pieces = []
        self.generate(self.engine(), [3, 4, 5], 4, on_text=lambda index, piece: pieces.append((index, piece)))
        yield "hand on_text to self._next_token: the pieces make", "".join(piece for _, piece in pieces)

    def test_a_stop_string_ends_the_answer(self) -> Values:
        engine = self.engine(tokenizer=load_tokenizer(resolve("tutor")))
        output = self.generate(engine, [34], 12, stop=("CD",))  # tokens 35 to 38 are A to D
        found = output["token_ids"], output["text"], output["finish_reason"]
        yield "the model says ABCDEF…, stop='CD': tokens, text, finish_reason", found

    def test_each_time_is_between_the_right_moments(self) -> Values:
        start, prompt_time, step_time = (float(x) for x in some(3, 5, 40))
        clock = [start]  # a forward pass takes more with a prompt, choosing a token 0.5 s
        engine = self.engine()
        model, choose = engine.model, engine._next_token

        def forward(input_ids, **kwargs):
            clock[0] += prompt_time if input_ids.shape[1] > 1 else step_time
            return model(input_ids, **kwargs)

        def next_token(*args: object) -> int:
            clock[0] += 0.5
            return choose(*args)

        engine.model, engine._next_token = forward, next_token
        with (
            patch.object(stage, "synchronized_time", lambda device: clock[0]),
            patch.object(time, "perf_counter", lambda: clock[0]),
        ):
            metrics = self.generate(engine, [3, 4, 5], 4, arrival=start - 3)["metrics"]
        yield (
            f"a call at {start - 3} s that starts at {start}; the prompt takes {prompt_time} s, a step {step_time} s, "
            "choosing a token 0.5 s: ttft, prefill_time, decode_time",
            [metrics[name] for name in ("ttft", "prefill_time", "decode_time")],
        )

    def test_the_times_are_measured(self) -> Values:
        metrics = self.generate(self.engine(), [3, 4, 5], 4)["metrics"]
        for name in ("prefill_time", "decode_time", "ttft"):
            yield (
                f"{name} is the time between two moments, which are not the same",
                Compared(metrics[name], least=1e-12),
            )


class TestWholeStage:
    def test_the_tutor_answers(self) -> Values:
        yield from whole_stage(stage.LLM)

    def test_penalties_reach_the_sampler(self) -> Values:
        llm = stage.LLM("tutor", device="cpu")
        params = SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=2.0, frequency_penalty=2.0)
        outputs = llm.generate(["a a a a"] * 2, [GREEDY, params], use_tqdm=False)
        yield "an answer without and with penalties", [output["token_ids"] for output in outputs]
