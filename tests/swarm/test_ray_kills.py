"""Each process of Ray on one machine is killed, then the program itself: `ray_kills.py`."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from layershuffle.swarm.ray_local import processes_of
from once import once

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def killed(tmp_path_factory):
    """The output and leftovers of the program, run once for all pytest workers."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    return json.loads(once(tmp_path_factory, "ray_kills.json", kill_all).read_text())


def kill_all(out):
    """`ray_kills.py`: what became of Ray's processes; its own SIGKILL, and the start of the next.

    Nobody is there to clean up: Ray's agents would run on for a minute, its directory stays. The
    parent of the program is process 1, as under a service manager.
    """
    orphan = ("sh", "-c", '"$@" &', "sh", sys.executable, HERE / "ray_kills.py")
    with subprocess.Popen(
        orphan, env=with_paths(TMPDIR="/tmp"), stdout=subprocess.PIPE, text=True
    ) as shell:
        begun, *kills = (json.loads(shell.stdout.readline() or "{}") for _ in range(5))
        before = len(list(processes_of(Path(begun["directory"]))))
        with suppress(ProcessLookupError):  # a program that has ended said less
            os.kill(begun["pid"], signal.SIGKILL)
    swept = "from layershuffle.swarm.ray_local import sweep; sweep()"
    subprocess.run([sys.executable, "-c", swept], check=True, env=with_paths(TMPDIR="/tmp"))
    directory = Path(begun["directory"])
    left = list(processes_of(directory))
    there = directory.exists()
    end = {"kills": kills, "before": before, "left": left, "there": there}
    out.write_text(json.dumps({**begun, **end}))


def with_paths(**variables):
    before = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": paths, **variables}


@pytest.mark.parametrize(
    ("name", "says", "renewals"),
    [
        ("gcs_server", "gcs_server (exit code -9)", 0),  # it is started again under the others
        ("raylet", "raylet (exit code -9)", 1),
        # Raylets end with either of their agents.
        ("ray::DashboardA", "raylet (exit code 0)", 1),
        ("ray::RuntimeEnv", "raylet (exit code 0)", 1),
    ],
)
def test_each_process_of_ray_may_be_killed(killed, name, says, renewals):
    (kill,) = [kill for kill in killed["kills"] if kill.get("name") == name]
    assert kill["trouble"] == f"Ray's {says} ended and is started again"
    assert (kill["before"], kill["left"]) == (4, 0 if renewals else 3)
    assert (kill["renewals"], kill["nodes"]) == (renewals, [True])
    print(f"{name}: said after {kill['noticed']:.1f} s, whole {kill['whole']:.1f} s later")


def test_a_program_whose_parent_is_process_1_outlives_its_raylet(killed):
    """Ray takes the parent for the raylet, and process 1 for a parent that has died."""
    if killed["parent"] != 1:
        pytest.skip("this machine gives orphans to another process")
    assert [kill.get("name") for kill in killed["kills"][:2]] == ["gcs_server", "raylet"]


def test_a_killed_program_leaves_no_process(killed):
    assert Path(killed["directory"]).parent == Path("/tmp")
    assert killed["before"] == 4
    assert killed["left"] == []
    assert not killed["there"]
