"""The garbage collector during measurements and imports; cores."""

import gc
import os

import pytest

from layershuffle.machine import collector_paused, cores


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled: bool) -> None:
    try:
        if not enabled:
            gc.disable()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() == len(os.sched_getaffinity(0))
    # As on macOS and Windows.
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == os.cpu_count()
