"""`fit`: from settings to a refined model on disk."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from layershuffle.core.policies import policy_to_json
from layershuffle.core.stack import depth_of
from layershuffle.ground.errors import Interrupted, ModelFileError, UsageError
from layershuffle.ground.files import file_names, locked, refuse_foreign, user_path, write_text
from layershuffle.ground.machine import device_of, hardware, stop_signals, torch_threads, versions
from layershuffle.ground.settings import digest
from layershuffle.ground.text import clock, counted, unheard
from layershuffle.models import save
from layershuffle.training.checkpoints import (
    DATA_FILE,
    LOGS,
    SETTINGS_FILE,
    check_data,
    latest_checkpoint,
    load_state,
    prepare_directory,
)
from layershuffle.training.distributed import is_first_process, joined
from layershuffle.training.history import HISTORY, add_row, begin_history, read_history, write_page
from layershuffle.training.job import Job, prepare
from layershuffle.training.loop import Listener, OnPhase, train
from layershuffle.training.settings import FitSettings
from layershuffle.training.state import TrainState
from layershuffle.training.warmup import too_large

RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a finished run reports; also in `result.json`."""

    schema: int
    method: str
    seed: int
    finished: str
    steps: int
    train_seconds: float
    """Of the whole run, scoring included."""
    images_per_second: float
    """Images trained on per second of the training steps: without scoring, saving or compiling."""
    selected: dict[str, Any]
    paper_protocol: bool
    settings: dict[str, Any]
    data: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    processes: int = 1
    compile: dict[str, Any] = field(default_factory=dict)
    """mode, reason (of eager mode), graphs, recompiles; of the process that finished the run."""


def fit(
    settings: FitSettings | None = None,
    out: str | Path = "",
    *,
    on_event: Listener = unheard,
    on_phase: OnPhase = unheard,
    **fields: Any,
) -> FitResult:
    """Train as `settings` say in the directory `out`, and save the best state in `out/model`.

    The settings are those of `layershuffle fit`, as one object or by keyword:

        ls.fit(model="timm:vit_small_patch16_224", data="folder:flowers", out="runs/flowers")
        model = ls.load("runs/flowers")

    A run that was killed at any moment resumes from its last checkpoint when it is started again
    with the same settings, and ends with the same weights, bit for bit on a CPU. A finished run
    returns its result at once. `on_event` is called with every event, a dictionary with its "kind",
    and `on_phase` with the phases of every step (layershuffle.training.loop).

    Raises `UsageError` if `out` holds another run, `Interrupted` after SIGTERM with a checkpoint
    saved, `TrainingError` for a loss that is not finite or a batch that does not fit the memory.
    """
    if not out or (settings is not None and fields):
        raise UsageError(
            "fit needs a directory, and settings as one object or by keyword",
            hint='fit(model="timm:NAME", data="folder:DIR", out="runs/NAME")',
        )
    settings = settings or FitSettings(**fields)
    out = user_path(out)
    if is_first_process():
        refuse_foreign(out, mark=SETTINGS_FILE, kind="LayerShuffle run")
    with (
        joined(device_of(settings.device)) as ranks,
        _own(out) if ranks.first else nullcontext(),
        # The number of threads decides how sums are rounded, so it is a setting of the run.
        torch_threads(settings.threads),
    ):
        if ranks.first:
            prepare_directory(out, settings)
        ranks.check_same(digest(settings), what="The settings")
        finished = ranks.from_first(lambda: read_result(out))
        if finished is not None:
            if ranks.first:
                on_event({"kind": "complete", "steps": finished.steps})
            return finished
        job = prepare(settings, out, ranks=ranks)
        if ranks.first:
            check_data(job)
        return _run(job, on_event, on_phase)


@contextmanager
def _own(out: Path) -> Iterator[None]:
    """Lock `out`; a run that is refused leaves nothing there, if nothing was there before."""
    is_new = not out.exists()
    with locked(out):
        was_empty = not file_names(out)  # no other process has begun in it meanwhile
        try:
            yield
        finally:
            if was_empty and file_names(out) <= {SETTINGS_FILE, DATA_FILE}:
                for path in out.iterdir():  # the lock, too
                    path.unlink()
                if is_new:
                    out.rmdir()


def read_result(out: Path) -> FitResult | None:
    """The result of the finished run in `out`, or `None`."""
    path = out / RESULT_FILE
    if not path.is_file():
        return None
    try:
        return FitResult(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelFileError(
            f"This result file cannot be read ({error})", place=path, hint="delete it and run again"
        ) from error


def _run(job: Job, on_event: Listener, on_phase: OnPhase) -> FitResult:
    def tell(kind: str, **facts: Any) -> None:
        if not job.ranks.first:  # all processes have the same events
            return
        if kind == "history":
            add_row(job.out / HISTORY, facts)
            if tracking is not None:
                _track(tracking, facts)
        on_event({"kind": kind, **facts})

    def keep_best(model: nn.Module, scores: dict[str, float]) -> None:
        save(model, job.out / "model", record=_record(job, state.step, scores))

    state = load_state(job, job.ranks.from_first(lambda: latest_checkpoint(job.checkpoints)))
    if job.ranks.first:
        begin_history(job.out / HISTORY, step=state.step)
    tracks = job.settings.log_with is not None and job.ranks.first
    tracking = _trackers(job) if tracks else None
    notes = list(job.data.notes)
    if job.precision_why:
        notes.append(f"precision {job.precision}: {job.precision_why}")
    tell("data", text=_describe_data(job), notes=tuple(notes))
    tell("start", steps=job.steps, at=state.step)
    # A run that was killed between its last checkpoint and its result has no step left.
    if state.step < job.steps:
        with stop_signals() as stop, job.compiler.limits():
            try:
                train(state, tell=tell, keep_best=keep_best, stop_asked=stop, on_phase=on_phase)
            except torch.OutOfMemoryError as error:
                raise too_large(job) from error
    tell("end", step=state.step)
    if tracking is not None:
        for tracker in tracking.trackers:
            tracker.finish()
    if state.step < job.steps:
        raise Interrupted(
            f"Stopped at step {state.step} of {job.steps}; a checkpoint is saved",
            place=job.out,
            hint="run the same command again to continue",
        )
    return job.ranks.from_first(lambda: _finish(state))


def _trackers(job: Job) -> Accelerator:
    """The trackers that accelerate has, begun with the settings and the history of the run.

    A killed run had told them steps that it takes again. So every start begins their curves anew,
    and each step is there once: in OUT/logs, or in the newest run of a tracker that keeps all.
    """
    shutil.rmtree(job.out / LOGS, ignore_errors=True)
    place = ProjectConfiguration(logging_dir=str(job.out / LOGS))
    tracking = Accelerator(log_with=job.settings.log_with, project_config=place)
    # Trackers take numbers and words alone.
    config = {name: str(value) for name, value in job.settings.model_dump(mode="json").items()}
    tracking.init_trackers("layershuffle", config=config)
    for row in read_history(job.out / HISTORY):
        _track(tracking, row)
    return tracking


def _track(tracking: Accelerator, row: Mapping[str, float]) -> None:
    """Tell the trackers a row of the history."""
    tracking.log({name: row[name] for name in row if name != "step"}, int(row["step"]))


def _describe_data(job: Job) -> str:
    sizes: list[str] = []
    for name in ("train", "holdout", "test"):
        split = job.data.splits.get(name)
        if split is not None:
            sizes.append(f"{split.size:,} {name}")
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    depth = depth_of(job.model)
    ends = sum(job.method.fixed)
    drawn = f" ({depth - ends} of them drawn)" if ends else ""
    return (
        f"{', '.join(sizes)} images of {len(job.data.classes)} classes; model of {depth} "
        f"blocks{drawn}, {parameters:,} parameters"
    )


def _record(job: Job, step: int, scores: dict[str, float]) -> dict[str, Any]:
    """What `layershuffle.json` in the directory of a saved model says of its training."""
    top1 = {
        "sequential": scores["eval_sequential_top1"],
        "arbitrary": scores["eval_arbitrary_top1"],
    }
    provenance = {"base": job.settings.model, "base_sha256": job.base_sha256}
    if job.origin:
        provenance["blocks_of_base"] = str(job.origin)
    return {
        "method": job.method.name,
        "policy": policy_to_json(job.method.policy),
        "selected": {
            "step": step,
            "metric": f"{job.selection_split} cross-entropy, {job.select_by} order",
            "value": scores[f"eval_{job.select_by}_cross_entropy"],
            # Percent, on the same images: what a reader of the card asks first.
            "top1": top1,
            "images": job.data.splits[job.selection_split].size,
        },
        # The options of the method where none were given: a preset may change.
        "settings": job.settings.model_dump(mode="json") | job.method.options,
        "provenance": {**provenance, "data": job.settings.data, **versions()},
    }


def _facts(result: FitResult, out: Path) -> dict[str, str]:
    """What the page of a run says, by its label: the run, its scores, and its time."""
    selected = result.selected
    sizes = []
    for name in ("train", "holdout", "test"):
        if name in result.data["sizes"]:
            sizes.append(f"{result.data['sizes'][name]:,} {name}")
    images = counted(selected["images"], "image")
    metric = selected["metric"].partition(",")[0]
    test = f"no step has seen them; layershuffle eval {quote(str(out))} --data "
    test += f"{quote(result.data['spec'])} scores them"
    if result.paper_protocol:
        test = "they picked the checkpoint, as in the paper, so the scores above are theirs"
    return {
        "model": result.settings["model"],
        "data": f"{result.data['spec']}: {', '.join(sizes)} images of {result.data['classes']} "
        "classes",
        "method": f"{result.method}, seed {result.seed}",
        "top-1 with the blocks in order": f"{selected['top1']['sequential']:.1f} % of {images} "
        "that picked the checkpoint",
        "top-1 in any order": f"{selected['top1']['arbitrary']:.1f} % of the same",
        f"best {metric}": f"{selected['value']:.3f}, at step {selected['step']:,} of "
        f"{result.steps:,}",
        "test images": test,
        "time": f"{clock(result.train_seconds)} in all, {result.images_per_second:,.0f} images/s "
        "in training",
        "computed on": f"{result.hardware['gpu'] or result.hardware['processor']}, "
        f"{result.hardware['precision']}",
    }


def _finish(state: TrainState) -> FitResult:
    job = state.job
    # The best state may have been saved before a resume: only its own record knows its score.
    stored = json.loads((job.out / "model" / "layershuffle.json").read_text(encoding="utf-8"))
    result = FitResult(
        schema=1,
        method=job.method.name,
        seed=job.settings.seed,
        finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        steps=job.steps,
        train_seconds=round(state.seconds(), 2),
        images_per_second=round(state.images_trained / max(state.step_seconds, 1e-9), 1),
        selected=stored["selected"],
        paper_protocol=job.settings.paper_protocol,
        settings=job.settings.resolved(),
        data={
            "spec": job.data.spec,
            "classes": len(job.data.classes),
            "sizes": {name: split.size for name, split in job.data.splits.items()},
            "notes": [*job.data.notes],
        },
        hardware=hardware(job.precision, device=job.device),
        versions=versions(),
        processes=job.ranks.count,
        compile=job.compiler.report(),
    )
    write_page(job.out, method=result.method, facts=_facts(result, job.out))
    write_text(job.out / RESULT_FILE, json.dumps(asdict(result), indent=2))
    shutil.rmtree(job.checkpoints)  # a finished run has nothing to resume
    return result
