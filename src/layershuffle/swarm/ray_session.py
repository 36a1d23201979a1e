"""Connect this process to a Ray cluster: its own on this machine, or a running one.

`local_ray` and `joined_ray` yield a `RaySession` and leave nothing behind. They set the environment
that Ray reads at its first import, so call them before anything imports Ray. The session reconnects
when Ray's own processes have died (research/decisions).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from layershuffle import ray_cluster
from layershuffle.errors import LayerShuffleError
from layershuffle.ray_cluster import connect_ray, import_ray
from layershuffle.swarm.limits import Limits, restart_pause
from layershuffle.swarm.ray_config import (
    NAMESPACE,
    Tls,
    check_tls,
    check_token,
    environment,
)
from layershuffle.swarm.ray_local import LocalCluster, RayFailure, sweep

_Result = TypeVar("_Result")
_CLUSTER, _EXTRA = "swarm", "swarm"
_HINT = "start one with `layershuffle swarm head`, or check the address"
_LOOK = 0.5  # seconds between two checks of Ray
_ANSWER_SECONDS = 1.0
_log = logging.getLogger(__name__)


class Cluster(Protocol):
    """A cluster that this process connects to. Calls block."""

    def connect(self, ray: Any) -> None:
        """Connect; start the cluster first if it is ours. Raises `LayerShuffleError`."""

    def disconnect(self, ray: Any) -> None:
        """Disconnect; end the cluster if it is ours."""

    def failure(self) -> RayFailure | None:
        """The part of Ray that is lost; `None` if none is."""


class RaySession:
    """This process's connection to Ray, which `keep` renews whenever Ray's processes die.

    `ray` is the connected module. `trouble` is the current fault of Ray, "" if there is none.
    """

    def __init__(self, ray: Any, cluster: Cluster) -> None:
        self.ray, self.trouble = ray, ""
        self._cluster = cluster
        # One thread for all calls: the kernel ends Ray's processes with the thread that started
        # them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-session")

    def open(self) -> None:
        """Connect. Raises what `Cluster.connect` raises."""
        self._thread.submit(self._cluster.connect, self.ray).result()

    async def keep(self, *, forget: Callable[[], None], begin_anew: Callable[[str], None]) -> None:
        """Check for failures and reconnect, until cancelled.

        `forget` is called before a new connection, which old handles would block, and `begin_anew`
        after it, with the reason. Attempts back off.
        """
        clock, limits = asyncio.get_running_loop().time, Limits()
        tries, since, due = 0, clock(), clock()
        while True:
            failure = await self._blocking(self._cluster.failure)
            self._note(failure)
            if failure is not None and failure.renewable and clock() >= due:
                tries, pause = restart_pause(tries, ran=clock() - since, limits=limits)
                try:
                    # If it ended again soon after a revival, a new connection is needed.
                    if failure.revive is not None and tries == 1:
                        await self._blocking(failure.revive)
                    else:
                        forget()
                        await self._blocking(self._renew)
                        begin_anew(failure.what)
                except LayerShuffleError as error:
                    _log.error("%s", error.cause)
                since, due = clock(), clock() + pause
            await asyncio.sleep(_LOOK)

    def close(self) -> None:
        """Disconnect, after a connection in progress has been made or has failed."""
        self._thread.submit(self._cluster.disconnect, self.ray).result()
        self._thread.shutdown()

    def _renew(self) -> None:
        self._cluster.disconnect(self.ray)
        try:
            self._cluster.connect(self.ray)
        except LayerShuffleError:
            self._cluster.disconnect(self.ray)  # ends the processes that did start
            raise

    def _note(self, failure: RayFailure | None) -> None:
        trouble = "" if failure is None else failure.what
        if trouble and trouble != self.trouble:
            _log.error("%s", trouble)
        elif self.trouble and not trouble:
            _log.warning("Ray runs again")
        self.trouble = trouble

    async def _blocking(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


@contextmanager
def local_ray(names: Sequence[str]) -> Iterator[RaySession]:
    """Run a cluster of this process for the block hosts `names`, only on 127.0.0.1.

    It has its own token, and ends with this process, however that ends. Clusters that earlier
    processes left when they were killed are removed first. Raises `UsageError` if Ray is not
    installed, `LayerShuffleError` if it does not start.
    """
    sweep()
    cluster = LocalCluster(names)
    try:
        # Ray reads these variables once, when it is imported.
        with (
            _set(environment(cluster.token, store=cluster.store, loopback=True) | _outlives()),
            _session(import_ray(extra=_EXTRA), cluster) as session,
        ):
            yield session
    finally:
        cluster.remove()


@contextmanager
def _session(ray: Any, cluster: Cluster) -> Iterator[RaySession]:
    # Ray prints a message about a dead process by this function, which it looks up as it connects.
    ray._private.worker.print_to_stdstream = _log_lines
    session = RaySession(ray, cluster)
    try:
        session.open()
        yield session
    finally:
        session.close()


class JoinedCluster:
    """The running cluster at `address` (`Cluster`), whose head runs on this machine."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._raylet: tuple[str, int] | None = None
        self._stale = False

    def connect(self, ray: Any) -> None:
        """Connect. Raises `UsageError` if nothing answers or the token is refused."""
        connect_ray(
            self._address,
            namespace=NAMESPACE,
            cluster=_CLUSTER,
            extra=_EXTRA,
            hint=_HINT,
            refused="use the head's token (and its TLS files), on a machine of the swarm",
        )
        mine = ray.get_runtime_context().get_node_id()
        (member,) = [node for node in ray.nodes() if node["NodeID"] == mine]
        self._raylet = member["NodeManagerAddress"], member["NodeManagerPort"]
        self._stale = False

    def disconnect(self, ray: Any) -> None:
        """Disconnect; the hosts continue."""
        ray.shutdown()

    def failure(self) -> RayFailure | None:
        """The failure of the head or of Ray on this machine, if one refuses connections."""
        host, _, port = self._address.rpartition(":")
        # Remembered: the next raylet may take the same port, and does not know this process.
        self._stale |= self._raylet is not None and not _answers(self._raylet)
        if not _answers((host, int(port))):
            return RayFailure(
                f"The head at {self._address} does not answer. Requests still go to the hosts that "
                "can be reached, but a host that fails now does not come back until the head "
                "runs again"
            )
        if self._stale:
            return RayFailure("Ray on this machine ended and has begun anew", renewable=True)
        return None


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


@contextmanager
def joined_ray(address: str, *, token: Path, tls: Tls | None = None) -> Iterator[RaySession]:
    """Join the running cluster whose head is at `address` ("10.0.0.1:6400"), as a client on a
    member.

    Raises `UsageError` if the token is missing or not private (at once), if nothing answers at the
    address, or if the cluster refuses the token.
    """
    # Checked first, because Ray tries for 20 s before it gives up.
    check_token(token)
    if tls is not None:
        check_tls(tls)
    check_answers(address)  # before the import of Ray, which takes a second
    with (
        _set(environment(token, tls=tls) | _outlives()),
        _session(import_ray(extra=_EXTRA), JoinedCluster(address)) as session,
    ):
        yield session


def check_answers(address: str) -> None:
    """Raises `UsageError` if `address` is not HOST:PORT, or no swarm's head listens there."""
    ray_cluster.check_answers(address, cluster=_CLUSTER, hint=_HINT)


def _outlives() -> dict[str, str]:
    """Environment variables of a process that survives its raylet.

    Ray ends a process whose connection breaks when its raylet is dead, and assumes that the raylet
    is its parent. A gateway whose parent is process 1, as under systemd, always looks like that.
    Raylets set the variable for the processes that they start.
    """
    return {"RAY_RAYLET_PID": str(os.getpid())}


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _log_lines(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    del ignore_prefix
    _log.debug("%s", data.get("lines"))
