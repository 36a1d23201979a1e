"""Tar shards: patterns, labels, classes, holdout by shard or by key, streams, errors."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from layershuffle.data import DataOptions, ImageData, ImageView, open_data
from layershuffle.data.shards import expand_braces, find_shards, split_patterns
from layershuffle.data.wds import held_out_shards
from layershuffle.errors import DataError, UsageError
from pictures import file_of, noise
from refusals import refuses

pytestmark = pytest.mark.usefixtures("own_cache")
VIEW = ImageView(channels=3, height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3)


def shard(path: Path, keys: range, *, label: str = "cls", image: str = "png") -> Path:
    """One tar: sample k is noise(k) with label k % 3."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for k in keys:
            text = {"cls": str(k % 3), "json": json.dumps({"label": k % 3}), "txt": "words"}[label]
            for name, content in ((image, file_of(noise(k), image)), (label, text.encode())):
                member = tarfile.TarInfo(f"{k:06d}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five training shards of 12 samples and one validation shard of 6."""
    for k in range(5):
        shard(tmp_path / "tars" / f"train-{k:03d}.tar", range(12 * k, 12 * k + 12))
    shard(tmp_path / "tars" / "val-000.tar", range(1000, 1006))
    return tmp_path / "tars"


def opened(place: Path | str, **options: object) -> ImageData:
    return open_data(f"wds:{place}", VIEW, options=DataOptions(**{"holdout": 0.2, **options}))


def contents(data: ImageData, name: str) -> list[bytes]:
    return [image.permute(1, 2, 0).numpy().tobytes() for image, _ in data.splits[name].dataset]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("t-{008..011}.tar", ["t-008.tar", "t-009.tar", "t-010.tar", "t-011.tar"]),
        ("t-{8..10}", ["t-8", "t-9", "t-10"]),
        ("t-{2..0}", ["t-2", "t-1", "t-0"]),
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
    ],
)
def test_braces(pattern: str, names: list[str]) -> None:
    assert expand_braces(pattern) == names


def test_commas_inside_braces_do_not_cut() -> None:
    assert split_patterns("{a,b}.tar,c.tar") == ["{a,b}.tar", "c.tar"]


def test_ways_to_name_shards(root: Path, tmp_path: Path) -> None:
    expected = {"train": sorted(root.glob("train*")), "test": [root / "val-000.tar"]}
    assert find_shards(str(root)) == expected
    assert find_shards(f"{root}/train-{{000..004}}.tar,{root}/val-000.tar") == expected
    assert find_shards(f"{root}/train-*.tar,{root}/val-{{000..000}}.tar") == expected
    other = tmp_path / "nested"
    shards = {
        kind: [shard(other / folder / "0.tar", range(3))]
        for kind, folder in (("train", "train"), ("validation", "val"), ("test", "test"))
    }
    assert find_shards(str(other)) == shards


@pytest.mark.parametrize("streaming", [False, True])
def test_a_whole_shard_is_held_out(root: Path, streaming: bool) -> None:
    data = opened(root, streaming=streaming)
    assert data.classes == ("0", "1", "2")
    note = next(note for note in data.notes if "training shards" in note)
    assert "1 of 5 training shards, the same for every seed" in note
    number = int(note.split("train-")[1][:3])
    held_out = range(12 * number, 12 * number + 12)
    assert contents(data, "holdout") == [noise(k).tobytes() for k in held_out]
    rest = sorted(noise(k).tobytes() for k in range(60) if k not in held_out)
    assert sorted(contents(data, "train")) == rest
    assert contents(data, "test") == [noise(k).tobytes() for k in range(1000, 1006)]
    assert [label for _, label in data.splits["test"].dataset] == [k % 3 for k in range(1000, 1006)]
    sizes = [data.splits[name].size for name in ("train", "holdout", "test")]
    assert sizes == ([None] * 3 if streaming else [48, 12, 6])


def test_a_small_share_is_cut_by_key_alike_in_tables_and_streams(root: Path) -> None:
    table = opened(root, holdout=0.09)
    stream = opened(root, holdout=0.09, streaming=True)
    assert any("hash of their key" in note for note in table.notes)
    assert any("hash of their key" in note for note in stream.notes)
    held_out = contents(table, "holdout")
    assert 1 <= len(held_out) <= 15
    assert held_out == contents(stream, "holdout")
    assert sorted(contents(table, "train")) == sorted(contents(stream, "train"))
    assert len(set(held_out) | set(contents(table, "train"))) == 60


@pytest.mark.parametrize(
    ("count", "share", "number"), [(5, 0.05, 0), (1, 0.9, 0), (20, 0.05, 1), (100, 0.05, 5)]
)
def test_how_many_shards_are_held_out(count: int, share: float, number: int) -> None:
    held_out = held_out_shards(count, share)
    assert len(held_out or []) == number
    assert (held_out is None) == (number == 0)
    if held_out is not None:
        assert len(set(held_out)) == number
        assert set(held_out) <= set(range(count))


def test_never_are_all_shards_held_out() -> None:
    assert len(held_out_shards(2, 0.99) or []) == 1


def test_json_labels_other_image_types_and_named_classes(tmp_path: Path) -> None:
    shard(tmp_path / "train-0.tar", range(30), label="json")
    shard(tmp_path / "val-0.tar", range(50, 53), image="bmp")
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    data = opened(tmp_path)
    assert data.classes == ("ant", "bee", "cat")
    assert [label for _, label in data.splits["test"].dataset] == [2, 0, 1]
    assert contents(data, "test") == [noise(k).tobytes() for k in range(50, 53)]


def test_validation_beside_test_is_the_holdout(root: Path) -> None:
    shard(root / "test-0.tar", range(2000, 2004))
    data = opened(root)
    assert [data.splits[name].size for name in ("train", "holdout", "test")] == [60, 6, 4]
    only = opened(root, train=False, max_test=3)
    assert {name: split.size for name, split in only.splits.items()} == {"test": 3}


def test_labels_beyond_the_classes(root: Path) -> None:
    (root / "classes.txt").write_text("ant\nbee\n")
    with refuses(DataError):
        opened(root)
    (root / "classes.txt").write_text("ant\nant\n")
    with refuses(DataError):
        opened(root)


def test_missing_shards_are_named(root: Path) -> None:
    with refuses(DataError, root / "train-005.tar"):
        opened(f"{root}/train-{{000..009}}.tar,{root}/val-000.tar")
    with refuses(DataError, root / "x-*.tar"):
        opened(f"{root}/x-*.tar,{root}/val-000.tar")
    with refuses(UsageError):
        opened(f"{root}/train-000.tar")
    with refuses(UsageError):
        opened(f"{root}/nowhere")
    with refuses(UsageError):
        opened("https://example.org/a.tar,b.tar")
    (root / "val-000.tar").unlink()
    with refuses(DataError, root):
        opened(root)


@pytest.mark.parametrize("named", [False, True])
def test_a_broken_shard_is_named(root: Path, named: bool) -> None:
    if named:
        (root / "classes.txt").write_text("ant\nbee\ncat\n")
    (root / "train-000.tar").write_bytes(b"not a tar archive" * 100)
    with refuses(DataError, root / "train-000.tar"):
        opened(root)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_truncated_shard_is_an_error_whenever_it_is_met(root: Path, streaming: bool) -> None:
    path = root / "val-000.tar"
    path.write_bytes(path.read_bytes()[:3000])
    with refuses(DataError):
        list(opened(root, streaming=streaming).splits["test"].dataset)


def test_samples_without_labels(tmp_path: Path) -> None:
    shard(tmp_path / "train-0.tar", range(3), label="txt")
    shard(tmp_path / "val-0.tar", range(3), label="txt")
    with refuses(DataError):
        opened(tmp_path)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    with refuses(DataError):
        opened(tmp_path)


@pytest.mark.parametrize("content", [b"{}", b'{"label": "x"}', b"[1]", b"{"])
def test_a_label_that_is_no_integer(tmp_path: Path, content: bytes) -> None:
    for name in ("train-0.tar", "val-0.tar"):
        with tarfile.open(tmp_path / name, "w") as archive:
            member = tarfile.TarInfo("0.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with refuses(DataError):
        opened(tmp_path)
