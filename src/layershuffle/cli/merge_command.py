"""`layershuffle merge RECIPE.yaml --out DIR`, and `layershuffle merge --random 100 DIR...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from layershuffle.cli.parsing import settings_from, take_option
from layershuffle.errors import UsageError
from layershuffle.merging.rows import MergingRow, by_model, group_rows, rows_csv
from layershuffle.merging.settings import MergingSettings

_ABOUT = (
    "Two forms. merge RECIPE.yaml --out DIR writes the model whose blocks come from the donors "
    "that the recipe names. merge MODEL... --random N --data SPEC draws N merges and scores them "
    "beside their donors, soups and ensembles; it also takes --mode sequential|arbitrary, "
    "--base SPEC, --out FILE.csv (every score) and --json. N stands for --merges N."
)
_MODES = ("sequential", "arbitrary")


def run(argv: Sequence[str]) -> int:
    """Merge as a recipe says, or at random."""
    wants_help = any(word in ("-h", "--help") for word in argv)
    random, words = take_option(argv, "--random")
    if random is not None or wants_help:
        return _run_random(random, words)
    out, words = take_option(words, "--out")
    if out is None or len(words) != 1 or words[0].startswith("-"):
        raise UsageError(
            "merge needs RECIPE.yaml and --out DIR, or MODEL... with --random N and --data SPEC",
            hint="layershuffle merge --help",
        )
    return _run_recipe(Path(words[0]), Path(out))


def take_models(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first flag, and the others."""
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:count]), list(words[count:])


def _show_passes(done: int, total: int) -> None:
    """A line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\rpass {done}/{total}", end="\n" if done == total else "", file=sys.stderr)


def _run_recipe(path: Path, out: Path) -> int:
    from layershuffle.merging.recipe import merge_recipe, read_merge_recipe

    merge = merge_recipe(read_merge_recipe(path), out)["provenance"]["merge"]
    for number, donor in enumerate(merge["donors"]):
        blocks = [str(block) for block, one in enumerate(merge["blocks"]) if one == number]
        print(f"blocks {','.join(blocks)} from {donor['model']}")
    print(
        f"stem {merge['stem']}, head {merge['head']}\nModel: {out}\n"
        f"Next: layershuffle eval {quote(str(out))} --data SPEC"
    )
    return 0


def _run_random(random: str | None, words: Sequence[str]) -> int:
    data, words = take_option(words, "--data")
    mode, words = take_option(words, "--mode")
    base, words = take_option(words, "--base")
    out, words = take_option(words, "--out")
    as_json = "--json" in words
    models, words = take_models([word for word in words if word != "--json"])
    if random is not None:
        words = ["--merges", random, *words]
    settings = settings_from(
        MergingSettings, words, recipe=None, command="merge MODEL...", about=_ABOUT
    )
    mode = mode or "arbitrary"
    if data is None or not models:
        raise UsageError("merge --random needs models and --data SPEC", hint="models come first")
    if mode not in _MODES:
        raise UsageError(f"{mode!r} is not an order mode", hint=f"modes are {', '.join(_MODES)}")

    from layershuffle.files import write_text
    from layershuffle.merging.scoring import score_merging

    notes: list[str] = []
    rows = score_merging(
        models,
        data,
        settings=settings,
        mode="sequential" if mode == "sequential" else "arbitrary",
        base=base,
        progress=_show_passes,
        note=notes.append,
    )
    if out is not None:
        write_text(Path(out), rows_csv(rows))
    report = {
        "donors": models,
        "data": data,
        "mode": mode,
        "settings": settings.model_dump(mode="json"),
        "groups": [_summary(group) for group in group_rows(rows).values()],
        "notes": notes,
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(report, indent=2) if as_json else _table(report))
    return 0


def _summary(rows: Sequence[MergingRow]) -> dict[str, Any]:
    """Means per model, then over models: the interval covers models where there are several."""
    from layershuffle.stats import estimate

    def over_models(metric: str, *, percent: bool) -> dict[str, Any]:
        return asdict(estimate(by_model(rows, metric), images=rows[0].n, percent=percent))

    first = rows[0]
    what = " ".join(word for word in (first.kind, first.ends) if word)
    if first.kind in ("soup", "ensemble"):
        what += f" {first.name}"
    return {
        "what": what,
        "main": bool(first.main),
        "top1": over_models("top1", percent=True),
        "top5": over_models("top5", percent=True),
        "cross_entropy": over_models("cross_entropy", percent=False),
    }


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{len(report['donors'])} donors on {report['data']}, {report['mode']} order, "
        f"seed {report['settings']['seed']}, {report['settings']['precision']}",
        f"{'':<36}{'models':>7}{'orders':>7}{'top-1 %':>9}{'sd':>7}{'min':>7}{'max':>7}"
        f"{'95 %':>16}{'top-5 %':>9}{'CE':>8}",
    ]
    for group in report["groups"]:
        top1 = group["top1"]
        spread = top1["sd_models"] if top1["models"] > 1 else top1["sd_orders"]
        interval = f"{top1['low']:.1f} to {top1['high']:.1f}"
        lines.append(
            f"{group['what'] + (' *' if group['main'] else ''):<36}{top1['models']:>7}"
            f"{top1['orders']:>7}{top1['mean']:>9.2f}"
            f"{'-' if spread is None else format(spread, '.2f'):>7}{top1['least']:>7.1f}"
            f"{top1['most']:>7.1f}{interval:>16}{group['top5']['mean']:>9.2f}"
            f"{group['cross_entropy']['mean']:>8.3f}"
        )
    lines.append(
        f"{report['groups'][0]['top1']['images']} images each. *: what the settings name first. "
        "sd and 95 %: over models (t-interval), of a single model over its orders, of a single "
        "order over images (Wilson). min, max: single scores."
    )
    return "\n".join([*lines, *report["notes"]])
