"""Models in this process that answer in the orders that visitors of the page try.

They also report how many test pictures are correct in an order: a hundred small ones are one batch.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.core.position import backbone_of
from layershuffle.core.stack import depth_of, fixed_of, running, wrap
from layershuffle.core.tensors import in_float64, logits_of
from layershuffle.data import DataOptions, open_data
from layershuffle.data.class_names import numbered
from layershuffle.data.transforms import PixelFinish, PlainTransform
from layershuffle.gateway.http.files import PAIR, pair_names, takes_pairs
from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.images.pixels import SKIP_HINT, read_image
from layershuffle.images.view import ImageView
from layershuffle.models import (
    class_names_of,
    file_view,
    image_view,
    load,
    num_classes_of,
)
from layershuffle.models.origin import origin_of
from layershuffle.scoring.evaluate_spec import matched

Role = Literal["ours", "ordinary"]
OURS = "bundled:digits-swarm"
ORDINARY = "bundled:digits-ordinary"
# Settings that both runs must share before the page says that they were trained for as long.
_SAME_RUN = ("model", "data", "steps", "epochs", "batch_size", "lr", "schedule")
_TOP = 5
MAX_PASSES = 8
"""Most steps of an order, in multiples of the depth: one visitor must not occupy the models."""
_SCORES = 256  # orders whose scores are cached
_THREADS = 2  # so that an answer does not wait for another user's hundred pairs
_MILLI = 1000.0
_ACROSS = 10  # pictures in a row of the sheet, as in page/picture.js
_PICTURES = 100  # test pictures of the page
_LARGE = 64 * 64  # pixels
_FEW = 25  # test pictures if they are larger than that, so that a score takes seconds


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Test pictures of the page, and the class of each.

    `pixels` is uint8 `[n, channels, height, width]`. `images` is what the models get, float32 of
    the same shape.
    """

    pixels: Tensor
    images: Tensor
    classes: Tensor


class Workbench:
    """Answers of `models`, by role; all have the same depth, image size and number of classes.

    `names` has the name of the model of every role on the page. `pictures` are shown first; by
    default they are the packaged pairs of digits, if the model takes them. Raises `UsageError` for
    models that differ.
    """

    def __init__(
        self,
        models: Mapping[Role, nn.Module],
        *,
        names: Mapping[Role, str],
        pictures: Pictures | None = None,
    ) -> None:
        self.models = {role: wrap(model).eval() for role, model in models.items()}
        self.names = dict(names)
        first, *others = self.models.values()
        self.depth = depth_of(first)
        self.view = file_view(first)
        # An order has to suit all models: one without ends runs in every order.
        begins = 0
        ends = 0
        for model in self.models.values():
            kept_first, kept_last = fixed_of(model)
            begins = max(begins, kept_first)
            ends = max(ends, kept_last)
        self.fixed = (begins, ends)
        self.labels = class_names_of(first) or numbered(num_classes_of(first))
        kind = (self.depth, self.view, num_classes_of(first))
        for model in others:
            if (depth_of(model), file_view(model), num_classes_of(model)) != kind:
                raise UsageError("The models of the page differ in depth, image size or classes")
        if pictures is None and takes_pairs(self.view, class_names_of(first) or ()):
            pictures = packaged_pairs(self.view, self.labels)
        self.pictures = pictures
        self._cached_hits = lru_cache(_SCORES)(self._hits)
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="workbench")
        self._run_first_forwards()

    def _run_first_forwards(self) -> None:
        """Let every thread run every model once.

        A first forward takes many times as long as those that the page shows.
        """
        together = threading.Barrier(_THREADS)
        blank = torch.zeros(1, self.view.channels, self.view.height, self.view.width)
        everything = ExecutionOrder.sequential(self.depth)

        def run_all() -> None:
            together.wait()  # or one thread would take the turns of both
            for role in self.models:
                self._logits(role, blank, everything)

        for done in [self.pool.submit(run_all) for _ in range(_THREADS)]:
            done.result()

    def facts(self) -> dict[str, object]:
        """The facts that the page must know before it can draw.

        They are the depth, the numbers of first and last blocks that keep their place (`fixed`),
        width and height of the images, whether there are test pictures (`pairs`), name and title of
        every model by its role, and what is known of their training (`training`).
        """
        records: dict[Role, Mapping[str, Any]] = {}
        models: dict[Role, dict[str, str]] = {}
        for role, model in self.models.items():
            record = origin_of(backbone_of(model)).record
            records[role] = record
            models[role] = {"name": self.names.get(role, ""), "title": model_title(record)}
        return {
            "depth": self.depth,
            "fixed": self.fixed,
            "width": self.view.width,
            "height": self.view.height,
            "pairs": self.pictures is not None,
            "models": models,
            "training": same_training(records.get("ours", {}), records.get("ordinary", {})),
        }

    @cached_property
    def sheet(self) -> tuple[bytes, list[str]]:
        """A PNG file of all test pictures, ten in a row, and their classes."""
        pictures = self._shown()
        file = io.BytesIO()
        to_pil_image(make_grid(pictures.pixels, nrow=_ACROSS, padding=0)).save(file, "PNG")
        return file.getvalue(), [self.labels[index] for index in pictures.classes.tolist()]

    def order(self, text: str) -> ExecutionOrder:
        """The order that a visitor names, by its blocks between the ends, with the ends around it.

        Raises `UsageError` for an invalid order, one that names an end, and too many steps.
        """
        order = order_of(text, self.depth).within_ends(self.fixed)
        if len(order) > MAX_PASSES * self.depth:
            raise UsageError(
                f"{len(order)} steps are too many", hint=f"take {MAX_PASSES * self.depth} at most"
            )
        return order

    def picture(self, file: bytes) -> bytes:
        """A PNG file of what the models see of the image in `file`.

        It is turned upright, resized and cropped as in training. Raises `DataError` if it cannot be
        read.
        """
        seen = io.BytesIO()
        to_pil_image(self._pixels(file)).save(seen, "PNG")
        return seen.getvalue()

    def _pixels(self, file: bytes) -> Tensor:
        """The image in `file` as uint8 `[channels, height, width]` of the models."""
        if not file:
            raise DataError("There is no image in the request", hint="send its file as the body")
        try:
            image = read_image(file, self.view.channels, place="the file")
        except DataError as error:
            hint = "open a JPEG, PNG, WebP, GIF, BMP or TIFF file"
            raise DataError(
                error.cause, hint=hint if error.hint == SKIP_HINT else error.hint
            ) from error
        return PlainTransform(self.view)(image)

    def answers(self, order: ExecutionOrder, file: bytes) -> dict[str, object]:
        """The most probable classes of every model for the image in `file`.

        They come with the time of the forward in milliseconds. Raises `DataError` if the image
        cannot be read.
        """
        batch = PixelFinish(self.view)(self._pixels(file)[None])
        answers: dict[str, object] = {}
        for role in self.models:
            begun = time.perf_counter()
            logits = self._logits(role, batch, order)
            ms = (time.perf_counter() - begun) * _MILLI
            # In float64: in float32 the probabilities of many classes do not add up to 1.
            best = in_float64(logits[0]).softmax(dim=-1).topk(min(_TOP, logits.shape[-1]))
            top: list[dict[str, object]] = []
            for index, chance in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                top.append({"label": self.labels[index], "probability": chance})
            answers[role] = {"top": top, "ms": ms}
        return {"answers": answers}

    def scores(self, order: ExecutionOrder, body: bytes = b"") -> dict[str, object]:
        """The number of test pictures that every model classifies correctly in an order.

        Raises `UsageError` if there are none.
        """
        del body
        return {"right": self._cached_hits(order), "of": len(self._shown().classes)}

    def _hits(self, order: ExecutionOrder) -> dict[str, int]:
        images = self._shown().images
        classes = self._shown().classes
        hits: dict[str, int] = {}
        for role in self.models:
            guesses = self._logits(role, images, order).argmax(-1)
            hits[role] = int((guesses == classes).sum())
        return hits

    def _shown(self) -> Pictures:
        if self.pictures is None:
            raise UsageError("There are no test pictures for this model")
        return self.pictures

    def _logits(self, role: Role, batch: Tensor, order: ExecutionOrder) -> Tensor:
        model = self.models[role]
        with torch.inference_mode(), running(model, order):
            logits: Tensor = logits_of(model(batch), model)
        return logits


def model_title(record: Mapping[str, Any]) -> str:
    """What a model is called on the page, by the record of its training.

    model_title({"method": "baseline", "policy": {"policy": "sequential"}})  # "Ordinary model"
    """
    policy = record.get("policy") or {}
    if policy == {"policy": "sequential"}:
        return "Ordinary model"
    if policy.get("policy") == "shuffled":
        return "Shuffled model"
    method = record.get("method")
    return f"Model of {method}" if method else "Model"


def same_training(ours: Mapping[str, Any], ordinary: Mapping[str, Any]) -> str:
    """A sentence on the training of a shuffled model and an ordinary one, from their records.

    It is "" unless both were trained for as long on the same data from the same weights.
    """
    if (model_title(ours), model_title(ordinary)) != ("Shuffled model", "Ordinary model"):
        return ""
    first = ours.get("settings") or {}
    second = ordinary.get("settings") or {}
    if not first:
        return ""
    for name in _SAME_RUN:
        if first.get(name) != second.get(name):
            return ""
    if first.get("steps") is not None:
        length = f"{first['steps']:,} steps"
    elif first.get("epochs") is not None:
        length = f"{first['epochs']:g} epochs"
    else:
        return ""
    return (
        f"Both were fine-tuned for {length} on {first['data']}: the shuffled model in drawn "
        "orders, the ordinary one always with its blocks in order."
    )


def open_workbench(model: str, *, ordinary: str | None, data: str | None = None) -> Workbench:
    """A workbench of the models with the specs `model` and `ordinary`, and of pictures of `data`.

    Raises the errors of loading the models and of opening the data.
    """
    names: dict[Role, str] = {"ours": model}
    if ordinary is not None:
        names["ordinary"] = ordinary
    models = {role: load(name) for role, name in names.items()}
    pictures = None if data is None else _test_pictures(models["ours"], data, name=model)
    return Workbench(models, names=names, pictures=pictures)


def _test_pictures(model: nn.Module, spec: str, *, name: str) -> Pictures:
    view = image_view(model)
    count = _PICTURES if view.height * view.width <= _LARGE else _FEW
    data = open_data(spec, view, options=DataOptions(train=False, max_test=count))
    data = matched(model, data, name=name)
    split = data.splits["test"]
    images: list[Tensor] = []
    labels: list[int] = []
    for number in range(split.size):
        image, label = split.dataset[number]
        images.append(image)
        labels.append(label)
    pixels = torch.stack(images)
    classes = torch.tensor(labels)
    return Pictures(pixels=pixels, images=data.finish(pixels), classes=classes)


def packaged_pairs(view: ImageView, labels: Sequence[str]) -> Pictures:
    """The packaged test pairs, for a model with these classes; their sheet has them row by row."""
    _, height, width = PAIR
    with Image.open(asset("page", "pairs.png")) as image:
        sheet = torch.from_numpy(np.array(image.convert("L")))
    pixels = sheet.unfold(0, height, height).unfold(1, width, width).reshape(-1, *PAIR)
    classes = torch.tensor([labels.index(name) for name in pair_names()])
    return Pictures(pixels=pixels, images=PixelFinish(view)(pixels), classes=classes)
