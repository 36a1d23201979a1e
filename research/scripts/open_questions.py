# Ran at commit 8550626.
"""Measure the results of docs/open-questions.md, and write its tables.

    python scripts/open_questions.py runs/digits-tied   # measure on the models of that study
    python scripts/open_questions.py                    # only write the tables again

The study is that of `layershuffle reproduce digits-tied --out runs/digits-tied`.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from performance_page import medians_of, with_marked
from science_page import ARMS, interval, verdict
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import layershuffle as ls
from layershuffle.analysis import AnalysisSettings, read_analysis, run_analysis
from layershuffle.core.losses import logits_of
from layershuffle.core.methods import METHODS
from layershuffle.core.tying import middle_blocks, tie
from layershuffle.data import DataOptions, open_data
from layershuffle.data.batches import DeviceBatches
from layershuffle.data.digits import CANVAS
from layershuffle.files import write_text
from layershuffle.merging.ensembles import evaluate_ensemble
from layershuffle.merging.soups import uniform_soup
from layershuffle.models import image_view
from layershuffle.stats import Difference, compare, mean
from layershuffle.text import markdown_table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "open-questions.md", ROOT / "docs" / "results" / "open-questions"
DEPTH, SEEDS, IMAGES, DRAWS = 12, (0, 1, 2), 600, 2
MISSING = (2, 3, 4, 6)
MISSING_ARMS = ("baseline", "layershuffle", "layershuffle-depth")
FORWARDS, AVERAGED_DRAWS = (1, 2, 3, 6), 3
AVERAGED_ARM = "layershuffle"
PROBED = {
    "baseline": "ordinary training",
    "layershuffle": "LayerShuffle",
    "layershuffle-depth": "LayerShuffle-depth",
    "layershuffle-predict-500-steps": "LayerShuffle-predict, 500 steps",
    "layershuffle-predict": "LayerShuffle-predict, 2,000 steps",
    "layershuffle-predict-8000-steps": "LayerShuffle-predict, 8,000 steps",
}
ENDS = ("input", "output")
PROBED_BY_POSITION = ("baseline", "layershuffle", "layershuffle-depth")
"""Arms with a table of the probe's accuracy at each position."""
LABELS = {arm.name: arm.label for arm in ARMS}
# `truncated` is left out, because it costs as much as a smaller model.
COSTED = (
    *((name, None) for name in METHODS if name not in {"truncated", "layershuffle-tied"}),
    *(("layershuffle-tied", distinct) for distinct in (6, 3, 1)),
)
"""Methods, and the number of different blocks of a tied model."""
TIMED = {
    "layershuffle-tied --distinct 3": "layershuffle-tied, distinct 3",
    "layershuffle-mixed": "layershuffle-mixed, orders per batch 4",
}
"""The names of methods with options in `benchmarks/methods.py`."""
CASES = ("width 64, batch 64", "width 192, batch 32")
TIMES = ("step", "answer")


@dataclass(frozen=True, kw_only=True)
class MissingRow:
    """Top-1 in percent with `missing` blocks left out, in a row or spread out.

    It is the mean over the sets of blocks and the drawn orders.
    """

    arm: str
    seed: int
    layout: str
    missing: int
    order: str
    top1: float


@dataclass(frozen=True, kw_only=True)
class AveragedRow:
    """Top-1 in percent of the mean of the logits of `forwards` forwards.

    `members`: the seeds of the models, as "0+1+2". A single model runs in `forwards` orders, as
    does the soup "0*1*2", whose weights are the means of three models.
    """

    members: str
    forwards: int
    draw: int
    top1: float


@dataclass(frozen=True, kw_only=True)
class ProbedRow:
    """Accuracy in percent of a linear probe on the input of blocks, at one position.

    It is the mean over all blocks and the test images of `layershuffle analyze position`.
    """

    arm: str
    seed: int
    position: int
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """The cost of a method. `forward` and `step`: million floating-point operations per image."""

    method: str
    parameters: int
    file_bytes: int
    forward: float
    step: float


def sets_of(missing: int, layout: str) -> list[tuple[int, ...]]:
    """Sets of `missing` blocks "in a row" or "spread out"; each block is in one set of a layout.

    So both layouts leave out important blocks, such as the first, equally often.
    """
    count = DEPTH // missing
    if layout == "in a row":
        return [tuple(range(k * missing, (k + 1) * missing)) for k in range(count)]
    return [tuple(range(k, DEPTH, count)) for k in range(count)]


def orders_without(missing: Sequence[int], *, arbitrary: bool) -> list[ls.ExecutionOrder]:
    """Orders of the other blocks: sequential, or `DRAWS` random ones, the same for every set."""
    if not arbitrary:
        orders = [tuple(range(DEPTH))]
    else:
        orders = [ls.Shuffled().draw(DEPTH, seed=0, step=draw).blocks for draw in range(DRAWS)]
    return [
        ls.ExecutionOrder([block for block in order if block not in missing], DEPTH)
        for order in orders
    ]


def measure_missing(study: Path, batches: DeviceBatches) -> Iterator[MissingRow]:
    """Score the models without consecutive blocks and without as many spread out."""
    for arm in MISSING_ARMS:
        # The ordinary model has only 5 % in a random order, so it has nothing to lose.
        cases = [
            (layout, missing, arbitrary, order)
            for arbitrary in ((False,) if arm == "baseline" else (False, True))
            for missing in MISSING
            for layout in ("in a row", "spread out")
            for blocks in sets_of(missing, layout)
            for order in orders_without(blocks, arbitrary=arbitrary)
        ]
        for seed in SEEDS:
            model = model_of(study, arm, seed)
            scores = ls.evaluate(model, batches, orders=[case[-1] for case in cases])
            grouped: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
            for (layout, missing, arbitrary, _), score in zip(cases, scores, strict=True):
                grouped[layout, missing, arbitrary].append(score.top1)
            for (layout, missing, arbitrary), values in grouped.items():
                order = "arbitrary" if arbitrary else "sequential"
                yield MissingRow(
                    arm=arm,
                    seed=seed,
                    layout=layout,
                    missing=missing,
                    order=order,
                    top1=mean(values),
                )
            print(f"missing: {arm}, seed {seed}", flush=True)


def measure_averaged(study: Path, batches: DeviceBatches) -> Iterator[AveragedRow]:
    """Score orders of one model, and several models, by the number of forwards per answer."""
    models = {seed: model_of(study, AVERAGED_ARM, seed) for seed in SEEDS}
    alone = {str(seed): model for seed, model in models.items()}
    alone["*".join(alone)] = uniform_soup(list(models.values()))
    groups = {
        (name, forwards): [model] * forwards
        for name, model in alone.items()
        for forwards in FORWARDS
    }
    for seeds in ((0, 1), (1, 2), (2, 0), (0, 1, 2)):
        groups["+".join(map(str, seeds)), len(seeds)] = [models[seed] for seed in seeds]
    for (members, forwards), donors in groups.items():
        scores = evaluate_ensemble(donors, batches, num_orders=AVERAGED_DRAWS)
        for draw, score in enumerate(scores):
            yield AveragedRow(members=members, forwards=forwards, draw=draw, top1=score.top1)
        print(f"averaged: {members}, {forwards} forwards", flush=True)


def measure_positions(study: Path) -> Iterator[ProbedRow]:
    """Score the probe on the input of blocks, at every position of every model."""
    for arm in PROBED_BY_POSITION:
        for seed in SEEDS:
            with TemporaryDirectory() as directory:
                out = Path(directory) / "position"
                settings = AnalysisSettings()
                spec = spec_of(study, arm, seed)
                run_analysis("position", spec, data_spec="digit-pairs", settings=settings, out=out)
                probe = read_analysis(out).facts["sources"]["probe on the block's input"]
            for position, accuracy in enumerate(probe["by_position"]):
                yield ProbedRow(arm=arm, seed=seed, position=position, accuracy=accuracy)


def measure_costs() -> Iterator[CostRow]:
    """Count parameters, bytes and operations; a step is the mean over 100 orders of the policy."""
    image = torch.zeros(1, 1, *CANVAS)
    for name, distinct in COSTED:
        method, host = METHODS[name], ls.load("bundled:digits")
        model = ls.add_position(
            host if distinct is None else tie(host, middle_blocks(distinct, DEPTH)),
            encoding=ls.EncodingForm() if method.encoding else None,
            prediction=ls.PredictionForm() if method.prediction else None,
        )
        orders = [method.policy.draw(DEPTH, seed=0, step=step) for step in range(100)]
        exits = method.exit_weight is not None
        steps = [
            operations(model, image, order=order, backward=True, exits=exits) for order in orders
        ]
        whole = ls.ExecutionOrder.sequential(DEPTH)
        with TemporaryDirectory() as directory:
            ls.save(model, Path(directory) / "model")
            files = list(Path(directory).rglob("*.safetensors"))
            file_bytes = sum(file.stat().st_size for file in files)
        yield CostRow(
            method=f"{name} --distinct {distinct}" if distinct else name,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            file_bytes=file_bytes,
            forward=operations(model, image, order=whole, backward=False) / 1e6,
            step=mean(steps) / 1e6,
        )


def operations(
    model: ls.PositionedModel,
    image: torch.Tensor,
    *,
    order: ls.ExecutionOrder,
    backward: bool,
    exits: bool = False,
) -> int:
    """Floating-point operations of matrix products for `image`, as torch counts them.

    `backward`: count a training step, with the position prediction of the model. With `exits` the
    head runs twice; the block of the exit does not matter.
    """
    running = ls.running(model, [order], exit_after=1) if exits else ls.running(model, order)
    predicts = backward and model.prediction is not None
    # Fused attention on a CPU is missing in torch's table of counts and would count as 0.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        guessing = model.guessing() if predicts else nullcontext()
        with torch.set_grad_enabled(backward), running, guessing as guesses:
            loss = logits_of(model(image)).sum()
            if guesses is not None:
                loss = loss + guesses.loss()
        if backward:
            loss.backward()
    return int(counter.get_total_flops())


def spec_of(study: Path, arm: str, seed: int) -> str:
    """The spec of a trained model of the study."""
    return f"dir:{study / 'runs' / f'{arm}-seed{seed}' / 'fit'}"


def model_of(study: Path, arm: str, seed: int) -> nn.Module:
    """A trained model of the study."""
    return ls.load(spec_of(study, arm, seed))


def scored_batches(model: nn.Module) -> DeviceBatches:
    """The first `IMAGES` test pairs of a fixed shuffle, as `model` takes them."""
    options = DataOptions(train=False, max_test=IMAGES)
    data = open_data("digit-pairs", image_view(model), options=options)
    return DeviceBatches(
        data.splits["test"], data.finish, batch_size=250, device="cpu", processes=0
    )


def measure(study: Path) -> None:
    """Measure all questions; all but the probes are measured on `IMAGES` random test pairs."""
    torch.set_num_threads(1)
    batches = scored_batches(model_of(study, "baseline", 0))
    keep("costs.csv", list(measure_costs()))
    keep("missing.csv", list(measure_missing(study, batches)))
    keep("averaged.csv", list(measure_averaged(study, batches)))
    keep("positions.csv", list(measure_positions(study)))


def keep(name: str, rows: Sequence[DataclassInstance]) -> None:
    """Write a table with a row for each of `rows`."""
    lines = [",".join(asdict(rows[0]))]
    lines += [
        ",".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in astuple(r)) for r in rows
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_text(RESULTS / name, "\n".join(lines) + "\n")


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a committed table."""
    with (RESULTS / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def missing_difference(
    rows: Sequence[Mapping[str, str]], arm: str, order: str, missing: int
) -> tuple[float, float, Difference]:
    """Mean top-1 in a row, spread out, and the first minus the second in pairs over seeds."""
    means: dict[str, dict[int, float]] = defaultdict(dict)
    for each in rows:
        if (each["arm"], each["order"], each["missing"]) == (arm, order, str(missing)):
            means[each["layout"]][int(each["seed"])] = float(each["top1"])
    row, spread = means["in a row"], means["spread out"]
    return mean(list(row.values())), mean(list(spread.values())), compare(row, spread)


def missing_table() -> str:
    """The table of what leaving out neighbours costs, by arm, order and number of blocks."""
    scores = rows_of("missing.csv")
    head = ["arm", "the others run", "missing", "in a row", "spread out", "difference"]
    rows = []
    for arm, order in dict.fromkeys((score["arm"], score["order"]) for score in scores):
        words = "in order" if order == "sequential" else "in any order"
        for missing in MISSING:
            row, spread, gap = missing_difference(scores, arm, order, missing)
            cells = [LABELS[arm], words, str(missing), f"{row:.1f}", f"{spread:.1f}"]
            rows.append([*cells, interval(gap), f"**{verdict(gap)}**"])
    return markdown_table([*head, "in a row is"], rows, align="llrrrrl")


def averaged_verdict(models: Sequence[float], orders: Sequence[float]) -> str:
    """The verdict: whether all draws of several models beat all of one model, or the reverse."""
    if min(models) > max(orders):
        return "several models"
    return "several orders" if max(models) < min(orders) else "not told apart"


def averaged_table() -> str:
    """The table of orders of a model, models and soups, by the number of forwards per answer."""
    values: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows_of("averaged.csv"):
        kind = row["members"][1:2]  # "" for one model, else the separator of seeds
        values[kind, int(row["forwards"])].append(float(row["top1"]))
    head = ["forwards per answer", "one model, as many orders", "as many models", "better"]
    rows = []
    for forwards in FORWARDS:
        orders, models, soup = (values[kind, forwards] for kind in ("", "+", "*"))
        better = f"**{averaged_verdict(models, orders)}**" if models else ""
        texts = [
            f"{mean(scores):.1f} ({min(scores):.1f} to {max(scores):.1f})" if scores else ""
            for scores in (orders, models, soup)
        ]
        rows.append([forwards, *texts[:2], better, texts[2]])
    return markdown_table([*head, "soup of three models, as many orders"], rows, align="rrrlr")


def cost_table() -> str:
    """The table of parameters, saved bytes, operations, and benchmarked times."""
    medians = medians_of("methods")
    head = ["method", "parameters", "saved MB", "MFLOP per answer", "MFLOP per image trained"]
    head += [f"time per {what}, {case}" for what in TIMES for case in CASES]
    rows = []
    for row in rows_of("costs.csv"):
        name = row["method"]
        measured = TIMED.get(name, name)
        megabytes = int(row["file_bytes"]) / 1e6
        cells = [f"`{name}`", f"{int(row['parameters']):,}", f"{megabytes:.2f}"]
        cells += [f"{float(row[column]):.1f}" for column in ("forward", "step")]
        for what in TIMES:
            for case in CASES:
                median = medians.get(f"{what} of {measured}, {case}")
                cells.append("1" if name == "baseline" else f"{median:.2f}" if median else "")
        rows.append(cells)
    return markdown_table(head, rows, align="l" + "r" * (len(head) - 1))


def position_table() -> str:
    """The table of a linear probe's accuracy on positions, from the study digits-paper."""
    rows = []
    with (ROOT / "docs" / "results" / "digits-paper" / "analysis.csv").open(encoding="utf-8") as f:
        values = {(row["task"], row["name"]): row["value"] for row in csv.DictReader(f)}
    for arm, label in PROBED.items():
        names = [f"facts/sources/probe on the block's {end}/accuracy" for end in ENDS]
        accuracies = [float(values[f"position-{arm}-seed0", name]) for name in names]
        rows.append([label, *(f"{accuracy:.1f}" for accuracy in accuracies)])
    return markdown_table(["model", *(f"probe on the {end}" for end in ENDS)], rows, align="lrr")


def by_position_table() -> str:
    """The table of the input probe's accuracy at each position, the mean over models."""
    accuracies: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows_of("positions.csv"):
        accuracies[row["arm"]][int(row["position"])].append(float(row["accuracy"]))
    rows = [
        [LABELS[arm], *(f"{mean(accuracies[arm][position]):.0f}" for position in range(DEPTH))]
        for arm in PROBED_BY_POSITION
    ]
    return markdown_table(["model", *map(str, range(DEPTH))], rows, align="l" + "r" * DEPTH)


def with_tables(page: str) -> str:
    """`page` with new tables between its marks."""
    tables = {
        "missing": missing_table(),
        "averaged": averaged_table(),
        "costs": cost_table(),
        "position": position_table(),
        "by position": by_position_table(),
    }
    for name, text in tables.items():
        page = with_marked(page, name, text)
    return page


if __name__ == "__main__":
    for path in sys.argv[1:]:
        measure(Path(path))
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
    print(f"Written: {PAGE}")
