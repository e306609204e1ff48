"""Speculative decoding with a scripted acceptance: as many tokens of each draft are right as a given rate says.

The tokens then mean nothing, but every step does the same work as with a real draft.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.micro import take_turns, timed
from beyond.speculation import LLM
from beyond.speculation.token_table import TokenTable
from stage_a_naive.sampling import SamplingParams
from stage_e_batching.parts import InFlight
from stage_e_batching.step import ScheduledStep
from stage_f_graph_tp.step_input import StepInput

RATE = 0.83  # of the tokens of the drafts
PROMPT = 128  # tokens


class ScriptedTable(TokenTable):
    """Guesses of which a given share counts as right, whatever the model samples. The look-up still runs."""

    def __init__(self, num_slots: int, max_model_len: int, draft_tokens: int, device: torch.device) -> None:
        super().__init__(num_slots, max_model_len, draft_tokens, device)
        self.rate = torch.zeros(1, device=device)
        self._owed = torch.zeros(num_slots + 1, device=device)  # guesses to call right, by batch slot
        self._numbers = torch.arange(1, draft_tokens + 1, device=device)

    def guess(self, slots: Tensor) -> None:
        """Guess 1 if the guess is scripted to be right, else 0."""
        super().guess(slots)
        self._owed[slots] = self._owed[slots] % 1 + self.rate * len(self._numbers)
        right = self._numbers <= self._owed[slots, None]
        self.tokens[slots[:, None], self.last[slots, None] + self._numbers] = right.int()

    def keep(self, ids: Tensor, inputs: StepInput, last_tokens: Tensor) -> None:
        """Let every row sample 1 if the next row's guess is scripted to be right, else 2."""
        next_rows = inputs.sample_tokens[1 : len(ids)]
        ids[:-1] = 2 - (inputs.input_ids[next_rows] == 1).long()
        super().keep(ids, inputs, last_tokens)


class ScriptedLLM(LLM):
    """Look-up with a scripted acceptance."""

    def __init__(self, model: str, **options: object) -> None:
        with patch("beyond.engine.TokenTable", ScriptedTable):  # before its steps are recorded
            super().__init__(model, speculation="ngram", **options)

    def script(self, rate: float | None) -> None:
        """Guess in every step, with this share of right guesses; None: no guesses."""
        self.engine.drafts.drafter = SimpleNamespace(has_draft=lambda sequence: rate is not None)
        self.runner.layers.tokens.table.rate.fill_(rate or 0.0)


class ScriptedModelLLM(LLM):
    """Drafts from a small model with a scripted acceptance, for one request at a time.

    The tokens that the large model sampled are replaced on the host, so that the small one finds its guesses come true.
    """

    def __init__(self, model: str, **options: object) -> None:
        super().__init__(model, speculation="model", **options)
        self._owed = 0.0  # guesses to call right
        self._launch, self.runner.launch = self.runner.launch, self._verify

    def script(self, rate: float | None) -> None:
        """Guess in every step, with this share of right guesses; None: no guesses."""
        nobody = SimpleNamespace(has_draft=lambda sequence: False)
        self.engine.drafts.drafter = nobody if rate is None else self._drafter
        self._rate = rate

    def _verify(self, step: ScheduledStep) -> InFlight | SimpleNamespace:
        draft, in_flight = step.sequences[0].guesses.draft, self._launch(step)
        if not draft:
            return in_flight
        self._owed = self._owed % 1 + self._rate * len(draft)
        ids = [guess if i < int(self._owed) else (guess + 1) % 2 for i, guess in enumerate(draft)]
        sampled = in_flight.wait()._replace(token_ids=[*ids, 2])
        return SimpleNamespace(wait=lambda: sampled)


def run(llm: LLM, batch: int, params: SamplingParams) -> tuple[float, float]:
    """Return seconds per token of one request, and tokens per step and request, while all decode."""
    ids = random.Random(batch)
    prompts = [[ids.randrange(llm.vocab_size) for _ in range(PROMPT)] for _ in range(batch)]
    before = replace(llm.engine.counters)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    steps = llm.engine.counters.num_steps - before.num_steps
    prefill_steps = -(-batch * PROMPT // llm.options.max_num_batched_tokens)
    seconds = statistics.median(output["metrics"]["tpot"] for output in outputs)
    return seconds, (params.max_tokens - 1) / max(1, steps - prefill_steps)


def time_ways(llm: LLM, batch: int, repeats: int, ways: Mapping[object, tuple], /, **what: object) -> list[dict]:
    """Return a row per way, {name: (what prepares the engine, sampling parameters)}: time and tokens per step."""

    def work(way: object) -> tuple[float, float]:
        prepare, params = ways[way]
        prepare()
        return run(llm, batch, params)

    rows = []
    for way, samples in take_turns(work, ways, repeats).items():
        seconds, per_step = zip(*samples, strict=True)
        rows.append(timed(list(seconds), **what, way=way) | {"tokens_per_step": statistics.median(per_step)})
    return rows
