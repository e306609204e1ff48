"""Every row of a batch ends for its own reason, at its own token, and takes nobody with it."""

from __future__ import annotations

import importlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stage_a_naive.loading import TUTOR_PATH
from stage_a_naive.sampling import SamplingParams

OTHER_EOS = 77  # named in generation_config.json, unknown to the tokenizer
POOL = {"num_kvcache_blocks": 64, "max_num_seqs": 8}
ENGINES = [
    pytest.param("stage_a_naive", {}, id="a"),
    pytest.param("stage_b_decode_step", {"sync_every": 3}, id="b"),
    pytest.param("stage_c_fused_mlp", {}, id="c", marks=pytest.mark.compiler),
    pytest.param("stage_d_paged", POOL, id="d"),
    pytest.param("stage_e_batching", POOL, id="e"),
    pytest.param("stage_f_graph_tp", POOL, id="f"),
    pytest.param("beyond.quantization", POOL | {"quantization": "int8"}, id="8 bits"),
    pytest.param("beyond.speculation", POOL, id="guesses"),
]


def scripted(scripts: list[list[int]]) -> Callable:
    """A sampler that gives each request, told by its seed, the tokens of its script; past the end, the last again."""
    calls: Counter[int] = Counter()

    def choose(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        ids = []
        for seed in (p.seed for p in params):
            ids.append(scripts[seed][min(calls[seed], len(scripts[seed]) - 1)])
            calls[seed] += 1
        return torch.tensor(ids, device=logits.device)

    return choose


@pytest.mark.parametrize("listens", [False, True], ids=["at the end", "streamed"])
@pytest.mark.parametrize(("package", "options"), ENGINES)
def test_each_row_ends_for_its_own_reason(tmp_path: Path, package: str, options: dict, listens: bool):
    model = Path(shutil.copytree(TUTOR_PATH, tmp_path / "model"))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [OTHER_EOS]}))
    llm = importlib.import_module(package).LLM(model, device="cpu", **options)
    words = llm.tokenizer.encode("A cache keeps keys and values")
    decoded = [llm.tokenizer.decode([word]) for word in words]
    across = decoded[2][-1] + decoded[3][0]  # no single token holds it
    assert not any(across in text for text in decoded)
    eos = llm.tokenizer.eos_token_id
    asked = [
        ([eos], {}),
        ([OTHER_EOS], {}),
        ([*words[:2], OTHER_EOS], {}),
        (words, {"stop": across}),
        (words, {"stop_token_ids": (words[1],)}),
        ([eos, *words], {"ignore_eos": True, "max_tokens": 5}),
        (words, {"max_tokens": 5}),
    ]
    scripts = [script for script, _ in asked]
    params = [SamplingParams(seed=i, **options) for i, (_, options) in enumerate(asked)]
    heard = [""] * len(asked)
    llm.sampling_fn = scripted(scripts)
    outputs = llm.generate(
        [[5 + i] * (3 + i) for i in range(len(asked))],
        params,
        use_tqdm=False,
        on_text=(lambda i, piece: heard.__setitem__(i, heard[i] + piece)) if listens else None,
    )
    lengths = [1, 1, 3, 4, 2, 5, 5]
    assert [o["token_ids"] for o in outputs] == [script[:n] for script, n in zip(scripts, lengths, strict=True)]
    assert [o["finish_reason"] for o in outputs] == ["stop"] * 5 + ["length"] * 2
    texts = [o["text"] for o in outputs]
    assert texts[:2] == ["", ""] and texts[3] == "".join(decoded[:4]).partition(across)[0]
    if listens:
        assert heard == texts
    llm.close()
