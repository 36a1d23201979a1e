"""The death of Ray's processes: decisions in virtual time, and removed leftovers.

That real ones are killed: test_ray_kills.py, and test_swarm_up.py under requests.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
from fake_hosts import condition, coordinated

from clock import loop_time, run_virtual
from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.host import HostInfo
from layershuffle.swarm.limits import Limits, restart_pause
from layershuffle.swarm.placement import HostRecord, Node, ended
from layershuffle.swarm.ray_hosts import RayHosts
from layershuffle.swarm.ray_local import LocalCluster, RayFailure, sweep
from layershuffle.swarm.ray_session import JoinedCluster, RaySession
from waiting import until

CORES = os.cpu_count()
LIMITS = Limits(restart_ms=200, restart_max_ms=30_000, stable_ms=60_000)


def test_restarts_back_off_up_to_a_bound():
    tries, pauses = 0, []
    for _ in range(10):
        tries, pause = restart_pause(tries, ran=1.0, limits=LIMITS)
        pauses.append(pause)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    assert restart_pause(10_000, ran=1.0, limits=LIMITS) == (10_001, 30.0)
    assert restart_pause(tries, ran=59.9, limits=LIMITS) == (11, 30.0)
    assert restart_pause(tries, ran=60.0, limits=LIMITS) == (1, 0.2)


def test_a_host_that_dies_soon_after_every_start_backs_off():
    """A host that is up for a moment has not started well."""
    host, now, waited = HostRecord("a", "n1", frozenset({0}), "up", since=0.0), 0.0, []
    for _ in range(4):
        now += 2.0
        host = ended(host, now=now, limits=LIMITS)
        waited.append(round(host.retry_at - now, 6))
        host = HostRecord("a", "n1", frozenset({0}), "up", tries=host.tries, since=now)
    assert waited == [0.2, 0.4, 0.8, 1.6]
    assert ended(host, now=now + 60.0, limits=LIMITS).retry_at == pytest.approx(now + 60.2)
    failed = HostRecord("a", "n1", frozenset({0}), "starting", tries=2, since=-1e9)
    assert ended(failed, now=0.0, limits=LIMITS).retry_at == 0.8


class Calls:
    """A cluster that does what its test says, and when everything was called."""

    def __init__(self, *, losses=(), broken=0):
        self.losses, self.broken, self.calls = dict(losses), broken, []

    def connect(self, ray):
        self.note("connect")
        if self.broken:
            self.broken -= 1
            raise LayerShuffleError("Ray does not start")
        self.losses.pop("lost", None)

    def disconnect(self, ray):
        self.note("disconnect")

    def failure(self):
        return self.losses.get("lost")

    def revive(self):
        self.note("revive")
        del self.losses["lost"]

    def note(self, what):
        self.calls.append((round(loop_time(), 2), what))


def kept(cluster, *, seconds, events=()):
    """The session after that time; `events` are (time, function) pairs."""

    async def go():
        session = RaySession(None, cluster)
        keeping = asyncio.create_task(
            session.keep(
                forget=lambda: cluster.note("forget"),
                begin_anew=lambda why: cluster.note(f"anew: {why}"),
            )
        )
        for time, happen in events:
            await asyncio.sleep(time - loop_time())
            happen()
        await asyncio.sleep(seconds - loop_time())
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        return session

    return run_virtual(go())


def test_a_dead_ray_is_reported_and_reconnected_within_a_second(caplog):
    cluster = Calls()
    dead = RayFailure("Ray's raylet ended", renewable=True)
    with caplog.at_level(logging.WARNING):
        session = kept(cluster, seconds=99, events=[(61.2, lambda: losing(cluster, dead))])
    # The handles of the old connection are dropped before it ends.
    assert cluster.calls == [
        (61.5, "forget"),
        (61.5, "disconnect"),
        (61.5, "connect"),
        (61.5, "anew: Ray's raylet ended"),
    ]
    assert [record.message for record in caplog.records] == ["Ray's raylet ended", "Ray runs again"]
    assert session.trouble == ""


def losing(cluster, failure):
    cluster.losses["lost"] = failure


def test_a_gcs_is_revived_once_and_then_all_of_ray_is_renewed():
    cluster = Calls()
    dead = RayFailure("Ray's gcs_server ended", renewable=True, revive=cluster.revive)
    times = [(70.0, 1), (71.0, 2), (200.0, 3)]
    kept(cluster, seconds=300, events=[(at, lambda: losing(cluster, dead)) for at, _ in times])
    done = [what for _, what in cluster.calls]
    renewed = ["forget", "disconnect", "connect", "anew: Ray's gcs_server ended"]
    # After a minute that went well, reviving is tried first again.
    assert done == ["revive", *renewed, "revive"]


def test_a_ray_that_does_not_start_is_tried_with_pauses(caplog):
    cluster = Calls(broken=3, losses={"lost": RayFailure("Ray does not run", renewable=True)})
    session = kept(cluster, seconds=99)
    starts = [time for time, what in cluster.calls if what == "connect"]
    # It looks every half second; pauses of 0.2, 0.4 and 0.8 s.
    assert starts == [0.0, 0.5, 1.0, 2.0]
    # What a failed start has left is ended.
    assert [what for _, what in cluster.calls].count("disconnect") == 4 + 3
    assert session.trouble == ""
    assert "Ray does not start" in caplog.text


class FullMachine:
    """Ray's node on a machine that starts no process any more."""

    gcs_address = "127.0.0.1:1"

    def __init__(self):
        self._ray_params = SimpleNamespace(gcs_server_port=0)
        self.all_processes = {"gcs_server": [SimpleNamespace(returncode=-9)], "raylet": []}

    def dead_processes(self):
        ended = self.all_processes.get("gcs_server", [])
        return [("gcs_server", SimpleNamespace(process=p, returncode=-9)) for p in ended]

    def start_gcs_server(self):
        raise OSError("Cannot allocate memory")


def test_a_gcs_that_does_not_start_again_is_still_a_loss():
    """A failed revival leaves no dead process behind, and all of Ray has to be started anew."""
    cluster = LocalCluster(["a"])
    try:
        cluster._node = FullMachine()
        failure = cluster.failure()
        with pytest.raises(LayerShuffleError, match="Cannot allocate memory"):
            failure.revive()
        failure = cluster.failure()
        assert failure.renewable
        assert failure.revive is None
    finally:
        cluster.remove()


def test_an_unreachable_head_is_waited_for():
    """Hosts that can be reached go on, and a new connection would end that."""
    cluster = Calls(losses={"lost": RayFailure("The head does not answer")})
    session = kept(cluster, seconds=50)
    assert cluster.calls == []
    assert session.trouble == "The head does not answer"


def test_a_joined_cluster_knows_its_head_and_its_own_member():
    with listening() as head, listening() as member:
        cluster = JoinedCluster(f"127.0.0.1:{head.getsockname()[1]}")
        cluster._raylet = member.getsockname()
        assert cluster.failure() is None
        member.close()
        assert cluster.failure().renewable
        head.close()
        assert "head at 127.0.0.1" in cluster.failure().what
        assert not cluster.failure().renewable
    # Also when another process has taken the member's port since: it does not know this one.
    with listening() as head, listening() as member:
        cluster._address = f"127.0.0.1:{head.getsockname()[1]}"
        cluster._raylet = member.getsockname()
        assert cluster.failure().renewable


def listening():
    return socket.create_server(("127.0.0.1", 0))


# --- hosts that start again ----------------------------------------------------------------------


def test_hosts_start_again_after_ray_has_ended():
    """The machines are the same, and their processes are not known any more."""

    async def check(coordinator, hosts):
        first = dict(hosts.processes)
        await coordinator.drain("b")
        hosts.processes.clear()
        coordinator.begin_anew("Ray ended")
        assert coordinator.router.swarm["a"].why == "Ray ended"
        assert condition(coordinator, "a") == "gone"
        await until(lambda: condition(coordinator, "a") == "healthy")
        assert hosts.processes["a"] is not first["a"]
        assert coordinator.hosts["b"].phase == "held"

    coordinated(check)


def test_a_host_that_fails_to_start_at_first_is_not_up_again(caplog):
    async def check(coordinator, hosts):
        hosts.raises["load"] = LayerShuffleError("no torch there")
        hosts.machines.append(Node("n3", ("c",), ""))
        await until(lambda: "Host c did not start: no torch there" in caplog.text)
        del hosts.raises["load"]
        await until(lambda: "c" in coordinator.router.swarm)
        assert "up again" not in caplog.text
        hosts.kill("c")
        await until(lambda: "Host c is up again" in caplog.text)

    coordinated(check)


def test_no_more_processes_start_at_once_than_there_are_cores():
    """Six hosts that restart together would take the cores from those that live."""

    class Counting(RayHosts):
        now = most = 0

        async def _begun(self, name, node):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(1.0)
            self.now -= 1
            return HostInfo(name, {}, 1, 0, 0)

    async def go():
        hosts, clock = Counting(None, limits=LIMITS), asyncio.get_running_loop().time
        names = [f"host-{number}" for number in range(2 * CORES + 1)]
        await asyncio.gather(*[hosts.start(name, node="n1") for name in names])
        assert (hosts.most, round(clock(), 3)) == (CORES, 3.0)
        # Another machine has cores of its own.
        await asyncio.gather(*[hosts.start("a", node=node) for node in ("n2", "n3")])
        assert round(clock(), 3) == 4.0

    run_virtual(go())


# --- what is left when the program was killed -----------------------------------------------------


def test_only_unused_leftovers_are_removed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    in_use, leftover, other = LocalCluster(["a"]), LocalCluster(["a"]), tmp_path / "ls-other"
    other.mkdir()
    words = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    processes = [
        subprocess.Popen(words, stdout=subprocess.PIPE, env={"RAY_AUTH_TOKEN_PATH": str(token)})
        for token in (in_use.token, leftover.token)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == b"up\n"
        sweep()
        assert [process.poll() for process in processes] == [None, None]
        leftover.release()  # what the kernel does when its process dies
        sweep()
        assert processes[1].wait(60) == -9
        assert processes[0].poll() is None
        assert {path.name for path in tmp_path.iterdir()} == {in_use.directory.name, "ls-other"}
        assert "1 process" in caplog.text
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        in_use.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["ls-other"]
