"""A decode step in one call: record the calls of a step once, and replay them for every token.

A kernel of a small decode step runs for a few microseconds, and Python takes longer to launch it: the GPU waits.
But every step makes the same calls, as stage B's works on fixed memory. So note them once, with all arguments, and let
one call make them all again: on a GPU, a CUDA graph. No Python is in it: an `if` took one branch for good. What changes
must be in memory, as the token is: a replay writes it where the next one reads it. The answers are stage B's loop's.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache

from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.loop import QUESTION, encode
from stage_b_decode_step.loop import decode_step, generate, prefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
graphs: dict[torch.Tensor, Callable] = {}  # of each generation, which has memory of its own
made: list[tuple] = []  # calls of PyTorch: what was called, with which arguments, and the results


class Calls(TorchDispatchMode):  # inside `with Calls():` every call that reaches PyTorch is noted
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made.append((function, args, kwargs or {}, function(*args, **(kwargs or {}))))
        return made[-1][-1]


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Run a step once, and return a function that makes all of its calls again."""
    if DEVICE == "cuda":
        step()  # compiles and allocates what is used for the first time, which a graph cannot
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()  # recorded, not run
        return graph.replay
    made.clear()
    with Calls():
        step()
    return partial(replay, made.copy())


def replay(calls: list[tuple]) -> None:
    for function, args, kwargs, results in calls:
        for old, new in zip(tree_leaves(results), tree_leaves(function(*args, **kwargs)), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)  # where the calls after this one look for it
    made.clear()  # this stand-in has made them all; with a graph, none of them would come from Python


def replayed_step(model: PreTrainedModel, token: torch.Tensor, cache: StaticCache) -> None:
    """Run the token, and overwrite it with the next one, as `decode_step` does: record that once, then replay it."""
    if token in graphs:
        graphs[token]()
    else:
        graphs[token] = record(partial(decode_step, model, token, cache))


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).to(DEVICE)
    prompt_ids, answers, counts = encode(AutoTokenizer.from_pretrained(TUTOR_PATH), QUESTION), [], []
    for step in (decode_step, replayed_step):
        with torch.device(DEVICE), torch.inference_mode():
            answers.append(generate(step, model, prompt_ids, model.config.eos_token_id, max_tokens=200))
            assert answers[0] == answers[-1]
            token, cache = prefill(model, prompt_ids)
            step(model, token, cache)
            made.clear()
            with Calls():
                step(model, token, cache)
        counts.append(len(made) or 1)  # a replay is one call, though not one of PyTorch
    print("recorded:", "a CUDA graph" if DEVICE == "cuda" else "a list of calls, which stands in for a graph here")
    print(f"calls from Python per step: {counts[0]} → {counts[1]} [H200: 15,963 → 76,126 tokens/s with 256 requests]")


if __name__ == "__main__":
    main()
