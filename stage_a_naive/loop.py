"""The idea of an inference engine on one screen: generate a text without a KV cache, then with one.

Both choose the same tokens. `python -m stage_a_naive.loop` prints how many tokens each one runs, and the time.
"""

from timeit import repeat

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from stage_a_naive.checkpoints.tutor import TUTOR_PATH

QUESTION = "How do I build a mini vLLM inference loop from scratch? Answer in bullet points."


@torch.inference_mode()
def generate_uncached(model: PreTrainedModel, prompt_ids: list[int], eos_id: int, max_tokens: int) -> list[int]:
    """Generate by running the model over the whole text again for every token."""
    ids: list[int] = []
    while len(ids) < max_tokens and eos_id not in ids:
        out = model(torch.tensor([prompt_ids + ids]), use_cache=False)  # logits [1, prompt + generated, vocab]
        ids.append(int(out.logits[0, -1].argmax()))  # the scores after the last token; greedy takes the best
    return ids


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt_ids: list[int], eos_id: int, max_tokens: int) -> list[int]:
    """Generate with a KV cache: prefill the prompt once, then decode one token per step."""
    out = model(torch.tensor([prompt_ids]), use_cache=True)  # prefill: logits [1, prompt, vocab] and the cache
    ids = [int(out.logits[0, -1].argmax())]
    while len(ids) < max_tokens and ids[-1] != eos_id:
        out = model(torch.tensor([ids[-1:]]), past_key_values=out.past_key_values, use_cache=True)  # decode: [1, 1]
        ids.append(int(out.logits[0, -1].argmax()))
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Turn a question into the token ids of a prompt, in the chat format that the model was trained on."""
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    answers, counts, run = [], [], []  # run: tokens in each pass of the model
    model.get_input_embeddings().register_forward_hook(lambda module, ids, rows: run.append(ids[0].numel()))
    prompt_ids, eos_id = encode(tokenizer, QUESTION), tokenizer.eos_token_id
    torch.set_num_threads(1)  # several threads would wait for one another if other programs run
    for function in (generate_uncached, generate):
        run.clear()
        seconds = repeat(lambda: answers.append(function(model, prompt_ids, eos_id, 200)), number=1, repeat=3)  # noqa: B023
        counts.append(sum(run) // 3)
        busy = " (other programs run here: the times differ)" * (max(seconds) > 2 * min(seconds))
        print(f"{function.__name__:17} {len(answers[-1])} tokens in {sorted(seconds)[1]:.2f} s{busy}")
    print(tokenizer.decode(answers[-1], skip_special_tokens=True))
    assert answers[0] == answers[-1]
    print(f"tokens run through the model: {counts[0]:,} → {counts[1]:,} [H200: the same, it is a count]")


if __name__ == "__main__":
    main()
