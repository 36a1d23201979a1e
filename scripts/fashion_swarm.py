"""Ask a swarm for 1,000 test images of Fashion-MNIST while its hosts leave, three blocks each.

    layershuffle export RUN --out int8 --precision int8
    python scripts/fashion_swarm.py int8 data/fashion-dinov2/data/test.parquet

Writes docs/results/tables/fashion-dinov2-swarm.csv: with 4, 2 and 1 of four hosts the share of
right answers, blocks and visits of an answer, and how long a request takes.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pyarrow.parquet

from layershuffle.gateway.client.client import SwarmClient
from layershuffle.models.manifest import read_manifest

OUT = Path(__file__).resolve().parent.parent / "docs/results/tables/fashion-dinov2-swarm.csv"
COLUMNS = ("hosts", "images", "top1", "blocks", "visits", "half_ms", "most_ms")
IMAGES = 1000
HOSTS = 4
PORT = 8155
COMMAND = (sys.executable, "-m", "layershuffle", "swarm")


def room_of(model: Path) -> float:
    """Memory of a host in MB: a quarter of the blocks, so that it takes over no others."""
    manifest = read_manifest(model)
    largest = max(manifest.files[block.weights].bytes for block in manifest.blocks)
    return (len(manifest.blocks) / HOSTS + 0.5) * largest / 1e6


def measure(swarm: SwarmClient, rows: list[dict[str, Any]], alive: int) -> list[object]:
    """A line of the table: all images, one after the other, with `alive` hosts."""
    answers = [swarm.classify(row["image"]["bytes"], confidence="off") for row in rows]
    right = sum(a.top[0].index == row["label"] for a, row in zip(answers, rows, strict=True))
    took = [answer.ms.total for answer in answers]
    blocks = sum(len(answer.blocks) for answer in answers)
    visits = sum(len(answer.route) for answer in answers)
    return [
        alive,
        IMAGES,
        f"{100 * right / IMAGES:.1f}",
        f"{blocks / IMAGES:.2f}",
        f"{visits / IMAGES:.2f}",
        f"{median(took):.1f}",
        f"{quantiles(took, n=100)[98]:.1f}",
    ]


def main(model: Path, images: Path) -> None:
    """Start the swarm, let its hosts leave one after the other, and write the table."""
    rows = pyarrow.parquet.read_table(images).slice(0, IMAGES).to_pylist()
    lines: list[list[object]] = []
    with tempfile.TemporaryDirectory() as state:
        words = ["--hosts", str(HOSTS), "--copies", "1", "--memory-mb", str(room_of(model))]
        up = [*COMMAND, "up", "--model", str(model), *words, "--port", str(PORT), "--state", state]
        serving = subprocess.Popen(up, stdout=subprocess.PIPE, text=True)
        assert serving.stdout is not None
        try:
            for line in serving.stdout:
                print(line, end="")
                if "It answers at" in line:
                    break
            else:
                sys.exit("The swarm did not start; its reason stands above.")
            with SwarmClient(f"http://127.0.0.1:{PORT}") as swarm:
                for alive in range(HOSTS, 0, -1):
                    if alive < HOSTS:
                        leaver = f"host-{alive + 1}"
                        subprocess.run([*COMMAND, "drain", leaver, "--state", state], check=True)
                    if alive != 3:
                        lines.append(measure(swarm, rows, alive))
        finally:
            serving.terminate()
            serving.wait()
    with OUT.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
