"""A connection to a Ray cluster that runs: studies and swarms both take it from here."""

from __future__ import annotations

import logging
import socket
from typing import Any

from layershuffle.errors import UsageError
from layershuffle.extras import require
from layershuffle.text import one_line

_CONNECT_SECONDS = 5.0


def import_ray(*, extra: str) -> Any:
    """The module `ray`. Raises `UsageError` if it is not installed; `extra` brings it."""
    require(extra, "ray")

    import ray

    return ray


def check_answers(address: str, *, cluster: str, hint: str) -> None:
    """Raises `UsageError` if nothing listens at `address` (HOST:PORT). `cluster`: what should."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{address!r} is no address", hint="give HOST:PORT, as 10.0.0.1:6400")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    # OverflowError: a port above 65535.
    except (OSError, OverflowError) as error:
        # Ray ends the whole process where nothing listens, without an exception.
        raise UsageError(
            f"No {cluster} answers at {address!r} ({one_line(error)})", hint=hint
        ) from error


def init_ray(ray: Any, address: str, *, namespace: str) -> None:
    """Connect the module `ray` to the cluster at `address`; the logs of its workers stay there.

    Raises whatever Ray does.
    """
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=namespace)


def connect_ray(
    address: str, *, namespace: str, cluster: str, extra: str, hint: str, refused: str = ""
) -> Any:
    """The module `ray`, connected to the cluster at `address`.

    `address`: HOST:PORT, or "auto" for the cluster that this machine is a member of. `cluster` and
    `hint` are for messages: what should answer there, and what to do if it does not; `refused`:
    what to do if it refuses the connection. Raises `UsageError` if Ray is not installed, if nothing
    answers, or if the cluster does not take this client's token.
    """
    ray = import_ray(extra=extra)
    fixed = address.rpartition(":")[2].isdecimal()
    if fixed:
        check_answers(address, cluster=cluster, hint=hint)
    try:
        if fixed:
            # Ray's own way in tries a wrong token for 20 seconds; this asks once.
            ray._raylet.GcsClient(address=address)
        init_ray(ray, address, namespace=namespace)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UsageError(
            f"The {cluster} at {address!r} does not let this client in ({one_line(error)})"
            if fixed
            else f"No {cluster} answers at {address!r} ({one_line(error)})",
            hint=refused if fixed and refused else hint,
        ) from error
    return ray
