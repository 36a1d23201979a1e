"""`layershuffle bench KIND`: speed and memory on this machine, in this run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING

from layershuffle.bench.settings import KINDS, BenchSettings
from layershuffle.cli.parsing import settings_from
from layershuffle.errors import UsageError

if TYPE_CHECKING:
    from layershuffle.bench.report import Report

_ABOUT = (
    f"Measure speed and memory. KIND is one of {', '.join(KINDS)}. Random weights and generated "
    "images, no download. Also takes --json."
)


def run(argv: Sequence[str]) -> int:
    """Measure and print a report, or JSON."""
    as_json = "--json" in argv
    words = [word for word in argv if word != "--json"]
    kind = words.pop(0) if words and not words[0].startswith("-") else None
    settings = settings_from(BenchSettings, words, recipe=None, command="bench KIND", about=_ABOUT)
    if kind not in KINDS:
        near = get_close_matches(kind or "", KINDS, n=1)
        raise UsageError(
            f"bench measures {', '.join(KINDS)}" + (f", not {kind!r}" if kind else ""),
            hint=f"did you mean {near[0]!r}?" if near else "layershuffle bench --help",
        )
    from layershuffle.bench.report import report_text

    report = _measured(kind, settings)
    print(json.dumps(asdict(report), indent=2) if as_json else report_text(report))
    return 0


def _measured(kind: str, settings: BenchSettings) -> Report:
    from layershuffle.bench.kinds import BENCHES
    from layershuffle.bench.settings import resolve
    from layershuffle.machine import torch_threads

    with torch_threads(settings.threads) if settings.threads else nullcontext():
        return BENCHES[kind](resolve(settings))
