"""Run a study on a local Ray cluster that loses a node: `python ray_cluster.py RECIPE OUT`.

A program of its own, because Ray leaves threads and handlers in the process that starts it. The
second node dies when the study has begun to train; its run must go on elsewhere.
"""

import sys
import threading
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from layershuffle.cli import main


def kill_when_training(cluster, node, out):
    """Take the node down without a word as soon as a run trains; one of the two is on it."""
    deadline = time.monotonic() + 120
    while not list(out.glob("runs/*/progress.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)
    print("node killed", flush=True)


def run(recipe, out):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        second = cluster.add_node(num_cpus=1, num_gpus=0)
        cluster.wait_for_nodes()
        threading.Thread(
            target=kill_when_training, args=(cluster, second, Path(out)), daemon=True
        ).start()
        return main(["reproduce", recipe, "--out", out, "--ray", cluster.address])
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2]))
