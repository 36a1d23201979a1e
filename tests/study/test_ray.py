"""The same study on a local Ray cluster whose training machine dies.

It has one arm, because every task is a process that imports torch for ten seconds.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fixture import TINY, done_here, results

from layershuffle.cli import main
from layershuffle.study.settings import StudySettings

RECIPE = {
    **TINY,
    "arms": [{"method": "layershuffle"}],
    "fit": {**TINY["fit"], "steps": 40, "eval_every": 10},
    "evaluate": {"modes": "sequential,arbitrary", "num_orders": 2},
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def on_cluster(recipe, out):
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    return subprocess.run(
        [sys.executable, Path(__file__).parent / "ray_cluster.py", recipe, out],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        check=False,
    )


def test_a_cluster_that_loses_a_machine_gives_the_same_numbers(recipe, tmp_path):
    done = on_cluster(recipe, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node killed" in done.stdout
    done_here(StudySettings(**RECIPE), tmp_path / "here")
    assert results(tmp_path / "out") == results(tmp_path / "here")
    assert (tmp_path / "out" / "report.html").is_file()
    assert not (tmp_path / "out" / ".shared-disk").exists()


def test_no_cluster_at_the_address(recipe, tmp_path, capsys):
    pytest.importorskip("ray")
    words = ["reproduce", str(recipe), "--out", str(tmp_path / "out"), "--ray", "127.0.0.1:1"]
    assert main(words) == 2
    assert "No Ray cluster answers at '127.0.0.1:1'" in capsys.readouterr().err
