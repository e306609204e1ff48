"""What 8-bit weights and an 8-bit KV cache cost in quality: the tutor's answers, logits, and perplexity.

Every answer of the tutor's FAQ, in the wording that it was trained on and in wordings that it never saw, is run in one
forward pass behind its question. An answer is *exact* if the best token is its own at every position. *Perplexity* is
that of the answers to unseen wordings. *Logit error* is the largest difference of any logit from the unquantised
model's, *KL* the mean over positions of KL(unquantised || quantised), in nats. A `random:` model has no answers; it
reads the same text, and its logits are compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.micro import caption
from benchmarks.text import markdown, sections
from beyond.options import Options
from beyond.quantization.parts import load_quantized_runtime
from stage_a_naive.chat import render_chat
from stage_a_naive.checkpoints.loading import load_tokenizer, pick_device, pick_dtype, resolve
from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_d_paged.attention import AttentionMetadata
from stage_d_paged.runtime import Runtime

MODELS = ("tutor", "random:qwen2.5-0.5b")
RANDOM_TEXTS = 4  # answers that a `random:` model reads
START = 16  # tokens of an answer to an unseen wording that must be right, as in the tutor's model card
KINDS: dict[str, dict[str, object]] = {
    "unquantised": {},
    "bfloat16": {},
    "weights int8": {"quantization": "int8"},
    "weights int8 / 128": {"quantization": "int8", "quantization_group_size": 128},
    "weights fp8": {"quantization": "fp8"},
    "weights int8, head too": {"quantization": "int8", "quantize_lm_head": True},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
    "all int8": {"quantization": "int8", "quantize_lm_head": True, "kv_cache_dtype": "int8"},
    "all fp8": {"quantization": "fp8", "quantize_lm_head": True, "kv_cache_dtype": "fp8"},
}
SHOWN = ("bfloat16", "weights int8", "KV int8", "all int8", "all fp8")  # in the lesson, and of a `random:` model


@dataclass(frozen=True)
class Text:
    """A question and its answer as one sequence."""

    ids: list[int]
    first: int  # where the answer begins
    unseen: bool  # the question is worded in a way that the tutor was not trained on


def measure(device: str = "auto") -> dict:
    """Every model in every format, compared with itself unquantised (float32 on a CPU, bfloat16 on a GPU)."""
    texts, rows = read_texts(), []
    for name in MODELS:
        own = texts if name == "tutor" else texts[:RANDOM_TEXTS]
        reference: list[Tensor] = []
        for kind, options in KINDS.items():
            runtime = load(name, device, "bfloat16" if kind == "bfloat16" else "auto", options)
            logits = [logits_of(runtime, text) for text in own]
            reference = reference or logits
            row = {"model": name, "kind": kind, "matrix_bytes": matrix_bytes(runtime), **compare(reference, logits)}
            rows.append(row | (score(own, logits) if name == "tutor" else {}))
            print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "dtype": str(pick_dtype("auto", pick_device(device))).removeprefix("torch.")}


def read_texts() -> list[Text]:
    """The FAQ in its own wording, then in unseen ones."""
    tokenizer = load_tokenizer(resolve("tutor"))
    answers = {entry["question"]: entry["answer"] for entry in read_faq()}
    lines = (TUTOR_PATH / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    unseen = {entry["wording"]: entry["question"] for entry in map(json.loads, lines)}

    def text(wording: str, answer: str, is_unseen: bool) -> Text:
        chat = render_chat(tokenizer, [{"role": "user", "content": wording}])
        prompt, ids = (tokenizer.encode(part, add_special_tokens=False) for part in (chat, answer))
        return Text([*prompt, *ids, tokenizer.eos_token_id], len(prompt), is_unseen)

    known = [text(question, answer, False) for question, answer in answers.items()]
    return known + [text(wording, answers[question], True) for wording, question in unseen.items()]


def load(name: str, device: str, dtype: str, options: dict[str, object]) -> Runtime:
    where = pick_device(device)
    options = Options(**options, max_model_len=1024)
    return load_quantized_runtime(resolve(name), options, where, pick_dtype(dtype, where))


@torch.inference_mode()
def logits_of(runtime: Runtime, text: Text) -> Tensor:
    """The logits before each token of the answer, float32 `[answer tokens, vocab]`."""
    length, device = len(text.ids) - 1, runtime.device
    blocks = -(-length // runtime.block_size)
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    positions = torch.arange(length, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    metadata = AttentionMetadata(ints([0, length]), ints([length]), positions, table, length, length)
    ids = torch.tensor(text.ids[:-1], device=device)
    hidden = runtime.model(ids, positions, runtime.make_pool(blocks), metadata)
    return runtime.model.compute_logits(hidden[text.first - 1 :]).float()


def compare(reference: list[Tensor], logits: list[Tensor]) -> dict[str, float]:
    """The largest logit error and the mean KL divergence from `reference`."""
    pairs = list(zip(reference, logits, strict=True))
    divergence = 0.0
    for before, after in pairs:
        p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
        divergence += (p.exp() * (p - q)).sum().item()
    error = max((before - after).abs().max().item() for before, after in pairs)
    return {"logit_error": error, "kl": divergence / sum(map(len, reference))}


def score(texts: list[Text], logits: list[Tensor]) -> dict[str, float]:
    """Exact answers to known wordings; right starts of answers to unseen ones, and their perplexity."""
    known, unseen, losses = [], [], []
    for text, found in zip(texts, logits, strict=True):
        targets = torch.tensor(text.ids[text.first :], device=found.device)
        best = found.argmax(-1) == targets
        if not text.unseen:
            known.append(best.all().item())
            continue
        unseen.append(best[:START].all().item())
        losses.append(-found.double().log_softmax(-1).gather(1, targets[:, None]))
    perplexity = torch.cat(losses).mean().exp().item()
    return {"exact": sum(known) / len(known), "unseen": sum(unseen) / len(unseen), "perplexity": perplexity}


def matrix_bytes(runtime: Runtime) -> int:
    """Memory of all matrices with their scales, the embedding included."""
    return sum(p.nbytes for p in runtime.model.parameters() if p.dim() == 2)


def table(results: list[dict]) -> dict[str, list[str]]:
    """The tutor in the formats that the lesson shows; every model and format."""
    result, models = results[0], {}
    for row in result["rows"]:
        models.setdefault(row["model"], []).append(row)
    few = {name: [row for row in rows if row["kind"] in SHOWN] for name, rows in models.items()}
    tutor, unquantised = models["tutor"], f"unquantised is {result['dtype']}"
    perplexities = [row["perplexity"] for row in tutor]
    answers = f"perplexity on answers to unseen wordings: {min(perplexities):.4f} to {max(perplexities):.4f}"
    everything = {f"**{name}**": lines_of((few | {"tutor": tutor})[name]) for name in models}
    return {
        "quantized-quality": [*lines_of(few["tutor"]), "", caption(result, unquantised)],
        "quantized-quality-all": [*sections(everything), caption(result, unquantised, answers)],
    }


def lines_of(rows: list[dict]) -> list[str]:
    """Memory, then quality, a line per format."""
    heads = ["format", "matrices", "largest logit error", "KL, nats"]
    body = [
        [row["kind"], f"{row['matrix_bytes'] / 1e6:.1f} MB", f"{row['logit_error']:.3f}", f"{row['kl']:.1e}"]
        for row in rows
    ]
    if "exact" in rows[0]:  # a trained model
        heads.append("answers exact, unseen wordings")
        body = [[*cells, f"{r['exact']:.1%}, {r['unseen']:.1%}"] for cells, r in zip(body, rows, strict=True)]
    return markdown(heads, body)
