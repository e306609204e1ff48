"""Hidden tests of lab A, to extend: cases that follow from each student's own seed, for every exercise.

make grade-a LAB_TESTS=labs/pack/hidden            (seed 0)
python -m labs.batch a submissions/ results/ --tests labs/pack/hidden --seed-secret FILE
"""

import statistics
import time

import torch

from labs.tests import test_lab_a as public
from labs.tests.support import noisy_argmax, student_random


class TestVariant:
    def test_random_cuts(self):
        cuts = sorted(student_random().sample(range(1, 12), 4))
        public.TestVariant().test_the_answer_is_that_of_the_whole_prompt_and_each_part_ran_once(tuple(cuts))


class TestChatPrompt:
    def test_random_messages(self):
        numbers = student_random()
        for _ in range(20):
            roles = numbers.choices(("system", "user", "assistant"), k=numbers.randint(1, 5))
            texts = ["".join(numbers.choices(" \n\t<|>aé字.", k=numbers.randint(0, 12))) for _ in roles]
            expected = "".join(f"<|im_start|>{r}\n{t}<|im_end|>\n" for r, t in zip(roles, texts, strict=True))
            text = public.chat.chatml([{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)])
            expected += "<|im_start|>assistant\n"
            assert text == expected, f"expected {expected!r}, got {text!r}"


class TestSample:
    def test_random_rows(self):
        numbers = student_random()
        logits = torch.randn(30, 200, generator=torch.Generator().manual_seed(numbers.randint(0, 10**6)))
        seeds, steps = ([numbers.randint(0, 10**6) for _ in range(30)] for _ in range(2))
        params = [
            public.SamplingParams(temperature=numbers.choice((0.0, 0.7, 2.0)), top_k=numbers.choice((0, 1, 5, 50)))
            for _ in range(30)
        ]
        ids = public.sampling.sample(logits, params, seeds, steps).tolist()
        expected = [noisy_argmax(*row) for row in zip(logits, params, seeds, steps, strict=True)]
        assert ids == expected, f"30 rows of 200 logits: expected {expected[:6]}…, got {ids[:6]}…"


class TestAppend:
    def test_random_parts(self):
        numbers = student_random()
        ends = sorted(numbers.sample(range(1, 8), numbers.randint(1, 5)))
        spare = numbers.randint(1, 9)
        public.TestAppend().test_each_token_attends_to_all_before_it_and_to_itself(ends=ends, spare=spare)


class TestTimed:
    def test_random_times(self):
        numbers = student_random()
        for _ in range(20):
            durations = [numbers.randint(1, 1000) / 8 for _ in range(numbers.randint(2, 12))]
            median = statistics.median(durations[1:])
            public.TestTimed().test_it_is_the_median_of_all_calls_but_the_first(durations, median)


class TestFloor:
    def test_random_answers(self):
        numbers = student_random()
        for _ in range(50):
            weights, kv, prompt, generated = (numbers.randint(1, most) for most in (10**6, 1000, 500, 60))
            expected = sum(weights + (prompt + step) * kv for step in range(1, generated)) / 64
            found = public.floors.answer_floor(weights, kv, prompt, generated, 64.0)
            given = f"weights {weights}, {kv} per token, prompt {prompt}, answer {generated}, 64 bytes/s"
            assert abs(found - expected) <= 1e-9 * max(1, expected), f"{given}: {expected} s, got {found}"


def expected_ids(last: int, max_tokens: int, eos: int) -> list[int]:
    """What `CountingModel` says after a token."""
    ids = list(range(last + 1, last + 1 + max_tokens))
    return ids[: ids.index(eos) + 1] if eos in ids else ids


class TestLoop:
    def test_random_prompts(self):
        numbers = student_random()
        for _ in range(20):
            first, length, max_tokens, eos = (numbers.randint(1, most) for most in (20, 9, 12, 45))
            model, prompt = public.CountingModel(), list(range(first, first + length))
            expected = expected_ids(prompt[-1], max_tokens, eos)
            ids = public.loop.generate(model, prompt, eos, max_tokens)
            given = f"prompt {prompt}, eos_id {eos}, max_tokens {max_tokens}"
            assert ids == expected, f"{given}: expected {expected}, got {ids}"
            calls = [prompt, *([token] for token in expected[:-1])]
            assert model.calls == calls, f"{given}: the model's calls are {calls}, got {model.calls}"


class TestGenerateOne:
    def test_random_prompts(self):
        numbers, one = student_random(), public.TestGenerateOne()
        for _ in range(20):
            first, length, max_tokens, eos = (numbers.randint(1, most) for most in (20, 9, 12, 45))
            engine, prompt = one.engine(eos_token_ids=frozenset({eos})), list(range(first, first + length))
            expected = expected_ids(prompt[-1], max_tokens, eos)
            output = one.generate(engine, prompt, max_tokens, arrival=time.perf_counter() - length)
            found, reason = (output["token_ids"], output["finish_reason"]), "stop" if expected[-1] == eos else "length"
            given = f"prompt {prompt}, end {eos}, max_tokens {max_tokens}"
            assert found == (expected, reason), f"{given}: expected {expected} and {reason!r}, got {found}"
            assert output["metrics"]["ttft"] >= length, f"{given}: ttft counts from the arrival, {length} s ago"
