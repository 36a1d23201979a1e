"""`layershuffle swarm ...` and `classify`, and the operator's endpoint."""

import asyncio
import json
import re
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path

import httpx
import pytest
import torch
from pico_hosts import PATIENT

import layershuffle as ls
from common import FAMILIES, images, logits_of, redraw
from layershuffle.cli import main
from layershuffle.cli.swarm.asking import describe_answer
from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm import service as services
from layershuffle.swarm.bundle import make_bundle
from layershuffle.swarm.expectations import Expected
from layershuffle.swarm.local import LocalHosts
from layershuffle.swarm.plan import HostPlan, SwarmPlan, read_swarm_plan
from layershuffle.swarm.server.admin import (
    SOCKET,
    Operator,
    operator_endpoint,
    scratch_directory,
    state_directory,
)
from layershuffle.swarm.server.schemas import Classification, Guess, ImageAnswer, Times
from layershuffle.swarm.service import Cargo, running_service
from waiting import HANGS, wait_for

HOST = ["swarm", "host", "--address", "127.0.0.1:9", "--name", "a"]


def test_the_expected_accuracy_is_that_of_images_like_the_calibrations():
    """The accuracy on other photographs was not measured."""
    answer = Classification(
        images=[ImageAnswer(top=[Guess(label="cat", index=0, probability=0.9)])],
        depth=2, blocks=[1, 0], versions=[0, 1], skipped=[], degraded=False, ending="complete",
        route=[],
        expected=Expected(
            top1=95.04, low=94.1, high=95.96, orders_low=93.0, orders_high=97.0, kept=2, orders=20,
            images=2000, data="digit-pairs", split="test", effective=700.0,
        ),
        ms=Times(total=5.0, stem=1.0, swarm=3.0, head=1.0),
    )  # fmt: skip
    assert describe_answer(answer, Path("a.png")).splitlines()[-1] == (
        "On images like digit-pairs, 95.0 % of answers with 2 blocks in any order are correct "
        "(94.1 to 96.0 over 2,000 images, which count as 700 independent ones); nine of ten orders "
        "lie between 93.0 and 97.0 %. Of other images nothing is known."
    )
    ran = describe_answer(answer, Path("a.png")).splitlines()[1]
    assert ran == "2 of 2 blocks in 5 ms: "
    rounds = answer.model_copy(update={"blocks": [1, 0, 1], "versions": [0, 0, 2]})
    ran = describe_answer(rounds, Path("a.png")).splitlines()[1]
    assert ran == "2 of 2 blocks in 5 ms, as 1+0,1: "
    older = answer.model_copy(update={"blocks": [1, 0, 0], "versions": [0, 0, 1]})
    ran = describe_answer(older, Path("a.png")).splitlines()[1]
    assert ran.endswith("as 1,0@0,0@1 (block@number of the steps whose state it read): ")


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "code", "phrase"),
    [
        (["swarm", "status", "--address", "http://127.0.0.1:9"], 1, "cannot be reached"),
        (["classify", "x.png", "--address", "http://127.0.0.1:9"], 2, "x.png"),
        (["swarm", "up", "--hosts", "13"], 2, "13 hosts are too many for 12 blocks"),
        (["swarm", "up", "--model", "dir:/nowhere"], 1, "no such directory"),
        (["swarm", "plan", "/nowhere.yaml"], 2, "There is no such file"),
        ([*HOST, "--ip", "10.0.0.2"], 2, "token does not exist"),
        (["swarm", "head", "--ip", "10.0.0.1", "--tls-key", "k"], 2, "TLS needs a certificate"),
        (["swarm", "head", "--ip", "127.0.0.1"], 2, "machines cannot reach 127.0.0.1"),
        (["swarm", "calibrate", "timm:vit_tiny_patch16_224?pretrained=false"], 2, "no directory"),
    ],
)
def test_errors_are_one_paragraph(capsys, monkeypatch, tmp_path, words, code, phrase):
    monkeypatch.setenv("HOME", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="ls-") as short:  # a socket's path is
        monkeypatch.setenv("XDG_STATE_HOME", short)
        status, out, err = run(capsys, *words)
    # What takes seconds is said before.
    loading = "  0.0 s  Loading dir:/nowhere to count its blocks ...\n"
    assert (status, out.removeprefix(loading)) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert " Next: " in err
    assert phrase in err


def test_operator_commands_without_a_swarm(capsys, tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    for words in (["drain", "a"], ["readmit", "a"], ["swap", "a", "1", "--donor", "x"], ["drill"]):
        code, _, err = run(capsys, "swarm", *words, "--state", str(tmp_path / "state"))
        assert code == 2
        assert "No swarm of this user runs on this machine" in err


def test_a_port_in_use_is_told_before_anything_is_started(capsys, tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["swarm", "up", "--port", port, "--state", str(tmp_path / "state")]
        code, out, err = run(capsys, *words)
    assert (code, out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert "Next: end what listens there, or name another --port" in err


def test_a_wrong_address_of_a_head_is_told_before_the_model_is_loaded(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("model: dir:/nowhere\nhosts: {a: {blocks: [0]}}\n")
    (tmp_path / "state").mkdir(mode=0o700)
    words = ["deploy", str(plan), "--address", "127.0.0.1:9", "--state", str(tmp_path / "state")]
    code, _, err = run(capsys, "swarm", *words)
    assert code == 2
    assert "No swarm answers at '127.0.0.1:9'" in err


def test_plan_and_simulate(capsys, tmp_path):
    hosts, plan = tmp_path / "hosts.yaml", tmp_path / "plan.yaml"
    hosts.write_text("hosts: {pi: {count: 4, memory_mb: 50}}\n")
    for replicas, warned in (("1", True), ("2", False)):
        code, out, _ = run(capsys, "swarm", "plan", str(hosts), "--replicas", replicas)
        assert ("Warning: one host holds all blocks" in out) == warned, out
    hosts.write_text("hosts: {pi: {count: 4, memory_mb: 0.5, availability: 0.9}}\n")
    code, out, _ = run(capsys, "swarm", "plan", str(hosts), "--replicas", "1", "--out", str(plan))
    assert code == 0
    assert "free order   in order" in out
    assert f"Next: layershuffle swarm simulate {plan} --profile {hosts}\n" in out
    again = ["swarm", "plan", str(hosts), "--out", str(plan)]
    code, out, err = run(capsys, *again)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: This path exists already. Where: {plan}. Next: name another")
    plan.write_text("an older plan")
    assert run(capsys, *again, "--overwrite")[0] == 0
    assert read_swarm_plan(plan).hosts.keys() == {"pi-1", "pi-2", "pi-3", "pi-4"}
    words = ["swarm", "simulate", str(plan), "--requests", "50", "--kill", "0.5"]
    code, first, _ = run(capsys, *words, "--profile", str(hosts))
    assert code == 0
    assert "replicated-sequential" in first
    assert first.startswith("2 of 4 hosts die (--kill 0.5, rounded down), seed 0\n")
    table = {line.split("  ")[0]: line.split()[-3:] for line in first.splitlines()}
    assert table["% failed"][0] == "0.00"
    assert float(table["% failed"][1]) > 10
    code, _, err = run(capsys, *words, "--min-blocks", "13")
    assert (code, "ask for at most 12 (--min-blocks)" in err) == (2, True)
    code, out, _ = run(capsys, *words, "--profile", str(hosts), "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["hosts"], report["seed"], len(report["faults"])) == (4, 0, 2)
    failed = [f"{routing['percent']['failed']:.2f}" for routing in report["routings"]]
    assert failed[-3:] == table["% failed"]
    words = ["swarm", "simulate", str(plan), "--requests", "50", "--churn"]
    for times in ("", "60", "1 2 3"):
        assert run(capsys, *words, *times.split())[0] == 2
    for times in ("inf 0", "0 10", "nan 1", "1 inf"):
        code, _, err = run(capsys, *words, *times.split())
        assert (code, "--churn takes two times above 0" in err) == (2, True)
    code, out, _ = run(capsys, *words, "1", "2")
    seconds = [float(cell) for cell in out.split("simulated seconds")[1].splitlines()[0].split()]
    assert max(seconds) > 1.5 * min(seconds)
    assert (code, f"ran for {min(seconds):.0f} to {max(seconds):.0f} s" in out) == (0, True)
    code, out, _ = run(capsys, *words, "1", "2", "--rate", "5")
    assert (code, "ran for" in out) == (0, False)


def test_both_kinds_of_failures_at_once_are_refused(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("hosts: {a: {blocks: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}}\n")
    words = ["swarm", "simulate", str(plan), "--kill", "0.5", "--churn", "1", "1"]
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "--churn and --kill exclude each other" in err


# --- the operator's endpoint ----------------------------------------------------------------------


def test_directories_that_others_may_enter_are_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="Other users may enter"):
        state_directory(str(tmp_path / "open"))
    assert state_directory(str(tmp_path / "new")).stat().st_mode & 0o777 == 0o700
    with pytest.raises(UsageError, match="too long for a socket"):
        state_directory(str(tmp_path / ("x" * 120)))


def test_what_ray_opens_to_others_does_not_keep_a_machine_from_starting_again(monkeypatch):
    """Ray gives its own directory mode 0777 at every start."""
    assert len(str(scratch_directory("host-6500"))) < 40
    # Not pytest's directory, whose path may be too long for a socket.
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        scratch = scratch_directory("head-6400")
        scratch.mkdir()
        scratch.chmod(0o777)
        assert scratch_directory("head-6400") == scratch
        assert scratch.parent.stat().st_mode & 0o777 == 0o700


PLAN = SwarmPlan(
    model="pico",
    hosts={"a": HostPlan(blocks=(0, 2)), "b": HostPlan(blocks=(1, 3))},
    limits=PATIENT,
)


# The event loop of the swarm, for work that runs in a thread beside it.
LOOP = ContextVar("LOOP")


def served(tmp_path, work, model=None):
    """`work(operator, service)` in a thread, beside a swarm here that an operator can reach."""

    async def go():
        nonlocal model
        LOOP.set(asyncio.get_running_loop())
        model = model or FAMILIES["timm-vit"].wrapped()
        cargo = Cargo(model, {"pico": make_bundle(model)}, None)
        hosts = LocalHosts(list(PLAN.hosts), limits=PLAN.limits)
        state = state_directory(str(tmp_path / "s"))
        async with running_service(PLAN, cargo, backend=hosts, within=60) as service:
            assert service.missing == ()
            async with operator_endpoint(service, state):
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
        async with operator_endpoint(service, state):
            raise AssertionError

    with pytest.raises(UsageError, match="runs already"):
        asyncio.run(open_again())


def test_a_second_swarm_is_refused_before_its_model_is_loaded(tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text("model: dir:/nowhere\nhosts: {a: {blocks: [0]}}\n")

    def work(operator, service):
        state = ["--state", str(tmp_path / "s")]
        for words in (
            ["up", "--model", "dir:/nowhere", *state],
            ["deploy", str(plan), "--address", "127.0.0.1:9", *state],
        ):
            code, _, err = run(capsys, "swarm", *words)
            assert code == 2
            assert "A swarm of this user runs already" in err

    served(tmp_path, work)


def condition_until(service, host, wanted):
    wait_for(lambda: service.router.swarm[host].condition, holds=lambda now: now == wanted)


def test_the_operator_commands_the_swarm(tmp_path, monkeypatch):
    def work(operator, service):
        assert operator.command("plan") == PLAN.model_dump(mode="json")
        assert operator.command("routing", routing="sequential") == {"before": "order-free"}
        assert service.router.routing == "sequential"
        operator.command("routing", routing="order-free")
        assert operator.command("drain", host="a") == {"empty": True}
        assert service.router.swarm["a"].condition == "draining"
        operator.command("readmit", host="a")
        condition_until(service, "a", "healthy")
        with pytest.raises(UsageError, match="Host a is healthy, so it was not restarted"):
            operator.command("readmit", host="a")
        operator.command("fault", host="b", kind="crash")
        operator.command("fault", host="b", kind="rejoin")
        condition_until(service, "b", "healthy")
        with pytest.raises(UsageError, match="no host 'z'"):
            operator.command("drain", host="z")
        with pytest.raises(UsageError, match="no host 'z'"):
            operator.command("readmit", host="z")
        with pytest.raises(LayerShuffleError, match="no such directory"):
            operator.command("swap", host="a", block=0, donor="dir:/nowhere")
        with pytest.raises(UsageError, match="kind: Input should be 'crash', 'freeze'"):
            operator.command("fault", host="a", kind="explode")

    served(tmp_path, work)


def test_the_operator_endpoint_refuses_unknown_keys(tmp_path):
    """Otherwise a misspelt key would be ignored silently."""

    def work(operator, service):
        socket = httpx.HTTPTransport(uds=str(tmp_path / "s" / SOCKET))
        with httpx.Client(transport=socket, base_url="http://operator") as client:
            for path, fields, cause in [
                ("/drain", {"host": "a", "fast": True}, "fast: Extra inputs are not permitted"),
                ("/readmit", {"host": "a", "x": 1, "y": 2}, "x: Extra inputs .*; y: Extra"),
                ("/swap", {"host": "a", "block": 0, "doner": "x"}, "donor: Field required; doner"),
                ("/routing", {"routing": "sequential", "host": "a"}, "host: Extra"),
                ("/fault", {"host": "a", "kind": "crash", "at": 3}, "at: Extra"),
                ("/fault", {"host": "a"}, "kind: Field required"),
                ("/drain", ["a"], "Input should be a valid dictionary"),
            ]:
                answer = client.post(path, json=fields)
                assert answer.status_code == 400, path
                assert re.match(cause, answer.json()["cause"]), answer.json()
                assert answer.json()["hint"]
        assert service.router.routing == "order-free"
        assert all(host.condition == "healthy" for host in service.router.swarm.values())

    served(tmp_path, work)


@pytest.fixture
def siblings(tmp_path):
    """Two saved models of one base, whose blocks 2 differ: the one that is served, and a donor."""
    record = {"provenance": {"base_sha256": "ab"}}
    model = FAMILIES["timm-vit"].wrapped()
    ls.save(model, tmp_path / "base", record=record)
    with torch.no_grad():
        ls.blocks_of(model)[2].mlp.fc2.bias += 1.0
    ls.save(model, tmp_path / "donor", record=record)
    return ls.load(str(tmp_path / "base")), tmp_path / "donor"


def answer(service, batch, **asked):
    """The swarm's answer."""
    coroutine = service.remote_model.classify(batch, deadline=service.router.clock() + 30, **asked)
    return asyncio.run_coroutine_threadsafe(coroutine, LOOP.get()).result(HANGS)


def whole_answer(service, batch, **asked):
    """Its answer with all blocks, repeated because hosts may be late on a busy machine."""
    for _ in range(100):
        got = answer(service, batch, **asked)
        if got.route.ending == "complete":
            return got
        time.sleep(0.05)
    raise AssertionError(got.route)


class Gate:
    """Calls that set `reached` and then wait for `free`."""

    def __init__(self):
        self.reached, self.free = threading.Event(), threading.Event()

    def before(self, function):
        def wait(*args, **kwargs):
            self.reached.set()
            assert self.free.wait(HANGS)
            return function(*args, **kwargs)

        return wait


@pytest.mark.parametrize("saved", [True, False], ids=["one block is read", "a model is loaded"])
def test_a_swap_keeps_no_request_waiting(tmp_path, monkeypatch, siblings, saved):
    model, place = siblings
    donor = ls.load(str(place))
    batch = images(1)
    with torch.no_grad(), ls.running(donor, (2,)):
        wanted = logits_of(donor(batch))
    spec = str(place) if saved else "timm:donor"
    gate = Gate()
    monkeypatch.setattr(services, "read_block", gate.before(services.read_block))
    load = (lambda spec: pytest.fail("all of it was loaded")) if saved else lambda spec: donor
    monkeypatch.setattr(services, "load", gate.before(load))

    def work(operator, service):
        whole_answer(service, batch)
        with ThreadPoolExecutor(1) as pool:
            swapping = pool.submit(operator.command, "swap", host="a", block=2, donor=spec)
            try:
                assert gate.reached.wait(HANGS)
                for _ in range(4):  # answered while the donor is read, which goes on only then
                    answer(service, batch)
                assert not swapping.done()
            finally:
                gate.free.set()
            swapping.result(HANGS)
        got = whole_answer(service, batch, order=(2,))
        assert torch.equal(got.logits, wanted)
        with pytest.raises(UsageError, match=r"has no block 7 \(0 to 3 exist\)"):
            operator.command("swap", host="a", block=7, donor=spec)

    served(tmp_path, work, model)


def test_a_swap_is_undone_with_the_model_itself(tmp_path):
    """Its record tells no base: it is its own."""
    model = FAMILIES["timm-vit"].wrapped()
    ls.save(model, tmp_path / "own")
    stranger = redraw(FAMILIES["timm-vit"].wrapped(), seed=3).eval()
    ls.save(stranger, tmp_path / "stranger")

    def work(operator, service):
        operator.command("swap", host="a", block=2, donor=str(tmp_path / "own"))
        with pytest.raises(UsageError, match="the base is"):
            operator.command("swap", host="a", block=2, donor=str(tmp_path / "stranger"))

    served(tmp_path, work, ls.load(str(tmp_path / "own")))


def test_of_a_plans_donors_only_their_blocks_are_read(tmp_path, monkeypatch, siblings):
    _, place = siblings
    plan = SwarmPlan(
        model=str(tmp_path / "base"),
        hosts={
            "a": HostPlan(blocks=(0, 1, 2, 3), donors={2: str(place), 1: str(tmp_path / "base")})
        },
    )
    loaded = []
    monkeypatch.setattr(services, "load", lambda spec: loaded.append(spec) or ls.load(spec))
    cargo = services.load_cargo(plan)
    assert loaded == [plan.model]
    donor = make_bundle(ls.load(str(place)))
    bundle = cargo.bundles[str(place)]
    assert dict(bundle.tensors) == {2: donor.tensors[2]}
    assert bundle.program == donor.program
    start = cargo.bundles[plan.model].sample
    assert (bundle.sample == start).all()
    with torch.no_grad():
        after = ls.blocks_of(ls.load(str(place)))[2](torch.from_numpy(start.copy()))
    assert (bundle.compute(2, start) == after.numpy()).all()
    assert set(cargo.bundles[plan.model].tensors) == {0, 1, 2, 3}


def test_cargo_needs_no_calibration_of_hub_models(monkeypatch):
    model = FAMILIES["timm-vit"].wrapped()
    assert services.calibration_of("timm:vit_tiny_patch16_224", model) is None
