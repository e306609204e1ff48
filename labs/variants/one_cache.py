"""One cache for many questions: a step compiled or recorded for one cache must find every question in it.

Stage B's step works on the same tensors at every call. A second cache would be other memory, at other addresses, and
the step would have to be prepared again. `python -m labs.variants.one_cache` answers three questions, the longest one
first, with a cache each and with one cache, and says whether the answers are the same.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache

from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode
from stage_b_decode_step import loop


@torch.inference_mode()
def prefill_again(model: PreTrainedModel, prompt_ids: list[int], token: torch.Tensor, cache: StaticCache) -> None:
    """Run another prompt in a cache that has been used, and overwrite `token`, `[1, 1]`, with its first token.

    The cache's old content is no longer visible, and none of its tensors is replaced.
    """
    cache.reset()
    logits = model(torch.tensor([prompt_ids]), past_key_values=cache).logits
    token.copy_(logits[:, -1].argmax(-1, keepdim=True))


@torch.inference_mode()
def answer_all(model: PreTrainedModel, prompts: list[list[int]], eos_id: int, max_tokens: int) -> list[list[int]]:
    """Answer the prompts one after another in one cache."""
    token, cache = loop.prefill(model, prompts[0])
    answers = []
    for prompt_ids in prompts:
        prefill_again(model, prompt_ids, token, cache)
        answers.append([int(token)])
        while len(answers[-1]) < max_tokens and answers[-1][-1] != eos_id:
            loop.decode_step(model, token, cache)
            answers[-1].append(int(token))
    return answers


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    prompts = [encode(tokenizer, entry["question"]) for entry in read_faq()[:3]]
    prompts.sort(key=len, reverse=True)
    work = tokenizer.eos_token_id, 60
    expected = [loop.generate(loop.decode_step, model, prompt, *work) for prompt in prompts]
    same = "as in new caches" if answer_all(model, prompts, *work) == expected else "others than in new caches"
    print(f"{len(prompts)} questions in one cache of {loop.POSITIONS} positions: answers {same}")


if __name__ == "__main__":
    main()
