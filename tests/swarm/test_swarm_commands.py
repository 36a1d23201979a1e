"""`layershuffle swarm ...` and `classify` as a user meets them, and the operator's door."""

import asyncio
import dataclasses
import tempfile
import time
from importlib import import_module

import pytest
import torch

import layershuffle as ls
from common import FAMILIES, images
from layershuffle.cli import main
from layershuffle.cli.classify_command import Options as ClassifyOptions
from layershuffle.cli.swarm.serving import operator_door
from layershuffle.cli.swarm_command import WORDS
from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm import service as services
from layershuffle.swarm.bundle import make_bundle
from layershuffle.swarm.local import LocalHosts
from layershuffle.swarm.operating import Operator, scratch_directory, state_directory
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.service import Cargo, running_service

FLAGS = {
    "up": "hosts model plan port replicas routing state threads wire",
    "demo": "deadline_ms hosts requests seed",
    "head": "ip port store tls_authority tls_certificate tls_key token",
    "host": "address ip name port threads tls_authority tls_certificate tls_key token",
    "deploy": "address bind keys plan port public state threads tls_authority tls_certificate "
    "tls_key token wait",
    "status": "address api_key json",
    "drain": "host state",
    "readmit": "host state",
    "swap": "block donor host state",
    "drill": "address api_key concurrency data deadline_ms kill kinds plan requests routings seed "
    "state",
    "plan": "floor hosts model objective out reach replicas time_limit wire",
    "simulate": "churn clients hosts kill min_blocks plan profile rate requests routings seed",
    "calibrate": "data images model orders seed",
}
HOST = ["swarm", "host", "--address", "127.0.0.1:9", "--name", "a"]
CLASSIFY_FLAGS = "address api_key deadline_ms images json min_blocks order top_k"


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_flags_are_frozen():
    """A new flag is a promise: it enters this list and the command's page in the same commit."""
    for word in WORDS:
        options = import_module(f"layershuffle.cli.swarm.{word}").Options
        assert sorted(field.name for field in dataclasses.fields(options)) == FLAGS[word].split()
    names = sorted(field.name for field in dataclasses.fields(ClassifyOptions))
    assert names == CLASSIFY_FLAGS.split()


def test_every_word_is_on_the_page(repository):
    page = (repository / "docs" / "commands" / "swarm.md").read_text()
    assert [word for word in WORDS if f"swarm {word}" not in page] == []


@pytest.mark.parametrize(
    ("words", "code", "phrase"),
    [
        (["swarm", "upp"], 2, "did you mean 'swarm up'?"),
        (["swarm", "status", "--address", "http://127.0.0.1:9"], 1, "cannot be reached"),
        (["classify", "x.png", "--address", "http://127.0.0.1:9"], 2, "x.png"),
        (["swarm", "up", "--hosts", "13"], 2, "13 hosts are too many for 12 blocks"),
        (["swarm", "up", "--model", "dir:/nowhere"], 1, "no such directory"),
        (["swarm", "plan", "/nowhere.yaml"], 2, "cannot be read"),
        ([*HOST, "--ip", "10.0.0.2"], 2, "token is not there"),
        (["swarm", "head", "--ip", "10.0.0.1", "--tls-key", "k"], 2, "TLS needs a certificate"),
        (["swarm", "head", "--ip", "127.0.0.1"], 2, "machines cannot reach 127.0.0.1"),
        (["swarm", "calibrate", "timm:vit_tiny_patch16_224?pretrained=false"], 2, "no directory"),
    ],
)
def test_errors_are_one_paragraph(capsys, monkeypatch, tmp_path, words, code, phrase):
    monkeypatch.setenv("HOME", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="ls-") as short:  # a socket's path is
        monkeypatch.setenv("XDG_STATE_HOME", short)
        found, out, err = run(capsys, *words)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert phrase in err


def test_operator_commands_without_a_swarm(capsys, tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    for words in (["drain", "a"], ["readmit", "a"], ["swap", "a", "1", "--donor", "x"], ["drill"]):
        code, _, err = run(capsys, "swarm", *words, "--state", str(tmp_path / "state"))
        assert code == 2
        assert "No swarm of this user runs on this machine" in err


def test_plan_and_simulate(capsys, tmp_path):
    hosts, plan = tmp_path / "hosts.yaml", tmp_path / "plan.yaml"
    hosts.write_text("hosts: {pi: {count: 4, memory_mb: 0.5, availability: 0.9}}\n")
    code, out, _ = run(capsys, "swarm", "plan", str(hosts), "--replicas", "1", "--out", str(plan))
    assert code == 0
    assert "best pipeline" in out
    assert f"Next: layershuffle swarm simulate {plan}" in out
    words = ["swarm", "simulate", str(plan), "--requests", "50", "--kill", "0.5"]
    code, first, _ = run(capsys, *words, "--profile", str(hosts))
    assert code == 0
    assert "replicated-sequential" in first
    table = {line.split("  ")[0]: line.split()[-3:] for line in first.splitlines()}
    assert table["% failed"][0] == "0.00"
    assert float(table["% failed"][1]) > 10


def test_both_kinds_of_failures_at_once_are_refused(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("hosts: {a: {blocks: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}}\n")
    words = ["swarm", "simulate", str(plan), "--kill", "0.5", "--churn", "1", "1"]
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "two kinds of failures" in err


# --- the operator's door --------------------------------------------------------------------------


def test_directories_that_others_may_enter_are_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="Other users may enter"):
        state_directory(str(tmp_path / "open"))
    assert state_directory(str(tmp_path / "new")).stat().st_mode & 0o777 == 0o700
    with pytest.raises(UsageError, match="too long for a socket"):
        state_directory(str(tmp_path / ("x" * 120)))
    assert len(str(scratch_directory("host-6500"))) < 40


PLAN = SwarmPlan(model="pico", hosts={"a": HostPlan(blocks=(0, 2)), "b": HostPlan(blocks=(1, 3))})


def served(tmp_path, work):
    """`work(operator, service)` in a thread, beside a swarm in this process with its door open."""

    async def go():
        model = FAMILIES["timm-vit"].wrapped()
        cargo = Cargo(model, {"pico": make_bundle(model)}, None)
        places = LocalHosts(list(PLAN.hosts), limits=PLAN.limits)
        state = state_directory(str(tmp_path / "s"))
        async with running_service(
            PLAN, cargo, places=places, transport=places.transport, within=20
        ) as service:
            assert service.missing == ()
            async with operator_door(service, state):
                operator = Operator(state)
                try:
                    await asyncio.to_thread(work, operator, service)
                finally:
                    operator.close()
                await asyncio.to_thread(second_is_refused, service, state)

    asyncio.run(go())
    assert list((tmp_path / "s").iterdir()) == []


def second_is_refused(service, state):
    async def open_again():
        async with operator_door(service, state):
            raise AssertionError

    with pytest.raises(UsageError, match="runs already"):
        asyncio.run(open_again())


def condition_until(service, host, wanted):
    for _ in range(400):
        if service.router.swarm[host].condition == wanted:
            return
        time.sleep(0.02)
    raise AssertionError(service.router.swarm[host])


def test_the_operator_commands_the_swarm(tmp_path, monkeypatch):
    def work(operator, service):
        assert operator.plan() == PLAN.model_dump(mode="json")
        assert operator.routing("sequential") == "order-free"
        assert service.router.routing == "sequential"
        operator.routing("order-free")
        assert operator.drain("a") is True
        assert service.router.swarm["a"].condition == "draining"
        operator.readmit("a")
        condition_until(service, "a", "healthy")
        operator.fault("b", "crash")
        operator.fault("b", "rejoin")
        condition_until(service, "b", "healthy")
        with pytest.raises(UsageError, match="no host 'z'"):
            operator.drain("z")
        with pytest.raises(LayerShuffleError, match="no such directory"):
            operator.swap("a", 0, donor="dir:/nowhere")
        with pytest.raises(LayerShuffleError, match="422"):
            operator.fault("a", "explode")

    served(tmp_path, work)


def test_a_swapped_block_answers_with_its_new_weights(tmp_path, monkeypatch):
    donor = FAMILIES["timm-vit"].wrapped()
    with torch.no_grad():
        ls.blocks_of(donor)[2].mlp.fc2.bias += 1.0
    monkeypatch.setattr("layershuffle.models.load", lambda spec: donor)
    monkeypatch.setattr("layershuffle.swarm.operating.check_sibling", lambda ours, theirs: None)
    monkeypatch.setattr(
        "layershuffle.swarm.coordinator.checked_donor", lambda one, base, *, block: one
    )
    batch = images(1)
    with torch.no_grad(), ls.running(donor, (2,)):
        wanted = donor(batch)

    def work(operator, service):
        operator.swap("a", 2, donor="sibling")
        deadline = service.router.clock() + 5
        asked = service.front.classify(batch, deadline=deadline, order=(2,))
        got = asyncio.run_coroutine_threadsafe(asked, service.front.loop).result(10)
        assert torch.equal(got.logits, wanted)

    served(tmp_path, work)


def test_cargo_needs_no_calibration_of_hub_models(monkeypatch):
    assert (
        services._calibration("timm:vit_tiny_patch16_224", FAMILIES["timm-vit"].wrapped()) is None
    )
