"""The idea of an inference engine on one screen: generate a text without a KV cache, then with one.

Both choose the same tokens. `python -m stage_a_naive.loop` prints how long each takes.
"""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from stage_a_naive.loading import TUTOR_PATH

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


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": QUESTION}]
    prompt_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    generate(model, prompt_ids, tokenizer.eos_token_id, max_tokens=2)  # the first call of everything is slow
    answers = []
    for function in (generate_uncached, generate):
        start = time.perf_counter()
        answers.append(function(model, prompt_ids, tokenizer.eos_token_id, max_tokens=200))
        seconds = time.perf_counter() - start
        print(f"{function.__name__:17} {len(answers[-1])} tokens in {seconds:.2f} s")
    assert answers[0] == answers[1]
    print(tokenizer.decode(answers[1], skip_special_tokens=True))


if __name__ == "__main__":
    main()
