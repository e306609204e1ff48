"""Shortest prompt first: an order other than the order of arrival often gives first tokens earlier.

Many short prompts wait behind a long one, so the mean time to the first token falls when the short ones go first. This
rule alone would let a long prompt wait forever while short ones keep arriving. So a request that has waited long enough
goes first anyway. `python -m labs.variants.shortest_first` answers 24 questions of very different lengths in both
orders and prints the steps before the first token.
"""

from collections import deque
from collections.abc import Callable
from statistics import mean

from transformers import AutoTokenizer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode
from stage_d_paged.loop import BLOCK_SIZE, PagedAttention, Pool, Sequence, load
from stage_d_paged.model import DecoderModel
from stage_e_batching.loop import NUM_BLOCKS, num_left, step

PATIENCE = 40  # steps after which a waiting sequence goes before all that have waited less


def by_arrival(waiting: deque[Sequence]) -> None:
    """The order of stage E's program: nothing is changed."""


def by_length(waiting: deque[Sequence]) -> None:
    """Sort the waiting sequences into the order in which they join.

    First those that have waited for `PATIENCE` steps or more in all (`sequence.waited`), the longest wait first; then
    the others, the fewest tokens left to run first. Equal ones keep their order. The deque itself is changed, because
    the scheduler uses the same object.
    """
    in_order = sorted(waiting, key=lambda s: (0, -s.waited) if s.waited >= PATIENCE else (1, num_left(s)))
    waiting.clear()
    waiting.extend(in_order)


def generate(
    model: DecoderModel, prompts: list[list[int]], eos_id: int, order: Callable[[deque[Sequence]], None]
) -> tuple[list[list[int]], list[int]]:
    """Answer all prompts; return the answers, and for each the number of steps before its first token."""
    pool, sequences = Pool(model.config, NUM_BLOCKS, BLOCK_SIZE), [Sequence(list(prompt)) for prompt in prompts]
    first_steps: dict[Sequence, int] = {}
    waiting, running = deque(sequences), []
    for sequence in sequences:
        sequence.waited = 0
    while waiting or running:
        order(waiting)
        for sequence in step(model, pool, waiting, running, eos_id):
            first_steps.setdefault(sequence, len(pool.held))
        for sequence in waiting:
            sequence.waited += 1
    answers = [sequence.ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
    return answers, [first_steps[sequence] for sequence in sequences]


def long_and_short(tokenizer: object) -> list[list[int]]:
    """Return 24 prompts; in every fourth one, three other questions with answers precede the question."""
    faq = read_faq()[:24]
    told = " ".join(f"{entry['question']} {entry['answer']}" for entry in faq[:3])
    return [encode(tokenizer, ("" if i % 4 else told) + entry["question"]) for i, entry in enumerate(faq)]


def main() -> None:
    model, tokenizer = load(PagedAttention()), AutoTokenizer.from_pretrained(TUTOR_PATH)
    prompts = long_and_short(tokenizer)
    answers, means = [], []
    for order in (by_arrival, by_length):
        given, first_steps = generate(model, prompts, tokenizer.eos_token_id, order)
        answers.append(given)
        means.append(mean(first_steps))
        print(f"{order.__name__:11} first tokens after {min(first_steps)} to {max(first_steps)} steps")
    assert answers[0] == answers[1]
    print(f"steps to the first token, mean of {len(prompts)}: {means[0]:.0f} → {means[1]:.0f}")


if __name__ == "__main__":
    main()
