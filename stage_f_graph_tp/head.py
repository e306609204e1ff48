"""The LM head and the sampler: from final states to tokens on their way to the host.

`sample` is the part that a CUDA graph can hold: it computes logits, chooses a token for each row, and keeps the tokens
where the next step reads them. `complete` adds the rest (log-probabilities, a replaced sampler) after the graph,
for steps in which some row asks for it. The tokens are copied to the host without waiting, and `InFlight.wait`
fetches them when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stage_d_paged.model import DecoderModel
from stage_e_batching import parts
from stage_e_batching.sampler import LOGPROBS, REPLACED, SampledTokens, Sampler, SamplerInput
from stage_f_graph_tp.forward import StepOutput
from stage_f_graph_tp.last_tokens import Tokens
from stage_f_graph_tp.step_input import StepInput, StepShape


@dataclass(frozen=True)
class InFlight:
    """A step that was launched on the device."""

    sampled: SampledTokens | None  # None: nothing samples in this step
    host_ids: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    check: Callable[[], None] | None = None  # see `StepOutput`

    def wait(self) -> parts.Sampled:
        """Wait for the step's tokens.

        Raises:
            RuntimeError: the step's results are invalid.
        """
        if self.sampled is None:
            return parts.Sampled([])
        if self.check is not None:
            self.check()  # first, because invalid results may be any numbers
        if self.arrived is not None:
            self.arrived.synchronize()
        assert self.host_ids is not None
        return self.sampled.on_host(self.host_ids)


NOTHING_SAMPLED = InFlight(None)


class Head:
    """The LM head over the whole vocabulary, and the sampler.

    Args:
        model: has the LM head.
        vocab_size: the whole model's.
        sampler: has at least as many batch slots as `tokens`.
        tokens: keep the sampled tokens for the next step.

    Attributes:
        completes: flags of the sampler features that need `complete` after `sample`.
        makes_logits: whether `sample` computes whole rows of logits.
    """

    completes = LOGPROBS | REPLACED
    makes_logits = True

    def __init__(
        self, model: DecoderModel, vocab_size: int, dtype: torch.dtype, sampler: Sampler, tokens: Tokens
    ) -> None:
        self.model, self.sampler, self.tokens = model, sampler, tokens
        self.device = tokens.by_slot.device
        # The one buffer into which all recorded steps write their logits; allocated when steps are recorded.
        self._logits = torch.empty(0, vocab_size, dtype=dtype, device=self.device)
        pinned = self.device.type == "cuda"
        self._host_ids = [torch.empty(tokens.num_slots, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]

    def prepare(self, shapes: list[StepShape], record: Callable) -> list[str]:
        """Allocate one buffer for the logits of all steps of these shapes, which are recorded next.

        Returns:
            a line per kind of step that it records itself: none here.
        """
        rows = max((shape.num_samples for shape in shapes), default=0)
        if self.device.type == "cuda" and self.makes_logits:
            self._logits = self._logits.new_empty(rows, self._logits.shape[1])
        return []

    def sample(self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape) -> StepOutput:
        """Choose a token for each of the step's `num_samples` rows, and keep it for the next step."""
        hidden, count = output.hidden, shape.num_samples
        if hidden is not None and len(hidden) > count:
            output = output._replace(hidden=hidden.index_select(0, inputs.sample_tokens[:count]))
        rows = output.hidden if output.logits is None else output.logits
        assert rows is not None
        output = self.choose(output, inputs.sampling.first(len(rows)))
        assert output.ids is not None and output.told is not None
        return output._replace(kept=self._keep(output.ids, output.told, inputs, shape))

    def _keep(self, ids: Tensor, told: Tensor, inputs: StepInput[Tensor], shape: StepShape) -> Tensor:
        """Keep a step's tokens for the next step; returns the tokens to copy to the host."""
        kept = self.tokens.keep(ids, inputs, shape)
        return told if kept is ids else torch.where(kept == ids, told, kept)

    def choose(self, output: StepOutput, rows: SamplerInput) -> StepOutput:
        """Choose a token for every row; adds ids `[rows]` and logits `[rows, vocab]`."""
        logits = output.logits
        if logits is None:
            assert output.hidden is not None
            place = self._logits[: len(output.hidden)]
            logits = self.model.compute_logits(output.hidden, out=place if len(place) == len(output.hidden) else None)
        ids, told = self.sampler.choose(logits, rows)
        return output._replace(logits=logits, ids=ids, told=told)

    def finish(
        self, output: StepOutput, inputs: StepInput[Tensor], shape: StepShape, sample_slots: np.ndarray, needs: int
    ) -> InFlight:
        """Compute a step's missing outputs, and start the copy of its tokens to the host, without padding rows.

        Args:
            output: has the final states of all tokens, or of the rows that sample.
            sample_slots: the batch slots of the rows that are not padding.
            needs: flags of the sampler features that these rows use.
        """
        count = len(sample_slots)
        if count == 0:
            return NOTHING_SAMPLED
        if output.is_on_host:
            assert output.kept is not None
            return InFlight(SampledTokens(output.kept, output.kept), output.kept, check=output.check)
        if output.ids is None:
            output = self.sample(output, inputs, shape._replace(num_samples=count))
        assert output.kept is not None
        sampled = SampledTokens(output.kept[:count], output.kept[:count])
        if needs & self.completes:
            try:
                sampled = self.complete(output, inputs.sampling.first(count), sample_slots)
            except Exception:
                if output.check is not None:
                    output.check()  # a step that timed out may have left invalid input for the sampler
                raise
            sampled = replace(sampled, told=self._keep(sampled.ids, sampled.told, inputs, shape))
        if self.device.type != "cuda":
            return InFlight(sampled, sampled.told.clone(), check=output.check)  # the next replay overwrites them
        self._host_ids.reverse()  # the other buffer may still be read
        host_ids = self._host_ids[0][:count]
        host_ids.copy_(sampled.told, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return InFlight(sampled, host_ids, arrived, output.check)

    def complete(self, output: StepOutput, rows: SamplerInput, sample_slots: np.ndarray) -> SampledTokens:
        """Add log-probabilities, and the tokens of replaced samplers, to a step's tokens."""
        count = len(sample_slots)
        assert output.logits is not None and output.ids is not None and output.told is not None
        given = output.logits[:count], output.ids[:count], output.told[:count]
        return self.sampler.complete(*given, rows, sample_slots)

    def discard(self, last: parts.InFlight) -> None:
        """Wait for the last launched step, and drop it. Its error, if any, was reported before."""
        with suppress(Exception):
            last.wait()

    def release(self) -> None:
        """Do nothing: it owns no graphs."""
