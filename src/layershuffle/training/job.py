"""What a run needs, resolved once from its settings: model, data, numbers of steps and images."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import nn
from torch.utils.data import Subset

from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.methods import Method
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import depth_of, stack_of
from layershuffle.core.tying import tie
from layershuffle.data import DataOptions, ImageData, Split, open_data
from layershuffle.data.loading import loader_processes
from layershuffle.data.splits import DeviceBatches
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.ground.extras import installed
from layershuffle.ground.machine import choose_precision, device_of
from layershuffle.ground.text import counted
from layershuffle.images.view import resized_as
from layershuffle.models import (
    blank_images,
    image_view,
    load,
    name_classes,
    num_classes_of,
    replace_head,
    set_class_names,
    set_image_view,
    truncate,
)
from layershuffle.models.files import LOG, weights_digest
from layershuffle.scoring.evaluate_spec import matched
from layershuffle.training.distributed import Ranks
from layershuffle.training.optimizer import check_optimizer, freeze
from layershuffle.training.settings import DEFAULT_EPOCHS, FitSettings
from layershuffle.training.sharding import idle_parameters

# Of 100 images, one is a percent; with fewer, chance outweighs the differences of checkpoints.
_FEW_IMAGES = 100


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that stays the same during a run.

    `base_sha256` is the digest of the pretrained blocks (the head may be new). `origin` names the
    pretrained blocks that a truncated model is made of. `images_per_forward` are those of one
    process, `steps` the optimiser steps, `eval_every` those between two evaluations. The held-out
    cross-entropy in the order mode `select_by` picks the checkpoint. `ranks` are the processes that
    train together. `precision` is the dtype of forwards (fp32, or bf16 by autocast), and
    `precision_why` the reason if the settings left it open. `untouched` is a copy of the model
    before the method prepared it, for a run that keeps its features.
    """

    settings: FitSettings
    ranks: Ranks
    out: Path
    method: Method
    data: ImageData
    model: nn.Module
    compiler: BlockCompiler
    images_per_forward: int
    steps: int
    eval_every: int
    select_by: str
    precision: str
    precision_why: str = ""
    base_sha256: str = ""
    origin: ExecutionOrder | None = None
    untouched: nn.Module | None = None

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints that an unfinished run resumes from."""
        return self.out / "checkpoints"

    # Cached, because every step asks for these and finding a GPU, or the blocks, takes time.
    @cached_property
    def device(self) -> str:
        """Where the run computes: cpu, cuda or mps."""
        return device_of(self.settings.device)

    @cached_property
    def untouched_sha256(self) -> str | None:
        """The digest of the weights of `untouched`."""
        return None if self.untouched is None else weights_digest(self.untouched)

    @property
    def workers(self) -> int:
        """The number of loader processes."""
        workers = self.settings.workers
        return loader_processes(self.settings.data) if workers is None else workers

    @property
    def sharded(self) -> bool:
        """Whether every process holds a part of the weights (FSDP2)."""
        return self.settings.parallel == "fsdp" and self.ranks.count > 1

    @cached_property
    def has_unused_parameters(self) -> bool:
        """Whether DDP has to look for parameters without a gradient, by a walk in every step."""
        alone = self.ranks.count == 1 or self.sharded
        return not alone and (not self.method.runs_all or bool(idle_parameters(self.model)))

    @cached_property
    def depth(self) -> int:
        """The number of blocks."""
        return depth_of(self.model)

    @cached_property
    def order_rank(self) -> int:
        """The number of the process if every process draws its own orders, else 0."""
        return self.ranks.rank if self.settings.rank_orders == "own" else 0

    @property
    def selection_split(self) -> str:
        """The split that picks the checkpoint; the paper used the one that it reports."""
        return "test" if self.settings.paper_protocol else "holdout"

    @cached_property
    def selection_batches(self) -> DeviceBatches:
        """The part of the selection split that this process scores.

        It stays on the GPU, or in memory, after the first pass if there is room for it.
        """
        split = self.data.splits[self.selection_split]
        ranks = self.ranks
        # Every process scores every n-th image. With fewer images than processes some would get
        # none, so every process scores all of them.
        if ranks.count > 1 and split.size >= ranks.count:
            rows = range(ranks.rank, split.size, ranks.count)
            split = Split(dataset=Subset(split.dataset, rows))
        return DeviceBatches(
            split,
            self.data.finish,
            batch_size=self.settings.eval_batch_size,
            device=self.device,
            processes=self.workers,
            keep=True,
        )


def prepare(settings: FitSettings, out: Path, *, ranks: Ranks) -> Job:
    """Load the model and open the data; other classes give the model a new head.

    Raises `UsageError` for settings that are impossible here, and the errors of model and data.
    """
    forwards = settings.accumulate * ranks.count
    device = device_of(settings.device)
    if settings.batch_size % forwards:
        raise UsageError(
            f"A step of {settings.batch_size} images cannot be shared by {ranks.count} processes "
            f"with {settings.accumulate} forwards each",
            hint=f"give a --batch-size that {forwards} divides",
        )
    images_per_forward = settings.batch_size // forwards
    method = settings.build_method()
    if method.orders_per_batch > images_per_forward:
        raise UsageError(
            f"With {ranks.count} processes a forward has {counted(images_per_forward, 'image')}, "
            f"and its {method.orders_per_batch} groups need one each",
            hint=f"give a --batch-size of at least {method.orders_per_batch * forwards}, or fewer "
            "--orders-per-batch",
        )
    if ranks.count > 1 and ":" in settings.device:
        raise UsageError(
            f"Each of the {ranks.count} processes has a GPU of its own, and --device "
            f"{settings.device} names one for all",
            hint="give --device cuda, or choose GPUs by CUDA_VISIBLE_DEVICES",
        )
    if settings.log_with is not None and not installed(settings.log_with):
        raise UsageError(
            f"log_with needs the package {settings.log_with}, which is not installed",
            hint=f"pip install {settings.log_with}",
        )
    precision, why = choose_precision(settings.precision, device=device, training=True)
    check_optimizer(settings.opt)
    backbone = load(_with_drop_path(settings), seed=settings.seed)
    name_classes(backbone, settings.classes, place=settings.model)
    options = DataOptions(
        # The paper selected on the split that it reports, and trained on all the rest.
        holdout=None if settings.paper_protocol else settings.holdout,
        augment=settings.augment,
        skip_corrupt=settings.skip_corrupt,
        seed=settings.seed,
    )
    # Saved with the model, so that every later score prepares images in the same way.
    set_image_view(backbone, resized_as(image_view(backbone), settings.resize))
    data = _with_head(
        backbone, open_data(settings.data, image_view(backbone), options=options), settings
    )
    untouched = None if settings.keep_features is None else deepcopy(backbone)
    # Before `truncate` removes blocks, because merges compare the bases of donors by this digest.
    base_sha256 = weights_digest(stack_of(backbone))
    ends_before = stack_of(backbone).fixed if stack_of(backbone).shuffled else method.fixed
    origin = None
    if method.blocks is not None:
        origin = method.blocks.draw(depth_of(backbone), seed=settings.seed, step=0)
        truncate(backbone, origin)
    _warn_of_few(data)
    per_epoch = math.ceil(data.splits["train"].size / settings.batch_size)
    steps = settings.steps or math.ceil((settings.epochs or DEFAULT_EPOCHS) * per_epoch)
    eval_every = min(settings.eval_every or per_epoch, steps)
    notes = _notes(data, settings, steps=steps, chooses=eval_every < steps)
    notes += _of_other_ends(ends_before, method.fixed)
    method, notes_on_start = _started(method, backbone)
    data = replace(data, notes=(*data.notes, *notes, *notes_on_start))
    if settings.freeze:
        _freeze(backbone, settings, method=method)
    model = method.prepare(backbone, blank_images(backbone, 1))
    return Job(
        settings=settings,
        ranks=ranks,
        out=out,
        method=method,
        data=data,
        model=model,
        # Groups come in many sizes; one graph with symbolic sizes serves them all.
        compiler=BlockCompiler(
            reason=_why_eager(settings, device), dynamic=method.orders_per_batch > 1
        ),
        images_per_forward=images_per_forward,
        steps=steps,
        eval_every=eval_every,
        select_by=method.selects_by if settings.select_by == "method" else settings.select_by,
        precision=precision,
        precision_why=why,
        base_sha256=base_sha256,
        origin=origin,
        untouched=untouched,
    )


def _freeze(backbone: nn.Module, settings: FitSettings, *, method: Method) -> None:
    """Freeze parts of `backbone`, whose weights `Method.prepare` then leaves as they are."""
    if method.distinct is not None:
        # First, because tied blocks have the weights of one of them; `prepare` changes no more.
        stack_of(backbone).fixed = method.fixed
        tie(backbone, distinct=method.distinct)
    freeze(backbone, settings.freeze)


def _why_eager(settings: FitSettings, device: str) -> str | None:
    """Why blocks are not compiled; `None` if they are."""
    if settings.compile is False:
        return "compile is off"
    if settings.compile is None and device == "cpu":
        return "off by default on a CPU, where it takes minutes and gains little"
    if settings.compile is None and device == "mps":
        return "off by default on the GPU of a Mac, where it was not tried"
    return None


def _with_drop_path(settings: FitSettings) -> str:
    """The spec of the model with its rate of stochastic depth."""
    if settings.drop_path is None:
        return settings.model
    if not settings.model.startswith("timm:"):
        raise UsageError(
            f"{settings.model} has no argument for stochastic depth, as timm's models have",
            place="--drop-path",
            hint="give a model timm:NAME, or --block-drop, which leaves whole blocks out",
        )
    if "drop_path_rate=" in settings.model:
        raise UsageError(
            f"The rate of stochastic depth is there twice: --drop-path {settings.drop_path}, and "
            "drop_path_rate in the model",
            place=settings.model,
            hint="leave one of them out",
        )
    separator = "&" if "?" in settings.model else "?"
    return f"{settings.model}{separator}drop_path_rate={settings.drop_path}"


def _with_head(backbone: nn.Module, data: ImageData, settings: FitSettings) -> ImageData:
    """`data` in the order of the model's classes; other classes give the model a new head.

    The model has the names of the data afterwards; data without names are numbered.
    """
    try:
        data = matched(backbone, data, name=settings.model)
    except DataError as error:
        # `replace_head` warns of another number of classes itself.
        if len(data.classes) == num_classes_of(backbone):
            LOG.warning("%s: %s.", settings.model, error.cause)
        replace_head(backbone, len(data.classes), seed=settings.seed)
    # Numbers as well: a folder has the same ones in the order 0, 1, 10, 2.
    set_class_names(backbone, data.classes)
    return data


def _warn_of_few(data: ImageData) -> None:
    """Log a warning for data that cannot show what distinguishes classes."""
    classes = len(data.classes)
    images = data.splits["train"].size
    if classes == 1:
        LOG.warning("%s has a single class, so every answer is right: give several", data.spec)
    elif images < 2 * classes:
        LOG.warning(
            "%s has %d training images for %d classes, fewer than two per class: check that its "
            "folders are classes, or give a smaller --holdout",
            *(data.spec, images, classes),
        )


def _of_other_ends(before: tuple[int, int], now: tuple[int, int]) -> list[str]:
    """A note on a model that was trained with other ends before."""
    if before == now:
        return []
    flags = ["--fixed {},{}".format(*ends) for ends in (before, now)]
    return ["the model was trained with {} before, and is trained with {} now".format(*flags)]


def _started(method: Method, backbone: nn.Module) -> tuple[Method, list[str]]:
    """The method with the `branch_scale` that it applies to `backbone`, and a note that says so."""
    scale = method.branch_scale
    if scale == 1:
        return method, []
    if stack_of(backbone).shuffled:
        return replace(method, branch_scale=1.0), [
            "the model was prepared for drawn orders before, so its blocks begin with their "
            f"weights as they are, without --branch-scale {scale:g}"
        ]
    return method, [
        f"drawn blocks begin with {scale:g} of what they add to the state, so the first scores are "
        "hardly better than chance (--branch-scale 1 leaves the weights as they are)"
    ]


def _notes(data: ImageData, settings: FitSettings, *, steps: int, chooses: bool) -> list[str]:
    """Notes on settings that do not suit so few images, or so few steps.

    `chooses`: whether there is more than one evaluation, so that a checkpoint is chosen.
    """
    notes = []
    split = "test" if settings.paper_protocol else "holdout"
    images = data.splits[split].size
    training = data.splits["train"].size
    if chooses and images < _FEW_IMAGES:
        notes.append(
            f"only {counted(images, 'image')} ({split}) to pick the checkpoint, so the choice is "
            f"mostly chance; use {_FEW_IMAGES} or more (--holdout is their share)"
        )
    if settings.batch_size > training:
        notes.append(
            f"every step has all {training} training images: --batch-size {settings.batch_size} is "
            "more than there are"
        )
    if settings.warmup >= steps:
        notes.append(
            f"the learning rate never reaches {settings.lr:g}: --warmup {settings.warmup} is as "
            f"long as the run of {counted(steps, 'step')}, or longer"
        )
    return notes
