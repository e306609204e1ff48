"""A pretrained model: acceptance of guesses, sizes of nuclei, and the loss from 8 bits.

    make real-model                                        # builds the model: Gemma 3 270M
    python -m benchmarks.micro real_model part=guesses     # or nuclei, quality: counts, nothing is timed

The texts are on every machine: this course's lessons and programs, and the docstrings of Python's standard library; a
results file has their hashes. *guesses*: the model continues prompts of four kinds, greedily and with a chat's
sampling. A guess is right if it is the token that the model chose, and all guesses before it are right; so all guesses
can be judged in one pass over the finished text. Look-up is the engine's. *First layers* are the model's first layers
with its last norm and its LM head: no smaller Gemma is at hand, and nothing was trained. Every step that can guess
guesses; the engine's pauses are not counted. *nuclei*: how many tokens a filter keeps per position. *quality*: the next
token at every position, in every format, compared with float32 of the same dequantised weights.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.loops import PROGRAMS
from benchmarks.micro import chosen, with_engine
from benchmarks.micro.quantized import CACHE, WEIGHTS, load, states_of
from benchmarks.micro.sampling import PEAK, random_prompts
from benchmarks.results import ROOT
from beyond.speculation.ngram import NgramDrafter
from beyond.speculation.sequence import Guesses
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.params import SamplingParams
from stage_d_paged.runtime import Runtime
from stage_e_batching import LLM

MODEL = ROOT / "build" / "models" / "gemma-3-270m"
MODULES = ("argparse", "asyncio", "collections", "csv", "datetime", "difflib", "fractions", "functools", "heapq")
MODULES += ("json", "inspect", "logging", "os", "pathlib", "random", "re", "shutil", "socket", "statistics", "string")
MODULES += ("subprocess", "tarfile", "threading", "unittest", "zipfile")


def measure(part: str = "guesses", texts: int = 20) -> dict:
    """Measure one part of the study.

    Args:
        part: guesses, nuclei or quality.
        texts: of `quality`, an even number; each has 1,024 tokens.

    Raises:
        ValueError: the part does not exist, or the model has not been built.
    """
    work = chosen(PARTS, part)
    if not MODEL.is_dir():
        raise ValueError(f"no {MODEL.relative_to(ROOT)}: `make real-model` builds it")
    named = [{"name": name, "sha256": hashlib.sha256(text.encode()).hexdigest()} for name, text in texts_of().items()]
    found = work(texts) if part == "quality" else work()
    return {"part": part, "model": MODEL.name} | found | {"texts": named}


# ---- texts ----------------------------------------------------------------------------------------------------------


@cache
def texts_of() -> dict[str, str]:
    """Return the texts by name: the course's English lessons and programs, and docstrings."""
    rooms = ("stage_*/**", "beyond/**", "docs")
    pages = sorted(p for room in rooms for p in ROOT.glob(f"{room}/*.md") if not p.name.endswith(".zh-CN.md"))
    files = {"pages": pages, "programs": [ROOT / program for program in PROGRAMS]}
    texts = {name: "\n\n".join(p.read_text(encoding="utf-8") for p in own) for name, own in files.items()}
    return texts | {"docstrings": "\n\n".join(text for _, text in documented())}


def documented() -> Iterator[tuple[str, str]]:
    """Return the docstrings of `MODULES` and of their functions and classes, with their names."""
    seen = set()
    for name in MODULES:
        module = importlib.import_module(name)
        parts = [(name, module), *((f"{name}.{own}", getattr(module, own)) for own in sorted(module.__all__))]
        for own, part in parts:
            text = inspect.cleandoc((part.__doc__ or "") if part is module or callable(part) else "")
            if text and text not in seen:
                seen.add(text)
                yield own, text


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(resolve(MODEL))


@cache
def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def begin() -> list[int]:
    """Return the token that begins a text."""
    return [tokenizer().bos_token_id]


def spread(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Cut this many pieces out of a text, at equal distances."""
    starts = [i * (len(ids) - length) // count for i in range(count)]
    return [list(ids[start : start + length]) for start in starts]


# ---- guesses --------------------------------------------------------------------------------------------------------

PROMPTS, TOKENS, MOST = 32, 96, 8  # of a kind; tokens of an answer; the longest draft
LAYERS = (6, 12, 15)  # of 18, that guess
FIRST_LAYERS = tuple(f"first {count} layers" for count in LAYERS)
ANSWERS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.7, "top_p": 0.8, "top_k": 20}}


def count_guesses() -> dict:
    """Count the right guesses of a draft, for every kind of text, greedy and sampled, and each way to guess."""
    kinds, rows = make_prompts(), []
    flat = [prompt for prompts in kinds.values() for prompt in prompts]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for way, asked in ANSWERS.items():
        params = [SamplingParams(**asked, max_tokens=TOKENS + MOST, ignore_eos=True, seed=i) for i in range(len(flat))]
        options = {"device": "cpu", "dtype": "float32", "max_num_seqs": PROMPTS, "max_model_len": 1024}
        outputs = with_engine(lambda llm, p=params: llm.generate(flat, p, use_tqdm=False), LLM, MODEL, **options)
        answers = [output["token_ids"] for output in outputs]
        for kind, at in zip(kinds, range(0, len(flat), PROMPTS), strict=True):
            own = slice(at, at + PROMPTS)
            rows += rows_of(model, flat[own], answers[own], {"text": kind, "answers": way})
    return {"tokens": TOKENS, "prompts": PROMPTS, "bytes": bytes_by_layers(model), "rows": rows}


def make_prompts() -> dict[str, list[list[int]]]:
    """Prompts of four kinds."""
    prose = encode("\n\n".join(filter(is_prose, texts_of()["pages"].split("\n\n"))))
    questions = [(name, text) for name, text in documented() if 100 < len(encode(text)) < 300]
    chosen = [questions[i * len(questions) // PROMPTS] for i in range(PROMPTS)]
    found = {
        "copying": [p + encode("\n\nThe same text once more:\n\n") + p[:8] for p in spread(prose, PROMPTS, 160)],
        "code": spread(encode(texts_of()["programs"]), PROMPTS, 256),
        "prose": spread(prose, PROMPTS, 256),
        "a question after its context": [
            encode(f"{name}\n\n{text}\n\nQuestion: What does {name} do?\nAnswer:") for name, text in chosen
        ],
    }
    return {kind: [begin() + prompt for prompt in prompts] for kind, prompts in found.items()}


def is_prose(paragraph: str) -> bool:
    return len(paragraph) > 200 and not any(mark in paragraph for mark in ("```", "|", "<!--", "- ["))


def rows_of(model: object, prompts: list, answers: list, what: dict) -> list[dict]:
    """Return a row for each way to guess: steps with a draft, by the number of right guesses."""
    runs = {"look-up": [looked_up(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]}
    if what["answers"] == "greedy":
        layers = (*LAYERS, model.config.num_hidden_layers)
        agreed = [agreements(model, *both, layers) for both in zip(prompts, answers, strict=True)]
        whole = np.mean([own[layers[-1]] for own in agreed])
        assert whole > 0.99, f"all layers give {whole:.2%} of the tokens that the engine gave"
        runs |= {
            name: [run_lengths(own[count]) for own in agreed] for name, count in zip(FIRST_LAYERS, LAYERS, strict=True)
        }
    again = np.mean([is_again(answer, at) for answer in answers for at in range(TOKENS)])
    rows = []
    for name, own in runs.items():
        for draft in (4, MOST):
            counted, plain = chain(own, draft)
            rows.append(what | {"by": name, "drafted": draft, "plain": plain, "right": counted, "again": float(again)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


@torch.inference_mode()
def agreements(model: object, prompt: list[int], answer: list[int], layers: Sequence[int]) -> dict[int, list[bool]]:
    """Tell, by the number of first layers, whether these would have chosen each token of an answer."""
    ids, taken = torch.tensor([prompt + answer[:-1]]), torch.tensor(answer)
    states = model.model(ids, output_hidden_states=True).hidden_states  # the last one is behind the norm
    found = {}
    for count in layers:
        own = states[count][0, len(prompt) - 1 :]
        own = own if count == len(states) - 1 else model.model.norm(own)
        found[count] = (model.lm_head(own).argmax(-1) == taken).tolist()
    return found


def run_lengths(right: list[bool]) -> list[int]:
    """Count, at each position, the right guesses before the first wrong one."""
    found = [0] * (len(right) + 1)
    for at in reversed(range(len(right))):
        found[at] = found[at + 1] + 1 if right[at] else 0
    return found[:-1]


def looked_up(prompt: list[int], answer: list[int]) -> list[int | None]:
    """Count the right looked-up guesses at each position of the answer; None where there are no guesses."""
    drafter, text = NgramDrafter(MOST), SimpleNamespace(token_ids=list(prompt), guesses=Guesses())
    found: list[int | None] = []
    for at, token in enumerate(answer):
        draft = drafter.draft(text)
        agree = [guess == right for guess, right in zip(draft, answer[at:], strict=False)]
        found.append([*agree, False].index(False) if draft else None)
        text.token_ids.append(token)
    return found


def chain(runs: list[list[int | None]], draft: int) -> tuple[list[int], int]:
    """Step through answers with drafts of this length; returns steps by right guesses, and steps without a draft."""
    counted, plain = [0] * (draft + 1), 0
    for own in runs:
        at = 1  # the prompt's own step gives the first token
        while at < TOKENS:
            right = own[at]
            if right is None:
                plain, at = plain + 1, at + 1
            else:
                counted[min(right, draft)] += 1
                at += min(right, draft) + 1
    return counted, plain


def is_again(ids: list[int], at: int, size: int = 4) -> bool:
    """Tell whether the last few tokens up to here occurred earlier in the answer."""
    last = ids[at - size + 1 : at + 1]
    return at >= size and any(ids[i : i + size] == last for i in range(at - size + 1))


def bytes_by_layers(model: object) -> dict[str, float]:
    """Return the share of the model's weights that a pass of the first layers reads."""
    head = model.lm_head.weight.numel()
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    return {str(count): (head + sum(layers[:count])) / (head + sum(layers)) for count in LAYERS}


def by_text(result: dict) -> list[dict]:
    """Add tokens per step and P(k right) to the rows."""
    found = []
    for row in result["rows"]:
        drafts, steps = sum(row["right"]), sum(row["right"]) + row["plain"]
        right = sum(k * count for k, count in enumerate(row["right"]))
        found.append(
            row
            | {"mean": right / drafts if drafts else 0.0, "with_draft": drafts / steps, "per_step": 1 + right / steps}
            | {"share": [count / max(1, drafts) for count in row["right"]]}
        )
    return found


def of_layers(result: dict, text: str) -> str:
    """Return how many of four guesses of the first layers are right, by the number of layers."""
    means = {row["by"]: row["mean"] for row in by_text(result) if (row["text"], row["drafted"]) == (text, 4)}
    return ", ".join(f"{means[name]:.2f}" for name in FIRST_LAYERS)


# ---- nuclei ---------------------------------------------------------------------------------------------------------

LENGTH, NUCLEUS_TEXTS = 1024, 4  # tokens: longer than the model's window
FILTERS = {"top_p 0.8": 0.8, "top_p 0.9": 0.9, "top_p 0.95": 0.95}
MIN_P, TEMPERATURES, QUANTILES, SHORT_LIST = 0.05, (0.7, 1.0), (10, 25, 50, 75, 90, 99), 256


def count_nuclei() -> dict:
    """Count the sizes of nuclei: of the model on its texts, and of random weights as in the study `sampling`."""
    rows, texts = [], texts_of()
    runtime = load(str(MODEL), "cpu", "float32", {})
    for name in ("pages", "docstrings"):
        pieces = [begin() + ids for ids in spread(encode(texts[name]), NUCLEUS_TEXTS // 2, LENGTH - 1)]
        rows += sizes({"model": MODEL.name, "logits": "trained", "text": name}, runtime, pieces)
    del runtime
    random = load("random:qwen2.5-0.5b", "cpu", "float32", {})
    for logits in ("flat", "peaked"):
        if logits == "peaked":
            random.model.norm.weight.data.mul_(PEAK)
        rows += sizes(
            {"model": "random:qwen2.5-0.5b", "logits": logits, "text": "random tokens"}, random, random_prompts(0, 2)
        )
    return {"rows": rows}


@torch.inference_mode()
def sizes(what: dict, runtime: Runtime, texts: list[list[int]]) -> list[dict]:
    """Return a row for each filter and temperature: the tokens that it keeps, over all positions."""
    found: dict[tuple[str, float], list[int]] = {}
    for ids in texts:
        for states in states_of(runtime, ids).split(64):
            logits = runtime.model.compute_logits(states).float().numpy()
            logits = torch.from_numpy(np.ascontiguousarray(np.sort(logits)[:, ::-1]))  # faster than PyTorch's
            for temperature in TEMPERATURES:
                p = (logits / temperature).softmax(-1)
                before = p.cumsum(-1, dtype=torch.float64) - p
                for name, top_p in FILTERS.items():
                    found.setdefault((name, temperature), []).extend((before < top_p).sum(-1).tolist())
                kept = (p >= MIN_P * p[:, :1]).sum(-1).tolist()
                found.setdefault((f"min_p {MIN_P}", temperature), []).extend(kept)
    rows = []
    for (name, temperature), kept in found.items():
        own = {f"{q} %": float(np.percentile(kept, q)) for q in QUANTILES}
        one, many = np.mean(np.array(kept) == 1), np.mean(np.array(kept) > SHORT_LIST)
        row = what | {"filter": name, "temperature": temperature, "positions": len(kept), **own}
        rows.append(row | {"mean": float(np.mean(kept)), "one": float(one), "beyond_short_list": float(many)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


# ---- quality --------------------------------------------------------------------------------------------------------

EVERY = 4  # half of the texts are pages, half docstrings; each is read, every fourth next token is judged
KINDS: dict[str, dict[str, object]] = {
    "weights int8": WEIGHTS,
    "weights fp8": {"quantization": "fp8"},
    "KV int8": CACHE,
    "KV fp8": {"kv_cache_dtype": "fp8"},
}
SUMS = ("positions", "loss", "kl", "equal", "sure", "sure_equal")


@torch.inference_mode()
def rate_quality(count: int) -> dict:
    """Measure perplexity and equal next tokens of every format, by kind of text."""
    runtimes = {"float32": load(str(MODEL), "cpu", "float32", {})}
    runtimes |= {kind: load(str(MODEL), "cpu", "float32", options) for kind, options in KINDS.items()}
    rows = []
    for name in ("pages", "docstrings"):
        sums = {kind: torch.zeros(len(SUMS), dtype=torch.float64) for kind in runtimes}
        for ids in spread(encode(texts_of()[name]), count // 2, LENGTH - 1):
            for kind, own in compare(runtimes, begin() + ids).items():
                sums[kind] += own
            print(name, {kind: own.tolist() for kind, own in sums.items()}, flush=True)
        for kind, own in sums.items():
            rows.append({"kind": kind, "text": name} | dict(zip(SUMS, own.tolist(), strict=True)))
    return {"tokens": count * LENGTH, "rows": rows}


def compare(runtimes: dict[str, Runtime], ids: list[int]) -> dict[str, Tensor]:
    """Compute every format's `SUMS` over every `EVERY`th position of a text; the first format is the reference.

    A position is *sure* if the reference gives its best token a probability above one half.
    """
    states = {kind: states_of(runtime, ids)[:-1][::EVERY].split(256) for kind, runtime in runtimes.items()}
    found = {kind: torch.zeros(len(SUMS), dtype=torch.float64) for kind in runtimes}
    for i, target in enumerate(torch.tensor(ids[1:])[::EVERY].split(256)):
        p = None
        for kind, runtime in runtimes.items():
            q = runtime.model.compute_logits(states[kind][i]).float().log_softmax(-1)
            if p is None:
                p, best, weight = q, q.argmax(-1), q.exp()
                sure = weight.amax(-1) > 0.5
            equal, loss = q.argmax(-1) == best, -q.gather(1, target[:, None]).sum()
            kl = (weight * (p - q)).sum()
            counts = len(target), loss, kl, equal.sum(), sure.sum(), (equal & sure).sum()
            found[kind] += torch.tensor([float(value) for value in counts], dtype=torch.float64)
    return found


def losses(result: dict) -> list[dict]:
    """Combine the sums of each format over all texts."""
    texts = dict.fromkeys(row["text"] for row in result["rows"])

    def made(kind: str, rows: list[dict]) -> dict:
        own = {key: sum(row[key] for row in rows) for key in rows[0] if key not in ("kind", "text")}
        unsure, unsure_equal = own["positions"] - own["sure"], own["equal"] - own["sure_equal"]
        return {
            "kind": kind,
            "positions": own["positions"],
            "perplexity": float(np.exp(own["loss"] / own["positions"])),
            "mean_kl": own["kl"] / own["positions"],
            "equal_share": own["equal"] / own["positions"],
            "sure_share": own["sure"] / own["positions"],
            "sure_equal_share": own["sure_equal"] / own["sure"],
            "unsure_equal_share": unsure_equal / unsure,
        }

    found = []
    for kind in dict.fromkeys(row["kind"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        by = {name: made(kind, [row for row in rows if row["text"] == name]) for name in texts}
        found.append(made(kind, rows) | {f"of_{name}": own["perplexity"] for name, own in by.items()})
    return found


PARTS: dict[str, Callable[..., dict]] = {
    "guesses": count_guesses,
    "nuclei": count_nuclei,
    "quality": rate_quality,
}
