"""The engine of stage A with its decode step as a separate function, made fast.

    prompt -> token ids -> prefill -> choose -> DecodeStep -> choose -> DecodeStep -> ... -> text

A token takes the same path as in stage A. `DecodeStep` has fixed shapes, so it can be compiled: this is the idea of the
stage. The other options keep the loop around the step cheaper than the step. Each has a switch, so that its gain can be
measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from stage_a_naive.checkpoints.model_config import layer_kinds, rope_of_kind
from stage_a_naive.contract.logprobs import PromptLogprobs, top_logprobs
from stage_a_naive.contract.outputs import Completion, GenerationOutput, OnText, Request, synchronized_time
from stage_a_naive.contract.params import as_boolean, as_integer, check_field
from stage_a_naive.entrypoints.progress import progress_bar
from stage_a_naive.llm import LLM as NaiveLLM
from stage_a_naive.sampling import choose_tokens
from stage_b_decode_step.attention import ATTENTION_NAME, PREFILL_NAME, attention_and_matmul_settings
from stage_b_decode_step.decode_step import DecodeStep, Step, compiled
from stage_b_decode_step.static_cache import StaticKVCache, cache_length
from stage_b_decode_step.token_log import TokenLog

WARMUP_STEPS = 4  # on a GPU, a compiled step compiles, runs once without a graph, records its graph, and replays it
SWITCHES = ("compile", "static_cache", "last_logits_only", "async_eos", "buffers", "pinned", "warmup")


class LLM(NaiveLLM):
    """Stage A's engine with an optimised decode step.

    Args:
        model, device, dtype, seed: as in stage A.
        compile: use `torch.compile` for the decode step (with CUDA graphs on a GPU).
        static_cache: one KV cache of fixed shape and address instead of one that grows. Compiling needs it.
        last_logits_only: compute the prompt's logits for its last position only (transformers' `logits_to_keep`).
        async_eos: find the end of sequence a few steps late instead of waiting for the device at every step.
        sync_every: with `async_eos`, send tokens to the host every this many steps; None is 8 on a GPU, and 1 on a CPU,
            which computes while Python waits. Up to `2 * sync_every - 1` steps after the end are computed for nothing.
        buffers: write each step's token into buffers allocated once instead of new tensors.
        pinned: copy prompts from, and tokens to, pinned host memory (GPU only).
        sdpa: fused attention kernels, chosen by name, instead of attention written out; None is yes, except in a
            compiled step, for which the compiler makes faster kernels.
        matmul_precision: PyTorch's setting for float32 matrices: `highest`, `high` (TF32 on a GPU) or `medium`.
        warmup: run each cache size once before its first request is timed; its time counts as `build_time`, including
            compilation. Without it, the first request's metrics contain this one-time work.

    Raises:
        ValueError: the options cannot be combined, or a required compiler is missing.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        compile: bool = False,
        static_cache: bool = True,
        last_logits_only: bool = True,
        async_eos: bool = True,
        sync_every: int | None = None,
        buffers: bool = True,
        pinned: bool = True,
        sdpa: bool | None = None,
        matmul_precision: str = "high",
        warmup: bool = True,
    ) -> None:
        if compile and not static_cache:
            raise ValueError("compile=True needs static_cache=True: a cache that grows is a new program for every step")
        if sync_every is not None and not async_eos:
            raise ValueError(f"sync_every={sync_every} needs async_eos=True; without it, Python waits for every step")
        if matmul_precision not in ("highest", "high", "medium"):
            raise ValueError(f"matmul_precision must be 'highest', 'high' or 'medium', got {matmul_precision!r}")
        self.compile, self.static_cache, self.last_logits_only = compile, static_cache, last_logits_only
        self.async_eos, self.sync_every, self.buffers, self.pinned = async_eos, sync_every, buffers, pinned
        self.sdpa, self.matmul_precision, self.warmup = sdpa, matmul_precision, warmup
        for switch in SWITCHES:
            check_field(self, switch, as_boolean, lambda v: True, "True or False")
        if sdpa is not None:
            check_field(self, "sdpa", as_boolean, lambda v: True, "None, True or False")
        if sync_every is not None:
            check_field(self, "sync_every", as_integer, lambda v: v >= 1, "None or an integer, 1 or more")
        super().__init__(model, device=device, dtype=dtype, seed=seed)
        on_gpu = self.device.type == "cuda"
        self.sync_every = self.sync_every or (8 if on_gpu else 1)
        self.decode_step = DecodeStep(self.model)
        self._step: Step = compiled(self.decode_step, self.device) if compile else self.decode_step
        self._work: dict[int, tuple[StaticKVCache | None, TokenLog]] = {}  # by cache length
        self._warm: set[tuple[int, int]] = set()  # (cache length, decode steps) of the warm-ups so far

    def _model_options(self) -> dict[str, Any]:
        config = self.source.config
        rope_types = {rope_of_kind(config, kind).get("rope_type") for kind in layer_kinds(config)}
        rope_type = next(iter(rope_types & {"dynamic", "longrope"}), None)
        if self.compile and rope_type:
            raise ValueError(
                f"compile=True cannot be combined with a model of rope scaling type {rope_type!r}: Python looks at "
                "the position in every step to choose the frequencies; leave compile off"
            )
        if self.sdpa is None:
            return {"attn_implementation": PREFILL_NAME if self.compile else ATTENTION_NAME}
        return {"attn_implementation": ATTENTION_NAME if self.sdpa else "eager"}

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Apply PyTorch's settings for the duration of a call, and restore them after it."""
        with ExitStack() as stack:
            stack.enter_context(attention_and_matmul_settings(self.matmul_precision))
            # Compiled programs with graphs need autograd's records, which tensors of inference mode do not keep.
            stack.enter_context(torch.no_grad() if self.compile else torch.inference_mode())
            if self.compile:
                # One program per cache length and engine is intended; PyTorch considers more than 8 a mistake.
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))
            yield

    def _generate(self, requests: list[Request], use_tqdm: bool, on_text: OnText | None) -> list[GenerationOutput]:
        with self._settings():
            built = self.build_time
            for request in requests:
                self._prepare(request)
            built = self.build_time - built  # compiling is no part of the first token's time
            progress = progress_bar(requests, desc="generate", unit="request") if use_tqdm else requests
            return [self._generate_one(request, request.arrival_time + built, on_text) for request in progress]

    def _generate_one(self, request: Request, arrival: float, on_text: OnText | None) -> GenerationOutput:
        completion = Completion(request, self.tokenizer, self.eos_token_ids, self.max_model_len, on_text is None)
        static_cache, log = self._work[self._length(request)]
        log.clear()
        start = synchronized_time(self.device)

        cache = self._fresh_cache(static_cache)
        logits = self._prefill(request.prompt_token_ids, cache)  # [1, vocab]
        log.write(self._choose(logits, completion, step=0))
        log.send()
        self._accept(log.receive(max_in_flight=0), logits, completion, on_text)  # wait for the first token
        first = synchronized_time(self.device)

        self._decode(cache, log, completion, on_text)
        end = synchronized_time(self.device)
        return completion.to_output(arrival, start, first, end)

    def _score(self, prompt_token_ids: list[int], count: int) -> PromptLogprobs:
        with self._settings():
            return super()._score(prompt_token_ids, count)

    def _prefill(self, prompt: list[int], cache: Cache) -> Tensor:
        """Run all prompt tokens at once and return the logits `[1, vocab]` of the last one."""
        pin = self.pinned and self.device.type == "cuda"
        input_ids = torch.tensor([prompt], pin_memory=pin).to(self.device, non_blocking=pin)  # [1, prompt]
        if len(prompt) == 1:
            return self.decode_step(input_ids, cache)  # one token is a decode step
        # Only the last position's logits are needed. All of them are a matrix product of prompt x hidden x vocab.
        keep = 1 if self.last_logits_only else 0  # in transformers, 0 means all
        out = self.model(
            input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=keep, return_dict=False
        )
        if isinstance(cache, StaticKVCache):
            cache.end_prefill(len(prompt))
        return out[0][:, -1, :].float()

    def _decode(self, cache: Cache, log: TokenLog, completion: Completion, on_text: OnText | None) -> None:
        """Run steps until the completion is finished. Surplus steps stay inside the cache: their number is limited."""
        params = completion.request.params
        # Penalties, bad words and log-probabilities need every token on the host at once.
        every_step = not self.async_eos or params.needs_tokens or params.logprobs is not None
        last = completion.num_remaining_tokens if completion.finish_reason is None else 0
        assert self.sync_every is not None
        for step in range(1, last + 1):
            logits = self._step(log.next_input, cache)
            log.write(self._choose(logits, completion, step))
            wait_for_all = every_step or step == last
            if wait_for_all or step % self.sync_every == 0:
                log.send()
            # One chunk may be in flight: the device works on its steps while the host reads the chunk before.
            self._accept(log.receive(max_in_flight=0 if wait_for_all else 1), logits, completion, on_text)
            if completion.finish_reason is not None:
                break

    def _choose(self, logits: Tensor, completion: Completion, step: int) -> Tensor:
        """Choose a token id `[1]` on the device without waiting for it; `step` tokens were chosen before."""
        return choose_tokens(logits, [completion], [step])

    def _accept(self, ids: list[int], logits: Tensor, completion: Completion, on_text: OnText | None) -> None:
        """Add tokens that have arrived; tokens after the end are surplus and are dropped."""
        count = completion.request.params.logprobs
        for token_id in ids:
            if completion.finish_reason is not None:
                return
            # With log-probabilities the host waits for every step, so these logits belong to this token.
            logprobs = None if count is None else top_logprobs(logits[0], count, token_id)
            completion.tell(on_text, completion.append(token_id, logprobs))

    # Before the clock starts -----------------------------------------------------------------------------------------

    def _most_tokens(self, request: Request) -> int:
        """Return the most tokens that a request can generate."""
        return min(request.params.max_tokens, self.max_model_len - len(request.prompt_token_ids))

    def _length(self, request: Request) -> int:
        """Return the cache length for a request."""
        return cache_length(len(request.prompt_token_ids) + self._most_tokens(request))

    def _prepare(self, request: Request) -> None:
        """Allocate and warm up what a request of this size needs, unless it is ready. This counts as build time."""
        start = time.perf_counter()
        length = self._length(request)
        if length not in self._work:
            cache = StaticKVCache(self.model.config, length, self.dtype, self.device) if self.static_cache else None
            self._work[length] = cache, TokenLog(length, self.device, self.buffers, self.pinned)
        steps = WARMUP_STEPS if self._most_tokens(request) > 1 else 0  # one token needs no step, so none is compiled
        if self.warmup and (length, steps) not in self._warm:
            self._warm_up(length, min(len(request.prompt_token_ids), length - steps), steps)
            self._warm.add((length, steps))
        self.build_time += synchronized_time(self.device) - start

    def _warm_up(self, length: int, prompt_len: int, steps: int) -> None:
        """Run a request whose answer is thrown away: kernels are loaded, workspaces allocated, programs compiled."""
        static_cache, log = self._work[length]
        log.clear()
        cache = self._fresh_cache(static_cache)
        log.write(self._prefill([0] * prompt_len, cache).argmax(-1))
        for _ in range(steps):
            log.write(self._step(log.next_input, cache).argmax(-1))
        log.send()
        log.receive(max_in_flight=0)

    def _fresh_cache(self, static_cache: StaticKVCache | None) -> Cache:
        if static_cache is None:
            return DynamicCache(config=self.model.config)
        static_cache.reset()
        return static_cache
