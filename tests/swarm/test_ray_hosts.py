"""The contract over two engines, and for Ray its settings, token, and leftovers."""

import asyncio
import importlib.util
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from channel_site import served
from engines import BLOCKS, CHECKS, LIMITS, rig_of

from layershuffle.errors import UsageError
from layershuffle.swarm.chaos import signal_process
from layershuffle.swarm.frames import FrameKind, answer_frame, word_frame
from layershuffle.swarm.local import LocalHosts
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostGone,
    HostUnavailable,
    Packet,
    Visit,
    WorkExpired,
)
from layershuffle.swarm.ray_config import (
    SYSTEM_CONFIG,
    Tls,
    check_tls,
    check_token,
    environment,
    head_command,
    host_command,
    host_names,
    host_resources,
    new_token,
)
from layershuffle.swarm.ray_hosts import RayHosts, RayTransport, called
from layershuffle.swarm.ray_session import check_answers, joined_ray
from once import once
from waiting import HANGS, until

HERE = Path(__file__).parent
RAY_CHECKS = (
    "nothing_listens_beyond_this_machine",
    "no_port_answers_without_the_token",
    "memory_holds",
    "a_client_without_the_token_gets_nothing",
    "a_frozen_process_is_ended_for_good",
    "visits_go_over_channels",
    "hosts_outlive_their_coordinator",
)
PROGRAM_SECONDS = 600


# --- the contract ---------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_contract_in_this_process(check):
    async def go():
        rig = await rig_of(LocalHosts(list(BLOCKS), limits=LIMITS))
        try:
            async with asyncio.timeout(PROGRAM_SECONDS):
                await rig.heal()
                await check(rig)
        finally:
            await rig.coordinator.close()

    asyncio.run(go())


@pytest.fixture(scope="session")
def over_ray(tmp_path_factory):
    """What `ray_contract.py` found, by check. Run once, however many pytest workers ask."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    out = once(tmp_path_factory, "ray_contract.jsonl", run_contract)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {line["name"]: line for line in lines}


def run_contract(out):
    run_program(out)
    if '"up"' not in out.read_text():
        run_program(out)  # Ray gives up where its processes need more than 30 seconds


def run_program(out):
    before = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *([before] if before else [])])
    process = subprocess.Popen(
        [sys.executable, HERE / "ray_contract.py", out],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=PROGRAM_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # its cluster ends with it
        output, _ = process.communicate()
    tell(out, name="ended", code=process.returncode, said=output)


def tell(out, **facts):
    with out.open("a") as file:
        file.write(json.dumps(facts) + "\n")


@pytest.mark.parametrize(
    "check", [*CHECKS, *RAY_CHECKS, *(f"{check} over Ray alone" for check in CHECKS)]
)
def test_contract_over_ray(check, over_ray):
    assert check in over_ray, over_ray["ended"]["said"][-4000:]
    assert not over_ray[check]["failure"], over_ray[check]["failure"]
    print(check, over_ray[check]["seconds"], over_ray[check]["measured"])


def test_ray_ends_with_its_program(over_ray):
    ended = over_ray["ended"]
    assert ended["code"] == 0, ended["said"][-4000:]
    assert over_ray["down"]["left"] == 0
    assert "(raylet)" not in ended["said"], "a dead host is told by our log, not by Ray's"


class FakeRay:
    """What `called` needs of the module: its errors, and that calls can be cancelled."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError):
            def __init__(self, cause):
                self.cause = cause

        class ActorDiedError(RayError): ...

        class ActorUnavailableError(RayError): ...

        class PendingCallsLimitExceeded(RayError): ...

        class TaskCancelledError(RayError): ...

    def __init__(self):
        self.cancelled, self.killed = [], []

    def is_initialized(self):
        return True

    def cancel(self, reference):
        self.cancelled.append(reference)

    def kill(self, actor):
        self.killed.append(actor)


ERRORS = FakeRay.exceptions


@pytest.mark.parametrize(
    ("raised", "becomes", "says"),
    [
        (ERRORS.ActorDiedError(), HostGone, "process of host a is dead"),
        (ERRORS.ActorUnavailableError("no way"), HostUnavailable, "cannot be reached now"),
        (ERRORS.PendingCallsLimitExceeded("full"), HostUnavailable, "too many waiting calls"),
        (ERRORS.TaskCancelledError(), HostUnavailable, "cannot be reached now"),
        (ERRORS.RayTaskError(WorkExpired("too old")), WorkExpired, "too old"),
        (ERRORS.RayTaskError(UsageError("odd")), UsageError, "odd"),
        (ERRORS.RayTaskError(KeyError("oops")), HostFailed, "broke on the call"),
    ],
)
def test_errors_of_ray_become_ours(raised, becomes, says):
    async def fails():
        raise raised

    with pytest.raises(becomes, match=says) as caught:
        asyncio.run(called(FakeRay(), fails, host="a"))
    assert type(caught.value) is becomes
    # Clients read the cause: Ray's words, and its types, are for the log.
    for word in ("no way", "oops", "KeyError", "Actor", "PendingCalls", "Task"):
        assert word not in caught.value.cause


def test_a_cancelled_call_is_dropped_at_the_host():
    async def go():
        ray, call = FakeRay(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(called(ray, lambda: call, host="a"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ray.cancelled == [call]

    asyncio.run(go())


STATE = Packet("fp32", np.ones((1, 2, 3), np.float32))


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", "a head of 0 bytes"),
        (bytes(200), "no frame"),
        (b"".join(answer_frame(0, Answer(STATE, 1.0, 0.0)))[:-9], "15 bytes of 24"),
        (b"".join(word_frame(FrameKind.WELCOME)), "kind WELCOME"),
        (pickle.dumps(Answer(STATE, 1.0, 0.0)), "no frame"),
        (None, "a NoneType in the place of a frame"),
    ],
)
def test_an_answer_that_cannot_be_read_is_a_failure_of_its_host(sent, says, caplog):
    async def go():
        transport = RayTransport(FakeRay())
        remote = asyncio.get_running_loop().create_future()
        remote.set_result(sent)
        visit = SimpleNamespace(remote=lambda order: remote)
        transport.actors["a"] = SimpleNamespace(visit=visit)
        await transport.visit(Visit("a", 0, 1.0), STATE)

    with pytest.raises(HostFailed, match=r"The answer of host a cannot be read\.$"):
        asyncio.run(go())
    assert says in caplog.text


def test_only_visits_that_ray_carried_are_logged(caplog):
    """The channel of a dead host is closed, too, but nothing goes there over Ray."""

    async def answers(order):
        return b"".join(answer_frame(0, Answer(STATE, 1.0, 0.0)))

    async def go():
        transport, dies = RayTransport(FakeRay()), lambda order: raises(ERRORS.ActorDiedError())
        async with served() as (server, _, transport.links["a"]):
            server.close()
            await until(lambda: transport.links["a"].why)
            for remote, logged in ((dies, 0), (answers, 1), (answers, 1)):
                transport.actors["a"] = SimpleNamespace(visit=SimpleNamespace(remote=remote))
                with suppress(HostGone):
                    await transport.visit(Visit("a", 0, 1.0), STATE)
                assert caplog.text.count("Visits to host a go over Ray") == logged

    asyncio.run(go())


class Making(RayHosts):
    """Hosts whose processes take until `made` to make; what was made is in `all`."""

    def __init__(self, ray):
        super().__init__(ray, limits=LIMITS)
        self.made, self.all, self.asked = threading.Event(), [], False

    def _actor_of(self, name, node):
        self.asked = True
        self.made.wait(HANGS)
        self.all.append(f"{name}@{node}")
        return self.all[-1]


def test_a_start_that_was_given_up_leaves_no_process():
    """The thread that makes the process goes on when its caller has gone."""

    async def go():
        hosts = Making(FakeRay())
        starting = asyncio.create_task(hosts.start("a", node="n1"))
        await until(lambda: hosts.asked)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled()
        ending = asyncio.create_task(hosts.end("a"))
        await asyncio.sleep(0)
        assert not ending.done()
        hosts.made.set()
        await ending
        assert hosts._ray.killed == hosts.all == ["a@n1"]
        assert hosts.transport.actors == {}

    asyncio.run(go())


def test_a_host_that_could_not_be_ended_is_ended_later():
    async def go():
        ray = FakeRay()
        hosts = Making(ray)
        hosts.transport.actors["a"] = "a@n1"
        kill, ray.kill = ray.kill, lambda actor: raises(ERRORS.RayError("no head"))
        with pytest.raises(HostUnavailable, match="accepts no calls now"):
            await hosts.end("a")
        ray.kill = kill
        await hosts.end("a")
        assert ray.killed == ["a@n1"]
        await hosts.end("a")
        assert ray.killed == ["a@n1"]

    asyncio.run(go())


def raises(error):
    raise error


def test_signals_to_a_process_that_is_dead():
    ray = FakeRay()
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "here")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        signal_process(ray, child.pid, number=signal.SIGKILL, node="here")
        assert child.wait() == -9
    with pytest.raises(HostUnavailable, match="is dead"):
        signal_process(ray, child.pid, number=signal.SIGKILL, node="here")


# --- settings -------------------------------------------------------------------------------------


def test_a_new_token_is_for_its_owner_alone(tmp_path):
    token = tmp_path / "secret" / "token"
    new_token(token)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    check_token(token)
    before = token.read_bytes()
    with pytest.raises(UsageError, match="token exists already"):
        new_token(token)
    assert token.read_bytes() == before


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: written(path, "  \n", 0o600), "is empty"),
        (lambda path: written(path, "0" * 64, 0o640), "Other users may read"),
    ],
)
def test_a_bad_token_file_is_told_at_once(tmp_path, make, says):
    """Ray itself would try for 20 seconds first."""
    path = tmp_path / "token"
    make(path)
    with pytest.raises(UsageError, match=says) as caught, joined_ray("127.0.0.1:9", token=path):
        pass
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def written(path, text, mode):
    path.write_text(text)
    path.chmod(mode)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", ":6400", "auto"])
def test_invalid_addresses(address):
    with pytest.raises(UsageError, match="is no address"):
        check_answers(address)


def test_addresses_without_a_server(tmp_path):
    new_token(tmp_path / "token")
    with (
        pytest.raises(UsageError, match="No swarm answers at '127"),
        joined_ray("127.0.0.1:9", token=tmp_path / "token"),
    ):
        pass


def test_tls_files_are_checked(tmp_path):
    files = Tls(*(tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")))
    for path in (files.certificate, files.key, files.authority):
        with pytest.raises(UsageError, match="does not exist"):
            check_tls(files)
        written(path, "x", 0o600)
    check_tls(files)
    files.key.chmod(0o644)
    with pytest.raises(UsageError, match="swarm's key"):
        check_tls(files)


def test_environment(tmp_path):
    tls = Tls(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")
    variables = environment(
        tmp_path / "t", tls=tls, store=tmp_path / "gcs", threads=3, loopback=True
    )
    assert variables == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "t"),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "604800",
        "RAY_task_events_report_interval_ms": "0",
        "OMP_NUM_THREADS": "3",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(tmp_path / "cert"),
        "RAY_TLS_SERVER_KEY": str(tmp_path / "key"),
        "RAY_TLS_CA_CERT": str(tmp_path / "ca"),
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(tmp_path / "gcs"),
    }
    plain = environment(tmp_path / "t")
    assert plain["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"
    assert plain["RAY_START_HOOK"] == "layershuffle.swarm.ray_local.only_essentials"


def options(command):
    words = [word.removeprefix("--").partition("=") for word in command if word.startswith("--")]
    return {name: value for name, _, value in words}


def test_commands(tmp_path):
    head = options(head_command(tmp_path, ip="10.0.0.1"))
    host = options(
        host_command(tmp_path, address="10.0.0.1:6400", name="pi-1", ip="10.0.0.2", port=7000)
    )
    assert json.loads(head["system-config"]) == dict(SYSTEM_CONFIG)
    assert "resources" not in head
    assert "ray-client-server-port" not in head  # an error where grpc is not installed
    assert (head["port"], head["include-dashboard"], head["num-cpus"]) == ("6400", "false", "0")
    assert json.loads(host["resources"]) == {"block_host": 1.0, "host:pi-1": 1.0}
    assert host["address"] == "10.0.0.1:6400"
    assert {"block", "head"} <= head.keys()
    assert "block" in host
    for ports_of, first in ((head, 6400), (host, 7000)):
        ports = [int(value) for name, value in ports_of.items() if name.endswith("-port")]
        ports = [port for port in ports if port]
        assert len(set(ports)) == len(ports)
        assert all(first <= port < first + 100 for port in ports)


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_members_need_an_address_that_others_reach(tmp_path, ip):
    with pytest.raises(UsageError, match="cannot reach"):
        head_command(tmp_path, ip=ip)
    with pytest.raises(UsageError, match="swarm up"):
        host_command(tmp_path, address="10.0.0.1:6400", name="a", ip=ip)


def test_names_travel_as_resources():
    assert host_names(host_resources(["pi-2", "pi-1"])) == ("pi-1", "pi-2")
    assert host_names({"CPU": 4.0, "host:": 1.0, "node:10.0.0.1": 1.0}) == ()
    assert host_resources([]) == {}
