"""Plans: round trips through YAML, and refused plans."""

import subprocess
import sys

import pytest

from layershuffle.errors import SettingsError, UsageError
from layershuffle.swarm.plan import (
    HostPlan,
    SwarmPlan,
    plan_text,
    read_swarm_plan,
)


def test_a_plan_survives_its_file(tmp_path):
    plan = SwarmPlan(
        model="runs/a/model",
        hosts={"pi-1": HostPlan(blocks=(0, 2)), "pi-2": HostPlan(blocks=(1,))},
        routing="sequential",
        wire="int8",
        limits={"deadline_ms": 500},
    )
    (tmp_path / "plan.yaml").write_text(plan_text(plan), encoding="utf-8")
    assert read_swarm_plan(tmp_path / "plan.yaml") == plan
    assert "hop_factor" not in plan_text(plan), "defaults stay out"
    plan.check(3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts: {}", "at least 1"),
        ("hosts: {a: {blocks: [1, 1]}}", "block 1 is named twice"),
        ("hosts: {a: {blocks: [0]}}\nrouting: ordered", "order-free"),
        ("hosts: {a: {blocks: [0]}}\nlimits: {deadline: 3}", "deadline_ms"),
        ("- a", "mapping"),
        ("hosts: {a: [", "cannot be read"),
    ],
)
def test_refused_plans_name_file_and_reason(tmp_path, text, words):
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((SettingsError, UsageError), match=words) as error:
        read_swarm_plan(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("blocks", "words"), [((0, 1), "No host holds block 2"), ((0, 1, 2, 3), "last is 2")]
)
def test_plans_that_do_not_fit_the_model(blocks, words):
    with pytest.raises(UsageError, match=words):
        SwarmPlan(hosts={"a": HostPlan(blocks=blocks)}).check(3)


def test_a_gateway_starts_without_torch():
    """Importing it takes seconds, and 300 MB."""
    code = "import layershuffle.cli.swarm.serving, layershuffle.swarm.server.start, sys; "
    words = [sys.executable, "-c", f"{code}print('torch' in sys.modules)"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
