"""The cache against a slow loop, after kills, and with damaged files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from forked import SERVER
from layershuffle.cli import main
from layershuffle.data import DataOptions, ImageView, cache, open_data
from layershuffle.data.cache import (
    build_cache,
    class_folders,
    default_out,
    partial_of,
    shrunk,
    verify_cache,
)
from layershuffle.errors import DataError, UsageError
from layershuffle.settings import CacheSettings
from refusals import refuses

VIEW = ImageView(channels=3, height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3)
SMALL = CacheSettings(size=24, workers=0)
COUNTS = {"train": 10, "val": 3}


def picture(seed: int, size: tuple[int, int] = (60, 40)) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def fill(root: Path, classes: tuple[str, ...] = ("ant", "bee")) -> Path:
    """10 training and 3 validation images per class: JPEG, PNG, grey, tall, small and large."""
    for split, count in COUNTS.items():
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for k in range(count):
                seed = 100 * label + k + 50 * (split == "val")
                size = [(60, 40), (40, 60), (20, 30), (240, 200)][k % 4]
                image = picture(seed, size).convert("L" if k == 5 else "RGB")
                image.save(root / split / name / f"{k}.{'png' if k % 2 else 'jpg'}")
    return root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "photos")


def contents(root: Path) -> dict[str, bytes]:
    """The content of every file below, except for the lock."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(p.relative_to(root)): p.read_bytes() for p in files if p.name != ".lock"}


def lines(out: Path) -> list[dict]:
    parts = sorted((out / "manifest").iterdir())
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def test_every_file_equals_a_slow_loop_and_the_manifest_says_so(source: Path) -> None:
    out = source.with_name("cached")
    report = build_cache(f"folder:{source}", out, settings=SMALL)
    assert dict(report.images) == {"train": 20, "val": 6}
    assert (report.written, report.skipped) == (26, ())
    manifest = lines(out)
    assert len(manifest) == 26
    for line in manifest:
        image = Image.open(line["source"])
        image.draft(None, [round(side * 48 / min(image.size)) for side in image.size])
        image = image.convert("RGB")
        scale = 24 / min(image.size)
        if scale < 1:
            size = [round(side * scale) for side in image.size]
            image = image.resize(size, Image.Resampling.BICUBIC)
        expected = io.BytesIO()
        image.save(expected, "JPEG", quality=90)
        content = (out / line["file"]).read_bytes()
        assert content == expected.getvalue(), line
        assert hashlib.sha256(content).hexdigest() == line["sha256"]
        assert len(content) == line["bytes"]
        split, name, _ = line["file"].split("/")
        assert (split, name) == Path(line["source"]).parts[-3:-1]
    assert sum(line["bytes"] for line in manifest) == report.bytes
    assert verify_cache(out) == 26
    assert not partial_of(out).exists()


def test_the_same_classes_and_the_same_images_held_out(source: Path) -> None:
    out = source.with_name("cached")
    build_cache(f"folder:{source}", out, settings=SMALL)
    options = DataOptions(holdout=0.3)
    old, new = (open_data(f"folder:{root}", VIEW, options=options) for root in (source, out))
    assert new.classes == old.classes
    origin = {str(out / line["file"]): line["source"] for line in lines(out)}
    for name in ("train", "holdout", "test"):
        source_images, other = old.splits[name].dataset, new.splits[name].dataset
        before = [source_images.table.name(row) for row in source_images.indices]
        after = [origin[other.table.name(row)] for row in other.indices]
        assert before == after, name


def test_several_processes_make_the_same_bytes(source: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "CHUNK", 3)
    alone, many = source.with_name("alone"), source.with_name("many")
    seen: list[tuple[str, float, float | None]] = []
    build_cache(f"folder:{source}", alone, settings=SMALL)
    parallel = CacheSettings(size=24, workers=2)
    build_cache(f"folder:{source}", many, settings=parallel, progress=lambda *now: seen.append(now))
    assert contents(alone) == contents(many)
    assert seen[0] == ("images", 0, 26)
    assert seen[-1] == ("images", 26, 26)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


def build_until_killed(spec: str, out: Path, images: int, half: bool) -> None:
    """Build until image number `images`, then kill this process before it or halfway through it."""
    write, written = cache.write_bytes, []

    def killing(path: Path, content: bytes) -> None:
        if len(written) == images:
            if half:
                path.parent.mkdir(parents=True, exist_ok=True)
                stage = path.with_name(f".staged-{os.getpid()}-{path.name}")
                stage.write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(path)
        write(path, content)

    cache.write_bytes, cache.CHUNK = killing, 4
    build_cache(spec, out, settings=SMALL)


@pytest.mark.parametrize(("images", "half"), [(0, False), (5, True), (8, False), (25, True)])
def test_a_killed_build_continues(source: Path, monkeypatch, images: int, half: bool) -> None:
    monkeypatch.setattr(cache, "CHUNK", 4)
    whole, out = source.with_name("whole"), source.with_name("out")
    build_cache(f"folder:{source}", whole, settings=SMALL)
    spec = f"folder:{source}"
    partial_of(out).mkdir()
    (partial_of(out) / ".staged-1-cache.json").write_text("{")  # killed at its very first file
    killed = SERVER.Process(target=build_until_killed, args=(spec, out, images, half))
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    work = partial_of(out)
    assert not out.exists()
    there = {p: p.stat().st_ino for p in work.rglob("*.jpg") if not p.name.startswith(".")}
    assert len(there) == images
    report = build_cache(spec, out, settings=SMALL)
    assert report.written == 26 - images
    assert contents(out) == contents(whole)
    again = {p: (out / p.relative_to(work)).stat().st_ino for p in there}
    assert again == there, "what was there was made again"
    assert not work.exists()
    assert build_cache(spec, out, settings=SMALL).written == 0


@pytest.mark.parametrize("damage", ["changed", "missing", "strange", "manifest"])
def test_verify_finds_what_is_wrong(source: Path, capsys, damage: str) -> None:
    out = source.with_name("cached")
    words = ["cache", f"folder:{source}", "--size", "24", "--workers", "0", "--out", str(out)]
    assert main([*words, "--verify"]) == 0
    assert "All 26 images are as they were written" in capsys.readouterr().out
    path = out / "train" / "bee" / "00000013.jpg"
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[-20] ^= 1
        path.write_bytes(content)
    elif damage == "missing":
        path.unlink()
    elif damage == "strange":
        path.with_name("x.jpg").write_bytes(content)
    else:
        part = out / "manifest" / "val-00000.jsonl"
        part.write_text(part.read_text().replace("val/ant", "val/bee", 1))
    assert main([*words, "--verify"]) == 1
    error = capsys.readouterr().err
    wanted = {
        "changed": "1 not what was written (train/bee/00000013.jpg)",
        "missing": "1 missing (train/bee/00000013.jpg)",
        "strange": "1 not in the manifest (train/bee/x.jpg)",
        "manifest": "the manifest has changed",
    }
    assert wanted[damage] in error
    assert f"delete {out} and make it again" in error


def test_an_unreadable_image_stops_the_build_or_is_skipped(source: Path, capsys) -> None:
    bad = source / "train" / "ant" / "4.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    out = source.with_name("cached")
    words = ["cache", f"folder:{source}", "--size", "24", "--workers", "0", "--out", str(out)]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert str(bad) in error
    assert "--skip-corrupt" in error
    assert not out.exists()
    assert main([*words, "--skip-corrupt", "--verify"]) == 0
    text = capsys.readouterr().out
    assert "19 train, 6 val images" in text
    assert "note: left out 1 unreadable image: " in text
    assert str(bad) in text
    again = build_cache(f"folder:{source}", out, settings=SMALL)
    assert len(again.skipped) == 1
    assert again.images["train"] == 19


def test_a_class_without_readable_images_is_an_error(source: Path) -> None:
    for path in (source / "val" / "bee").iterdir():
        path.write_bytes(b"no image")
    settings = CacheSettings(size=24, workers=0, skip_corrupt=True)
    with refuses(DataError):
        build_cache(f"folder:{source}", source.with_name("cached"), settings=settings)


def test_another_cache_in_the_same_place_is_refused(source: Path) -> None:
    spec, out = f"folder:{source}", source.with_name("cached")
    build_cache(spec, out, settings=SMALL)
    with refuses(UsageError):
        build_cache(spec, out, settings=CacheSettings(size=32))
    with refuses(UsageError):
        build_cache(spec, out, settings=CacheSettings(size=24, quality=80))
    with refuses(UsageError):
        build_cache(spec, source, settings=SMALL)


def renamed(folder: Path) -> None:
    """As many images of the same sizes in another order."""
    (folder / "0.jpg").rename(folder / "x.jpg")


def swapped(folder: Path) -> None:
    """Two images exchange their names."""
    (folder / "0.jpg").rename(folder / "x")
    (folder / "2.jpg").rename(folder / "0.jpg")
    (folder / "x").rename(folder / "2.jpg")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "0.jpg").unlink(),
        renamed,
        swapped,
    ],
)
def test_a_source_that_changed_meanwhile_is_refused(
    source: Path, monkeypatch, change: Callable[[Path], None]
) -> None:
    spec, out = f"folder:{source}", source.with_name("cached")

    def stop(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "write_bytes", stop)
        with pytest.raises(KeyboardInterrupt):
            build_cache(spec, out, settings=SMALL)
    change(source / "train" / "ant")
    with refuses(UsageError):
        build_cache(spec, out, settings=SMALL)


def test_other_files_in_the_partial_directory_are_refused(source: Path) -> None:
    spec, out = f"folder:{source}", source.with_name("cached")
    partial_of(out).mkdir()
    (partial_of(out) / "thesis.tex").write_text("ten years")
    with refuses(UsageError):
        build_cache(spec, out, settings=SMALL)


def test_hugging_face_data_with_a_validation_split(tmp_path: Path) -> None:
    names = ["wolf, timber", "ant/s", "10"]  # in no sorted order, and no names of folders
    kinds = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))
    parts = {
        split: datasets.Dataset.from_dict(
            {"image": [picture(k + start) for k in range(6)], "label": [0, 1, 2] * 2},
            features=kinds,
        )
        for split, start in (("train", 0), ("validation", 20), ("test", 40))
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    out = tmp_path / "cached"
    report = build_cache(f"hf:{tmp_path / 'saved'}", out, settings=SMALL)
    assert dict(report.images) == {"train": 6, "val": 6, "test": 6}
    new = open_data(f"folder:{out}", VIEW)
    assert new.classes == ("0-wolf-timber", "1-ant-s", "2-10")
    assert {name: split.size for name, split in new.splits.items()} == {
        "train": 6,
        "holdout": 6,
        "test": 6,
    }
    first = np.asarray(Image.open(out / "val" / "1-ant-s" / "00000001.jpg"), dtype=int)
    wanted = np.asarray(shrunk(picture(21), 24), dtype=int)
    assert np.abs(first - wanted).mean() < 4


def test_hugging_face_data_that_changed_meanwhile(tmp_path: Path) -> None:
    kinds = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))

    def checksum_of(seed: int) -> str:
        columns = {"image": [picture(seed), picture(seed + 1)], "label": [0, 1]}
        data = datasets.Dataset.from_dict(columns, features=kinds)
        place = tmp_path / f"saved-{seed}"
        datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(place))
        return cache._source(cache._open(f"hf:{place}"))

    assert checksum_of(0) != checksum_of(10)
    assert cache._source(cache._open(f"hf:{tmp_path / 'saved-0'}")) == cache._source(
        cache._open(f"hf:{tmp_path / 'saved-0'}")
    )


@pytest.mark.parametrize(
    ("classes", "folders"),
    [
        (("ant", "bee"), ("ant", "bee")),
        (("bee", "ant"), ("0-bee", "1-ant")),
        (("ant", "ant"), ("0-ant", "1-ant")),
        ((".a", "b"), ("0-.a", "1-b")),
        (("a/b", "c"), ("0-a-b", "1-c")),
        ((*tuple("0123456789"), "10"), tuple(f"{k:02d}-{k}" for k in range(11))),
    ],
)
def test_folders_sort_as_the_classes_count(
    classes: tuple[str, ...], folders: tuple[str, ...]
) -> None:
    assert class_folders(classes) == folders
    assert sorted(folders) == list(folders)


@pytest.mark.parametrize(
    ("size", "comes"), [((60, 40), (36, 24)), ((24, 90), (24, 90)), ((20, 9), (20, 9)),
                        ((25, 25), (24, 24)), ((1000, 25), (960, 24))],
)  # fmt: skip
def test_the_shorter_side_is_shrunk_to_size_and_never_enlarged(size, comes) -> None:
    assert shrunk(Image.new("RGB", size), 24).size == comes


def test_where_a_cache_goes(tmp_path: Path) -> None:
    assert default_out(f"folder:{tmp_path}/", 256) == Path(f"{tmp_path}-256")
    assert default_out("hf:owner/name", 128) == Path("name-128")
    assert default_out("hf:owner/name:config", 128) == Path("name-config-128")
    with refuses(UsageError):
        default_out("wds:a/t-{0..9}.tar,a/v-?.tar", 256)


def test_digits_need_no_cache(tmp_path: Path) -> None:
    with refuses(UsageError):
        build_cache("digit-pairs?train=20&validation=5&test=5", tmp_path / "x", settings=SMALL)


def test_a_class_without_images_in_one_split(tmp_path: Path) -> None:
    kinds = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    parts = {
        split: datasets.Dataset.from_dict(
            {"image": [picture(0), picture(1)], "label": labels}, features=kinds
        )
        for split, labels in (("train", [0, 1]), ("test", [1, 1]))
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    with refuses(DataError):
        build_cache(f"hf:{tmp_path / 'saved'}", tmp_path / "out", settings=SMALL)


def test_a_missing_source_leaves_no_files(tmp_path: Path) -> None:
    with refuses(DataError, tmp_path / "nope"):
        build_cache(f"folder:{tmp_path}/nope", tmp_path / "out", settings=CacheSettings())
    assert list(tmp_path.iterdir()) == []
