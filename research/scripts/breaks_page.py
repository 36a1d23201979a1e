# Ran at commit 8550626.
"""Write the results of scripts/breaks.py into docs/open-questions.md.

python scripts/breaks_page.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from breaks import TIED
from open_questions import FORWARDS, PAGE, averaged_verdict, rows_of
from performance_page import with_marked
from science_page import interval as words_of
from science_page import verdict

from layershuffle.files import write_text
from layershuffle.stats import Difference, compare, mean, t_interval, wilson_interval
from layershuffle.text import markdown_table

REFERENCE, NO_PARTS = ("data", "20000 pairs"), "none (prediction, detached)"
CHANCE = 1.0
PAIRS = 3
"""From this many pairs of models the interval over seeds decides; below, all pairs must agree."""
NOTHING_LEARNT = "nothing learnt"
NOT_MEASURED = (
    "Not measured yet: `python scripts/breaks.py runs/breaks` continues where it stopped."
)
CONDITIONS = {
    REFERENCE: "attention, 12 blocks, whole skip connections",
    ("breaks", "depth 2"): "2 blocks",
    ("breaks", "depth 4"): "4 blocks",
    ("breaks", "depth 6"): "6 blocks",
    ("breaks", "depth 24"): "24 blocks",
    **{("breaks", f"skip {s}"): f"skip connections times {s}" for s in (0.9, 0.75, 0.5, 0.25)},
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
class MeanInterval:
    """A mean in percent with its 95 % interval, over the orders or images of a model."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ModelScores:
    """Top-1 of a model in percent, in order and in each drawn order; as in `breaks.BreakScores`."""

    in_order: float
    any_order: Sequence[float]
    independent: float
    guessed: float | None


Group = Mapping[int, ModelScores]  # by seed
Models = Mapping[tuple[str, str, str], Group]  # question, case, arm


def read_models() -> Models:
    """All committed scores."""
    models: dict[tuple[str, str, str], dict[int, ModelScores]] = {}
    for row in rows_of("breaks.csv"):
        scores = ModelScores(
            in_order=float(row["in_order"]),
            any_order=[float(value) for value in row["any_order"].split()],
            independent=float(row["independent"]),
            guessed=float(row["guessed"]) if row["guessed"] else None,
        )
        models.setdefault((row["question"], row["case"], row["arm"]), {})[int(row["seed"])] = scores
    return models


def interval(values: Sequence[float], independent: float) -> MeanInterval:
    """The interval of the mean of `values`: at each end the wider of orders and images."""
    centre = mean(values)
    low, high = wilson_interval(centre, independent)
    if len(values) > 1:
        over_orders = t_interval(values)
        low, high = max(0.0, min(low, over_orders[0])), min(100.0, max(high, over_orders[1]))
    return MeanInterval(mean=centre, low=low, high=high)


def broken_in_pair(ordinary: ModelScores, shuffled: ModelScores) -> str:
    """Compare any order with half of the ordinary model's top-1 in one pair of models.

    The intervals are over orders and images, so they say nothing about other seeds, and decide more
    often than an interval over seeds.
    """
    usual = interval([ordinary.in_order], ordinary.independent)
    free = interval(shuffled.any_order, shuffled.independent)
    if usual.low <= 2 * CHANCE:
        return NOTHING_LEARNT
    if free.high < usual.low / 2:
        return "breaks down"
    return "holds" if free.low > usual.high / 2 else "not told apart"


def above_half(ordinary: Group, shuffled: Group) -> Difference:
    """LayerShuffle in any order minus half of ordinary training in order, paired by seed."""
    halves = {seed: in_order(scores) / 2 for seed, scores in ordinary.items()}
    return compare({seed: any_order(scores) for seed, scores in shuffled.items()}, halves)


def broken(ordinary: Group, shuffled: Group) -> str:
    """The verdict: whether the 95 % interval of `above_half` over three or more pairs excludes 0.

    With fewer pairs, `broken_in_pair` must agree on all of them, and the verdict says so.
    """
    seeds = sorted(ordinary.keys() & shuffled.keys())
    of_pairs = [broken_in_pair(ordinary[seed], shuffled[seed]) for seed in seeds]
    over_seeds = above_half(ordinary, shuffled)
    is_open = len(seeds) < PAIRS or not isfinite(over_seeds.low)
    if is_open or set(of_pairs) == {NOTHING_LEARNT}:
        return agreed(of_pairs)
    words = {"better": "holds", "worse": "breaks down"}
    judged = verdict(over_seeds)
    return words.get(judged, judged)


def agreed(of_pairs: Sequence[str]) -> str:
    """The verdict that all pairs of models share, else "not told apart"."""
    first = of_pairs[0]
    if len(set(of_pairs)) > 1 or first == "not told apart":
        return "not told apart"
    return first if first == NOTHING_LEARNT else f"{first} in each pair"


def break_table(models: Models, cases: Mapping[tuple[str, str], str], name: str) -> str:
    """The table of ordinary training and LayerShuffle in each measured case."""
    head = [name, "seeds", "ordinary training: in order", "any order"]
    head += ["LayerShuffle: in order", "any order", "gap", "share", "above half", "shuffling"]
    rows = []
    for case, label in cases.items():
        ordinary, shuffled = (models.get((*case, arm), {}) for arm in ("baseline", "layershuffle"))
        seeds = sorted(ordinary.keys() & shuffled.keys())
        if not seeds:
            continue
        cells = means_of((ordinary, shuffled), seeds)
        gap = round(cells[2] - cells[3], 1) + 0.0  # never "-0.0"
        numbers = [f"{cell:.1f}" for cell in (*cells, gap)]
        judged = broken(ordinary, shuffled)
        # A share of chance would mean nothing.
        is_learnt = judged != NOTHING_LEARNT
        share = f"{100 * cells[3] / cells[0]:.0f} %" if is_learnt else ""
        above = words_of(above_half(ordinary, shuffled)) if len(seeds) >= PAIRS else ""
        rows.append([label, len(seeds), *numbers, share, above, f"**{judged}**"])
    return markdown_table(head, rows, align="lrrrrrrrll") if rows else NOT_MEASURED


def means_of(groups: Sequence[Group], seeds: Sequence[int]) -> list[float]:
    """Mean top-1 of every group over `seeds`, in order and in any order."""
    return [
        mean([of(group[seed]) for seed in seeds])
        for group in groups
        for of in (in_order, any_order)
    ]


def in_order(scores: ModelScores) -> float:
    """Top-1 in order, in percent."""
    return scores.in_order


def any_order(scores: ModelScores) -> float:
    """Top-1 in any order, in percent: the mean over the drawn orders."""
    return mean(scores.any_order)


def difference(sample: Group, reference: Group, of: Callable[[ModelScores], float]) -> Difference:
    """Top-1 of `sample` minus `reference` in points, paired by the seeds that both have."""
    seeds = sample.keys() & reference.keys()
    return compare(
        {seed: of(sample[seed]) for seed in seeds}, {seed: of(reference[seed]) for seed in seeds}
    )


def moved_in_pair(sample: ModelScores, reference: ModelScores) -> str:
    """Compare any order in one pair of models, by the 95 % interval paired by drawn order."""
    pairs = (dict(enumerate(scores.any_order)) for scores in (sample, reference))
    return verdict(compare(*pairs))


def moved(sample: Group, reference: Group) -> tuple[str, str]:
    """The difference in any order, and whether its interval over seeds excludes zero.

    With fewer than three pairs, `moved_in_pair` must agree on all, and the verdict says so.
    """
    gap, seeds = difference(sample, reference, any_order), sorted(sample.keys() & reference.keys())
    if len(seeds) >= PAIRS:
        return words_of(gap), verdict(gap)
    return f"{gap.points:+.1f}", agreed([moved_in_pair(sample[s], reference[s]) for s in seeds])


def tied_table(models: Models) -> str:
    """The table of LayerShuffle with three tied and with twelve different blocks, by data."""
    head = ["training data", "seeds", "LayerShuffle: in order", "any order"]
    head += ["three tied blocks: in order", "any order", "tied in order", "tied in any order"]
    rows = []
    for case, label in DATA.items():
        twelve, three = (models.get((*case, arm), {}) for arm in ("layershuffle", TIED))
        seeds = sorted(twelve.keys() & three.keys())
        if not seeds:
            continue
        numbers = [f"{cell:.1f}" for cell in means_of((twelve, three), seeds)]
        ordered, (free, judged) = difference(three, twelve, in_order), moved(three, twelve)
        numbers += [f"{words_of(ordered)} **{verdict(ordered)}**", f"{free} **{judged}**"]
        rows.append([label, len(seeds), *numbers])
    return markdown_table(head, rows, align="lrrrrrll") if rows else NOT_MEASURED


def position_table(models: Models) -> str:
    """The table of LayerShuffle with different position parts."""
    reference = models.get(("position", NO_PARTS, "layershuffle"), {})
    head = ["position parts", "seeds", "in order", "in any order", "difference to none"]
    head += ["in any order", "positions guessed"]
    rows = []
    for (question, case, _), of_seed in models.items():
        seeds = sorted(of_seed.keys() & reference.keys())
        if question != "position" or not seeds:
            continue
        guesses = [g for seed in seeds if (g := of_seed[seed].guessed) is not None]
        gap, judged = moved(of_seed, reference)
        cells = [case, str(len(seeds)), *(f"{cell:.1f}" for cell in means_of([of_seed], seeds))]
        cells += ["", ""] if case == NO_PARTS else [gap, f"**{judged}**"]
        rows.append([*cells, f"{mean(guesses):.1f}" if guesses else ""])
    return markdown_table(head, rows, align="lrrrllr") if rows else NOT_MEASURED


def soup_table() -> str:
    """The table of a soup's orders against as many orders of one model, and against one order."""
    values: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for row in rows_of("averaged.csv"):
        if "+" not in row["members"]:
            values["*" in row["members"], int(row["forwards"])].append(float(row["top1"]))
    words = {"several models": "better", "several orders": "worse"}
    rows = []
    for forwards in FORWARDS:
        judged = [
            averaged_verdict(values[True, forwards], values[False, orders])
            for orders in (forwards, 1)
        ]
        rows.append([forwards, *(f"**{words.get(name, name)}**" for name in judged)])
    head = ["orders of the soup", "beside as many orders of one model", "beside one order of it"]
    return markdown_table(head, rows, align="rll")


def chance_words(page: str) -> str:
    """The paragraph about the number of comparisons in `page` and of independent images."""
    tables = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    verdicts = re.findall(r"\*\*[a-z ]+\*\*", tables)
    count = sum(name != f"**{NOTHING_LEARNT}**" for name in verdicts)
    images = [float(row["independent"]) for row in rows_of("breaks.csv")]
    least, most = min(images), max(images)
    return (
        f"The tables make {count} comparisons, most of them at 95 %: about {count / 20:.0f} would\n"
        "be told apart by chance if nothing differed anywhere. Digits repeat among the test\n"
        f"pairs, so that 1,000 of them count as {least:.0f} to {most:.0f} independent ones\n"
        "(`independent` in `breaks.csv`)."
    )


def with_tables(page: str) -> str:
    """`page` with new tables between its marks."""
    models = read_models()
    page = with_marked(page, "breaks", break_table(models, CONDITIONS, "model"))
    page = with_marked(page, "data", break_table(models, DATA, "training data"))
    page = with_marked(page, "tied data", tied_table(models))
    page = with_marked(page, "parts", position_table(models))
    page = with_marked(page, "soup", soup_table())
    return with_marked(page, "comparisons", chance_words(page))


if __name__ == "__main__":
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
    print(f"Written: {PAGE}")
