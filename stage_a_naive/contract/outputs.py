"""A request, its growing answer, and what it returns.

`Request` is a validated prompt, `Completion` the answer during generation, `GenerationOutput` the finished answer. In
all six stages, only `Completion` decides when a generation ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, repeat
from typing import Literal, NotRequired, TypedDict

import torch
from transformers import PreTrainedTokenizerFast

from stage_a_naive.contract.detokenize import IncrementalDecoder, is_special, last_with_text, placeholder
from stage_a_naive.contract.params import SamplingParams
from stage_a_naive.contract.stop_strings import first_stop, num_held_back
from stage_a_naive.contract.token_rules import TokenRules

NO_TOKEN = -2  # replaces an id if no token can be chosen; -1 is a wrong guess in speculation
NO_SCORES = (
    "the model's scores for the next token have no finite maximum (NaN or infinity), so none can be chosen; "
    "if the checkpoint is whole, try dtype='float32'"
)
FinishReason = Literal["stop", "length", "error"]
SamplingFunction = Callable[[torch.Tensor, list[SamplingParams]], torch.Tensor]
OnText = Callable[[int, str], None]  # (index of the prompt, new piece of its text)


class Metrics(TypedDict):
    """Times in seconds on a monotonic clock, read after the device has finished its work."""

    # From the request's first step to its first token, sampling included. From stage D on it also includes
    # everything else that runs in these steps (other prompts, decodes) and between the prompt's chunks.
    prefill_time: float
    decode_time: float  # from the first token to the last, including preemptions and other requests' work
    ttft: float  # time to first token, from the arrival of the prompt: tokenizing, waiting and prefill_time
    tpot: float  # time per output token after the first; 0 if there was only one
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV came from a prefix cache
    num_generated_tokens: int
    tokens_per_sec: float  # generated tokens / (prefill_time + decode_time)


class GenerationOutput(TypedDict):
    """The answer to one prompt."""

    prompt_index: int  # in the list of prompts
    index: int  # among the answers to this prompt
    text: str  # without special tokens and without the stop string, unless the request asks for them
    token_ids: list[int]  # with the end-of-sequence token, if it was generated
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: NotRequired[str | int]  # the stop string or stop token id of the request that ended it, if one did
    metrics: Metrics
    logprobs: NotRequired[list[dict[int, float]]]  # per step {token id: log-probability}, if requested
    prompt_logprobs: NotRequired[list[dict[int, float] | None]]  # the same per token of the prompt; None for the first
    error: NotRequired[Exception]  # what ended it, if `finish_reason` is "error"; other fields hold what it had by then


@dataclass(frozen=True)
class Request:
    """One prompt that has passed every check."""

    index: int  # position of its answer in the list of all answers
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # the caller's, or one that the engine chose
    sampling_fn: SamplingFunction | None = None  # what replaces the built-in sampler for this request
    token_rules: TokenRules | None = None
    prompt_index: int = 0
    answer_index: int = 0  # among the answers to its prompt
    arrival_time: float = field(default_factory=time.perf_counter)  # before tokenizing; seconds on the monotonic clock


class Completion:
    """One request's answer during generation.

    Args:
        request: the request to answer.
        tokenizer: decodes the text.
        eos_token_ids: the model's end-of-sequence ids.
        max_total_len: the most tokens in prompt and answer together.
        text_at_end: decode the text once, at the end. That is ten times cheaper than decoding after every token. With
            stop strings the text is decoded after every token anyway, because the search for them needs it.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: PreTrainedTokenizerFast,
        eos_token_ids: frozenset[int],
        max_total_len: int,
        text_at_end: bool = False,
    ) -> None:
        self.request = request
        self._options = (tokenizer, eos_token_ids, max_total_len, text_at_end)
        self.all_token_ids = list(request.prompt_token_ids)  # the prompt, then what was generated
        self.logprobs: list[dict[int, float]] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: Exception | None = None  # the error that ended this request, if any
        params = request.params
        self._tokenizer = tokenizer
        at_end, before, skip = text_at_end and not params.stop, request.prompt_token_ids, params.skip_special_tokens
        self._decoder = None if at_end else IncrementalDecoder(tokenizer, before, skip)
        # By id, the stop reason; the model's end of sequence is none, also where a request names it.
        self._stop_ids: dict[int, str | int | None] = special_ids(tokenizer, params.stop) if params.stop else {}
        self._stop_ids |= {i: i for i in params.stop_token_ids or ()}
        self._stop_ids |= {} if params.ignore_eos else dict.fromkeys(eos_token_ids)
        self.max_total_tokens = min(len(request.prompt_token_ids) + params.max_tokens, max_total_len)
        self._released = 0  # length of the text returned so far; a possible start of a stop string is held back
        self.text_ends: list[int] = []  # length of the returned text after each token

    @property
    def token_ids(self) -> list[int]:
        """Return the generated ids as a new list."""
        return self.all_token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_generated_tokens(self) -> int:
        return len(self.all_token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Return how many more tokens this completion may take, if no end-of-sequence token comes first."""
        return self.max_total_tokens - len(self.all_token_ids)

    def append(self, token_id: int, logprobs: dict[int, float] | None = None) -> str:
        """Add a generated token, decide whether it is the last, and return the text that became certain.

        An error while decoding the token's text ends the completion, and so does `NO_TOKEN`. A token after the end is
        dropped.
        """
        if self.finish_reason is not None:
            return ""
        if token_id == NO_TOKEN:
            self.fail(FloatingPointError(NO_SCORES))
            return ""
        try:
            return self._append(token_id, logprobs)
        except Exception:
            self.replay()
            if self.error is None:  # it came from outside, e.g. from a signal handler, and not from decoding the text
                raise
            return ""

    def _append(self, token_id: int, logprobs: dict[int, float] | None) -> str:
        self.all_token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        params = self.request.params
        stops = token_id in self._stop_ids and self.num_generated_tokens > params.min_tokens
        if self._decoder is not None and (not stops or params.include_stop_str_in_output):
            self._add_text(self._decoder.append(token_id))
        if stops:
            piece = self.finish("stop")
            if self.stop_reason is None:
                self.stop_reason = self._stop_ids[token_id]
        elif self.finish_reason is None and len(self.all_token_ids) >= self.max_total_tokens:
            piece = self.finish("length")
        else:
            piece = "" if self._decoder is None else self._release()
        self.text_ends.append(self._released)  # done last: a token counted here is complete
        return piece

    def finish(self, reason: FinishReason) -> str:
        """End the completion and return the text that was held back."""
        if self.finish_reason is None:
            self._add_text(self._whole_text() if self._decoder is None else self._decoder.flush())
            # The flushed text may itself complete a stop string, which is then the reason.
            self.finish_reason = self.finish_reason or reason
        return self._release()

    def _whole_text(self) -> str:
        ids = self.token_ids
        params = self.request.params
        stops = ids and ids[-1] in self._stop_ids and len(ids) > params.min_tokens
        if stops and not params.include_stop_str_in_output:
            del ids[-1]
        return decode_all(self._tokenizer, ids, self.request.prompt_token_ids, params.skip_special_tokens)

    def _add_text(self, piece: str) -> None:
        self.text += piece
        params = self.request.params
        stops = params.stop or () if self.num_generated_tokens > params.min_tokens else ()
        at = first_stop(self.text, stops, len(piece)) if stops else None
        if at is not None:
            stop = min((stop for stop in stops if self.text.startswith(stop, at)), key=len)
            self.text = self.text[: at + len(stop)] if params.include_stop_str_in_output else self.text[:at]
            self.finish_reason, self.stop_reason = "stop", stop

    def _release(self) -> str:
        end = len(self.text)
        params = self.request.params
        if self.finish_reason is None and params.stop and not params.include_stop_str_in_output:
            end -= num_held_back(self.text, params.stop)
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def tell(self, on_text: OnText | None, piece: str) -> None:
        """Call a callback with a piece of text. An error of the callback ends the completion."""
        if piece and on_text is not None:
            try:
                on_text(self.request.index, piece)
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the completion with an error of its sampler, text, structured output or callback."""
        if self._decoder is None:
            with suppress(Exception):
                self.text = self._whole_text()
        self.error, self.finish_reason = error, "error"

    def replay(self) -> None:
        """Rebuild the text from the tokens after an exception that may have interrupted `append` half-way.

        An exception that is raised again comes from decoding the text, and ends the completion.
        """
        new = Completion(self.request, *self._options)
        logprobs = repeat(None) if self.request.params.logprobs is None else self.logprobs
        try:
            for token_id, logprob in zip(self.token_ids, logprobs):  # noqa: B905 (the last token may lack its logprob)
                new._append(token_id, logprob)
        except Exception as error:
            new.fail(error)
        self.__dict__ = new.__dict__  # at once: an interrupt leaves the old state or the new one

    def to_output(
        self, arrival: float, start: float, first: float, end: float, num_cached: int = 0
    ) -> GenerationOutput:
        """Make the finished completion's output.

        Args:
            arrival, start, first, end: when the prompt arrived, when the request's computation began, and when its
                first and its last token were ready; seconds on the monotonic clock.
            num_cached: prompt tokens whose KV came from a prefix cache.
        """
        assert self.finish_reason is not None, "the completion is still growing"
        metrics = make_metrics(
            prefill_time=first - start,
            decode_time=end - first,
            ttft=first - arrival,
            num_prompt=len(self.request.prompt_token_ids),
            num_generated=self.num_generated_tokens,
            num_cached=num_cached,
        )
        output = GenerationOutput(
            prompt_index=self.request.prompt_index,
            index=self.request.answer_index,
            text=self.text,
            token_ids=self.token_ids,
            prompt_token_ids=self.request.prompt_token_ids,
            finish_reason=self.finish_reason,
            metrics=metrics,
        )
        if self.finish_reason == "stop" and self.stop_reason is not None:
            output["stop_reason"] = self.stop_reason
        if self.request.params.logprobs is not None:
            output["logprobs"] = self.logprobs
        if self.error is not None:
            output["error"] = self.error
        return output


def returned(outputs: list[GenerationOutput]) -> list[GenerationOutput]:
    """Return a call's outputs once all its requests have ended, or raise the first request's error.

    Raises:
        Exception: the error of the first request that failed. Its attribute `outputs` is the list of all outputs.
    """
    for output in outputs:
        if "error" in output:
            error = output["error"]
            vars(error)["outputs"] = outputs
            raise error
    return outputs


def special_ids(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> dict[int, str | int | None]:
    """Return, by id, the texts that are special tokens; an answer without special tokens cannot contain them."""
    wanted, added = set(texts), tokenizer.backend_tokenizer.get_added_tokens_decoder()
    found = {token_id: token.content for token_id, token in added.items() if token.content in wanted}
    return {token_id: text for token_id, text in found.items() if is_special(tokenizer, token_id)}


def decode_all(
    tokenizer: PreTrainedTokenizerFast,
    token_ids: Sequence[int],
    before: Sequence[int] = (),
    skip_special_tokens: bool = True,
) -> str:
    """Decode all ids at once; the result equals the joined pieces of an `IncrementalDecoder` started with `before`."""
    backend, context = tokenizer.backend_tokenizer, last_with_text(tokenizer, before)
    length = len(backend.decode(context, skip_special_tokens=True))
    parts: list[str] = []
    for is_known, run in groupby(token_ids, lambda token_id: backend.id_to_token(token_id) is not None):
        if is_known:
            parts.append(backend.decode([*context, *run], skip_special_tokens=skip_special_tokens)[length:])
        else:
            parts += map(placeholder, run)
    return "".join(parts)


def make_metrics(
    *, prefill_time: float, decode_time: float, ttft: float, num_prompt: int, num_generated: int, num_cached: int = 0
) -> Metrics:
    """Compute the figures that follow from the measured ones."""
    total = prefill_time + decode_time
    return Metrics(
        prefill_time=prefill_time,
        decode_time=decode_time,
        ttft=ttft,
        tpot=decode_time / (num_generated - 1) if num_generated > 1 else 0.0,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_generated_tokens=num_generated,
        tokens_per_sec=num_generated / total if total > 0 else 0.0,
    )


def synchronized_time(device: torch.device) -> float:
    """Wait until the device has finished all its work, then return the monotonic time in seconds.

    A GPU runs asynchronously: a clock that does not wait for it measures how fast the CPU launches work.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
