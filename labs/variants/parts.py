"""A prompt in parts: each part runs once, and the cache has the parts before it.

A chat grows by one question at a time. Its earlier turns have run already, and an engine that kept their cache runs the
new question alone. `python -m labs.variants.parts` answers one prompt, whole and cut in three, and prints what ran.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from stage_a_naive import loop
from stage_a_naive.checkpoints.tutor import TUTOR_PATH


@torch.inference_mode()
def generate_in_parts(model: PreTrainedModel, parts: list[list[int]], eos_id: int, max_tokens: int) -> list[int]:
    """Generate the answer to a prompt in non-empty parts; return the token ids up to and including `eos_id`.

    Every pass of the model runs one part, or the one token that was chosen last.
    """
    cache = None
    for part in parts:
        out = model(torch.tensor([part]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    ids = [int(out.logits[0, -1].argmax())]
    while len(ids) < max_tokens and ids[-1] != eos_id:
        out = model(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True)
        ids.append(int(out.logits[0, -1].argmax()))
    return ids


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
    tokenizer, run = AutoTokenizer.from_pretrained(TUTOR_PATH), []  # run: tokens in each pass of the model
    prompt_ids = loop.encode(tokenizer, loop.QUESTION)
    expected = loop.generate_uncached(model, prompt_ids, tokenizer.eos_token_id, max_tokens=200)
    model.get_input_embeddings().register_forward_hook(lambda module, ids, rows: run.append(ids[0].numel()))
    parts = [prompt_ids[:5], prompt_ids[5:6], prompt_ids[6:]]
    assert generate_in_parts(model, parts, tokenizer.eos_token_id, max_tokens=200) == expected
    print(f"tokens in the first four passes: {run[:4]}, in all of them {sum(run)}")


if __name__ == "__main__":
    main()
