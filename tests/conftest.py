"""Shared fixtures. Tests use no network: the hub libraries are in offline mode."""

import fcntl
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from layershuffle.ground.machine import collector_paused
from once import SHARED

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# Inductor would start compile processes, which import torch for 6 s and are not used.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# One thread in every process: results are compared bit for bit, and two test processes share two
# cores. Set before torch is imported, which reads it once.
os.environ["OMP_NUM_THREADS"] = "1"
# An example takes as long as a busy machine needs.
settings.register_profile("layershuffle", deadline=None)
settings.load_profile("layershuffle")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent


# Workers get the list of tests in equal parts and take over the ends of each other's: these stay
# with the first worker. Most wait for processes and time-outs more than they compute; at the end of
# the list the other workers would have nothing left to do meanwhile.
FIRST = (
    "test_on_ray",
    "test_three_machines",
    "test_coordinator",
    "test_swarm_up",
    # One server that imports everything once and forks processes (tests/forked.py).
    "test_distributed",
    "test_runner",
    "test_fit",
    "test_analyze_command",  # UMAP is compiled once per process, for seconds
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Test files import all libraries, which creates many objects and no garbage."""
    with collector_paused():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of `FIRST` run first, in its order, then all others in the order of files."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """What was imported stays: to look through it takes the collector half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """The process that starts the others makes a directory that all share."""
    if not hasattr(config, "workerinput"):
        os.environ[SHARED] = tempfile.mkdtemp(prefix="layershuffle-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """At exit some libraries warn about objects that were not collected."""
    gc.unfreeze()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[SHARED], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests marked `alone` run without other tests at the same time, because they measure time."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    place = Path(item.config.option.basetemp).parent  # that of all workers
    alone = item.get_closest_marker("alone") is not None
    with ExitStack() as stack:
        # A waiting test holds the gate, or others would keep starting before it.
        with _locked(place / "gate", fcntl.LOCK_EX):
            kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
            stack.enter_context(_locked(place / "room", kind))
        return (yield)


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield
