"""Continuous batching: before every step, decide again which sequences run.

A static batch, as in stage D, runs until its longest answer has ended. It is also small: no block can be taken back, so
only as many sequences start as fit at full length, two in 64 blocks. Here sequences join and leave between any two
steps:

- A waiting sequence joins as soon as there are blocks for its tokens so far, in order of arrival.
- A step runs up to 64 tokens: one for each answer, the rest from prompts, in chunks. With three answers running, a
  prompt of 70 tokens runs 61 of them in one step and 9 in the next.
- If a sequence needs a block and none is free, the one that joined last is preempted: it gives its blocks back and
  waits again. Its tokens are not lost. Later they run once more, like a longer prompt.

`python -m stage_e_batching.loop` answers 24 questions in static batches of two, then continuously; it counts the steps.
"""

from collections import deque

from transformers import AutoTokenizer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode
from stage_d_paged import loop as static
from stage_d_paged.loop import BLOCK_SIZE, LONGEST, PagedAttention, Pool, Sequence, load, release, run, take_blocks
from stage_d_paged.model import DecoderModel

NUM_BLOCKS = 64  # in the pool
TOKENS_PER_STEP = 64


def num_left(sequence: Sequence) -> int:
    """Return how many tokens of a sequence have not run yet: one while it answers, many in its prompt."""
    return len(sequence.ids) - sequence.num_computed


def fits(pool: Pool, sequence: Sequence) -> bool:
    """Whether a sequence has blocks for all its tokens, or enough blocks are free for the rest."""
    return len(sequence.ids) <= (len(sequence.block_table) + len(pool.free)) * pool.block_size


def schedule(pool: Pool, waiting: deque[Sequence], running: list[Sequence]) -> list[tuple[Sequence, range]]:
    """Choose what the next step runs. Moves sequences between the two queues, which are in order of arrival."""
    grown = 0
    while grown < len(running):  # every running sequence needs room for one more token
        if fits(pool, running[grown]):
            take_blocks(pool, running[grown], len(running[grown].ids))
            grown += 1
        else:  # preempt the last one, perhaps the one that needs the block
            waiting.appendleft(running.pop())
            release(pool, waiting[0])

    while waiting and sum(map(num_left, running)) < TOKENS_PER_STEP and fits(pool, waiting[0]):  # waiting ones join
        running.append(waiting.popleft())
        take_blocks(pool, running[-1], len(running[-1].ids))

    chunks, budget = [], TOKENS_PER_STEP
    for sequence in running:  # each runs what it has left; only the last one to join can exceed the budget
        count = min(num_left(sequence), budget)
        chunks.append((sequence, range(sequence.num_computed, sequence.num_computed + count)))
        budget -= count
    return [(sequence, span) for sequence, span in chunks if span]


def step(
    model: DecoderModel, pool: Pool, waiting: deque[Sequence], running: list[Sequence], eos_id: int
) -> list[Sequence]:
    """Run one step; returns the sequences that got a token. Sequences that have ended leave `running`."""
    chunks, news = schedule(pool, waiting, running), []
    for (sequence, span), token in zip(chunks, run(model, pool, chunks), strict=True):
        if span.stop == len(sequence.ids):  # its last token has run, so this is the next one
            sequence.ids.append(token)
            news.append(sequence)
            if token == eos_id or len(sequence.ids) == LONGEST:
                running.remove(sequence)
                release(pool, sequence)
    return news


def generate(model: DecoderModel, pool: Pool, prompts: list[list[int]], eos_id: int) -> list[list[int]]:
    """Answer all prompts, as many at a time as the blocks allow."""
    sequences = [Sequence(list(prompt)) for prompt in prompts]
    waiting, running = deque(sequences), []
    while waiting or running:
        step(model, pool, waiting, running, eos_id)
    return [sequence.ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def generate_static(model: DecoderModel, pool: Pool, prompts: list[list[int]], eos_id: int) -> list[list[int]]:
    """Answer all prompts in stage D's batches, as many at a time as have blocks for their full length."""
    size = NUM_BLOCKS * BLOCK_SIZE // LONGEST
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    return [answer for batch in batches for answer in static.generate(model, pool, batch, eos_id)]


def main() -> None:
    model, tokenizer = load(PagedAttention()), AutoTokenizer.from_pretrained(TUTOR_PATH)
    prompts = [encode(tokenizer, entry["question"]) for entry in read_faq()[:24]]
    answers, steps, run_tokens = [], [], []
    model.register_forward_hook(lambda module, inputs, output: run_tokens.append(len(inputs[0])))
    for function in (generate_static, generate):
        pool = Pool(model.config, NUM_BLOCKS, BLOCK_SIZE)
        run_tokens.clear()
        answers.append(function(model, pool, prompts, tokenizer.eos_token_id))
        steps.append(len(pool.held))
        print(f"{function.__name__:15} {steps[-1]:5,} steps, {sum(run_tokens):,} tokens run")
    assert answers[0] == answers[1]
    print(f"steps for 24 questions: {steps[0]:,} → {steps[1]:,} [CPU, 16 slots: 719 → 379 steps, 1.49 × the tokens/s]")


if __name__ == "__main__":
    main()
