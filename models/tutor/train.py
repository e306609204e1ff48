"""Train the tutor: a tokenizer and a model of a few million parameters that know one FAQ by heart.

The course needs a model that is small enough to live in the repository, answers in sentences without a download, and
makes a wrong kernel visible. So this script overfits on purpose. The model sees the
same questions again and again until greedy decoding returns every answer word for word, and then some more, so that
the best token leads the second best by a wide margin and rounding in another engine cannot change the text. Only its
open-ended prompts have many right answers: there it learns how likely each token is, so that sampling has a choice.

    python models/tutor/train.py --device cuda      # train, save, check
    python models/tutor/train.py            # the same on the CPU
    python models/tutor/train.py --check    # only check what is saved
    python models/tutor/train.py --new-tokenizer    # also make the tokenizer again: every token id changes
    python models/tutor/train.py --device cuda --layers 1 --epochs 16 --output models/tutor_draft    # its draft model
    python models/tutor/train.py --threads 1 --layers 2 --experts 8 --epochs 32 --output models/tutor_experts

The last one has a mixture of experts, and starts from the saved tutor. The weights of the tutor and of its draft model
were trained on an H200 that ran four trainings side by side, in 239 s and 57 s without the check, those of the tutor
with experts on a third of a core of a CPU, in 38 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
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

MLP_FEATURES = 768
WIDE_ENOUGH = 8.0  # logits; in bfloat16 a logit near 16 is rounded to a multiple of 0.125


def build_model(tokenizer: Tokenizer, num_layers: int, num_experts: int = 0) -> Qwen2ForCausalLM | Qwen3MoeForCausalLM:
    """Build Qwen2 in miniature, or Qwen3-MoE: every feature of the real ones, few parameters.

    That is GQA, RoPE, tied embeddings, and QKV bias (Qwen2) or norms of Q and K (Qwen3). A layer's experts together are
    as large as an MLP without experts.
    """
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "intermediate_size": MLP_FEATURES,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.0625,  # 1/sqrt(hidden): with the usual 0.02 so small a model learns far more slowly
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    if num_experts > 0:
        shape |= {"head_dim": 64, "num_experts": num_experts, "moe_intermediate_size": MLP_FEATURES // num_experts}
        shape |= {"num_experts_per_tok": 2, "norm_topk_prob": True, "router_aux_loss_coef": 0.01}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return model


@torch.no_grad()
def upcycle(model: Qwen3MoeForCausalLM, dense: Qwen2ForCausalLM) -> None:
    """Start a model with experts from a trained one without: this "sparse upcycling" saves most of the training.

    Embeddings, norms and attention are copied, and each expert gets an equal part of the MLP's features. The layers are
    taken at equal distances, from the first to the last. The model has to learn again what it cannot copy: which
    features a token needs, and to do without the other layers and the biases.
    """
    model.model.embed_tokens.load_state_dict(dense.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(dense.model.norm.state_dict())
    taken = torch.linspace(0, len(dense.model.layers) - 1, len(model.model.layers)).round().int().tolist()
    for layer, old in zip(model.model.layers, (dense.model.layers[i] for i in taken), strict=True):
        layer.load_state_dict(old.state_dict(), strict=False)  # attention and norms
        experts, count = layer.mlp.experts, model.config.num_experts
        gate, up = (matrix.weight.unflatten(0, (count, -1)) for matrix in (old.mlp.gate_proj, old.mlp.up_proj))
        experts.gate_up_proj.copy_(torch.cat([gate, up], 1))  # [experts, 2 features, hidden]
        down = old.mlp.down_proj.weight.unflatten(1, (count, -1)).transpose(0, 1)  # [experts, hidden, features]
        experts.down_proj.copy_(model.config.num_experts_per_tok * down)  # the weights of a token's experts add up to 1
        torch.nn.init.normal_(layer.mlp.gate.weight, std=0.02)  # at first the router prefers no expert


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


def train(model: Qwen2ForCausalLM | Qwen3MoeForCausalLM, samples: Samples, args: argparse.Namespace) -> None:
    """Cross-entropy on the answers with AdamW, in float32. Small batches: many steps matter more than smooth ones.

    Once the answers are known, cross-entropy hardly pulls any more. In the second half `hinge` does. With experts, a
    small loss pulls the router towards using all of them equally often.
    """
    config = model.config
    routed = {"output_router_logits": True} if args.experts else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    model.train()
    bar = tqdm(range(args.epochs), unit="epoch")
    for epoch in bar:
        losses = torch.zeros((), device=model.device)
        work = batches(samples.epoch(), args.tokens_per_batch, config.pad_token_id, samples.rng)
        for index, batch in enumerate(work):
            progress = (epoch + index / len(work)) / args.epochs
            optimizer.param_groups[0]["lr"] = args.lr * learning_rate_factor(progress)
            ids, labels, exact = (tensor.to(model.device) for tensor in batch)
            output = model.model(ids, use_cache=False, **routed)
            trained = labels != IGNORED
            hidden = output.last_hidden_state[trained]  # [positions, hidden]
            logits, targets = model.lm_head(hidden), labels[trained]  # [positions, vocab], [positions]
            loss = F.cross_entropy(logits, targets)
            if progress > 0.5:
                loss = loss + hinge(logits, targets, exact[trained])
            if args.experts:
                scores, read = output.router_logits, ids != config.pad_token_id
                unevenness = load_balancing_loss_func(scores, args.experts, config.num_experts_per_tok, read)
                loss = loss + config.router_aux_loss_coef * unevenness
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
    parser.add_argument(
        "--experts", type=int, default=0, help="of every layer, 2 per token; starts from the saved tutor"
    )
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
        model = build_model(tokenizer, args.layers, args.experts)
        if args.experts:
            upcycle(model, Qwen2ForCausalLM.from_pretrained(HERE, dtype=torch.float32))
        model.to(args.device)
        train(model, Samples(tokenizer, faq, random.Random(args.seed)), args)
        model.to(torch.bfloat16).save_pretrained(args.output)
        if args.experts:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(HERE / name, args.output)
        print(f"{model.num_parameters():,} parameters, {time.monotonic() - start:.0f} s", flush=True)
    if args.layers > 1:  # a draft model may be wrong
        print(json.dumps(check(args.output, args.device), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
