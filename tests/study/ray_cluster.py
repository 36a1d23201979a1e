"""Run a study on a local two-node Ray cluster: `python ray_cluster.py RECIPE OUT [kill]`.

A program of its own, because Ray leaves threads and handlers in the process that starts it. With
"kill" the second node dies while it trains; its run must go on elsewhere.
"""

import sys
import threading
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from layershuffle.cli import main


def kill_when_training(cluster, node, out):
    """Take the node down without a word as soon as two runs train, one of them on it."""
    deadline = time.monotonic() + 120
    while len(list(out.glob("runs/*/progress.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)
    print("node killed", flush=True)


def run(recipe, out, kill):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        second = cluster.add_node(num_cpus=1, num_gpus=0)
        cluster.wait_for_nodes()
        if kill:
            threading.Thread(
                target=kill_when_training, args=(cluster, second, Path(out)), daemon=True
            ).start()
        return main(["reproduce", recipe, "--out", out, "--ray", cluster.address])
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], kill="kill" in sys.argv[3:]))
