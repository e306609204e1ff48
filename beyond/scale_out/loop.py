"""A pipeline: two stages have half of the layers each, and work on different batches at the same time.

A model that is too large for one GPU can be cut between its layers. Stage 0 runs the first half and sends the hidden
states to stage 1, which runs the rest and chooses the next tokens. Stage 0 needs these for its next step: with one
batch in flight, a stage is idle in every second slot of time, which is the *bubble*. With two, stage 0 runs one batch
while stage 1 runs the other. This program draws the slots and counts the idle ones. The answers equal stage D's.
"""

from types import SimpleNamespace

import torch
from transformers import AutoTokenizer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode
from stage_d_paged import loop as whole
from stage_d_paged.loop import LONGEST, PagedAttention, Pool, Sequence, Step, load, take_blocks

ONE_IN_FLIGHT, TWO_IN_FLIGHT = 1, 2  # batches that were started and do not have their next tokens yet


def cut(pool: Pool) -> tuple:  # into two stages, each a model with half of the layers, and their keys and values
    first, last, half = load(PagedAttention()), load(PagedAttention()), len(pool.layers) // 2
    first.layers, first.norm = first.layers[:half], torch.nn.Identity()
    last.layers, last.embed_tokens = last.layers[half:], torch.nn.Identity()  # it is given hidden states, not ids
    return (first, SimpleNamespace(layers=pool.layers[:half])), (last, SimpleNamespace(layers=pool.layers[half:]))


def run_first(stage: tuple, batch: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, Step]:
    """Run the new tokens through the first layers; returns the message to stage 1."""
    chunks = [(sequence, range(sequence.num_computed, len(sequence.ids))) for sequence in batch]
    tokens = [(sequence, position) for sequence, span in chunks for position in span]
    ids, positions = torch.tensor([(s.ids[p], p) for s, p in tokens]).t()
    step = Step(chunks, torch.tensor([s.block_table[0] * LONGEST + p for s, p in tokens]))  # a sequence has one block
    return stage[0](ids, positions, stage[1], step), positions, step


def run_last(stage: tuple, states: torch.Tensor, positions: torch.Tensor, step: Step) -> None:
    last_rows = torch.tensor([len(span) for _, span in step.chunks]).cumsum(0) - 1
    logits = stage[0].compute_logits(stage[0](states, positions, stage[1], step)[last_rows])
    for (sequence, span), token in zip(step.chunks, logits.argmax(-1).tolist(), strict=True):
        sequence.num_computed = span.stop
        sequence.ids.append(token)


@torch.inference_mode()
def generate(most_in_flight: int, pool: Pool, prompts: list[list[int]], eos_id: int) -> tuple[list, list]:
    """Answer all prompts in two batches; returns the answers, and what each stage ran in every slot of time."""
    (first, last), sequences = cut(pool), [Sequence(list(prompt)) for prompt in prompts]
    for sequence in sequences:
        take_blocks(pool, sequence, LONGEST)
    ready, sent, schedule = [("A", sequences[::2]), ("B", sequences[1::2])], None, []
    while ready or sent:
        arrived, sent = sent, None
        if ready and most_in_flight > (arrived is not None):  # what has arrived is in flight until it has run
            name, batch = ready.pop(0)
            sent = name, batch, run_first(first, batch)
        if arrived:
            name, batch, message = arrived
            run_last(last, *message)
            if running := [s for s in batch if s.ids[-1] != eos_id and len(s.ids) < LONGEST]:
                ready.append((name, running))
        schedule.append([step[0] if step else "." for step in (sent, arrived)])
    return [sequence.ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)], schedule


def main() -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(TUTOR_PATH), load(PagedAttention())
    work = [encode(tokenizer, entry["question"]) for entry in read_faq()[:4]], tokenizer.eos_token_id
    expected, idle = whole.generate(model, Pool(model.config, 4, LONGEST), *work), []
    for most_in_flight in (ONE_IN_FLIGHT, TWO_IN_FLIGHT):
        answers, schedule = generate(most_in_flight, Pool(model.config, 4, LONGEST), *work)
        assert answers == expected
        print(*(f"stage {number}  {' '.join(slot[number] for slot in schedule[:30])} …" for number in (0, 1)), sep="\n")
        idle.append(f"{sum(slot.count('.') for slot in schedule)} of {2 * len(schedule)}")
    print(f"idle slots of the schedule: {idle[0]} → {idle[1]} [H200: 53 → 43 % of the time]")


if __name__ == "__main__":
    main()
