"""`layershuffle fit` and, from a recipe alone, `layershuffle pretrain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from layershuffle.cli.parsing import settings_from, take_option
from layershuffle.errors import UsageError
from layershuffle.settings import FitSettings

_ABOUT = (
    "Refine a model so that its blocks run in any order. Also takes --recipe FILE (YAML) and "
    "--out DIR, where the run goes. Settings: recipe, then LAYERSHUFFLE_* variables, then flags. "
    "Killed at any moment, the same command goes on."
)


def run(argv: Sequence[str]) -> int:
    """Fit; returns the exit code."""
    recipe, words = take_option(argv, "--recipe")
    return fit_from(words, recipe=Path(recipe) if recipe else None, command="fit", about=_ABOUT)


def fit_from(argv: Sequence[str], *, recipe: Path | None, command: str, about: str) -> int:
    """Parse settings and --out, fit, and say what came out and what to type next."""
    out, words = take_option(argv, "--out")
    settings = settings_from(FitSettings, words, recipe=recipe, command=command, about=about)
    if out is None:
        raise UsageError("No output directory was given", hint="add --out DIR")

    from layershuffle.cli.progress import progress_listener
    from layershuffle.training import fit, is_first_process

    if not is_first_process():  # of those that torchrun started, one speaks
        fit(settings, Path(out))
        return 0
    with progress_listener() as listener:
        result = fit(settings, Path(out), listeners=[listener])
    print(
        f"{result.method}, seed {result.seed}: best {result.selected['metric']} "
        f"{result.selected['value']:.4f} at step {result.selected['step']} of {result.steps}, "
        f"{result.train_seconds:.0f} s, {result.images_per_second:.0f} images/s "
        f"({result.hardware['gpu'] or result.hardware['processor']}, "
        f"{result.hardware['precision']}, batch {settings.batch_size})\n"
        f"Model: {out}/model\n"
        f"Next: layershuffle eval {quote(out)} --data {quote(settings.data)}"
    )
    return 0
