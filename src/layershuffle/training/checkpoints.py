"""The run directory: the settings of its run, and the checkpoints of an unfinished run.

A checkpoint `checkpoints/step-00000123/` holds `model.safetensors`, `state.pt` (step, optimiser,
schedule, best score, seconds) and, for every process, the states of torch's random generators,
which dropout draws from. Orders, batches and augmentation are pure functions of the seed and the
step, so they are not saved.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_model, save_model
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from layershuffle.data.class_names import RenumberedImages
from layershuffle.data.transforms import Images
from layershuffle.ground.errors import UsageError
from layershuffle.ground.files import file_names, remove_stale_stages, write_text
from layershuffle.ground.settings import read_recipe
from layershuffle.ground.text import shortened
from layershuffle.models.files import library_errors
from layershuffle.training.history import HISTORY
from layershuffle.training.job import Job
from layershuffle.training.settings import FitSettings
from layershuffle.training.sharding import WHOLE, all_finite
from layershuffle.training.state import TrainState, new_state

SETTINGS_FILE = "settings.yaml"
DATA_FILE = "data.json"
LOGS = "logs"
_MODEL = "model.safetensors"
_STATE = "state.pt"
_RNG = "rng-{}.pt"
# These change where and how fast a run computes, but not its result, so they may change.
_MAY_CHANGE = frozenset({"log_every", "log_with", "workers", "data_changed"})
_OF_NO_RESULTS = frozenset({SETTINGS_FILE, DATA_FILE, "checkpoints", HISTORY, LOGS})


def prepare_directory(out: Path, settings: FitSettings) -> None:
    """Write the settings of a new run into `out`, or check that they are those of the run there.

    Raises `UsageError` if `out` holds a run with other settings (the error names them). A directory
    without a checkpoint or a result, as left by a misspelt model name, accepts any settings.
    """
    path = out / SETTINGS_FILE
    has_results = latest_checkpoint(out / "checkpoints") or file_names(out) - _OF_NO_RESULTS
    if path.is_file() and has_results:
        _refuse_other_settings(path, settings)
    else:
        write_text(path, yaml.safe_dump(settings.resolved(), sort_keys=False))
    remove_stale_stages(out)
    remove_stale_stages(out / "checkpoints")


def check_data(job: Job) -> None:
    """Note the images of a new run, or check that an unfinished one still has them.

    What is noted: the classes in their order and, by split and class, the number of images and what
    their source tells without opening them (names and sizes of files, or rows). Raises
    `UsageError`, which lists what differs, unless the settings say that the data may have changed.
    """
    path = job.out / DATA_FILE
    data = job.data
    now: dict[str, Any] = {"classes": [*data.classes]}
    for name, split in data.splits.items():
        if isinstance(split.dataset, Images | RenumberedImages):
            now[name] = split.dataset.contents(data.classes)
    continued = latest_checkpoint(job.checkpoints) is not None and path.is_file()
    if continued and not job.settings.data_changed:
        noted = json.loads(path.read_text(encoding="utf-8"))
        moved = []
        for part in sorted((noted.keys() | now.keys()) - {"classes"}):
            old = noted.get(part, {})
            new = now.get(part, {})
            for name in sorted(old.keys() | new.keys()):
                old_count, old_digest = old.get(name, (0, ""))
                count, digest = new.get(name, (0, ""))
                if old_digest != digest:
                    text = f"{part}/{name} ({old_count} images before, {count} now)"
                    moved.append((0 not in (old_count, count), text))
        # Classes that came or went say more than the images that moved for them.
        differing = [text for _, text in sorted(moved)]
        if not differing and noted["classes"] != now["classes"]:
            differing = [f"the order of the classes ({shortened(now['classes'])} now)"]
        if differing:
            raise UsageError(
                f"The images are not those that this run began with: {shortened(differing)}",
                place=data.spec,
                hint="give the same images, go on with these (--data-changed), or start again in "
                "another --out",
            )
    write_text(path, json.dumps(now, indent=1))


def _refuse_other_settings(path: Path, settings: FitSettings) -> None:
    stored = read_recipe(path)
    # 0.2.0 did not write the values that a method has of its own.
    if stored.get("branch_scale") is None:
        stored = FitSettings(**stored).resolved()
    resolved = settings.resolved()
    differing = []
    for name in sorted(stored.keys() | resolved.keys()):
        theirs = stored.get(name)
        ours = resolved.get(name)
        if name not in _MAY_CHANGE and theirs != ours:
            differing.append(f"{name} ({theirs!r} there, {ours!r} now)")
    if differing:
        raise UsageError(
            f"This directory holds a run with other settings: {', '.join(differing)}",
            place=path,
            hint="give the same settings to continue, or another --out to start again",
        )


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest checkpoint; directories are renamed into place, so each one is whole."""
    # Step numbers have eight digits, so names sort as the steps do.
    return max(checkpoints.glob("step-*"), default=None)


def save_checkpoint(state: TrainState) -> None:
    """Write the state as the newest checkpoint and delete those before it.

    All processes must call this. Raises `TrainingError` if a weight is not finite: the last good
    checkpoint is worth more than a newer one with broken weights.
    """
    job = state.job
    ranks = job.ranks
    # A step that breaks the weights may still have a finite loss.
    if ranks.any(not all_finite(state.model)):
        state.refuse_non_finite(math.inf)
    final = job.checkpoints / f"step-{state.step:08d}"
    with ranks.stage(final) as stage:
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        on_mac = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        drawn = {"torch": torch.get_rng_state(), "cuda": on_gpu, "mps": on_mac}
        torch.save(drawn, stage / _RNG.format(ranks.rank))
        # All processes put the shards together, so that a single process can read the checkpoint.
        model = state.scored_model() if job.sharded else state.model
        # Its keys are names if the model is sharded, and numbers otherwise: torch pairs the two by
        # their order.
        if job.sharded:
            optimizer = get_optimizer_state_dict(state.model, state.optimizer, options=WHOLE)
        else:
            optimizer = state.optimizer.state_dict()
        if ranks.first:
            # Not `save_file`, which refuses weights that two modules share.
            save_model(model, str(stage / _MODEL))
            content = {
                "step": state.step,
                "best": state.best,
                "seconds": state.seconds(),
                "images": state.images_trained,
                "step_seconds": state.step_seconds,
                "optimizer": optimizer,
                "scheduler": state.scheduler.state_dict(),
                "untouched": job.untouched_sha256,
            }
            torch.save(content, stage / _STATE)
    if ranks.first:
        # Only now, so that a kill before this line leaves two checkpoints and never none.
        for path in sorted(job.checkpoints.glob("step-*")):
            if path.name < final.name:
                shutil.rmtree(path)


def load_state(job: Job, checkpoint: Path | None) -> TrainState:
    """The state of a run at the checkpoint; without a checkpoint, before its first step.

    Raises `ModelFileError` for a checkpoint that is damaged, and `UsageError` if the features that
    the run has to keep were those of another model.
    """
    if checkpoint is None:
        return new_state(job)
    hint = "delete it to begin again; the best model so far is in model/"
    with library_errors("torch", checkpoint, hint=hint):
        load_model(job.model, str(checkpoint / _MODEL))  # before `new_state` shards it
        # A run directory may come from elsewhere, so nothing in it is unpickled.
        content = torch.load(checkpoint / _STATE, map_location="cpu", weights_only=True)
    if content["untouched"] != job.untouched_sha256:
        raise UsageError(
            f"{job.settings.model} has other weights than when the run began, and the run keeps "
            "the features that it had",
            place=job.out,
            hint="restore the model, or begin again in another --out",
        )
    state = new_state(job)
    state.step = content["step"]
    state.best = content["best"]
    state.earlier_seconds = content["seconds"]
    state.images_trained = content["images"]
    state.step_seconds = content["step_seconds"]
    if job.sharded:
        set_optimizer_state_dict(state.model, state.optimizer, content["optimizer"], options=WHOLE)
    else:
        state.optimizer.load_state_dict(content["optimizer"])
    state.scheduler.load_state_dict(content["scheduler"])
    path = checkpoint / _RNG.format(job.ranks.rank)
    if path.is_file():  # with another number of processes the seeds of `new_state` remain
        drawn = torch.load(path, weights_only=True)
        torch.set_rng_state(drawn["torch"])
        if drawn["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(drawn["cuda"])
        if drawn["mps"] is not None and torch.backends.mps.is_available():
            torch.mps.set_rng_state(drawn["mps"])
    return state
