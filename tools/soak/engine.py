"""Random load on an engine: requests of random lengths, aborts, abandoned calls, and steps that raise."""

from __future__ import annotations

import gc
import random
import time

import torch

from stage_a_naive.contract.outputs import Request
from stage_a_naive.sampling import SamplingParams
from stage_e_batching import LLM

from .tally import Sample, Tally, resident_bytes

DRAIN_SECONDS = 10.0


class InjectedError(RuntimeError):
    """A failure that the soak causes on purpose."""


class Soak:
    """Random load on one engine."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.mailbox = llm.calls.new_mailbox()
        self.expected: dict[int, list[int]] = {}  # request id -> the answer it got alone
        self.live: list[int] = []
        self.fail_next = False
        llm.runner.model.register_forward_pre_hook(self._fail_if_told)
        limit = llm.max_model_len // 2
        bases = [self._tokens(limit) for _ in range(3)]
        self.prompts = [bases[i % 3][: self.rng.randrange(1, limit)] + self._tokens(5) for i in range(24)]
        self.greedy = SamplingParams(temperature=0, max_tokens=128)
        self.answers = [llm.generate([prompt], self.greedy, False)[0]["token_ids"] for prompt in self.prompts]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(10, self.llm.vocab_size) for _ in range(count)]

    def run(self, minutes: float) -> None:
        start = last_drain = time.perf_counter()
        end = start + 60 * minutes
        while time.perf_counter() < end:
            self._arrive()
            self._disturb()
            self._step()
            if time.perf_counter() - last_drain > DRAIN_SECONDS:
                self._drain()
                self._note(time.perf_counter() - start)
                last_drain = time.perf_counter()
        self._drain()
        self._note(time.perf_counter() - start)

    def _arrive(self) -> None:
        if len(self.live) > 2 * self.llm.options.max_num_seqs or self.rng.random() < 0.5:
            return
        which = self.rng.randrange(len(self.prompts))
        params = self.greedy
        if self.rng.random() < 0.4:
            params = SamplingParams(
                temperature=self.rng.choice([0.5, 1.0]),
                top_p=self.rng.choice([1.0, 0.9]),
                repetition_penalty=self.rng.choice([1.0, 1.1]),
                logprobs=self.rng.choice([None, 2]),
                max_tokens=self.rng.randrange(1, 64),
            )
        request = Request(0, self.prompts[which], params, self.rng.getrandbits(64))
        request_id = self.llm.calls.add_request(request, self.mailbox, streams=self.rng.random() < 0.5)
        self.live.append(request_id)
        if params is self.greedy:
            self.expected[request_id] = self.answers[which]

    def _disturb(self) -> None:
        """Abort a request, abandon a call, or make the next step fail."""
        if self.live and self.rng.random() < 0.02:
            self._abort(self.rng.choice(self.live))
        if self.rng.random() < 0.002:
            stream = self.llm.stream([self.rng.choice(self.prompts)], self.greedy)
            next(stream, None)
            stream.close()
        self.fail_next = self.rng.random() < 0.002

    def _abort(self, request_id: int) -> None:
        self.tally.aborted += self.llm.calls.abort(request_id)
        self.live.remove(request_id)
        self.expected.pop(request_id, None)

    def _step(self) -> None:
        try:
            self.llm.calls.step()
        except InjectedError:
            self.tally.errors += 1
        self.fail_next = False
        self._read_mail()

    def _fail_if_told(self, *_: object) -> None:
        if self.fail_next:
            raise InjectedError("made by the soak")

    def _read_mail(self) -> None:
        for event in self.mailbox.take():
            if event.output is None or event.request_id not in self.live:
                continue
            self.live.remove(event.request_id)
            self.tally.finished += 1
            expected = self.expected.pop(event.request_id, None)
            if expected is not None:
                self.tally.compared += 1
                self.tally.different += event.output["token_ids"] != expected

    def _drain(self) -> None:
        while self.llm.calls.has_unfinished():
            self.llm.calls.step()
            self._read_mail()

    def _note(self, seconds: float) -> None:
        gc.collect()
        on_gpu = self.llm.device.type == "cuda"
        stats = torch.cuda.memory_stats(self.llm.device) if on_gpu else {}
        self.tally.samples.append(
            Sample(
                seconds,
                self.tally.finished,
                resident_bytes(),
                stats.get("allocated_bytes.all.current", 0),
                stats.get("reserved_bytes.all.current", 0),
                self.llm.calls.stats()["num_used_blocks"],
            )
        )
