"""Run a study on a local Ray cluster that loses a node: `python ray_cluster.py RECIPE OUT`.

A separate program, because Ray leaves threads and handlers in the process that starts it. The
node that trains dies; its run must go on elsewhere.
"""

import contextlib
import sys
import threading
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from layershuffle.cli import main


def kill_when_training(cluster, nodes, out):
    """Kill the node whose run trains."""
    deadline = time.monotonic() + 600
    while not (busy := [node for node in nodes if trains(node, out)]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    cluster.remove_node(busy[0], allow_graceful=False)
    print("node killed", flush=True)


def trains(node, out):
    """Whether a run of this node has taken a step."""
    (raylet,) = node.all_processes["raylet"]
    return any((out / "runs" / task / "progress.json").exists() for task in tasks_of(raylet))


def tasks_of(raylet):
    """Names of the tasks whose processes descend from a node's raylet."""
    waiting, tasks = [raylet.process.pid], []
    while waiting:
        place = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            waiting += (place / "task" / place.name / "children").read_text().split()
            words = (place / "cmdline").read_text().split("\0")
            tasks += [words[-2]] if "layershuffle.study.worker" in words else []
    return tasks


def run(recipe, out):
    # No dashboard, because its server takes as long to start as the rest of the head.
    # Without a CPU, no task goes to the head, which has to stay.
    # Nor does anybody read logs of a cluster that grows by itself.
    bare = {"include_log_monitor": False, "no_monitor": True, "num_gpus": 0}
    head = {"num_cpus": 0, "include_dashboard": False, **bare}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=1, **bare) for _ in range(2)]
        cluster.wait_for_nodes()
        threading.Thread(
            target=kill_when_training, args=(cluster, nodes, Path(out)), daemon=True
        ).start()
        return main(["reproduce", recipe, "--out", out, "--ray", cluster.address])
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2]))
