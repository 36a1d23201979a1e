"""Where a run keeps what it needs to go on, and what it must not mix."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from layershuffle.errors import UsageError
from layershuffle.files import remove_stale_stages, write_text
from layershuffle.recipes import read_recipe
from layershuffle.settings import FitSettings

CHECKPOINT_FORM = "step-{:08d}"
SETTINGS_FILE = "settings.yaml"
# These change where and how fast a run computes, not what: a resumed run may change them.
_MAY_CHANGE = frozenset({"log_every", "workers"})
_NOTHING_YET = frozenset({".lock", SETTINGS_FILE, "checkpoints", "tensorboard"})


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest whole checkpoint; directories are renamed into place, so each one is whole."""
    found = sorted(checkpoints.glob("step-*"))
    return found[-1] if found else None


def remove_older(checkpoints: Path, newest: Path) -> None:
    """Delete every checkpoint before `newest`."""
    for path in sorted(checkpoints.glob("step-*")):
        if path.name < newest.name:
            shutil.rmtree(path)


def prepare_run(out: Path, settings: FitSettings) -> None:
    """Make or take up the run directory `out`.

    Raises `UsageError` if it holds a run with other settings (naming them) or files of something
    else. A run that ended before it had anything to keep, as with a misspelt path, binds nobody.
    """
    resolved = settings.model_dump(mode="json")
    path = out / SETTINGS_FILE
    if path.is_file() and _has_something(out):
        _refuse_other_settings(path, resolved)
    elif not path.is_file() and any(child.name != ".lock" for child in out.iterdir()):
        raise UsageError(
            "The output directory is not empty and holds no run of ours",
            place=out,
            hint="choose a new directory for --out",
        )
    else:
        write_text(path, yaml.safe_dump(resolved, sort_keys=False))
    remove_stale_stages(out)
    remove_stale_stages(out / "checkpoints")


def _has_something(out: Path) -> bool:
    others = {child.name for child in out.iterdir()} - _NOTHING_YET
    return bool(others) or latest_checkpoint(out / "checkpoints") is not None


def _refuse_other_settings(path: Path, resolved: dict[str, object]) -> None:
    # What the version that wrote it did not know is at its default.
    stored = {**FitSettings.model_construct().model_dump(mode="json"), **read_recipe(path)}
    differing = [
        f"{name} ({stored.get(name)!r} there, {resolved.get(name)!r} now)"
        for name in sorted(stored.keys() | resolved.keys())
        if name not in _MAY_CHANGE and stored.get(name) != resolved.get(name)
    ]
    if differing:
        raise UsageError(
            f"This directory holds a run with other settings: {', '.join(differing)}",
            place=path,
            hint="give the same settings to go on, or another --out to start afresh",
        )
