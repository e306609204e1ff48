"""Every row of a batch ends for its own reason, at its own token, and takes nobody with it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stage_d_paged
import stage_e_batching
import stage_f_graph_tp
from stage_a_naive.loading import TUTOR_PATH
from stage_a_naive.sampling import SamplingParams

OTHER_EOS = 77  # named in generation_config.json, unknown to the tokenizer


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
@pytest.mark.parametrize("stage", [stage_d_paged, stage_e_batching, stage_f_graph_tp], ids=lambda m: m.__name__)
def test_each_row_ends_for_its_own_reason(tmp_path: Path, stage, listens: bool):
    model = Path(shutil.copytree(TUTOR_PATH, tmp_path / "model"))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [OTHER_EOS]}))
    llm = stage.LLM(model, device="cpu", num_kvcache_blocks=64, max_num_seqs=8)
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
    if hasattr(llm, "close"):
        llm.close()
