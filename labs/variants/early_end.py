"""Steps that end early: how far ahead may a step be launched, and what happens to unnecessary steps?

An engine that launches a step before the last token has arrived cannot know whether that token ends the answer: such a
step runs for nothing. But it knows the limit on the number of tokens. And all launched steps must have run before
another request may use the cache. `python -m labs.variants.early_end` answers one question with 0, 1 and 3 steps ahead,
once until its end and once up to 20 tokens, and prints the steps that ran for nothing.
"""

from collections import deque
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.loop import QUESTION, encode
from stage_b_decode_step import loop as one_by_one
from stage_f_graph_tp.overlap_loop import DEVICE
from stage_f_graph_tp.overlap_loop import launch as launch_step


def generate_ahead(
    most_ahead: int, launch: Callable[[], Callable[[], int]], first: int, eos_id: int, max_tokens: int
) -> tuple[list[int], int]:
    """Generate with up to `most_ahead` steps in flight when another is launched.

    `first` is the token that the prefill chose. `launch()` puts the next step into the device's queue and returns a
    function that waits for its token. No step is launched for a token beyond `max_tokens`. When this returns, no step
    is in flight any more.

    Returns:
        The answer, from `first` up to and including `eos_id`, and the number of steps that were launched but not
        needed.
    """
    ids, in_flight = [first], deque()
    while len(ids) < max_tokens and ids[-1] != eos_id:
        while len(in_flight) <= most_ahead and len(ids) + len(in_flight) < max_tokens:
            in_flight.append(launch())
        ids.append(in_flight.popleft()())
    for wait in in_flight:
        wait()
    return ids, len(in_flight)


@torch.inference_mode()
def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval().to(DEVICE)
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    prompt_ids, unneeded = encode(tokenizer, QUESTION), []
    with torch.device(DEVICE):
        for max_tokens in (200, 20):
            expected = one_by_one.generate(
                one_by_one.decode_step, model, prompt_ids, tokenizer.eos_token_id, max_tokens
            )
            for most_ahead in (0, 1, 3):
                token, cache = one_by_one.prefill(model, prompt_ids)

                def launch(token: torch.Tensor = token, cache: object = cache) -> Callable[[], int]:
                    return launch_step(model, token, cache)

                ids, count = generate_ahead(most_ahead, launch, int(token), tokenizer.eos_token_id, max_tokens)
                assert ids == expected
                unneeded.append(count)
    print(f"steps for nothing, 0, 1 and 3 ahead: {unneeded[:3]} to the end, {unneeded[3:]} up to 20 tokens")


if __name__ == "__main__":
    main()
