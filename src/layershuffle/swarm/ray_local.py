"""Start, watch and end Ray's own processes for a swarm on one machine, and clean up after a crash.

Two of them are essential: the GCS, which knows all members and actors, and the raylet, which starts
the block hosts. Ray's `Node` starts them, as in `ray.init`, but without three helpers: the
dashboard, which delays the start, the autoscaler's monitor, whose port is open to everybody, and
the log monitor. Heads of several machines start without them as well (`only_essentials`). See
research/decisions.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layershuffle.errors import LayerShuffleError
from layershuffle.ray_cluster import init_ray
from layershuffle.swarm.ray_config import (
    CALL_CONFIG,
    LOOPBACK,
    NAMESPACE,
    STORE_BYTES,
    host_resources,
    new_token,
)
from layershuffle.text import one_line

_PREFIX = "ls-"  # short: sockets lie below it, and their paths have at most 107 bytes
_OWNER, _TOKEN = "owner", "token"
_GCS = "gcs_server"  # Ray's name of the process
_PROCESSES = Path("/proc")
_END_SECONDS = 5.0  # a process that survives SIGKILL for longer hangs in the kernel
_POLL = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayFailure:
    """A lost part of Ray; `what` describes it in a sentence.

    `renewable`: whether a new connection restores it. `revive` restores it and keeps the existing
    connections; it may raise `LayerShuffleError`.
    """

    what: str
    renewable: bool = False
    revive: Callable[[], None] | None = None


class LocalCluster:
    """A Ray cluster for the block hosts `names`, only on 127.0.0.1, with its own token.

    Its directory is locked while this process lives, so `sweep` recognises directories of dead
    processes. Ray's processes end with the thread that called `connect`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        # Mode 0700: with the token, others could run code as this user.
        self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = _owned(self.directory)
        self.token, self.store = self.directory / _TOKEN, self.directory / "gcs"
        new_token(self.token)
        self._node: Any | None = None

    def connect(self, ray: Any) -> None:
        """Start Ray's processes and connect to them. Raises `LayerShuffleError` if they do not
        start."""
        with _started(self.directory):
            self._node = _start_node(self.directory / "ray", self._names)
            init_ray(ray, self._node.gcs_address, namespace=NAMESPACE)
        # If Ray was imported earlier, it ignores `loopback` and listens on other addresses too.
        address = ray.nodes()[0]["NodeManagerAddress"]
        if address != LOOPBACK:
            raise LayerShuffleError(
                f"Ray listens on {address}, not on this machine alone: it was imported before",
                hint="start the local swarm in a process of its own",
            )

    def failure(self) -> RayFailure | None:
        """The part of Ray that has ended by itself; `None` if none has."""
        if self._node is None:
            return RayFailure("Ray does not run", renewable=True)
        dead = dict(self._node.dead_processes())
        # `_revive` removes it before it starts a new one, which fails on a machine without free
        # memory or processes.
        if _GCS not in self._node.all_processes:
            return RayFailure(
                f"Ray's {_GCS} could not be started again; all of Ray is", renewable=True
            )
        if not dead:
            return None
        ended = " and ".join(f"{kind} (exit code {dead[kind].returncode})" for kind in sorted(dead))
        revive = self._revive if [*dead] == [_GCS] else None
        return RayFailure(
            f"Ray's {ended} ended and is started again", renewable=True, revive=revive
        )

    def _revive(self) -> None:
        """Restart the GCS at its old address, with the state in its store.

        Calls to block hosts continue meanwhile, because they do not pass through it.
        """
        node: Any = self._node
        with _started(self.directory):
            # The port that the other processes know. `start_gcs_server` insists on a fresh node.
            node._ray_params.gcs_server_port = int(node.gcs_address.rpartition(":")[2])
            del node.all_processes[_GCS]
            node._gcs_address = node._gcs_client = None
            node.start_gcs_server()

    def disconnect(self, ray: Any) -> None:
        """Disconnect, and end every process of the cluster, even those that Ray has lost."""
        ray.shutdown()
        node, self._node = self._node, None
        if node is not None:
            # A raylet that ends gracefully ends its hosts.
            node.kill_all_processes(check_alive=False, allow_graceful=True)
        end_processes(self.directory)
        # The next cluster must not find the members and actors of this one.
        shutil.rmtree(self.store, ignore_errors=True)

    def remove(self) -> None:
        """Remove the directory, after the cluster has ended."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Give up the directory's lock, as the kernel does when this process ends."""
        os.close(self._lock)


def only_essentials(parameters: Any, head: bool) -> None:
    """The `RAY_START_HOOK`, which `ray start` calls before it starts anything.

    A head opens Ray's client server if grpc is installed, and refuses its option if it is not; no
    option disables the dashboard's process. The hook also makes the command end with its raylet,
    so that a service manager restarts it.
    """
    del head  # members have neither, but a raylet
    import ray._private.node

    class MemberNode(_essential_node()):  # type: ignore[misc]
        # `ray start --block` takes exit code 0 for "stopped on purpose" and waits forever, but a
        # raylet also ends with it when one of its agents has died.
        def dead_processes(self) -> Any:
            dead = super().dead_processes()
            if dead and not any(process.returncode for _, process in dead):
                raise SystemExit(f"Ray's {dead[0][0]} ended")
            return dead

    parameters.ray_client_server_port = None
    ray._private.node.Node = MemberNode


def _essential_node() -> Any:
    from ray._private.node import Node

    class EssentialNode(Node):  # type: ignore[misc]
        # The dashboard is not used, and starting it took 5 of the 14 seconds of Ray's start.
        def start_api_server(self, **settings: Any) -> None:
            del settings

    return EssentialNode


def _start_node(directory: Path, names: Sequence[str]) -> Any:
    from ray._private.parameter import RayParams

    parameters = RayParams(
        node_ip_address=LOOPBACK,
        # Otherwise Ray would start idle workers in advance, one per core.
        num_cpus=0,
        num_gpus=0,
        resources=host_resources(names),
        object_store_memory=STORE_BYTES,
        temp_dir=str(directory),
        include_log_monitor=False,
        no_monitor=True,
        _system_config=dict(CALL_CONFIG),
    )
    return _essential_node()(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)


@contextmanager
def _started(directory: Path) -> Iterator[None]:
    """Raise errors of the start as `LayerShuffleError`.

    Ray raises a plain `Exception` if its processes need more than 30 seconds, and OSError for its
    sockets.
    """
    try:
        yield
    except Exception as error:
        raise LayerShuffleError(
            f"Ray does not start ({one_line(error)})",
            place=directory,
            hint="if this machine is busy, wait until it is less so, then try again",
        ) from error


def sweep() -> None:
    """End and remove the clusters of this user whose own process was killed."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        if _is_left_over(owner):
            directory = owner.parent
            ended = end_processes(directory)
            shutil.rmtree(directory, ignore_errors=True)
            _log.warning(
                "Cleaned up after a swarm that was killed: %s, %d process(es)", directory, ended
            )


def _is_left_over(owner: Path) -> bool:
    try:
        if owner.stat().st_uid != os.getuid():
            return False
        lock = os.open(owner, os.O_RDWR)
    except OSError:  # it was removed meanwhile
        return False
    try:
        return _locked(lock)
    finally:
        os.close(lock)


def _owned(directory: Path) -> int:
    """The file descriptor of the lock that marks `directory` as used.

    The kernel frees the lock when this process ends; Ray's processes do not inherit the file.
    """
    fresh = directory / f"{_OWNER}.new"
    lock = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)
    _locked(lock)
    # Renamed only now to the name that `sweep` looks for, so it is never found unlocked.
    fresh.rename(directory / _OWNER)
    return lock


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def end_processes(directory: Path) -> int:
    """Kill every process of the cluster that lies in `directory`; returns how many there were.

    Ray's agents and workers end by themselves when their raylet dies, but some take a minute, and
    stopped ones never end.
    """
    begun, ended = time.monotonic(), set[int]()
    while pids := set(processes_of(directory)):
        if time.monotonic() - begun > _END_SECONDS:
            _log.error("Processes of Ray cannot be killed: %s", sorted(pids))
            break
        for pid in pids - ended:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        ended |= pids
        time.sleep(_POLL)
    return len(ended)


def processes_of(directory: Path) -> Iterator[int]:
    """The processes of the cluster that lies in `directory`, without this one.

    It finds none on systems without /proc (macOS).
    """
    for path in _PROCESSES.glob("[0-9]*"):
        if (pid := int(path.name)) != os.getpid():
            # Processes of other users and zombies cannot be read.
            with suppress(OSError):
                if _belongs(path, directory):
                    yield pid


def _belongs(process: Path, directory: Path) -> bool:
    word = f"RAY_AUTH_TOKEN_PATH={directory / _TOKEN}".encode()
    if word in (process / "environ").read_bytes().split(b"\0"):
        return True
    # The long titles of block hosts overwrite their environment, but their logs are here.
    if not (process / "cmdline").read_bytes().startswith(b"ray::"):
        return False
    files = [os.readlink(link) for link in (process / "fd").iterdir()]
    return any(file.startswith(f"{directory}/") for file in files)
