"""The user interface: `generate` and `chat`, the same in every stage.

The front end validates everything before anything runs, so a bad request only causes an error message. It passes plain
`Request`s to the stage's `_generate`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerFast

from stage_a_naive.chat import Message, render_chats
from stage_a_naive.checkpoints.loading import eos_token_ids, load_tokenizer, pick_device, pick_dtype, pick_seed, resolve
from stage_a_naive.contract.errors import shown
from stage_a_naive.contract.logprobs import PromptLogprobs
from stage_a_naive.contract.outputs import GenerationOutput, Metrics, OnText, Request, SamplingFunction, returned
from stage_a_naive.contract.params import SamplingParams, as_integer, check_sampling_fn
from stage_a_naive.contract.prompts import Prompt, Prompts, check_text, check_text_length, refuse_ids, text_or_ids
from stage_a_naive.contract.requests import add_prompt_logprobs, one_per_answer, one_per_prompt
from stage_a_naive.contract.structured_outputs import NO_FORMS, GrammarError
from stage_a_naive.contract.token_rules import TokenRules

if TYPE_CHECKING:
    from stage_a_naive.floor import ModelBytes


class Frontend:
    """Base of every stage's `LLM`.

    A stage loads its model, sets `vocab_size` and `max_model_len`, and implements `_generate`.

    Args:
        model, device, dtype, seed: as in every `LLM`.

    Attributes:
        source, device, dtype: the model's source, its device and its dtype.
        sampling_fn: replace it to choose tokens yourself: called as `fn(logits [rows, vocab] float32, params)` with one
            `SamplingParams` per row, it returns the ids `[rows]`. The logits are a copy. None is the built-in sampler.
            A call of `generate` keeps the function that was set when it began.
    """

    vocab_size: int
    max_model_len: int
    build_time: float  # seconds
    resolve = staticmethod(resolve)  # from a model's name to its checked files

    def __init__(self, model: str | PathLike[str], device: str, dtype: str | torch.dtype, seed: int) -> None:
        self.source = self.resolve(model)
        self.device = pick_device(device)
        self.dtype = pick_dtype(dtype, self.device)
        self.tokenizer = load_tokenizer(self.source)
        self.eos_token_ids = eos_token_ids(self.source, self.tokenizer)
        self.sampling_fn: SamplingFunction | None = None
        self._seeds = random.Random(pick_seed(seed))  # for requests without a seed
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.RLock()  # held for a call: an engine has one set of buffers
        self._calling_thread: int | None = None

    @property
    def model_bytes(self) -> ModelBytes:
        """The bytes that a decode step reads."""
        from stage_a_naive.floor import ModelBytes  # here: only a summary needs it

        return ModelBytes(self.source.config, self.dtype.itemsize)

    def memory_line(self, metrics: Metrics) -> str:
        """Return a summary of the bytes read per token and the distance from the floor; empty without a decode step."""
        from stage_a_naive.floor import against_floor  # here: only a summary needs it

        return against_floor(self.model_bytes, self.device, metrics)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_text: OnText | None = None,
    ) -> list[GenerationOutput]:
        """Complete prompts.

        Args:
            prompts: a string, a list of strings (encoded without a chat template), or a list of token-id lists; each
                may also be a dictionary, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: one for all prompts, or a list with one for each.
            use_tqdm: show a progress bar.
            on_text: called as `on_text(index, piece)` with every new piece of text of output `index`.

        Returns:
            One `GenerationOutput` per prompt, or `n` of them, in the order of the prompts.

        Raises:
            ValueError: a prompt or the parameters are out of range; in this case nothing has run.
            RuntimeError: the engine is closed, belongs to another process, or is inside a call of this thread already.
            Exception: the error that ended one request, from its sampler, text, structured output or callback. It is
                raised after all requests have ended, with all outputs in `error.outputs`; the outputs of failed
                requests have the `finish_reason` "error" and the exception in `error`.
        """
        return self._answer(self.requests(prompts, sampling_params), use_tqdm, on_text)

    def _answer(self, requests: list[Request], use_tqdm: bool, on_text: OnText | None) -> list[GenerationOutput]:
        with self._one_call():
            outputs = self._generate(requests, use_tqdm, on_text)
            if any(request.params.prompt_logprobs is not None for request in requests):
                add_prompt_logprobs(outputs, requests, self._score)
            return returned(outputs)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_text: OnText | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[GenerationOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists); otherwise as `generate`.

        Args:
            chat_template_kwargs: arguments of the model's chat template: `{"enable_thinking": False}` for Qwen3.
        """
        arrival = time.perf_counter()
        prompts = self.chat_prompts(messages, chat_template_kwargs)
        return self._answer(self.requests(prompts, sampling_params, arrival), use_tqdm, on_text)

    def chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Render one conversation or several with the model's chat template; returns the token ids of each.

        Raises:
            ValueError: a conversation is empty, malformed or too long, or the template refuses it or its arguments.
        """
        self._check_usable()
        # A template writes the special tokens itself; its substitute ChatML does not write the one that begins a text.
        add_special = not self.tokenizer.chat_template
        texts = enumerate(render_chats(self.tokenizer, messages, chat_template_kwargs))
        return [self.encode(i, text, add_special) for i, text in texts]

    def close(self) -> None:
        """End the engine; later calls raise an error. A second call does nothing."""
        self._closed = True

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this engine belongs to process {self._pid} and cannot be used in its forked child {os.getpid()} "
                "(locks, threads and GPU contexts do not survive a fork); make a new LLM in the child"
            )
        if self._closed:
            raise RuntimeError("this engine is closed; make a new LLM")

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """Hold the engine for one call, while calls from other threads wait.

        A stage whose engine serves several calls at once overrides it.

        Raises:
            RuntimeError: this thread already holds the engine and would wait for itself.
        """
        if self._calling_thread == threading.get_ident():
            raise RuntimeError(
                "generate or chat was called from inside a callback or sampler of the same engine, which serves one "
                "call at a time; make the call after the first has returned, or use a second LLM"
            )
        with self._lock:
            self._check_usable()  # it may have been closed while this call waited
            try:
                self._calling_thread = threading.get_ident()
                yield
            finally:
                self._calling_thread = None

    def _generate(self, requests: list[Request], use_tqdm: bool, on_text: OnText | None) -> list[GenerationOutput]:
        raise NotImplementedError(f"{type(self).__name__} has no engine")

    def encode(self, index: int, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text, with the tokens that this tokenizer adds to it (Llama's begin-of-sequence token)."""
        limit = self.max_model_len - 1
        if len(text) > 16 * limit:  # few tokens are longer: tokenizing a shorter text does not take long
            check_text_length(index, text, self.tokenizer, self._longest_token, limit)
        try:
            return encode_fast(self.tokenizer, text, add_special_tokens)
        except TypeError:
            check_text(index, text)
            raise

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))

    def _score(self, prompt_token_ids: list[int], count: int) -> PromptLogprobs:
        """Compute a prompt's log-probabilities: of each token and of the `count` likeliest in its place."""
        raise NotImplementedError(f"{type(self).__name__} has no model")

    def requests(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        arrival: float | None = None,
    ) -> list[Request]:
        """Check prompts and parameters as `generate` does and return a request for each answer, without running it.

        Args:
            arrival: when the prompts arrived, if that was before this call; seconds on the monotonic clock.
        """
        arrival = time.perf_counter() if arrival is None else arrival
        self._check_usable()
        prompt_list = as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompt_list)
        else:
            params = one_per_prompt(sampling_params, len(prompt_list))
        sampling_fn = self.sampling_fn  # read once, so that all requests of a call have the same
        if sampling_fn is not None:
            check_sampling_fn(sampling_fn)
        numbered = enumerate(zip(prompt_list, params, strict=True))
        requests = [self._request(i, prompt, p, sampling_fn, arrival) for i, (prompt, p) in numbered]
        return one_per_answer(requests) if any(p.n > 1 for p in params) else requests

    def _request(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        sampling_fn: SamplingFunction | None,
        arrival: float,
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling parameters of prompt {index}: expected SamplingParams, got {shown(params)}")
        if not isinstance(prompt, str):
            prompt = text_or_ids(index, prompt)
        ids = self.encode(index, prompt) if isinstance(prompt, str) else prompt
        if not 0 < len(ids) < self.max_model_len or min(ids) < 0 or max(ids) >= self.vocab_size:
            refuse_ids(index, ids, self.max_model_len, self.vocab_size)
        rules = None
        if params.has_token_rules:
            rules = TokenRules.of(index, params, self.tokenizer, self.eos_token_ids, self.vocab_size)
        if params.structured_outputs is not None:
            self._check_structured_outputs(index, params, sampling_fn)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        return Request(index, ids, params, seed, sampling_fn, rules, prompt_index=index, arrival_time=arrival)

    def _check_structured_outputs(self, index: int, params: SamplingParams, fn: SamplingFunction | None) -> None:
        """Validate a request's structured output; raise `GrammarError` if it is not supported, as here."""
        raise GrammarError(NO_FORMS.format(index))


def encode_fast(tokenizer: PreTrainedTokenizerFast, text: str, add_special_tokens: bool) -> list[int]:
    """As `tokenizer.encode`, without computing where in the text each token is: a fifth faster."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # a call of the tokenizer may have left these settings
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def as_list(prompts: Prompts) -> list[Prompt]:
    """Return one prompt or several as a list of prompts.

    Raises:
        ValueError: it is neither, or a flat list of token ids, which could mean one prompt or many.
    """
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is a string, a list of strings or of token-id lists, got {shown(prompts)}")
    listed: list[Any] = list(prompts)
    first = listed[0] if listed else ""
    if not isinstance(first, (str, list)) and getattr(first, "ndim", 0) == 0 and as_integer(first) is not None:
        raise ValueError("prompts is a flat list of token ids; wrap it in a list: [[1, 2, 3]]")
    return listed
