"""The workers of a study on the machines of a Ray cluster (`--ray auto|ADDRESS`).

Ray starts them and nothing else: they share the tasks as all workers do, by locks in the study's
directory, which must lie on a disk that all machines have.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layershuffle.errors import UsageError
from layershuffle.extras import require
from layershuffle.study.runner import STOP_SECONDS, LocalTeam, MakeTeam
from layershuffle.study.tasks import AnyTask
from layershuffle.text import one_line

_ANSWER_SECONDS = 5.0


def ray_team(address: str) -> MakeTeam:
    """What starts workers on the cluster at `address` ("auto": the one of this machine).

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

    class RayTeam:
        def __init__(self, out: Path, tasks: Sequence[AnyTask], count: int | None) -> None:
            gpus = int(ray.cluster_resources().get("GPU", 0))
            room = gpus or int(ray.cluster_resources().get("CPU", 1))
            # A worker whose machine dies starts again on another one.
            work = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=-1)(_work)
            number = min(count or room, len(tasks))
            self.workers = [work.remote(out.absolute(), list(tasks)) for _ in range(number)]

        def is_working(self) -> bool:
            ended, _ = ray.wait(self.workers, num_returns=len(self.workers), timeout=0)
            ray.get(ended)  # raises what a worker did
            return len(ended) < len(self.workers)

        def stop(self) -> None:
            for worker in self.workers:
                ray.cancel(worker)
            ray.wait(self.workers, num_returns=len(self.workers), timeout=STOP_SECONDS)
            ray.shutdown()

    return RayTeam


def _work(out: Path, tasks: list[Any]) -> None:
    """Keep one worker on the tasks of a study until none is left."""
    team = LocalTeam(out, tasks, 1)
    try:
        while team.is_working():
            time.sleep(1)
    finally:  # Ray cancels by KeyboardInterrupt
        team.stop()
