"""Run tasks on a Ray cluster (`--ray auto|ADDRESS`), one task per Ray worker.

The plan, the files and the worker are the same as on one machine. The study's directory must lie on
a disk that all machines share: runs resume from their checkpoints there, and merges read the models
of other tasks. That is checked before anything starts.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layershuffle.errors import UsageError
from layershuffle.files import write_text
from layershuffle.ray_cluster import connect_ray
from layershuffle.study.plan import FAILURE_FILE, RESULT_FILE, Task
from layershuffle.study.pool import LOG_FILE, STOP_SECONDS, fresh_directory, start_worker
from layershuffle.study.runner import MakePool
from layershuffle.study.settings import StudySettings
from layershuffle.text import one_line

_PROOF_FILE = ".shared-disk"
# The exit code of `Interrupted`.
_STOPPED = 143
_LOST = 1
# A network disk may show a file of another machine late.
_FIND_SECONDS = 60.0
# Each retry resumes from the last checkpoint, so five lost machines cost little.
_RETRIES = 5


def ray_pool(address: str) -> MakePool:
    """A function that makes pools on the cluster at `address` ("auto": that of this machine).

    Raises `UsageError` if Ray is not installed, the cluster does not answer, or one of its machines
    does not see the study's directory.
    """

    def make(study: StudySettings, out: Path) -> tuple[RayPool, int]:
        ray = connect_ray(
            address,
            namespace="layershuffle",
            cluster="Ray cluster",
            extra="ray",
            hint="start one with `ray start --head`, or leave --ray out",
        )
        check_shared(ray, out.absolute())
        gpus = int(ray.cluster_resources().get("GPU", 0))
        cpus = int(ray.cluster_resources().get("CPU", 1))
        pool = RayPool(ray, out.absolute(), gpus=gpus)
        return pool, study.workers or gpus or cpus

    return make


def check_shared(ray: Any, out: Path) -> None:
    """Raises `UsageError` if some machines of the cluster do not see `out`, and names them."""
    # The content is compared: another machine may have a directory of this name with an old file.
    proof, word = out / _PROOF_FILE, f"{platform.node()} {os.getpid()}"
    out.mkdir(parents=True, exist_ok=True)
    write_text(proof, word)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    try:
        blind = [
            node["NodeManagerAddress"] for node in nodes if _seen(ray, node, proof=proof) != word
        ]
    finally:
        proof.unlink()
    if blind:
        raise UsageError(
            f"The study's directory is not on a disk shared with {', '.join(blind)}",
            place=out,
            hint="give an --out on a network disk that all machines of the cluster mount",
        )


def _seen(ray: Any, node: Mapping[str, Any], *, proof: Path) -> str:
    # Hard affinity, or Ray would run the check on any machine.
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        node["NodeID"], soft=False
    )
    # It reserves no CPU, or the check would wait on a busy cluster.
    see = ray.remote(num_cpus=0, scheduling_strategy=strategy)(_sees)
    try:
        return str(ray.get(see.remote(str(proof)), timeout=_FIND_SECONDS))
    except ray.exceptions.RayError as error:
        raise UsageError(
            f"A machine of the cluster does not work ({one_line(error, limit=200)})",
            place=node["NodeManagerAddress"],
            hint="install the same layershuffle there, or take it out of the cluster",
        ) from error


def _sees(proof: str) -> str:
    path = Path(proof)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@dataclass
class RayPool:
    """Tasks of one study on a cluster; each takes one CPU, and one GPU if the cluster has any."""

    ray: Any
    out: Path
    gpus: int
    references: dict[str, Any] = field(default_factory=dict)
    directories: dict[str, Path] = field(default_factory=dict)

    @property
    def running(self) -> Collection[str]:
        """Names of the tasks that run or wait for resources of the cluster."""
        return self.references.keys()

    def start(self, task: Task) -> None:
        """Submit `task` to the cluster."""
        self.directories[task.name] = fresh_directory(task, self.out)
        log = self.directories[task.name] / LOG_FILE
        work = self.ray.remote(
            num_cpus=1,
            num_gpus=1 if self.gpus else 0,
            max_retries=_RETRIES,  # on another machine if one dies, from the last checkpoint
        )(_work)
        # Ray reserves one CPU for the task, but torch would use all CPUs of the machine.
        threads = None if self.gpus else 1
        self.references[task.name] = work.remote(str(self.out), task.name, str(log), threads)

    def reap(self) -> dict[str, int]:
        """Exit codes of the tasks that ended since the last call."""
        if not self.references:
            return {}
        names = {reference: name for name, reference in self.references.items()}
        # With a time-out of 0 it does not wait: the runner calls it again.
        ended, _ = self.ray.wait(list(names), num_returns=len(names), timeout=0)
        codes = {names[reference]: self._code(reference, names[reference]) for reference in ended}
        for name in codes:
            del self.references[name]
        return codes

    def _code(self, reference: Any, name: str) -> int:
        try:
            code = int(self.ray.get(reference))
        except self.ray.exceptions.TaskCancelledError:
            return _STOPPED
        except self.ray.exceptions.RayError as error:
            write_text(self.directories[name] / FAILURE_FILE, f"{type(error).__name__}: {error}\n")
            return _LOST
        if code == 0:
            self._wait_for_result(name)
        return code

    def _wait_for_result(self, name: str) -> None:
        """Wait for the result, which a network disk may show some seconds after it was written."""
        deadline = time.monotonic() + _FIND_SECONDS
        path = self.directories[name] / RESULT_FILE
        while not path.is_file() and time.monotonic() < deadline:
            os.listdir(path.parent)  # makes NFS look again
            time.sleep(0.2)

    def stop(self) -> None:
        """Cancel all tasks: each worker gets SIGTERM, and saves a checkpoint."""
        for reference in self.references.values():
            self.ray.cancel(reference)
        if self.references:
            running = list(self.references.values())
            self.ray.wait(running, num_returns=len(running), timeout=STOP_SECONDS)
        self.references.clear()
        self.ray.shutdown()


def _work(out: str, name: str, log: str, threads: int | None) -> int:
    """Run one task on the cluster in its own process, which ends with this one."""
    process = start_worker(Path(out), name, log=Path(log), threads=threads)
    try:
        return process.wait()
    except KeyboardInterrupt:  # how Ray cancels a task
        process.terminate()
        return process.wait()
