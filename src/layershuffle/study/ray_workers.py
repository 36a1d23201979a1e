"""The workers of a study on the machines of a Ray cluster (`--ray auto|ADDRESS`).

Ray starts them and nothing else: they share the tasks as all workers do, by locks in the study's
directory, which must lie on a disk that all machines have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layershuffle.ground.ray_cluster import connected_ray
from layershuffle.study.runner import STOP_SECONDS, LocalTeam, MakeTeam
from layershuffle.study.tasks import AnyTask


def ray_team(address: str) -> MakeTeam:
    """What starts workers on the cluster at `address` ("auto": the one of this machine).

    Raises `UsageError` if Ray is not installed or no cluster answers.
    """
    ray = connected_ray(address)

    class RayTeam:
        """A `Team` of Ray tasks, each of which keeps one worker process on its machine."""

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
