"""A connection to a Ray cluster that runs: studies and swarms both take it from here."""

from __future__ import annotations

import logging
import socket
from typing import Any

from layershuffle.ground.errors import UsageError
from layershuffle.ground.extras import require
from layershuffle.ground.text import one_line

_ANSWER_SECONDS = 5.0


def connected_ray(address: str) -> Any:
    """The module `ray`, connected to the cluster at `address` ("auto": the one of this machine).

    Raises `UsageError` if Ray is not installed or no cluster answers.
    """
    require("ray")

    import ray

    try:
        if address != "auto":
            # Ray ends the whole process where nothing listens, without an exception.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, OverflowError, ConnectionError, RuntimeError) as error:
        raise UsageError(
            f"No Ray cluster answers at {address!r} ({one_line(error)})",
            hint="start one with `ray start --head`, or leave --ray out",
        ) from error
    return ray
