"""Train the tutor: a tokenizer and a four-million-parameter Qwen2 model that know one FAQ by heart.

The course needs a model that is small enough to live in the repository, answers in sentences without a download, and
makes a wrong kernel visible. So this script does on purpose what one usually avoids: it overfits. The model sees the
same questions again and again until greedy decoding returns every answer word for word, and then some more, so that
the best token leads the second best by a wide margin and rounding in another engine cannot change the text. Only its
open-ended prompts have many right answers: there it learns how likely each token is, so that sampling has a choice.

    python models/tutor/train.py --device cuda      # train, save, check
    python models/tutor/train.py            # the same on the CPU
    python models/tutor/train.py --check    # only check what is saved
    python models/tutor/train.py --new-tokenizer    # also make the tokenizer again: every token id changes
    python models/tutor/train.py --device cuda --layers 1 --epochs 16 --output models/tutor_draft    # its draft model

The weights in the repository were trained on an H200 that ran four trainings side by side: the tutor took 239 s, the
draft model 57 s, without the check.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from tutor_check import check
from tutor_text import (
    END_OF_TEXT,
    HERE,
    IGNORED,
    TURN_END,
    Sample,
    Samples,
    logit_margins,
    pad,
    read_faq,
    save_tokenizer,
    train_tokenizer,
)

WIDE_ENOUGH = 8.0  # logits; in bfloat16 a logit near 16 is rounded to a multiple of 0.125


def build_model(tokenizer: Tokenizer, num_layers: int) -> Qwen2ForCausalLM:
    """Qwen2 in miniature: every feature of the real one (GQA, RoPE, QKV bias, tied embeddings), few parameters."""
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.0625,  # 1/sqrt(hidden): with the usual 0.02 so small a model learns far more slowly
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return model


def batches(samples: list[Sample], tokens_per_batch: int, pad_id: int, rng: random.Random) -> list:
    """Group samples of similar length, so that little of a batch is padding, and shuffle the groups."""
    groups, group = [], []
    for sample in sorted(samples, key=lambda sample: len(sample.ids) + rng.random() * 16):
        if group and (len(group) + 1) * len(sample.ids) > tokens_per_batch:
            groups.append(group)
            group = []
        group.append(sample)
    groups.append(group)
    rng.shuffle(groups)
    return [pad(group, pad_id) for group in groups]


def learning_rate_factor(progress: float) -> float:
    """A linear warm-up over the first 3 % of training, under a cosine from 1 to 0."""
    return min(1.0, progress / 0.03) * 0.5 * (1 + math.cos(math.pi * progress))


def hinge(logits: torch.Tensor, targets: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """By how much the margins fall short of `WIDE_ENOUGH`, on average: what pulls at the few narrow places that remain.

    Positions that are not `exact` count nothing: answers to open-ended prompts, where several tokens are right and a
    margin would choose one of them. logits `[positions, vocab]`, targets and exact `[positions]`.
    """
    shortfall = F.relu(WIDE_ENOUGH - logit_margins(logits, targets)) * exact
    return shortfall.sum() / exact.sum().clamp(min=1)


def train(model: Qwen2ForCausalLM, samples: Samples, args: argparse.Namespace) -> None:
    """Cross-entropy on the answers with AdamW, in float32. Small batches: many steps matter more than smooth ones.

    Once the answers are known, cross-entropy hardly pulls any more. In the second half `hinge` does.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    model.train()
    bar = tqdm(range(args.epochs), unit="epoch")
    for epoch in bar:
        losses = torch.zeros((), device=model.device)
        work = batches(samples.epoch(), args.tokens_per_batch, model.config.pad_token_id, samples.rng)
        for index, batch in enumerate(work):
            progress = (epoch + index / len(work)) / args.epochs
            optimizer.param_groups[0]["lr"] = args.lr * learning_rate_factor(progress)
            ids, labels, exact = (tensor.to(model.device) for tensor in batch)
            hidden = model.model(ids, use_cache=False).last_hidden_state  # [rows, width, hidden]
            trained = labels != IGNORED
            logits, targets = model.lm_head(hidden[trained]), labels[trained]  # [positions, vocab], [positions]
            loss = F.cross_entropy(logits, targets)
            if progress > 0.5:
                loss = loss + hinge(logits, targets, exact[trained])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += loss.detach()  # stays on the device, which no step waits for
        bar.set_postfix(loss=f"{losses.item() / len(work):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="do not train; check the saved model")
    parser.add_argument("--new-tokenizer", action="store_true", help="train the tokenizer again too")
    parser.add_argument("--layers", type=int, default=4, help="1 for a draft model, which knows the answers less well")
    parser.add_argument("--output", type=Path, default=HERE, help="where to save")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--tokens-per-batch", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu | cuda")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.check:
        start = time.monotonic()
        torch.manual_seed(args.seed)
        faq = read_faq()
        if args.new_tokenizer:
            save_tokenizer(train_tokenizer(faq))
        tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
        model = build_model(tokenizer, args.layers).to(args.device)
        train(model, Samples(tokenizer, faq, random.Random(args.seed)), args)
        model.to(torch.bfloat16).save_pretrained(args.output)
        print(f"{model.num_parameters():,} parameters, {time.monotonic() - start:.0f} s", flush=True)
    if args.layers > 1:  # a draft model may be wrong
        print(json.dumps(check(args.output, args.device), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
