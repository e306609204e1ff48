"""Turn the prompts and parameters of a call into one request per answer, and add prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stage_a_naive.contract.errors import shown
from stage_a_naive.contract.logprobs import PromptLogprobs
from stage_a_naive.contract.outputs import GenerationOutput, Request
from stage_a_naive.contract.params import SamplingParams


def one_per_prompt(sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return sampling parameters as a list; `ValueError` unless it is a list with one entry per prompt."""
    if isinstance(sampling_params, (str, bytes, Mapping)) or not isinstance(sampling_params, Iterable):
        raise ValueError(f"sampling_params is a SamplingParams, or a list of them, got {shown(sampling_params)}")
    params = list(sampling_params)
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts but {len(params)} sampling parameters; give one, or one each")
    return params


def one_per_answer(requests: Sequence[Request]) -> list[Request]:
    """Repeat each request `n` times, as its parameters say, and increase the seed by one each time."""
    answers = [(request, i) for request in requests for i in range(request.params.n)]
    return [
        replace(request, index=index, seed=(request.seed + i) % 2**64, answer_index=i)
        for index, (request, i) in enumerate(answers)
    ]


def only_answer(requests: list[Request]) -> Request:
    """Return the only request of a list; `ValueError` if a prompt asks for several answers."""
    if len(requests) > 1:
        raise ValueError(f"n={len(requests)} answers to one prompt are what generate and chat give; leave n out here")
    return requests[0]


def add_prompt_logprobs(
    outputs: Sequence[GenerationOutput], requests: Sequence[Request], score: Callable[[list[int], int], PromptLogprobs]
) -> None:
    """Add the log-probabilities of prompts to the outputs that ask for them.

    Args:
        outputs, requests: of one call, in the same order.
        score: computes log-probabilities from a prompt's ids and the number of likeliest tokens to return.
    """
    scores: PromptLogprobs = []
    for output, request in zip(outputs, requests, strict=True):
        count = request.params.prompt_logprobs
        if count is not None:
            if request.answer_index == 0:  # other answers to the same prompt follow
                scores = score(request.prompt_token_ids, count)
            output["prompt_logprobs"] = scores
