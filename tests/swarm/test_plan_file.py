"""Plans: round trips through YAML, and refused plans."""

import subprocess
import sys

import pytest

from layershuffle.errors import SettingsError, UsageError
from layershuffle.swarm.plan import (
    HostPlan,
    SwarmPlan,
    even_plan,
    noted_depth,
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
    ("hosts", "replicas", "held"),
    [
        (3, 1, [(0, 3), (1, 4), (2,)]),
        (3, 2, [(0, 2, 3), (0, 1, 3, 4), (1, 2, 4)]),
        (1, 1, [(0, 1, 2, 3, 4)]),
    ],
)
def test_even_plans(hosts, replicas, held):
    plan = even_plan(5, hosts, replicas=replicas)
    assert [host.blocks for host in plan.hosts.values()] == held
    plan.check(5)


@pytest.mark.parametrize(("depth", "hosts", "replicas"), [(5, 6, 1), (5, 2, 3), (5, 2, 0)])
def test_even_plans_that_cannot_be(depth, hosts, replicas):
    with pytest.raises(UsageError):
        even_plan(depth, hosts, replicas=replicas)


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


def test_the_depth_of_a_saved_model_is_read_from_its_record(tmp_path):
    record = tmp_path / "layershuffle.json"
    assert noted_depth("bundled:digits-swarm") == 12
    assert noted_depth(str(tmp_path)) is None
    for content, depth in (
        ('{"depth": 7}', 7),
        ('{"depth": "7"}', None),
        ('{"depth": true}', None),
        ('{"depth": 1025}', None),
        ("[7]", None),
        ("{", None),
    ):
        record.write_text(content)
        assert noted_depth(f"dir:{tmp_path}") == noted_depth(str(tmp_path)) == depth
    assert noted_depth("timm:vit_tiny_patch16_224?pretrained=false") is None


def test_a_swarm_starts_ray_before_anything_imports_torch():
    """Torch takes seconds, which the processes of Ray and of the hosts have meanwhile."""
    modules = ["ray_session", "ray_hosts", "placement", "plan", "server.admin"]
    imports = "; ".join(f"import layershuffle.swarm.{module}" for module in modules)
    words = [sys.executable, "-c", f"{imports}; import sys; print('torch' in sys.modules)"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
