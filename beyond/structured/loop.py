"""Constrained decoding: an automaton says which characters may follow, and a mask which tokens may.

A program that reads `{"stage": "D"}` cannot read *Stage D teaches paging*. A prompt can ask for the format; a mask on
the scores enforces it. The pattern `no|yes` allows n and y first; after y it allows e. Such states and steps are an
automaton. A token has several characters, so walk every token of the vocabulary through the automaton: *n*, *y* and
*yes* get through, *you* does not, and its score becomes -inf. The end-of-sequence token is allowed where the pattern
may end. A state is written here as the rest of the pattern (Brzozowski, 1964): for `no|yes`, after y, it is `es`.
"""

import re
from collections import deque
from functools import cache, reduce

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH
from stage_a_naive.loop import encode

QUESTIONS = "What is a KV cache?", "What is prefill?", "What is a block table?", "什么是 KV cache？"
PATTERN, MOST_TOKENS = r'\{"stage": "[A-F]", *"cached": (true|false)\}', 60
FREE, CONSTRAINED = False, True
DEAD, DONE = ("dead",), ("done",)  # no text can match any more; the match is complete


def then(a: tuple, b: tuple) -> tuple:
    return DEAD if DEAD in (a, b) else b if a == DONE else ("then", a, b)


def either(*states: tuple) -> tuple:
    branches = {branch for state in states for branch in (state[1:] if state[0] == "either" else [state])} - {DEAD}
    return ("either", *sorted(branches)) if len(branches) > 1 else branches.pop() if branches else DEAD


def parse(chars: deque) -> tuple:
    branch = DONE
    while chars and chars[0] != ")":
        if (char := chars.popleft()) == "|":
            return either(branch, parse(chars))
        item = ("one of", chars.popleft() if char == "\\" else char)
        if char == "(":
            item, _ = parse(chars), chars.popleft()
        elif char == "[":
            first, _, last, _ = (chars.popleft() for _ in "a-z]")
            item = ("one of", "".join(map(chr, range(ord(first), ord(last) + 1))))
        if chars and chars[0] == "*":
            item, _ = ("many", item), chars.popleft()
        branch = then(branch, item)
    return branch


def may_end(state: tuple) -> bool:
    combine = {"then": all, "either": any}.get(state[0])
    return combine(map(may_end, state[1:])) if combine else state[0] in ("done", "many")


@cache
def after(state: tuple, char: str) -> tuple:
    kind, *parts = state
    if kind == "one of":
        return DONE if char in parts[0] else DEAD
    rests = [after(part, char) for part in parts]
    if kind == "then":
        return either(then(rests[0], parts[1]), rests[1] if may_end(parts[0]) else DEAD)
    return either(*rests) if kind == "either" else then(rests[0], state) if kind == "many" else DEAD


@cache
def mask(state: tuple, texts: tuple, eos_id: int) -> torch.Tensor:
    """Return which tokens may come next, `[vocab]`; the end-of-sequence token where the pattern may end."""
    allowed = [text != "" and reduce(after, text, state) != DEAD for text in texts]
    return torch.tensor([*allowed[:eos_id], may_end(state), *allowed[eos_id + 1 :]])


@torch.inference_mode()
def generate(model, prompt_ids: list[int], eos_id: int, texts: tuple, pattern: str, constrained: bool) -> list[int]:
    ids, state, kv_cache = [], parse(deque(pattern)), None
    while len(ids) < MOST_TOKENS and eos_id not in ids:
        out = model(torch.tensor([ids[-1:] or prompt_ids]), past_key_values=kv_cache, use_cache=True)
        kv_cache, forbidden = out.past_key_values, ~mask(state, texts, eos_id) & constrained
        ids.append(int(out.logits[0, -1].masked_fill(forbidden, -torch.inf).argmax()))
        state = reduce(after, texts[ids[-1]], state)
    return ids


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)
    model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
    texts = tuple("" if i in tokenizer.all_special_ids else tokenizer.decode([i]) for i in range(len(tokenizer)))
    counts = []
    for constrained in (FREE, CONSTRAINED):
        work = [(model, encode(tokenizer, question), tokenizer.eos_token_id, texts) for question in QUESTIONS]
        answers = [tokenizer.decode(generate(*one, PATTERN, constrained)[:-1]) for one in work]
        counts.append(sum(re.fullmatch(PATTERN, answer) is not None for answer in answers))
    assert counts[1] == len(QUESTIONS) * CONSTRAINED, answers
    print(
        f"answers matching the pattern, of {len(QUESTIONS)}: {counts[0]} → {counts[1]} [H200: the same, it is a count]"
    )


if __name__ == "__main__":
    main()
