"""This process as a member of a Ray cluster: one of its own on this machine, or one that runs.

Both yield the module `ray`, connected, and leave nothing behind. They set the environment that Ray
reads when it is imported first, so call them before anything else imports Ray.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layershuffle import ray_cluster
from layershuffle.errors import LayerShuffleError
from layershuffle.ray_cluster import connect_ray, import_ray
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
from layershuffle.text import one_line

_CLUSTER, _EXTRA = "swarm", "swarm"
_HINT = "start one with `layershuffle swarm head`, or check the address"
_log = logging.getLogger(__name__)


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
        # Ray reads these variables once, when it is imported.
        with _set(environment(token, threads=threads, loopback=True)):
            ray = import_ray(extra=_EXTRA)
            _log_dead_hosts(ray)
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
            # With processors to offer, Ray would start idle workers in advance, one per core.
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
    # If Ray was imported earlier, it has not seen `loopback` and listens on other addresses too.
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
                f"Ray does not start ({one_line(error)})",
                place=self._directory,
                hint="if this machine is busy, wait until it is less so, then try again",
            ) from error


@contextmanager
def joined_ray(address: str, *, token: Path, tls: Tls | None = None) -> Iterator[Any]:
    """The running cluster whose head is at `address` ("10.0.0.1:6400"), as a client on a member.

    Raises `UsageError` if the token is missing or not private (at once), if nothing answers there,
    or if the cluster does not take the token.
    """
    # Before Ray sees it: with a wrong token Ray tries for 20 s before it gives up.
    check_token(token)
    if tls is not None:
        check_tls(tls)
    check_answers(address)  # before anything of Ray is imported, which takes a second
    with _set(environment(token, tls=tls)):
        _log_dead_hosts(import_ray(extra=_EXTRA))
        ray = connect_ray(
            address,
            namespace=NAMESPACE,
            cluster=_CLUSTER,
            extra=_EXTRA,
            hint=_HINT,
            refused="use the head's token (and its TLS files), on a machine of the swarm",
        )
        try:
            yield ray
        finally:
            ray.shutdown()


def check_answers(address: str) -> None:
    """Raises `UsageError` if `address` is not HOST:PORT, or no swarm's head listens there."""
    ray_cluster.check_answers(address, cluster=_CLUSTER, hint=_HINT)


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


def _log_dead_hosts(ray: Any) -> None:
    """Ray's paragraph about a process that died goes to the log, not to standard output.

    To be called before Ray connects, which is when it looks the function up.
    """
    ray._private.worker.print_to_stdstream = _log_lines


def _log_lines(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    del ignore_prefix
    _log.debug("%s", data.get("lines"))
