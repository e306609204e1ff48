"""The loop of `loop.py` behind the contract that all six stages keep.

    prompt -> token ids -> prefill -> choose -> decode step -> choose -> decode step -> ... -> text

The contract adds a device and a dtype, sampling parameters, conditions that end the answer, streamed text, and timing.
Two costs stay on purpose, because the next stage is about them: every step makes a new input tensor, and every step
waits until the GPU has handed its token to Python before it launches the next step.
"""

from __future__ import annotations

import time
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from stage_a_naive.checkpoints.loading import load_hf_model
from stage_a_naive.contract.logprobs import PromptLogprobs, score_tokens, top_logprobs
from stage_a_naive.contract.outputs import Completion, GenerationOutput, OnText, Request, synchronized_time
from stage_a_naive.entrypoints.frontend import Frontend
from stage_a_naive.entrypoints.progress import progress_bar
from stage_a_naive.sampling import choose_tokens


class LLM(Frontend):
    """A Hugging Face model with a hand-written prefill and decode loop.

    Args:
        model: `tutor`, a directory, a hub id, or `random:<preset>`.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto`, `float32`, `float16` or `bfloat16`.
        seed: for random weights, and for requests without a seed.

    Raises:
        ModelError: the model cannot be loaded or is not supported.
        MemoryError: the device does not have enough memory for the weights.
    """

    def __init__(
        self, model: str | PathLike[str], *, device: str = "auto", dtype: str | torch.dtype = "auto", seed: int = 0
    ) -> None:
        start = time.perf_counter()
        super().__init__(model, device, dtype, seed)
        self.model = load_hf_model(self.source, self.device, self.dtype, seed, **self._model_options())
        self.vocab_size = self.source.config.vocab_size
        self.max_model_len = self.source.config.max_position_embeddings
        self.build_time = time.perf_counter() - start

    def _model_options(self) -> dict[str, Any]:
        """Return options for transformers; later stages choose the attention implementation here."""
        return {}

    def _generate(self, requests: list[Request], use_tqdm: bool, on_text: OnText | None) -> list[GenerationOutput]:
        progress = progress_bar(requests, desc="generate", unit="request") if use_tqdm else requests
        return [self._generate_one(request, request.arrival_time, on_text) for request in progress]

    @torch.inference_mode()
    def _generate_one(self, request: Request, arrival: float, on_text: OnText | None) -> GenerationOutput:
        """Run one request from its first token to its last. `arrival` is when the call came in, for the TTFT."""
        completion = Completion(request, self.tokenizer, self.eos_token_ids, self.max_model_len, on_text is None)
        start = synchronized_time(self.device)

        # Prefill: all prompt tokens at once. [1, prompt] -> logits [1, prompt, vocab]; only the last row is used.
        out = self.model(torch.tensor([request.prompt_token_ids], device=self.device), use_cache=True)
        token_id = self._next_token(out.logits[:, -1], completion, on_text)
        first = synchronized_time(self.device)

        # Decode: one token and the cache per step. [1, 1] -> logits [1, 1, vocab]; the cache grows by one position.
        while completion.finish_reason is None:
            input_ids = torch.tensor([[token_id]], device=self.device)
            out = self.model(input_ids, past_key_values=out.past_key_values, use_cache=True)
            token_id = self._next_token(out.logits[:, -1], completion, on_text)
        end = synchronized_time(self.device)
        return completion.to_output(arrival, start, first, end)

    @torch.inference_mode()
    def _score(self, prompt_token_ids: list[int], count: int) -> PromptLogprobs:
        input_ids = torch.tensor([prompt_token_ids], device=self.device)
        [hidden] = self.model.model(input_ids, use_cache=False)[0]  # [prompt, hidden]: before the LM head
        return [None, *score_tokens(prompt_token_ids[1:], count, hidden, self.model.lm_head)]

    def _next_token(self, logits: Tensor, completion: Completion, on_text: OnText | None) -> int:
        """Choose a token from logits `[1, vocab]` and add it to the completion."""
        logits = logits.float()
        ids = choose_tokens(logits, [completion])  # [1]
        token_id = int(ids)  # waits for the device
        count = completion.request.params.logprobs
        logprobs = None if count is None else top_logprobs(logits[0], count, token_id)
        completion.tell(on_text, completion.append(token_id, logprobs))
        return token_id
