"""A decode step in one call: record the calls of a step once, and replay them for every token.

A kernel of a small decode step runs for a few microseconds, and Python takes longer to launch it: the GPU waits.
But every step makes the same calls, as stage B's works on fixed memory. So record them once, with all arguments, and
let one call repeat them all: on a GPU, a CUDA graph. It contains no Python: an `if` has taken one branch for good.
Values that change must be in memory, like the token: a replay writes it where the next one reads it.
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
graphs: dict[torch.Tensor, Callable] = {}  # one per generation, which has separate memory
made: list[tuple] = []  # PyTorch calls: the function, its arguments, its results


class Calls(TorchDispatchMode):  # inside `with Calls():` every call that reaches PyTorch is recorded
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made.append((function, args, kwargs or {}, function(*args, **(kwargs or {}))))
        return made[-1][-1]


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Run a step once, and return a function that repeats all of its calls."""
    if DEVICE == "cuda":
        step()  # a first run compiles and allocates, which a graph cannot do
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
                old.copy_(new)  # where later calls read it
    made.clear()  # this stand-in made them all; with a graph, none of them would come from Python


def replayed_step(model: PreTrainedModel, token: torch.Tensor, cache: StaticCache) -> None:
    """Run the token and overwrite it with the next one, as `decode_step` does: record once, then replay."""
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
    print(f"calls from Python per step: {counts[0]} → {counts[1]} [H200: 19,410 → 79,430 tokens/s with 256 requests]")


if __name__ == "__main__":
    main()
