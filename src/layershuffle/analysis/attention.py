"""How far, and how evenly, do blocks look at each position? (paper, section 5: "attention maps")

Distance: the mean distance in patches between the centre of a query patch and those of the key
patches, weighted by attention; tokens that are no patches (class, registers) are excluded on both
sides. Evenness: the entropy of a token's attention over all tokens, as a share of the largest
possible one, ln(tokens). Both are means over heads, tokens and images.

Fused kernels do not return the attention matrix, so softmax(q k^T scale + mask) is computed again
from their arguments. A TorchFunctionMode intercepts the calls; the models are not changed.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.overrides import TorchFunctionMode

from layershuffle.analysis.position_table import (
    Floats,
    PositionMeans,
    at_position,
    draw_maps,
    position_table,
    read_map,
    weighted_means,
)
from layershuffle.analysis.results import Measurement, Tables, with_interval
from layershuffle.analysis.subject import DoesNotApply, Subject
from layershuffle.core.hooks import Step
from layershuffle.core.tensors import in_float64

# Positional arguments of scaled_dot_product_attention.
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LARGEST_PREFIX = 32  # tokens before the patches: class, distillation, registers


class AttentionWatch(TorchFunctionMode):
    """Records the attention of every block, as a block hook and a mode of torch.

    `attentions` holds steps and their weights `[batch, heads, tokens, tokens]`; `grid` (rows,
    columns) is the output shape of the last convolution before the blocks, which makes the patches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attentions: list[tuple[Step, Tensor]] = []
        self.grid: tuple[int, int] | None = None
        self._step: Step | None = None

    def before(self, state: Tensor, step: Step) -> Tensor:
        """Return the input unchanged."""
        self._step = step
        return state

    def after(self, state: Tensor, step: Step) -> None:
        """The block has run."""
        del state, step
        self._step = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and record attention weights."""
        kwargs = kwargs or {}
        if self._step is None:
            out = func(*args, **kwargs)
            # Outside of the blocks, where the patch embedding is the last convolution.
            if func is F.conv2d:
                self.grid = (out.shape[-2], out.shape[-1])
            return out
        # timm, transformers and torchvision all end in one of these two functions.
        if func is F.scaled_dot_product_attention:
            arguments = {**dict(zip(_SDPA, args, strict=False)), **kwargs}
            self.attentions.append((self._step, _weights(arguments)))
        elif func is F.multi_head_attention_forward:
            # torch's own layer calls its kernel inside this function, which modes do not see, but
            # the function can return the weights.
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
            out, weights = func(*args, **kwargs)
            self.attentions.append((self._step, cast(Tensor, weights)))
            return out, None  # the layer expects no weights
        return func(*args, **kwargs)


def _weights(arguments: dict[str, Any]) -> Tensor:
    """Attention weights from the arguments of `scaled_dot_product_attention`."""
    query = arguments["query"]
    key = arguments["key"]
    mask = arguments.get("attn_mask")
    # Causal masks are for text; grouped queries would need repeated keys.
    if arguments.get("is_causal") or arguments.get("enable_gqa"):
        raise DoesNotApply("The model's attention is causal or grouped, not that of an image model")
    scale = arguments.get("scale")
    logits = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    weights: Tensor = logits.softmax(dim=-1)
    return weights


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """Distances `[patches, patches]` between the centres of patches, in patches."""
    rows, columns = torch.meshgrid(
        *(torch.arange(n, dtype=torch.float) for n in grid), indexing="ij"
    )
    places = torch.stack([rows.flatten(), columns.flatten()], dim=-1)
    return torch.cdist(places, places)


def distances(weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mean attention distance `[batch, heads, patches]` in patches; the last tokens are patches."""
    patches = grid[0] * grid[1]
    # Prefix tokens have no place in the image; the other weights of a row are normalised.
    between = weights[..., -patches:, -patches:]
    separation = patch_distances(grid).to(weights)
    # A patch that attends only to prefix tokens has distance 0, not 0 / 0.
    mean: Tensor = (between * separation).sum(-1) / between.sum(-1).clamp_min(1e-30)
    return mean


def evenness(weights: Tensor) -> Tensor:
    """Entropy `[batch, heads, tokens]` of every token's attention, as a share of the largest."""
    entropy: Tensor = torch.special.entr(weights).sum(-1)
    return entropy / math.log(weights.shape[-1])


def measure(subject: Subject) -> Measurement:
    """attention.csv: block, position, distance (patches), even (share of the largest entropy).

    distance_half and even_half are half their 95 % intervals. Numbers: both at the first and the
    last drawn position, and how they change from one to the other.
    """
    watch = AttentionWatch()
    drawn = subject.drawn
    means = {"distance": PositionMeans(drawn), "even": PositionMeans(drawn)}
    grid = (1, 1)
    for batch in subject.batches():
        for order in batch.orders:
            # Weights are batch x heads x tokens^2 per block, so only one forward's are kept.
            watch.attentions.clear()
            with watch:
                subject.run(batch.images, order, watch)
            if not watch.attentions:
                raise DoesNotApply(
                    "No block of this model computes attention between tokens by "
                    "scaled_dot_product_attention, so there is none to look at"
                )
            for step, weights in watch.attentions:
                grid = _check_square(weights, watch.grid)
                values = {"distance": distances(weights, grid), "even": evenness(weights)}
                for name, value in values.items():
                    # One value per image, because its heads and tokens are not independent.
                    of_image = in_float64(value).flatten(1).mean(1)
                    means[name].add(step.block, step.position, values=of_image, first=batch.first)
    clusters = subject.clusters(by_batch=True)
    columns: dict[str, Floats] = {}
    for name, mean in means.items():
        columns |= mean.columns(name, clusters)
    # The difference has its own interval, because the same images run at both positions.
    count = len(drawn)
    first = at_position(count, 0)
    last = at_position(count, count - 1)
    places = {"first": first, "last": last, "change": last - first}
    numbers = {}
    for name in ("distance", "even"):
        for place, cells in places.items():
            numbers[f"{name}_{place}"] = (means[name], cells)
    facts = {
        **subject.counts,
        "distance_if_even": float(patch_distances(grid).mean()),
        **weighted_means(numbers, clusters),
    }
    return Measurement(tables={"attention": position_table(columns, drawn=drawn)}, facts=facts)


def _check_square(weights: Tensor, grid: tuple[int, int] | None) -> tuple[int, int]:
    queries, keys = weights.shape[-2:]
    if grid is None or queries != keys or not 0 <= queries - grid[0] * grid[1] <= _LARGEST_PREFIX:
        raise DoesNotApply(
            f"The attention is {queries} by {keys}, which are not the patches "
            f"({grid or 'no convolution makes any'}) and a few tokens before them"
        )
    return grid


MEANINGS = {
    "distance": "mean distance in patches from a patch to those that it looks at, by attention",
    "distance if even": "that distance if a patch looked at all patches alike",
    "distance first": "distance at the first drawn position",
    "distance last": "distance at the last drawn position",
    "distance change": "the last minus the first",
    "even": "entropy of attention over tokens, as a share of the largest: 1 is alike to all",
    "even first": "evenness at the first drawn position",
    "even last": "evenness at the last drawn position",
    "even change": "the last minus the first",
}


def answer(measured: Measurement) -> str:
    """The answer in a sentence: distance and evenness at the first and the last drawn position."""
    facts = measured.facts
    first = with_interval(facts, "distance_first", form=".2f")
    last = with_interval(facts, "distance_last", form=".2f")
    return (
        f"The block at the first drawn position looks {first} patches far and the one at the last "
        f"{last} ({facts['distance_if_even']:.2f} would be alike to all patches); evenness goes "
        f"from {100 * facts['even_first']:.0f} to {100 * facts['even_last']:.0f} % of the largest."
    )


def figures(tables: Tables) -> dict[str, Figure]:
    """attention.svg: maps of distance and evenness."""
    table = tables["attention"]
    maps = [
        read_map(table, "distance", title="attention distance", meaning="patches"),
        read_map(table, "even", title="entropy of the attention", meaning="share of the largest"),
    ]
    return {"attention": draw_maps(maps)}
