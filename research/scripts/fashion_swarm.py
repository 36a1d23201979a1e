"""Ask a swarm for 1,000 test images of Fashion-MNIST while its hosts leave, three blocks each.

    layershuffle export RUN --out int8 --precision int8
    python research/scripts/fashion_swarm.py int8 data/fashion-dinov2/data/test.parquet

Writes docs/results/tables/fashion-dinov2-swarm.csv: with 4, 2 and 1 of four hosts the share of right
answers, blocks and visits of an answer, and how long a request takes.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

import pyarrow.parquet

from layershuffle.manifest import read_manifest
from layershuffle.swarm.client import SwarmClient

OUT = Path(__file__).resolve().parents[2] / "docs/results/tables/fashion-dinov2-swarm.csv"
IMAGES, HOSTS = 1000, 4
model, images = map(Path, sys.argv[1:])
manifest = read_manifest(model)
rows = pyarrow.parquet.read_table(images).slice(0, IMAGES).to_pylist()
# Room for a quarter of the blocks, so that no host takes over those of another.
block = max(manifest.files[each.weights].bytes for each in manifest.blocks)
room = (len(manifest.blocks) / HOSTS + 0.5) * block / 1e6
ours = [sys.executable, "-m", "layershuffle", "swarm"]

with tempfile.TemporaryDirectory() as state, OUT.open("w", newline="") as file:
    words = ["--hosts", str(HOSTS), "--copies", "1", "--memory-mb", str(room), "--port", "8155"]
    up = [*ours, "up", "--model", str(model), *words, "--state", state]
    serving = subprocess.Popen(up, stdout=subprocess.PIPE, text=True)
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["hosts", "images", "top1", "blocks", "visits", "half_ms", "most_ms"])
    try:
        while "It answers at" not in (line := serving.stdout.readline()):
            print(line, end="")
        with SwarmClient("http://127.0.0.1:8155") as swarm:
            for alive in range(HOSTS, 0, -1):
                if alive < HOSTS:
                    leaver = f"host-{alive + 1}"
                    subprocess.run([*ours, "drain", leaver, "--state", state], check=True)
                if alive == 3:
                    continue
                answers = [swarm.classify(row["image"]["bytes"], confidence="off") for row in rows]
                right = sum(a.top[0].index == row["label"] for a, row in zip(answers, rows))
                took = [answer.ms.total for answer in answers]
                blocks = [len(answer.blocks) for answer in answers]
                visits = [len(answer.route) for answer in answers]
                print(f"{alive} hosts: {min(blocks)} to {max(blocks)} blocks", flush=True)
                table.writerow([
                    alive, IMAGES, f"{100 * right / IMAGES:.1f}", f"{sum(blocks) / IMAGES:.2f}",
                    f"{sum(visits) / IMAGES:.2f}", f"{median(took):.1f}", f"{quantiles(took, n=100)[98]:.1f}",
                ])
    finally:
        serving.terminate()
        serving.wait()
