"""Errors are one paragraph, also from a loader process; what the machine causes is no fault."""

import errno
import gc
import os

import pytest
from torch.utils.data import DataLoader, Dataset

from layershuffle.ground.errors import (
    DataError,
    LayerShuffleError,
    UsageError,
    of_the_machine,
)
from layershuffle.ground.machine import collector_paused, cores


class Broken(Dataset):
    """Two images that cannot be read."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise DataError("cannot read image", place=f"{index}.png", hint="repair the file")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_loader_processes_are_one_paragraph(workers):
    with pytest.raises(DataError) as caught:
        list(DataLoader(Broken(), num_workers=workers))
    assert str(caught.value) == "cannot read image. Where: 0.png. Next: repair the file."


def test_questions_keep_their_mark():
    error = LayerShuffleError("no key 'a', did you mean 'b'?", hint="is it 'c'?")
    assert str(error) == "no key 'a', did you mean 'b'? Next: is it 'c'?"
    assert str(UsageError("wrong.", hint="mend it.")) == "wrong. Next: mend it."


def test_the_longest_parts_lose_their_middles():
    error = DataError("the column holds " + "QUJD" * 3000 + ", which is no path", place="a.csv")
    assert error.cause.startswith("the column holds QUJD")
    assert error.cause.endswith("QUJD, which is no path")
    assert str(error).endswith("is no path. Where: a.csv.")
    placed = DataError("no image", place="a/" * 5_000, hint="name one")
    assert (placed.cause, placed.hint, len(placed.place)) == ("no image", "name one", 10_000)


@pytest.mark.parametrize(
    "lengths", [(9_000, 9_000, 9_000), (10, 10, 9_000), (560, 4, 5), (5, 0, 9)]
)
def test_an_error_has_at_most_600_characters(lengths):
    cause, place, hint = ("q" * length for length in lengths)
    error = LayerShuffleError(cause, place=place, hint=hint)
    if sum(lengths) > 600:
        assert 570 < len(str(error)) <= 600
    else:
        assert str(error).count("q") == sum(lengths)


@pytest.mark.parametrize(
    ("error", "cause", "place"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/run/model"),
            "disk is full",
            "/run/model",
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."), "shared", None),
        (RuntimeError("unable to write to file </torch_7_42>: No space left"), "shared", None),
        (OSError("AF_UNIX path too long"), "too long for this system", None),
        (
            PermissionError(errno.EACCES, "Permission denied", "/cache"),
            "may not",
            "/cache",
        ),
        (
            RuntimeError("cannot cache function 'f': no locator available for file 'a'"),
            "numba",
            None,
        ),
    ],
)
def test_what_the_machine_causes(error, cause, place):
    """Alone, and as the cause of an error that a library raises of its own."""
    try:
        raise ValueError("cannot write") from error
    except ValueError as raised:
        wrapped = raised
    for found in (of_the_machine(error), of_the_machine(wrapped)):
        assert cause in found.cause
        assert found.place == place
        assert found.hint


def test_other_errors_are_not_the_machine_s():
    assert of_the_machine(KeyError("a")) is None


# --- the machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled):
    try:
        if not enabled:
            gc.disable()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    assert cores() == len(os.sched_getaffinity(0))
    # As on macOS and Windows.
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == os.cpu_count()
