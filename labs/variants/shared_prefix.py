"""A shared beginning: prompts that begin alike hold the same blocks for it, and run it once.

Chats of one product all begin with the same system prompt. Its keys and values are the same in each of them, because a
token's keys depend on itself and the tokens before it, on nothing later. So a block table may name blocks that another
sequence has filled. `python -m labs.variants.shared_prefix` answers five questions after one system prompt, each with
separate blocks and with shared ones, and prints the blocks that were taken and the tokens that ran.
"""

from collections.abc import Callable

from transformers import AutoTokenizer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_d_paged.loop import BLOCK_SIZE, PagedAttention, Pool, Sequence, load, run, take_blocks
from stage_d_paged.model import DecoderModel

SYSTEM = "You are the tutor of a course on inference engines. Answer in the language of the question, in one paragraph."
MAX_TOKENS = 20


def share_nothing(sequence: Sequence, other: Sequence, block_size: int) -> int:
    return 0


def share(sequence: Sequence, other: Sequence, block_size: int) -> int:
    """Let a sequence without blocks share another's blocks with the same tokens; return how many.

    Only whole blocks of tokens whose keys the other has computed are shared: a sequence writes into its last block. At
    least one token of the sequence is left to run, because its logits are needed. `num_computed` is then the number of
    its tokens that have keys.
    """
    most = min(len(sequence.ids) - 1, other.num_computed)
    same = next((i for i in range(most) if sequence.ids[i] != other.ids[i]), most)
    count = same // block_size
    sequence.block_table = other.block_table[:count]
    sequence.num_computed = count * block_size
    return count


def generate(
    model: DecoderModel,
    pool: Pool,
    prompts: list[list[int]],
    eos_id: int,
    share: Callable[[Sequence, Sequence, int], int],
) -> list[list[int]]:
    """Answer all prompts together; the first runs a step ahead of the others, which share its blocks."""
    first, *others = sequences = [Sequence(list(prompt)) for prompt in prompts]
    running = [first]
    while running:
        for sequence in running:
            take_blocks(pool, sequence, len(sequence.ids))
        chunks = [(sequence, range(sequence.num_computed, len(sequence.ids))) for sequence in running]
        for sequence, token in zip(running, run(model, pool, chunks), strict=True):
            sequence.ids.append(token)
        for sequence in others:
            share(sequence, first, pool.block_size)
        others = []  # they have shared by now
        running = [s for s, prompt in zip(sequences, prompts, strict=True) if goes_on(s, len(prompt), eos_id)]
    return [sequence.ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def goes_on(sequence: Sequence, num_prompt: int, eos_id: int) -> bool:
    """Whether an answer is not complete yet."""
    return sequence.ids[-1] != eos_id and len(sequence.ids) - num_prompt < MAX_TOKENS


def main() -> None:
    model, tokenizer = load(PagedAttention()), AutoTokenizer.from_pretrained(TUTOR_PATH)
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": entry["question"]}]
        for entry in read_faq()[:5]
    ]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    answers, blocks, ran = [], [], []
    model.register_forward_hook(lambda module, inputs, output: ran.append(len(inputs[0])))
    for way in (share_nothing, share):
        pool = Pool(model.config, 128, BLOCK_SIZE)
        ran.clear()
        answers.append(generate(model, pool, prompts, tokenizer.eos_token_id, way))
        blocks.append(pool.held[-1])
        print(f"{way.__name__:13} {blocks[-1]} blocks, {sum(ran)} tokens run")
    assert answers[0] == answers[1]
    print(f"blocks of five sequences: {blocks[0]} → {blocks[1]}")


if __name__ == "__main__":
    main()
