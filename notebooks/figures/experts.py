"""Which experts tokens choose, how many a batch touches, what a step reads then, and who has how much to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.pictures.picture import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Picture,
    draw_lines,
    new_figure,
    new_panel,
    new_panels,
)
from beyond.experts import layers
from beyond.experts.floor import expected_touched, weight_bytes
from stage_a_naive.checkpoints.experts import experts_of_layers
from stage_a_naive.floor import ModelBytes


class Routes(NamedTuple):
    """The tokens of a text, and for each the experts of every layer: int64 `[layers, tokens, per_token]`."""

    texts: list[str]
    chosen: Tensor
    count: int

    def shared(self, layer: int, first: int, second: int) -> int:
        """Return how many experts two tokens have in common in a layer."""
        return len({*self.chosen[layer, first].tolist()} & {*self.chosen[layer, second].tolist()})


@torch.inference_mode()
def record_routes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Routes:
    """Run a text through a model with experts, and note what its routers choose."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    experts = next(found for found in experts_of_layers(model.config) if found is not None)
    scores = model(torch.tensor([ids]), output_router_logits=True).router_logits  # of each layer, [tokens, count]
    chosen = torch.stack([layers.route(of_layer, experts)[1] for of_layer in scores])
    return Routes([tokenizer.decode([token_id]) for token_id in ids], chosen, experts.count)


def draw_routes(routes: Routes) -> Picture:
    """A panel per layer: a row for each token, with a mark at each of its experts; above, how many tokens each has."""
    num_layers, tokens, per_token = routes.chosen.shape
    figure = new_figure(4.4 * num_layers, 0.24 * tokens + 1.2)
    panels = figure.subplots(1, num_layers, sharey=True, squeeze=False)[0]
    for layer, (axes, chosen) in enumerate(zip(panels, routes.chosen, strict=True)):
        rows = torch.arange(tokens).repeat_interleave(per_token)
        axes.scatter(chosen.flatten(), rows, marker="s", s=60, color=BLUE)
        touched = len(chosen.unique())
        axes.set_title(f"layer {layer}: {touched} of {routes.count} experts are read", fontsize=11, loc="left")
        axes.set(xlabel="expert", xlim=(-0.6, routes.count - 0.4), ylim=(tokens - 0.4, -0.6))
        axes.set_xticks(range(routes.count))
        axes.set_yticks(range(tokens), [text.replace(" ", "·") for text in routes.texts], family="monospace")
        axes.tick_params(labelsize=8, length=0)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
    return Picture(figure, "the experts that each token of a sentence chooses, in each layer")


def count_touched(router: Tensor, rows: Tensor, per_token: int) -> dict[int, float]:
    """Count the experts that the first 1, 2, 4, … rows of each batch choose, on average over the batches.

    Args:
        router: `[count, hidden]`.
        rows: `[batches, tokens, hidden]`.
    """
    chosen = (rows @ router.T).topk(per_token).indices
    sizes = [2**i for i in range(rows.shape[1].bit_length()) if 2**i <= rows.shape[1]]
    return {size: sum(len(batch[:size].unique()) for batch in chosen) / len(chosen) for size in sizes}


def draw_touched(counts: Mapping[str, Mapping[int, float]], count: int, per_token: int) -> Picture:
    """The experts that a batch touches, by its tokens: as counted for each router, and by the formula."""
    figure, axes = new_panel(8.4, 3.8, "tokens in a step", f"experts touched, of {count}")
    sizes = range(1, 1 + max(size for counted in counts.values() for size in counted))
    formula = [expected_touched(count, per_token, size) for size in sizes]
    axes.plot(sizes, formula, color=GREY, label="the formula")
    for (name, counted), colour, look in zip(counts.items(), (BLUE, ORANGE, GREEN), "os^", strict=False):
        axes.plot(list(counted), list(counted.values()), look, color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(next(iter(counts.values()))), list(next(iter(counts.values()))))
    axes.set(ylim=(0, 1.05 * count))
    axes.legend(frameon=False)
    return Picture(figure, "the experts that a batch touches by its number of tokens, counted and by the formula")


def draw_floor(model: ModelBytes, requests: Sequence[int]) -> Picture:
    """What a step reads, and what a request's share of it is: with experts, and if all weights were read each time."""
    experts = next(found for found in experts_of_layers(model.config) if found is not None)
    read = {n: weight_bytes(model, expected_touched(experts.count, experts.per_token, n)) / 1e9 for n in requests}
    every = weight_bytes(model, experts.count) / 1e9
    panels = (
        {"xlabel": "requests", "ylabel": "GB that a step reads"},
        {"xlabel": "requests", "ylabel": "GB per request"},
    )
    figure, (left, right) = new_panels(10, 3.6, *panels)
    dense = f"all {every:.0f} GB each time"
    draw_lines(left, [("with experts", read, BLUE, "o-"), (dense, dict.fromkeys(requests, every), GREY, "--")])
    for name, points, colour, look in (
        ("with experts", {n: read[n] / n for n in requests}, BLUE, "o-"),
        (dense, {n: every / n for n in requests}, GREY, "--"),
    ):
        right.loglog(list(points), list(points.values()), look, color=colour, label=name)
    left.legend(frameon=False)
    right.legend(frameon=False)
    return Picture(figure, "the gigabytes of weights that a step reads, and those per request, by the requests")


def draw_loads(loads: Mapping[str, Sequence[int]], ranks: int) -> Picture:
    """The tokens of each expert, sorted within ranks of equally many experts, for each router."""
    figure, panels = new_panels(
        10,
        3.2,
        *({"title": name, "xlabel": f"experts, {ranks} ranks", "ylabel": "tokens"} for name in loads),
        sharey=True,
    )
    for axes, load in zip(panels, loads.values(), strict=True):
        share = len(load) // ranks
        sums = [sum(load[rank * share : (rank + 1) * share]) for rank in range(ranks)]
        for rank, total in enumerate(sums):
            own = range(rank * share, (rank + 1) * share)
            colour = ORANGE if total == max(sums) else BLUE
            axes.bar(own, sorted(load[rank * share : (rank + 1) * share], reverse=True), color=colour, width=1)
            axes.text(own[share // 2], max(map(max, loads.values())), f"{total}", ha="center", fontsize=9)
        axes.axhline(sum(load) / len(load), color=GREY, linestyle="--", linewidth=1)
        axes.set_xticks([])
    return Picture(figure, "the tokens of each expert on several ranks; orange is the rank with the most")
