"""Eight bits: bytes that a step reads, kernels, whole steps, quality, and torchao's weights compared with ours.

    python -m benchmarks.micro quantized part=bytes      # counted; so are `quality` and `library` on any machine
    python -m benchmarks.micro quantized part=kernels    # timed on a GPU, as `step` and `library_kernels` are

*bytes*: the bytes that a decode step reads, by the shapes of the models, and how many sequences fit next to the
weights. The engine loads each model on PyTorch's `meta` device, so the bytes are counted from its tensors. On a GPU it
also measures the memory of activations, so somewhat fewer sequences fit there. *kernels*: every launch of a CUDA graph
reads another copy of the weights or another part of the pool, `CYCLE_BYTES` in all, several times the L2 cache. *step*:
a CUDA graph of a step as the engine runs it, compared with the floor of its bytes. *quality*: every answer of the
tutor's FAQ in a forward pass after its question, in the wording that it was trained on and in unseen wordings. An
answer is exact if its token is the best one at every position; KL is the mean over positions of
KL(unquantised || quantised), in nats. A `random:` model has no answers: it reads the same text. *library*: the values
that torchao stores, and the quality of the transformers model with torchao's layers. *library_kernels*: torchao's int8
products beside ours, in CUDA graphs as in *kernels*, run by PyTorch as they are and compiled.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.micro import chosen, timed
from benchmarks.micro.attention import HEADS, arguments_of, make_case
from benchmarks.micro.decode_step import launch_of, step_arguments, step_by_layers
from benchmarks.timing import graph_seconds
from beyond.options import Options
from beyond.quantization.floor import QuantizedBytes
from beyond.quantization.formats import FORMATS, Quantized, quantize_matrix, quantize_rows
from beyond.quantization.kv_cache import QuantizedKVCache
from beyond.quantization.parts import load_quantized_runtime
from stage_a_naive.chat import render_chat
from stage_a_naive.checkpoints.loading import load_tokenizer, pick_device, pick_dtype, resolve
from stage_a_naive.checkpoints.presets import preset_config
from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.floor import ModelBytes
from stage_d_paged.attention import AttentionMetadata, pick_backend
from stage_d_paged.kv_cache import blocks_that_fit
from stage_d_paged.runtime import Runtime, empty_model
from stage_f_graph_tp.megakernel import choose_decode_step, most_rows

MODELS = ("qwen2.5-0.5b", "qwen2.5-7b")
WEIGHTS, HEAD, CACHE = {"quantization": "int8"}, {"quantize_lm_head": True}, {"kv_cache_dtype": "int8"}
DTYPE, BLOCK_SIZE, LONGEST = torch.bfloat16, 64, 4096


def measure(part: str = "bytes", device: str = "auto", models: tuple[str, ...] = MODELS) -> dict:
    """Measure one part of the study.

    Args:
        part: bytes, kernels, step, quality, library or library_kernels.
        device: of `quality`.
        models: of `step`.

    Raises:
        ValueError: the part does not exist, or a GPU or library that it needs is missing.
    """
    given = {"step": {"models": models}, "quality": {"device": device}}.get(part, {})
    return {"part": part} | chosen(PARTS, part, on_gpu=("kernels", "step", "library_kernels"))(**given)


# ---- bytes ----------------------------------------------------------------------------------------------------------

BATCHES = {"1 × 640": (1, 640), "32 × 4096": (32, 4096)}  # requests × context
READ: dict[str, dict[str, object]] = {
    "bfloat16": {},
    "weights": WEIGHTS,
    "weights and head": WEIGHTS | HEAD,
    "KV cache": CACHE,
    "all": WEIGHTS | HEAD | CACHE,
}
READ_SHOWN = ("weights and head", "KV cache", "all")  # next to bfloat16
MEMORIES = {"16 GB": 16 * 10**9, "141 GB": 141 * 10**9}  # of a small GPU, and of an H200
SEQUENCE = 4096  # tokens of the sequences that should fit


def count_bytes() -> dict:
    """Count the bytes of a step of every model, for both batches and all formats, and the sequences that fit."""
    rows, fits = [], []
    for model, (kind, options) in itertools.product(MODELS, READ.items()):
        cost = QuantizedBytes(ModelBytes(preset_config(model), 2), Options(**options))
        for batch, (requests, context) in BATCHES.items():
            sizes = {"weight_bytes": cost.weight_bytes, "kv_bytes": requests * context * cost.kv_bytes_per_token}
            rows.append({"model": model, "batch": batch, "kind": kind} | sizes)
        runtime = load_shapes(f"random:{model}", options)
        sequences = {name: sequences_that_fit(runtime, size) for name, size in MEMORIES.items()}
        own = {"weight_bytes": weight_bytes(runtime), "kv_bytes_per_token": runtime.bytes_per_token}
        fits.append({"model": model, "kind": kind} | own | {"sequences": sequences})
    return {"rows": rows, "fits": fits}


def load_shapes(model: str, options: dict[str, object]) -> Runtime:
    """Load the engine's model and pool for a GPU, without memory."""
    chosen = Options(**options, attention_backend="reference", kvcache_block_size=BLOCK_SIZE)
    return load_quantized_runtime(resolve(model), chosen, torch.device("meta"), DTYPE, build=empty_model)


def weight_bytes(runtime: Runtime) -> int:
    """Return the bytes of all weights with their scales; a tied embedding counts once."""
    return sum(parameter.nbytes for parameter in runtime.model.parameters())


def sequences_that_fit(runtime: Runtime, memory: int) -> int:
    """Return how many sequences fit together in the memory that the weights leave."""
    share = Options.gpu_memory_utilization
    budget = int(memory * share) - weight_bytes(runtime)
    try:
        blocks = blocks_that_fit(budget, runtime.make_pool(1).num_bytes, memory, share)
    except MemoryError:
        return 0
    return blocks // -(-SEQUENCE // runtime.block_size)


# ---- kernels --------------------------------------------------------------------------------------------------------

CYCLE_BYTES, KERNEL_REPEATS, TOKENS = 1 << 29, 15, (1, 32, 256, 1024)
COLUMNS = ("bfloat16", "int8", "fp8")
# Batches of the study `attention`, with all numbers of heads.
DECODES = ("decode 1 × 1024", "decode 32 × 640", "decode 32 × 4096", "prefill 1 × 8192")


class Matrix(NamedTuple):
    """A matrix of a model, and the layer's use of its product: product | gate_up | add."""

    name: str
    kind: str
    rows: int
    columns: int


MATRICES = (
    Matrix("7B QKV", "product", 4608, 3584),
    Matrix("7B gate and up", "gate_up", 2 * 18944, 3584),
    Matrix("7B down", "add", 3584, 18944),
    Matrix("0.5B down", "add", 896, 4864),
)


def time_products(formats: Sequence[str] = COLUMNS, tokens: Sequence[int] = TOKENS) -> Iterator[dict]:
    """Time every matrix in every format at every number of tokens."""
    for matrix, name in itertools.product(MATRICES, formats):
        torch.manual_seed(0)
        weight = torch.randn(matrix.rows, matrix.columns, device="cuda", dtype=DTYPE) * matrix.columns**-0.5
        weight = [weight] if name == "bfloat16" else list(quantize_matrix(weight, FORMATS[name]))
        size = sum(tensor.nbytes for tensor in weight)
        copies = [[tensor.clone() for tensor in weight] for _ in range(max(2, CYCLE_BYTES // size))]
        weights = [Quantized(*own) if len(own) > 1 else own[0] for own in copies]
        for count in tokens:
            samples = graph_seconds([product_of(matrix, weight, count) for weight in weights], KERNEL_REPEATS)
            yield timed(samples, what="product", case=matrix.name, format=name, tokens=count, bytes=size)


def product_of(matrix: Matrix, weight: Tensor | Quantized, tokens: int) -> Callable[[], object]:
    """Return a layer's use of the matrix: fused with its neighbours for few tokens, the product alone for many."""
    from beyond.quantization import products  # here: Triton is needed on a GPU alone
    from stage_f_graph_tp.kernels import skinny_gemm

    x = torch.randn(tokens, matrix.columns, device="cuda", dtype=DTYPE)
    eight_bits = isinstance(weight, Quantized)
    if tokens > skinny_gemm.skinny_limit(min(matrix.rows, matrix.columns)) or matrix.kind == "product":
        return (lambda: products.product(x, weight)) if eight_bits else (lambda: F.linear(x, weight))
    if matrix.kind == "gate_up":
        if eight_bits:
            scaled = products.scale_rows(x, torch.ones_like(x[0]))
            return lambda: products.gate_up_silu(scaled, 1e-6, weight)
        stream = skinny_gemm.sum_squares(x)
        return lambda: skinny_gemm.gate_up_silu(stream, 1e-6, weight)
    residual = torch.zeros(tokens, matrix.rows, device="cuda", dtype=DTYPE)
    counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    if not eight_bits:
        return lambda: skinny_gemm.product_add(x, weight, residual, counters)
    gain = torch.ones_like(residual[0])
    return lambda: products.product_add(x, weight, residual, gain, counters)


def time_attention() -> Iterator[dict]:
    """Time a decode and a prefill kernel over caches in every format."""
    from beyond.quantization.attention.triton_paged import KERNELS
    from stage_d_paged.attention.triton_paged import TritonAttention

    device, cases = torch.device("cuda"), [make_case(*names) for names in itertools.product(DECODES, HEADS)]
    for case, name in itertools.product(cases, COLUMNS):
        arguments, backend = arguments_of(case, 64), pick_backend("triton", device, DTYPE, case.head_dim)
        if name != "bfloat16":
            pools = [quantize_rows(pool, FORMATS[name]) for pool in arguments[0][1:3]]
            caches = [Quantized(values, scales.transpose(1, 2).contiguous()) for values, scales in pools]
            arguments = [(query, *caches, metadata) for query, _, _, metadata in arguments]
            backend = TritonAttention(device, DTYPE, case.head_dim, KERNELS)
        samples = graph_seconds([lambda a=a, b=backend: b.attend(*a, 0.1) for a in arguments], KERNEL_REPEATS)
        yield timed(samples, what="attention", case=case.name, format=name)
        torch.cuda.empty_cache()


# ---- a step ---------------------------------------------------------------------------------------------------------

ROWS, CONTEXT, REPLAYS, STEP_REPEATS = (1, 8, 32, 128), 640, 10, 9
STEPS: dict[str, dict[str, object]] = {
    "bfloat16": {},
    "int8": WEIGHTS,
    "int8 + head": WEIGHTS | HEAD,
    "int8 + head + KV": WEIGHTS | HEAD | CACHE,
}


@torch.inference_mode()
def time_steps(models: tuple[str, ...] = MODELS) -> dict:
    """Time every model in every format at every number of rows."""
    found = []
    for name, (kind, words) in itertools.product(models, STEPS.items()):
        options = Options(**words, max_model_len=LONGEST)
        runtime = load_quantized_runtime(resolve(f"random:{name}"), options, torch.device("cuda"), DTYPE)
        for rows in ROWS:
            sizes = {"weight_bytes": bytes_read(runtime), "kv_bytes": runtime.bytes_per_token * CONTEXT * rows}
            samples = graph_seconds([step_of(runtime, rows, options.uses_eight_bits)], STEP_REPEATS, REPLAYS)
            found.append(timed(samples, model=name, kind=kind, rows=rows, **sizes))
        del runtime
        torch.cuda.empty_cache()
    return {"rows": found}


def bytes_read(runtime: Runtime) -> int:
    """Return the bytes of weights that one step reads. An embedding that is not also the LM head hardly counts."""
    model = runtime.model
    unread = set() if model.lm_head is model.embed_tokens else set(map(id, model.embed_tokens.parameters()))
    return sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values() if id(p) not in unread)


def step_of(runtime: Runtime, rows: int, eight_bits: bool) -> Callable[[], object]:
    """Make a decode step of `rows` requests, as the engine runs it."""
    arguments = step_arguments(runtime.model.config, rows, CONTEXT, BLOCK_SIZE)
    if not eight_bits and rows <= most_rows(runtime.config) and (kernel := choose_decode_step(runtime)) is not None:
        return launch_of(kernel, arguments)
    pool = arguments[-1]
    cache = runtime.make_pool(pool.shape[2])
    if isinstance(cache, QuantizedKVCache):
        cache.tensor.copy_(pool.clamp(-1, 1) * 100)
        cache.scales.fill_(0.01)
    else:
        cache.tensor.copy_(pool)
    return step_by_layers(runtime.model, arguments, cache, LONGEST)


# ---- quality --------------------------------------------------------------------------------------------------------

RANDOM_TEXTS = 4  # answers that a `random:` model reads
START = 16  # tokens of an answer to an unseen wording that must be right, as in the tutor's model card
ALL_FP8 = {"quantization": "fp8", "quantize_lm_head": True, "kv_cache_dtype": "fp8"}
KINDS: dict[str, dict[str, object]] = {
    "unquantised": {},
    "bfloat16": {},
    "weights int8": WEIGHTS,
    "weights int8 / 128": WEIGHTS | {"quantization_group_size": 128},
    "weights fp8": {"quantization": "fp8"},
    "weights int8, head too": WEIGHTS | HEAD,
    "KV int8": CACHE,
    "KV fp8": {"kv_cache_dtype": "fp8"},
    "all int8": WEIGHTS | HEAD | CACHE,
    "all fp8": ALL_FP8,
}
SHOWN = ("bfloat16", "weights int8", "KV int8", "all int8", "all fp8")  # in the lesson, and of a `random:` model


class Text(NamedTuple):
    """A question and its answer as one sequence."""

    ids: list[int]
    first: int  # where the answer begins
    unseen: bool  # the question is worded in a way that the tutor was not trained on


def rate_quality(device: str = "auto") -> dict:
    """Compare every model in every format with itself unquantised (float32 on a CPU, bfloat16 on a GPU)."""
    texts, rows = read_texts(), []
    for name in ("tutor", "random:qwen2.5-0.5b"):
        own = texts if name == "tutor" else texts[:RANDOM_TEXTS]
        reference: list[Tensor] = []
        for kind, options in KINDS.items():
            runtime = load(name, device, "bfloat16" if kind == "bfloat16" else "auto", options)
            logits = [logits_of(runtime, text) for text in own]
            reference = reference or logits
            matrices = sum(p.nbytes for p in runtime.model.parameters() if p.dim() == 2)
            row = {"model": name, "kind": kind, "matrix_bytes": matrices, **compare(reference, logits)}
            rows.append(row | (score(own, logits) if name == "tutor" else {}))
            print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "dtype": str(pick_dtype("auto", pick_device(device))).removeprefix("torch.")}


def read_texts() -> list[Text]:
    """Read the FAQ in the trained wording, then in unseen wordings."""
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
    """Return the logits before each token of the answer, float32 `[answer tokens, vocab]`."""
    return runtime.model.compute_logits(states_of(runtime, text.ids[:-1])[text.first - 1 :]).float()


def states_of(runtime: Runtime, ids: list[int]) -> Tensor:
    """Return the final states of all positions of one text, `[tokens, hidden]`."""
    length, device = len(ids), runtime.device
    blocks = -(-length // runtime.block_size)
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    positions = torch.arange(length, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    metadata = AttentionMetadata(ints([0, length]), ints([length]), positions, table, length, length)
    return runtime.model(torch.tensor(ids, device=device), positions, runtime.make_pool(blocks), metadata)


def compare(reference: list[Tensor], logits: list[Tensor]) -> dict[str, float]:
    """Return the largest logit error and the mean KL divergence from `reference`."""
    pairs = list(zip(reference, logits, strict=True))
    divergence = 0.0
    for before, after in pairs:
        p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
        divergence += (p.exp() * (p - q)).sum().item()
    error = max((before - after).abs().max().item() for before, after in pairs)
    return {"logit_error": error, "kl": divergence / sum(map(len, reference))}


def score(texts: list[Text], logits: list[Tensor]) -> dict[str, float]:
    """Count exact answers to known wordings and right starts of answers to unseen ones; compute their perplexity."""
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


# ---- torchao --------------------------------------------------------------------------------------------------------

FORMAT_OF = {"int8": ("int8", None), "int8 / 128": ("int8", 128), "fp8": ("fp8", None)}  # name, group size


def torchao_quantization() -> ModuleType:
    """Import the library.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import torchao.quantization
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; pip install -c constraints.txt -e .[compare]") from error
    return torchao.quantization


@torch.inference_mode()
def time_library() -> dict:
    """Time torchao's int8 products of one token and of 32, and ours of the same matrices."""
    ao, tokens = torchao_quantization(), TOKENS[:2]
    rows = list(time_products(COLUMNS[:2], tokens))
    for matrix in MATRICES:
        copies = max(2, CYCLE_BYTES // (matrix.rows * matrix.columns))
        layers = [torch.nn.Linear(matrix.columns, matrix.rows, False, "cuda", DTYPE) for _ in range(copies)]
        ao.quantize_(torch.nn.Sequential(*layers), ao.Int8WeightOnlyConfig(granularity=ao.PerRow()))
        torch.compiler.reset()
        for way, product in {"torchao": F.linear, "torchao, compiled": torch.compile(F.linear, dynamic=False)}.items():
            for count in tokens:
                x = torch.randn(count, matrix.columns, device="cuda", dtype=DTYPE)
                launches = [lambda x=x, w=layer.weight, product=product: product(x, w) for layer in layers]
                samples = graph_seconds(launches, KERNEL_REPEATS)
                rows.append(timed(samples, what="product", case=matrix.name, format=way, tokens=count))
    return {"rows": rows, "libraries": {"torchao": version("torchao")}}


@torch.inference_mode()
def compare_library() -> dict:
    """Quantise the tutor's weights in each format with torchao, and compare."""
    from transformers import AutoModelForCausalLM

    ao, texts, rows = torchao_quantization(), read_texts(), []
    runtime = load("tutor", "cpu", "auto", {})
    reference = [logits_of(runtime, text) for text in texts]
    for name, (form, group) in FORMAT_OF.items():
        model = AutoModelForCausalLM.from_pretrained(TUTOR_PATH, dtype=torch.float32).eval()
        int8 = ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(group) if group else ao.PerRow())
        ao.quantize_(model.model, int8 if form == "int8" else ao.Float8WeightOnlyConfig())
        matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
        parts = [(w.qdata, w.scale) if hasattr(w, "qdata") else (w,) for w in matrices.values()]
        num_bytes = sum(tensor.nbytes for own in parts for tensor in own)
        logits = [model(torch.tensor([text.ids[:-1]])).logits[0, text.first - 1 :].float() for text in texts]
        row = {"format": name, "by": "torchao", "matrix_bytes": num_bytes, **compare_values(matrices, form, group)}
        rows.append(row | compare(reference, logits))
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "libraries": {"torchao": version("torchao")}}


def compare_values(theirs: dict[str, Tensor], form: str, group: int | None) -> dict[str, int]:
    """Count the stored values that differ from ours, with our own scales and with the library's."""
    from safetensors.torch import load_file

    found = dict.fromkeys(("values", "differ", "differ_at_their_scale"), 0)
    for name, weight in load_file(TUTOR_PATH / "model.safetensors").items():
        if not hasattr(theirs.get(name), "qdata"):
            continue
        values, scales = theirs[name].qdata.float(), theirs[name].scale
        scaled = weight.float() / scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
        again = scaled.round().clamp(-128, 127) if form == "int8" else scaled.to(FORMATS[form])
        ours = quantize_matrix(weight.float(), FORMATS[form], group).values
        found["values"] += weight.numel()
        found["differ"] += (ours.float() != values).sum().item()
        found["differ_at_their_scale"] += (again.float() != values).sum().item()
    return found


PARTS: dict[str, Callable[..., dict]] = {
    "bytes": count_bytes,
    "kernels": lambda: {"rows": [*time_products(), *time_attention()]},
    "step": time_steps,
    "quality": rate_quality,
    "library": compare_library,
    "library_kernels": time_library,
}
