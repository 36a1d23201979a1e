"""This process as a member of a Ray cluster: one of its own on this machine, or one that runs.

Both yield the module `ray`, connected, and leave nothing behind. They set the environment that Ray
reads when it is imported first, so call them before anything else imports Ray.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.ray_config import (
    CALL_CONFIG,
    LOOPBACK,
    NAMESPACE,
    STORE_BYTES,
    Tls,
    check_tls,
    check_token,
    environment,
    host_resources,
    new_token,
)

_CONNECT_SECONDS = 5.0
_log = logging.getLogger(__name__)
_INSTALL = "pip install 'layershuffle[swarm]', on all machines"


@contextmanager
def local_ray(names: Sequence[str], *, threads: int = 1) -> Iterator[Any]:
    """A cluster of this process's own for the block hosts `names`, on 127.0.0.1 alone.

    It has a token of its own, and ends with this process however that ends. Raises `UsageError` if
    Ray is not installed, `LayerShuffleError` if it does not start.
    """
    directory = Path(tempfile.mkdtemp(prefix="ls-"))  # short: sockets lie below it; mode 0700
    token = directory / "token"
    new_token(token)
    try:
        with _set(environment(token, threads=threads, loopback=True)):
            ray = _imported()
            try:
                _start(ray, directory / "ray", names)
                yield ray
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _start(ray: Any, directory: Path, names: Sequence[str]) -> None:
    with _Started(directory):
        ray.init(
            num_cpus=0,
            num_gpus=0,
            resources=host_resources(names),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace=NAMESPACE,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(directory),
            _system_config=dict(CALL_CONFIG),
        )
    address = ray.nodes()[0]["NodeManagerAddress"]
    if address != LOOPBACK:
        raise LayerShuffleError(
            f"Ray listens on {address}, not on this machine alone: it was imported before",
            hint="start the local swarm in a process of its own",
        )


class _Started:
    """Says in one paragraph why Ray does not start.

    Ray raises a plain `Exception` where its processes need more than 30 seconds, and gives no other
    way to tell that from the rest.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, Exception):
            raise LayerShuffleError(
                f"Ray does not start ({_words(error)})",
                place=self._directory,
                hint="if this machine is busy, wait until it is less so, then try again",
            ) from error


@contextmanager
def joined_ray(address: str, *, token: Path, tls: Tls | None = None) -> Iterator[Any]:
    """The running cluster whose head is at `address` ("10.0.0.1:6400"), as a client on a member.

    Raises `UsageError` if the token is missing or not private (at once), if nothing answers there,
    or if the cluster does not take the token.
    """
    check_token(token)
    if tls is not None:
        check_tls(tls)
    check_answers(address)
    with _set(environment(token, tls=tls)):
        ray = _imported()
        try:
            # Ray's own way in tries a wrong token for 20 seconds.
            ray._raylet.GcsClient(address=address)
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=NAMESPACE,
            )
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise UsageError(
                f"The swarm's head does not let this client in ({_words(error)})",
                place=address,
                hint="use the head's token (and its TLS files), on a machine of the swarm",
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def check_answers(address: str) -> None:
    """Raises `UsageError` if `address` is not HOST:PORT, or nothing listens there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{address!r} is no address", hint="give HOST:PORT, as 10.0.0.1:6400")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        # Ray ends the whole process where nothing listens, without an exception.
        raise UsageError(
            f"No swarm answers at {address} ({_words(error)})",
            hint="start one with `layershuffle swarm head`, or check the address",
        ) from error


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


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError("Ray is not installed", hint=_INSTALL) from error
    # Else a paragraph lands on standard output whenever a host's process dies.
    ray._private.worker.print_to_stdstream = _noted
    return ray


def _noted(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    del ignore_prefix
    _log.debug("%s", data.get("lines"))


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
