"""Write what scripts/breaks.py has measured into docs/open-questions.md.

python scripts/breaks_page.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from breaks import TIED
from open_questions import PAGE, rows_of
from science_page import with_marked

from layershuffle.files import write_text
from layershuffle.stats import mean, t_interval, wilson_interval
from layershuffle.text import markdown_table

REFERENCE, NO_PARTS = ("data", "20000 pairs"), "none (prediction, detached)"
CHANCE = 1.0
NOTHING_LEARNT = "nothing learnt"
NOT_MEASURED = "Not measured yet: `python scripts/breaks.py runs/breaks` goes on where it stopped."
CONDITIONS = {
    REFERENCE: "attention, 12 blocks, whole skip connections",
    ("breaks", "depth 2"): "2 blocks",
    ("breaks", "depth 4"): "4 blocks",
    ("breaks", "depth 6"): "6 blocks",
    ("breaks", "depth 24"): "24 blocks",
    ("breaks", "skip 0.5"): "skip connections times 0.5",
    ("breaks", "skip 0.25"): "skip connections times 0.25",
    ("breaks", "skip 0"): "no skip connections",
    ("breaks", "MLP-Mixer"): "MLP-Mixer",
    ("breaks", "MLP-Mixer, 1e-3"): "MLP-Mixer, refined at 1e-3",
    ("breaks", "ConvNeXt"): "ConvNeXt of one width",
    ("breaks", "ConvMixer"): "ConvMixer",
}
DATA = {
    **{("data", f"{n} pairs"): f"{n:,} pairs of all digits" for n in (20_000, 5_000, 1_000, 200)},
    **{
        ("data", f"{n} pairs, equal epochs"): f"{n:,} pairs, steps in proportion"
        for n in (5_000, 1_000)
    },
    **{("data", f"{n} digits"): f"20,000 pairs of {n} digits per class" for n in (31, 12, 5, 2)},
}


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean in percent with its 95 % interval over orders and images of a model."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Top-1 in percent of a model: in order, and a value per drawn order."""

    in_order: float
    any_order: Sequence[float]
    independent: float
    guessed: float | None


Models = Mapping[tuple[str, str, str], Mapping[int, Scores]]  # question, case, arm; by seed


def read_models() -> Models:
    """All committed scores."""
    models: dict[tuple[str, str, str], dict[int, Scores]] = {}
    for row in rows_of("breaks.csv"):
        scores = Scores(
            in_order=float(row["in_order"]),
            any_order=[float(value) for value in row["any_order"].split()],
            independent=float(row["independent"]),
            guessed=float(row["guessed"]) if row["guessed"] else None,
        )
        models.setdefault((row["question"], row["case"], row["arm"]), {})[int(row["seed"])] = scores
    return models


def interval(values: Sequence[float], independent: float) -> Interval:
    """Of the mean of `values`: over the orders or over the images, whichever end is farther out."""
    centre = mean(values)
    low, high = wilson_interval(centre, independent)
    if len(values) > 1:
        over_orders = t_interval(values)
        low, high = min(low, over_orders[0]), max(high, over_orders[1])
    return Interval(mean=centre, low=low, high=high)


def broken(shuffled: Interval, ordinary: Interval) -> str:
    """The criterion, for one pair of models: any order against half of the ordinary model."""
    if ordinary.low <= 2 * CHANCE:
        return NOTHING_LEARNT
    if shuffled.high < ordinary.low / 2:
        return "breaks down"
    return "holds" if shuffled.low > ordinary.high / 2 else "not told apart"


def agreed(verdicts: Sequence[str]) -> str:
    """What every pair of models says; else nothing is told apart."""
    return verdicts[0] if len(set(verdicts)) == 1 else "not told apart"


def verdict_on(models: Models, case: tuple[str, str]) -> str:
    """Whether shuffling breaks down in a case."""
    ordinary, shuffled = models[*case, "baseline"], models[*case, "layershuffle"]
    verdicts = []
    for seed in sorted(ordinary.keys() & shuffled.keys()):
        reference, scores = ordinary[seed], shuffled[seed]
        verdicts.append(
            broken(
                interval(scores.any_order, scores.independent),
                interval([reference.in_order], reference.independent),
            )
        )
    return agreed(verdicts)


def break_table(models: Models, cases: Mapping[tuple[str, str], str], name: str) -> str:
    """Ordinary training and LayerShuffle in each case that was measured."""
    head = [name, "seeds", "ordinary training: in order", "any order"]
    head += ["LayerShuffle: in order", "any order", "gap", "share", "shuffling"]
    rows = []
    for case, label in cases.items():
        ordinary, shuffled = (models.get((*case, arm), {}) for arm in ("baseline", "layershuffle"))
        seeds = sorted(ordinary.keys() & shuffled.keys())
        if not seeds:
            continue
        cells = [
            mean([of(group[seed]) for seed in seeds])
            for group in (ordinary, shuffled)
            for of in (in_order, any_order)
        ]
        gap = round(cells[2] - cells[3], 1) + 0.0  # never "-0.0"
        numbers = [f"{cell:.1f}" for cell in (*cells, gap)]
        verdict = verdict_on(models, case)
        # Of chance there is no share.
        share = "" if verdict == NOTHING_LEARNT else f"{100 * cells[3] / cells[0]:.0f} %"
        rows.append([label, len(seeds), *numbers, share, f"**{verdict}**"])
    return markdown_table(head, rows, align="lrrrrrrrl") if rows else NOT_MEASURED


def in_order(scores: Scores) -> float:
    """Top-1 in order, in percent."""
    return scores.in_order


def any_order(scores: Scores) -> float:
    """Top-1 in any order, in percent: the mean over the drawn orders."""
    return mean(scores.any_order)


def moved(sample: Scores, reference: Scores) -> tuple[float, float, float]:
    """Any order minus any order, in pairs over the drawn orders, with its 95 % interval."""
    gaps = [a - b for a, b in zip(sample.any_order, reference.any_order, strict=True)]
    return mean(gaps), *t_interval(gaps)


def moved_verdict(sample: Mapping[int, Scores], reference: Mapping[int, Scores]) -> str:
    """The criterion: over the orders of every pair of models the interval excludes zero."""
    verdicts = []
    for seed in sorted(sample.keys() & reference.keys()):
        _, low, high = moved(sample[seed], reference[seed])
        verdicts.append("better" if low > 0 else "worse" if high < 0 else "not told apart")
    return agreed(verdicts)


def tied_table(models: Models) -> str:
    """Three tied blocks beside LayerShuffle with twelve different ones, on the same data."""
    head = ["training data", "seeds", "LayerShuffle: in order", "any order"]
    head += ["three tied blocks: in order", "any order", "difference in any order", "tied is"]
    rows = []
    for case, label in DATA.items():
        twelve, three = (models.get((*case, arm), {}) for arm in ("layershuffle", TIED))
        seeds = sorted(twelve.keys() & three.keys())
        if not seeds:
            continue
        cells = [
            mean([of(group[seed]) for seed in seeds])
            for group in (twelve, three)
            for of in (in_order, any_order)
        ]
        numbers = [f"{cell:.1f}" for cell in cells]
        gap, verdict = f"{cells[3] - cells[1]:+.1f}", moved_verdict(three, twelve)
        rows.append([label, len(seeds), *numbers, gap, f"**{verdict}**"])
    return markdown_table(head, rows, align="lrrrrrrl") if rows else NOT_MEASURED


def position_table(models: Models) -> str:
    """What position parts do to LayerShuffle."""
    reference = models.get(("position", NO_PARTS, "layershuffle"), {})
    head = ["position parts", "seeds", "in order", "in any order", "difference to none"]
    head += ["in any order", "positions guessed"]
    rows = []
    for (question, case, _), of_seed in models.items():
        if question != "position":
            continue
        seeds = sorted(of_seed.keys() & reference.keys())
        if not seeds:
            continue
        ordered = mean([in_order(of_seed[seed]) for seed in seeds])
        arbitrary = mean([any_order(of_seed[seed]) for seed in seeds])
        gap = arbitrary - mean([any_order(reference[seed]) for seed in seeds])
        guesses = [g for seed in seeds if (g := of_seed[seed].guessed) is not None]
        cells = [case, str(len(seeds)), f"{ordered:.1f}", f"{arbitrary:.1f}"]
        verdict = moved_verdict(of_seed, reference)
        cells += ["", ""] if case == NO_PARTS else [f"{gap:+.1f}", f"**{verdict}**"]
        rows.append([*cells, f"{mean(guesses):.1f}" if guesses else ""])
    return markdown_table(head, rows, align="lrrrrlr") if rows else NOT_MEASURED


def with_tables(page: str) -> str:
    """`page` with new tables between its marks."""
    models = read_models()
    page = with_marked(page, "breaks", break_table(models, CONDITIONS, "model"))
    page = with_marked(page, "data", break_table(models, DATA, "training data"))
    page = with_marked(page, "tied data", tied_table(models))
    return with_marked(page, "parts", position_table(models))


if __name__ == "__main__":
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
    print(f"Written: {PAGE}")
