"""`layershuffle cache DATA`: a copy of the images at the size that training needs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from layershuffle.cli.parsing import settings_from, take_option
from layershuffle.errors import UsageError
from layershuffle.settings import CacheSettings

if TYPE_CHECKING:
    from layershuffle.data.cache import CacheReport

_ABOUT = (
    "Make a copy of image data (folder:, hf:, wds:, cifar100:) as JPEG files with --size pixels on "
    "their shorter side, which fit and eval read as folder:DIR. Also takes --out DIR and --verify, "
    "which reads every image back. Killed at any moment, the same command goes on."
)
_SECONDS_BETWEEN_LINES = 10.0


def run(argv: Sequence[str]) -> int:
    """Make the cache, or say that it is there; check it if asked to."""
    out, words = take_option(argv, "--out")
    verify = "--verify" in words
    words = [word for word in words if word != "--verify"]
    named = [] if not words or words[0].startswith("-") else [words.pop(0)]
    settings = settings_from(CacheSettings, words, recipe=None, command="cache DATA", about=_ABOUT)
    if not named:
        raise UsageError("cache needs the data", hint="layershuffle cache folder:DIR")

    from layershuffle.data.cache import build_cache, default_out, verify_cache
    from layershuffle.data.loading import loader_processes

    place = Path(out) if out is not None else default_out(named[0], settings.size)
    report = build_cache(named[0], place, settings=settings, progress=_Progress("cached"))
    print(_told(report))
    if verify:
        processes = loader_processes() if settings.workers is None else settings.workers
        count = verify_cache(place, processes=processes, progress=_Progress("checked"))
        print(f"All {count:,} images are what was written")
    print(f"Next: layershuffle fit --data {quote(f'folder:{place}')} ...")
    return 0


class _Progress:
    """Images done, images per second and time left: a line that is written over, or one per 10 s.

    The first call says what was there already.
    """

    def __init__(self, verb: str) -> None:
        self._verb, self._begun, self._first, self._told = verb, 0.0, -1, 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first < 0:
            self._begun, self._first, self._told = now, done, now
        live = sys.stderr.isatty()
        if not live and now - self._told < _SECONDS_BETWEEN_LINES:
            return
        self._told = now
        line = f"{done:,}/{total:,} images {self._verb}{self._pace(done, total, now)}"
        end = "" if live and done < total else "\n"
        print(f"\r\033[K{line}" if live else line, end=end, file=sys.stderr, flush=True)

    def _pace(self, done: int, total: int, now: float) -> str:
        new, seconds = done - self._first, now - self._begun
        if new <= 0 or seconds <= 0:
            return ""
        left = round(seconds / new * (total - done))
        return (
            f", {new / seconds:,.0f} images/s, "
            f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        )


def _told(report: CacheReport) -> str:
    images = ", ".join(f"{count:,} {folder}" for folder, count in report.images.items())
    lines = [
        f"{images} images in {report.out} ({report.bytes / 1e9:.2f} GB), "
        f"{report.written:,} of them made now"
    ]
    if report.skipped:
        names = "; ".join(report.skipped[:5])
        lines.append(f"note: {len(report.skipped)} unreadable images were left out: {names}")
    return "\n".join(lines)
