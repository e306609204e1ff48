"""What a user touches: `generate` and `chat`, the same in every stage.

The front end checks everything at the door, so that a bad request costs an error message and nothing else, and hands
plain `Request`s to the stage's own `_generate`.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from os import PathLike

import torch
from torch import Tensor

from stage_a_naive.call_guard import CallGuard
from stage_a_naive.chat import Message, render_chat
from stage_a_naive.loading import eos_token_ids, load_tokenizer, pick_device, pick_dtype, resolve
from stage_a_naive.outputs import Completion, GenerationOutput, Request
from stage_a_naive.sampling import SamplingFunction, SamplingParams, apply_penalties, sample

Prompts = str | Sequence[str] | Sequence[Sequence[int]]
OnText = Callable[[int, str], None]  # (index of the prompt, new piece of its text)


class Frontend:
    """Base of every stage's `LLM`.

    A stage loads its model, sets `vocab_size` and `max_model_len`, and implements `_generate`.

    Args:
        model, device, dtype, seed: those of every `LLM`.

    Attributes:
        source, device, dtype: which model, where and in what.
        sampling_fn: replace it to choose tokens yourself: called as `fn(logits [rows, vocab] float32, params)` with one
            `SamplingParams` a row, it returns the ids `[rows]`. None is the built-in sampler.
    """

    vocab_size: int
    max_model_len: int

    def __init__(self, model: str | PathLike[str], device: str, dtype: str | torch.dtype, seed: int) -> None:
        self.source = resolve(model)
        self.device = pick_device(device)
        self.dtype = pick_dtype(dtype, self.device)
        self.tokenizer = load_tokenizer(self.source)
        self.eos_token_ids = eos_token_ids(self.source, self.tokenizer)
        self.sampling_fn: SamplingFunction | None = None
        self._seeds = random.Random(seed)  # for the requests that bring no seed of their own
        self._guard = CallGuard()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_text: OnText | None = None,
    ) -> list[GenerationOutput]:
        """Complete prompts.

        Args:
            prompts: a string, a list of strings (encoded as they are, no chat template), or a list of token-id lists.
            sampling_params: one for all prompts, or a list with one for each.
            use_tqdm: show a progress bar.
            on_text: called as `on_text(index, piece)` with every piece of text as it becomes known.

        Returns:
            One `GenerationOutput` a prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt or the parameters are out of range; nothing has run then.
            RuntimeError: the engine is closed, belongs to another process, or is inside a call of this thread already.
        """
        requests = self._requests(prompts, sampling_params)
        with self._exclusive_call():
            return self._generate(requests, use_tqdm, on_text)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_text: OnText | None = None,
    ) -> list[GenerationOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists); otherwise as `generate`."""
        self._guard.check_usable()
        one = len(messages) == 0 or hasattr(messages[0], "keys")
        conversations = [messages] if one else messages
        prompts = [self._encode(render_chat(self.tokenizer, conversation)) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm, on_text)

    def close(self) -> None:
        """End the engine: later calls are refused. A second call does nothing."""
        self._guard.close()

    def _exclusive_call(self) -> AbstractContextManager[None]:
        """Held while `_generate` runs. A stage whose engine serves several calls side by side overrides it."""
        return self._guard.one_call()

    def _generate(self, requests: list[Request], use_tqdm: bool, on_text: OnText | None) -> list[GenerationOutput]:
        raise NotImplementedError(f"{type(self).__name__} has no engine")

    def _encode(self, text: str) -> list[int]:
        # The template already holds the special tokens; a plain prompt is encoded as it is.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _requests(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        self._guard.check_usable()
        prompt_list = [prompts] if isinstance(prompts, str) else list(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(prompt_list)
        else:
            params = list(sampling_params)
        if len(params) != len(prompt_list):
            raise ValueError(f"{len(prompt_list)} prompts but {len(params)} sampling parameters; give one, or one each")
        return [self._request(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompt_list, params, strict=True))]

    def _request(self, index: int, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling parameters of prompt {index}: expected SamplingParams, got {params!r}")
        if isinstance(prompt, int):
            raise ValueError("prompts is a flat list of token ids; wrap it in a list: [[1, 2, 3]]")
        ids = self._encode(prompt) if isinstance(prompt, str) else [operator.index(i) for i in prompt]
        if not ids:
            raise ValueError(f"prompt {index} is empty; a model needs at least one token to continue from")
        outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            raise ValueError(f"prompt {index}: token id {outside} is outside the vocabulary of {self.vocab_size}")
        if len(ids) > self.max_model_len - 1:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens; with a maximum model length of {self.max_model_len} "
                f"at most {self.max_model_len - 1} fit, so that one can be generated"
            )
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        return Request(index, ids, params, seed)

    def _choose(self, logits: Tensor, completions: Sequence[Completion]) -> Tensor:
        """The next token of each completion: logits `[rows, vocab]` float32 -> ids `[rows]` on the device.

        Raises:
            ValueError: a replaced `sampling_fn` returned something other than `[rows]` ids.
        """
        requests = [c.request for c in completions]
        params = [r.params for r in requests]
        prompts, outputs = [r.prompt_token_ids for r in requests], [c.token_ids for c in completions]
        logits = apply_penalties(logits, params, prompts, outputs)
        if self.sampling_fn is None:
            return sample(logits, params, [r.seed for r in requests], [len(ids) for ids in outputs])
        return checked_ids(self.sampling_fn(logits, params), logits)


def checked_ids(ids: Tensor, logits: Tensor) -> Tensor:
    """What a replaced sampler returned, refused where it is not one id a row."""
    if not isinstance(ids, Tensor) or ids.shape != logits.shape[:1] or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else repr(type(ids))
        raise ValueError(f"sampling_fn must return integer ids of shape [{logits.shape[0]}], got {got}")
    return ids.long()
