"""Where tasks run: a Ray cluster (`--ray auto|ADDRESS`), one task per Ray worker.

The plan, the files and the worker are the same as on one machine. The study's directory must lie on
a disk that all machines share: runs resume from their checkpoints there, and merges read the models
of other tasks. That is checked before anything starts.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layershuffle.errors import UsageError
from layershuffle.files import write_text
from layershuffle.study.plan import Task
from layershuffle.study.pool import LOG_FILE, STOP_SECONDS, fresh_directory, worker_command
from layershuffle.study.runner import MakePool
from layershuffle.study.settings import StudySettings

_PROOF_FILE = ".shared-disk"
_STOPPED = 143
_LOST = 1
_FIND_SECONDS = 60.0


def ray_pool(address: str) -> MakePool:
    """A maker of pools on the cluster at `address` ("auto": the one that this machine is in).

    Raises `UsageError` if Ray is not installed, the cluster does not answer, or one of its machines
    does not see the study's directory.
    """

    def make(study: StudySettings, out: Path) -> tuple[RayPool, int]:
        ray = _connected(address)
        check_shared(ray, out.absolute())
        gpus = int(ray.cluster_resources().get("GPU", 0))
        cpus = int(ray.cluster_resources().get("CPU", 1))
        pool = RayPool(ray, out.absolute(), gpus=gpus)
        return pool, study.workers or gpus or cpus

    return make


def _connected(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "Ray is not installed", hint="pip install 'layershuffle[ray]', on all machines"
        ) from error
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="layershuffle",
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"No Ray cluster answers at {address!r} ({' '.join(str(error).split())[:200]})",
            hint="start one with `ray start --head`, or leave --ray out",
        ) from error
    return ray


def check_shared(ray: Any, out: Path) -> None:
    """Raises `UsageError` naming the machines of the cluster that do not see `out`."""
    proof = out / _PROOF_FILE
    out.mkdir(parents=True, exist_ok=True)
    write_text(proof, str(os.getpid()))
    blind = []
    for node in (one for one in ray.nodes() if one["Alive"]):
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node["NodeID"], soft=False
        )
        see = ray.remote(num_cpus=0, scheduling_strategy=strategy)(_sees)
        if ray.get(see.remote(str(proof)), timeout=_FIND_SECONDS) != str(os.getpid()):
            blind.append(node["NodeManagerAddress"])
    proof.unlink()
    if blind:
        raise UsageError(
            f"The study's directory is not on a disk shared with {', '.join(blind)}",
            place=out,
            hint="give an --out on a network disk that all machines of the cluster mount",
        )


def _sees(proof: str) -> str:
    path = Path(proof)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@dataclass
class RayPool:
    """Tasks of one study on a cluster; each takes one CPU, and one GPU where there are any."""

    ray: Any
    out: Path
    gpus: int
    references: dict[str, Any] = field(default_factory=dict)

    @property
    def running(self) -> Collection[str]:
        """Names of the tasks that run or wait for a place on the cluster."""
        return self.references.keys()

    def start(self, task: Task) -> None:
        """Give `task` to the cluster."""
        log = fresh_directory(task, self.out) / LOG_FILE
        work = self.ray.remote(
            num_cpus=1,
            num_gpus=1 if self.gpus else 0,
            max_retries=-1,  # a machine that dies loses its tasks; they go on from checkpoints
        )(_work)
        self.references[task.name] = work.remote(str(self.out), task.name, str(log))

    def reap(self) -> dict[str, int]:
        """Exit codes of the tasks that ended since the last call."""
        if not self.references:
            return {}
        names = {reference: name for name, reference in self.references.items()}
        ended, _ = self.ray.wait(list(names), num_returns=len(names), timeout=0)
        codes = {names[reference]: self._code(reference) for reference in ended}
        for name in codes:
            del self.references[name]
        return codes

    def _code(self, reference: Any) -> int:
        try:
            return int(self.ray.get(reference))
        except self.ray.exceptions.TaskCancelledError:
            return _STOPPED
        except self.ray.exceptions.RayError as error:
            del error  # the worker's own log says more; the task counts as failed
            return _LOST

    def stop(self) -> None:
        """Cancel all: each worker gets SIGTERM, and saves a checkpoint."""
        for reference in self.references.values():
            self.ray.cancel(reference)
        if self.references:
            running = list(self.references.values())
            self.ray.wait(running, num_returns=len(running), timeout=STOP_SECONDS)
        self.references.clear()
        self.ray.shutdown()


def _work(out: str, name: str, log: str) -> int:
    """On the cluster: one task in a process of its own, which ends with this one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Path(log).open("ab") as file:
        process = subprocess.Popen(
            worker_command(Path(out), name),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            return process.wait()
        except KeyboardInterrupt:  # how Ray cancels a task
            process.terminate()
            return process.wait()
