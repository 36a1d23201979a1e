"""Files are complete or absent, whatever happens while they are written."""

import errno
import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import layershuffle as ls
from common import DIGITS_VIT
from layershuffle import cli
from layershuffle.gateway.http.operator import state_directory
from layershuffle.ground.errors import LayerShuffleError, UsageError, of_the_machine
from layershuffle.ground.files import (
    explained,
    listed_files,
    locked,
    refuse_others,
    remove_stale_stages,
    staged_directory,
    user_path,
    write_text,
)
from layershuffle.models import name_classes, num_classes_of
from refusals import refuses
from waiting import HANGS


def test_write_text_replaces_in_one_step(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_two_writers_of_one_file_do_not_meet(tmp_path, monkeypatch):
    """Processes of two containers that share a disk may have one number: both are 1."""
    path = tmp_path / "report.md"
    replace = os.replace

    def other_first(stage, target):
        monkeypatch.setattr(os, "replace", replace)
        write_text(path, "other")
        replace(stage, target)

    monkeypatch.setattr(os, "replace", other_first)
    write_text(path, "own")
    assert path.read_text() == "own"
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_a_file_in_the_place_of_a_directory_is_explained(tmp_path):
    (tmp_path / "d").mkdir()
    with refuses(LayerShuffleError, tmp_path / "d"):
        write_text(tmp_path / "d", "one")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def fill_half(final):
    with staged_directory(final) as stage:
        (stage / "weights").write_text("half")
        raise RuntimeError("killed")


def test_a_failed_directory_leaves_the_old_one(tmp_path):
    final = tmp_path / "model"
    with staged_directory(final) as stage:
        (stage / "weights").write_text("old")
    with pytest.raises(RuntimeError, match="killed"):
        fill_half(final)
    assert (final / "weights").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("swaps", [True, False])
def test_a_directory_is_replaced_whole(tmp_path, monkeypatch, swaps):
    if not swaps:
        monkeypatch.setattr("layershuffle.ground.files._exchange", lambda left, right: False)
    final = tmp_path / "model"
    for text, name in (("old", "a"), ("new", "b")):
        with staged_directory(final) as stage:
            (stage / name).write_text(text)
    assert sorted(p.name for p in final.iterdir()) == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_leaves_the_old_directory(tmp_path, monkeypatch, failing):
    final, renames = tmp_path / "model", itertools.count(1)
    with staged_directory(final) as stage:
        (stage / "weights").write_text("old")

    def replace(*places, rename=os.replace):
        if next(renames) == failing:
            raise OSError(errno.EXDEV, "Invalid cross-device link", *places)
        rename(*places)

    monkeypatch.setattr("layershuffle.ground.files._exchange", lambda left, right: False)
    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(LayerShuffleError), staged_directory(final):
        pass
    assert (final / "weights").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "out").symlink_to("disk/model")
    with staged_directory(tmp_path / "out") as stage:
        (stage / "weights").write_text("new")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "model" / "weights").read_text() == "new"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["disk", "model", "out", "weights"]


def test_other_files_beside_ours_are_not_deleted(tmp_path):
    for name in ("manifest.json", "stem.onnx", ".lock", ".staged-7-a.onnx"):
        (tmp_path / name).write_text("ours")
    refuse_others(tmp_path, ours=("manifest.json", "*.onnx"), kind="exported model")
    (tmp_path / "thesis.txt").write_text("years of work")
    for place in (tmp_path, tmp_path / "thesis.txt"):
        with refuses(UsageError, place):
            refuse_others(place, ours=("manifest.json", "*.onnx"), kind="exported model")


def test_a_mount_point_is_refused_before_the_work(tmp_path):
    (tmp_path / "link").symlink_to("/proc")
    for place in (Path("/proc"), tmp_path / "link"):
        with refuses(UsageError, place):
            refuse_others(place, ours=("*",), kind="exported model")


@pytest.mark.parametrize("listing", ['{"files": {"stem.onnx": {}}}', '{"files": 1}', "3", None])
def test_files_of_another_program_are_not_taken_for_ours_by_their_names(tmp_path, listing):
    for name in ("stem.onnx", "yolo.onnx"):
        (tmp_path / name).touch()
    if listing is not None:
        (tmp_path / "manifest.json").write_text(listing)
    ours = listed_files(tmp_path / "manifest.json")
    assert ours == ({"manifest.json", "stem.onnx"} if "stem" in (listing or "") else set())
    with refuses(UsageError, tmp_path):
        refuse_others(tmp_path, ours=ours, kind="exported model")


def test_stale_stages_go_and_nothing_else(tmp_path):
    (tmp_path / ".staged-abc").mkdir()
    (tmp_path / ".staged-abc" / "weights").write_text("half")
    (tmp_path / ".staged-7-a.json").write_text("half")
    (tmp_path / "model").mkdir()
    remove_stale_stages(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "number",
    [
        errno.ENOSPC,
        errno.EROFS,
        errno.EACCES,
        errno.EBUSY,
    ],
)
def test_system_errors_in_words(tmp_path, number):
    with refuses(LayerShuffleError, tmp_path), explained(tmp_path):
        raise OSError(number, os.strerror(number))


def test_other_system_errors_pass(tmp_path):
    with pytest.raises(InterruptedError), explained(tmp_path):
        raise InterruptedError(errno.EINTR, "it is")


HOLD = """
import sys
from pathlib import Path
from layershuffle.ground.files import locked
with locked(Path(sys.argv[1])):
    print("taken", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_kept_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("layershuffle.ground.files._LOCK_SECONDS", 0.0)
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as holder:
        assert holder.stdout.readline() == b"taken\n"
        with refuses(LayerShuffleError, tmp_path), locked(tmp_path):
            pass
        assert f"Another process is working in {tmp_path}; waiting up to" in caplog.text
        holder.stdin.close()
        assert holder.wait(HANGS) == 0
    with locked(tmp_path):  # the lock went with its process
        pass


def test_a_tilde_is_the_home_directory_wherever_a_place_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = ls.load(DIGITS_VIT)
    ls.save(model, "~/saved")
    assert cli.main(["eval", "--model=~/saved", "--data=folder:~/none", "--num-orders=1"]) == 1
    assert f"{tmp_path}/home/none" in capsys.readouterr().err
    Image.new("RGB", (40, 40), (200, 30, 30)).save(tmp_path / "home" / "red.png")
    assert cli.main(["predict", "dir:~/saved", "--image=~/red.png", "--top=1"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/home/red.png: ")
    names = tmp_path / "home" / "names.txt"
    names.write_text("\n".join(map(str, range(num_classes_of(model)))))
    name_classes(model, Path("~/names.txt"), place="saved")
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == [
        "names.txt",
        "red.png",
        "saved",
    ]
    assert not list((tmp_path / "here").iterdir())


def test_a_tilde_without_a_home_directory_is_explained(monkeypatch):
    def unknown(path):
        raise RuntimeError("Could not determine home directory.")

    # What pathlib does for a user without HOME and without an entry in passwd.
    monkeypatch.setattr(Path, "expanduser", unknown)
    with refuses(UsageError, "~/run") as caught:
        user_path("~/run")
    assert "HOME" in caught.value.hint
    with refuses(UsageError) as caught:
        state_directory(None)
    assert "--state" in caught.value.hint


def write_plain(place):
    write_text(place / "text", "x" * 200_000)


def write_checkpoint(place):
    torch.save(torch.zeros(50_000), place / "state.pt")


def write_weights(place):
    save_file({"w": torch.zeros(50_000)}, place / "w.safetensors")


@pytest.mark.parametrize("write", [write_plain, write_checkpoint, write_weights])
def test_a_limit_on_the_size_of_files_is_named(tmp_path, write):
    """As `ulimit -f` sets it: Python ignores its signal, and every saver fails in its own way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    try:
        with refuses(LayerShuffleError) as caught, explained(tmp_path):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit -f" in caught.value.hint


def test_a_limit_is_a_cause_of_the_machine_wherever_it_is_met():
    for error in (OSError(errno.EFBIG, "File too large"), RuntimeError("io (os error 27)")):
        assert "larger than this shell" in of_the_machine(error).cause
