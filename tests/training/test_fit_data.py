"""A run saves the classes of its data, how its images are prepared and how right it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml
from PIL import Image
from runs import settings

import layershuffle as ls
from common import FAMILIES, redraw
from layershuffle.core.position import backbone_of
from layershuffle.data import DataOptions, open_data
from layershuffle.data.splits import DeviceBatches
from layershuffle.ground.errors import Interrupted, ModelFileError, UsageError
from layershuffle.models import class_names_of, image_view, set_class_names
from layershuffle.scoring.evaluate_spec import evaluate_spec
from layershuffle.scoring.settings import EvalSettings
from layershuffle.training import fit
from layershuffle.training.settings import FitSettings

FOLDERS = ("disk", "grid", "stripe")  # in the order in which folders are numbered
BASE = ("stripe", "disk", "grid")
PER_CLASS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smooth noise in three folders; the images are not square."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in FOLDERS:
            (root / split / name).mkdir(parents=True)
            for number in range(PER_CLASS):
                coarse = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
                image = Image.fromarray(coarse).resize((64, 44), Image.Resampling.BICUBIC)
                image.save(root / split / name / f"{number}.png")
    return root


def base(place: Path, names: tuple[str, ...] | None) -> str:
    """A base with three classes of these names."""
    ls.save(FAMILIES["hf-vit"].wrapped(), place)
    model = ls.load(str(place), num_classes=3)
    redraw(model, seed=4)
    if names:
        set_class_names(model, names)
    ls.save(model, place)
    return f"dir:{place}"


def fitted(out: Path, model: str, data: Path, **changes: Any) -> Path:
    fields = {"steps": 1, "batch_size": 6, "eval_batch_size": 8, "workers": 0, "lr": 1e-6}
    fields |= {"method": "baseline", **changes}
    fit(FitSettings(model=model, data=f"folder:{data}", **fields), out)
    return out


def top1(model: Path | str, data: Path, **settings: Any) -> float:
    evaluation = evaluate_spec(
        str(model), f"folder:{data}", settings=EvalSettings(modes="sequential", **settings)
    )
    return evaluation.scores[0].top1


def stock_top1(model: Path, data: Path) -> float:
    """The accuracy of a stock pipeline on the folders, in percent."""
    stock = transformers.pipeline("image-classification", model=str(model))
    files = sorted((data / "val").glob("*/*.png"))
    right = [stock(str(file))[0]["label"] == file.parent.name for file in files]
    return 100 * sum(right) / len(right)


@pytest.mark.parametrize(
    ("names", "kept", "resize"),
    [
        (BASE, True, None),  # the same classes in another order: the head stays
        (BASE, True, "crop"),
        (None, True, "crop"),  # a base without names: by index
        (("stripe", "disk", "line"), False, None),  # other classes: a new head
    ],
)
def test_a_stock_pipeline_is_right_by_name_as_often_as_eval_says(
    names: tuple[str, ...] | None,
    kept: bool,
    resize: Any,
    data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = base(tmp_path / "base", names)
    caplog.clear()
    out = fitted(tmp_path / "out", model, data, resize=resize)
    assert ("line" in caplog.text, "has a new head" in caplog.text) == (not kept, not kept)
    again: Any = ls.load(str(out))
    assert class_names_of(again) == (BASE if names == BASE else FOLDERS)
    assert image_view(again).resize == (resize or "squash")
    head = backbone_of(again).classifier.weight
    near = (head - ls.load(model).classifier.weight).abs().max() < 1e-4
    assert bool(near) == kept
    # 24 images: of 12.5 %, chance is 33 %.
    score = top1(out, data)
    assert score == pytest.approx(stock_top1(out / "model", data))
    assert score == pytest.approx(top1(out, data, resize=resize or "squash"))
    wrong = json.loads((out / "model" / "layershuffle.json").read_text())["image_view"]
    assert wrong["resize"] == (resize or "squash")


def test_a_single_class_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "val"):
        (tmp_path / "data" / split / "disk").mkdir(parents=True)
        for number in range(PER_CLASS):
            Image.new("RGB", (32, 32)).save(tmp_path / "data" / split / "disk" / f"{number}.png")
    fitted(tmp_path / "run", base(tmp_path / "base", BASE), tmp_path / "data")
    assert "has a single class" in caplog.text


def test_a_run_goes_on_with_the_images_that_it_began_with(data: Path, tmp_path: Path) -> None:
    """A renamed class permutes labels, and a new image moves the holdout: neither in silence."""
    # In the order of its model, because the numbers of classes must not hide the files.
    model, images, out = base(tmp_path / "base", BASE), tmp_path / "data", tmp_path / "run"
    shutil.copytree(data, images)

    settings = FitSettings(
        model=model, data=f"folder:{images}", method="baseline", steps=3, batch_size=6, workers=0,
        eval_every=3, eval_batch_size=8, log_every=1, lr=1e-6,
    )  # fmt: skip

    def go_on(**changes: Any) -> None:
        # In a copy, because what goes on is another run afterwards.
        again = tmp_path / f"run-{len([*tmp_path.glob('run-*')])}"
        shutil.copytree(out, again)
        fit(settings.model_copy(update=changes), again)

    def ask_to_stop(event: dict[str, Any]) -> None:
        if event["kind"] == "log" and event["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        fit(settings, out, on_event=ask_to_stop)
    go_on()

    (images / "train/disk/0.png").rename(images / "train/disk/00.png")
    with pytest.raises(UsageError, match="train/disk"):
        go_on()
    (images / "train/disk/00.png").rename(images / "train/disk/0.png")
    with (images / "train/disk/0.png").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(UsageError, match="train/disk"):
        go_on()
    shutil.rmtree(images)
    shutil.copytree(data, images)
    for split in ("train", "val"):
        (images / split / "disk").rename(images / split / "zebra")
    with pytest.raises(UsageError, match="zebra"):
        go_on()
    go_on(data_changed=True)

    (state,) = out.glob("checkpoints/*/state.pt")
    os.truncate(state, 1000)
    with pytest.raises(ModelFileError, match="delete it to begin again"):
        go_on(data_changed=True)


@pytest.mark.parametrize(("held_out", "warned"), [(32, True), (120, False)])
def test_few_images_that_select_the_checkpoint_are_reported(tmp_path, held_out, warned):
    data = f"digit-pairs?train=32&validation={held_out}&test=8"
    run = settings(data=data, steps=2, eval_every=1)
    result = fit(run, tmp_path / "run")
    notes = [note for note in result.data["notes"] if "pick the checkpoint" in note]
    assert bool(notes) == warned
    assert all(f"only {held_out} images (holdout)" in note for note in notes)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    top1 = result.selected["top1"]
    (record,) = re.findall("```yaml\n(.*?)```", card, re.DOTALL)
    assert yaml.safe_load(record)["selected"] == result.selected
    assert "# vit_tiny_patch16_224, layershuffle\n" in card
    assert "100, in the order of the logits: 00, 01, " in card
    # The numbers are those that the saved model has on the same images.
    data = open_data(run.data, image_view(ls.load(str(tmp_path / "run"))), options=DataOptions())
    batches = DeviceBatches(
        data.splits["holdout"], data.finish, batch_size=50, device="cpu", processes=0
    )
    for mode, percent in top1.items():
        scores = ls.evaluate(
            ls.load(str(tmp_path / "run")), batches, modes=mode, num_orders=run.eval_orders,
            seed=run.seed,
        )  # fmt: skip
        assert percent == pytest.approx(sum(score.top1 for score in scores) / len(scores))


def test_steps_beyond_the_data_and_a_warmup_as_long_as_the_run_are_said(tmp_path):
    data = "digit-pairs?train=32&validation=120&test=8"
    few = settings(data=data, steps=2, batch_size=64, warmup=2, lr=1e-3)
    assert fit(few, tmp_path / "few").data["notes"][-2:] == [
        "every step has all 32 training images: --batch-size 64 is more than there are",
        "the learning rate never reaches 0.001: --warmup 2 is as long as the run of 2 steps, or "
        "longer",
    ]
    enough = settings(data=data, steps=2, batch_size=32, warmup=1)
    assert not any(
        "--batch" in note or "--warm" in note
        for note in fit(enough, tmp_path / "enough").data["notes"]
    )
