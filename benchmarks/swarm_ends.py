"""Claim: two blocks in the gateway cost a request about what their two hops cost it.

A model is exported twice, with its first and its last block in stem and head and with all blocks
for the hosts, and two swarms of four hosts on this machine answer in turn. Beside whole requests,
which run all blocks and the head once: what stem and head take, because the head runs after every
block of a request that may end when it is sure.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
from _clocks import PICO, SMOKE, Effort, cpu_timed
from _harness import Claim, ClaimRow, compare, run_claim
from swarm_cost import asked, gateway_of, processor_ms, swarm_of

import layershuffle as ls
from layershuffle.core.stack import stack_of
from layershuffle.export import export_model
from layershuffle.export.graphs import BlockPrecision
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.ground.bundled import asset

VIT = "timm:vit_small_patch16_224?pretrained=false&num_classes=100"
MODELS: dict[str, tuple[str, BlockPrecision, int]] = {
    "digits, fp32": ("bundled:digits-swarm", "fp32", 40),
    "ViT-S/16, int8": (VIT, "int8", 10),
}
"""Model, precision of its blocks, and requests in a row."""
SMOKES: dict[str, tuple[str, BlockPrecision, int]] = {"smoke, fp32": (PICO, "fp32", 2)}
HOSTS = 4
WHAT = "ends in the gateway / at hosts"


def exported(spec: str, out: Path, *, precision: BlockPrecision, fixed: tuple[int, int]) -> Path:
    """The files of the model with so many ends that keep their place, in a directory in `out`."""
    place = out / f"{fixed[0]}-{fixed[1]}"
    model = ls.wrap(ls.load(spec))
    stack_of(model).fixed = fixed
    ls.save(model, place / "model")
    data = None if precision == "fp32" else "digit-pairs?test=20"
    export_model(f"dir:{place / 'model'}", place / "files", precision=precision, data=data)
    return place / "files"


def parts(name: str, ends: Path, no_ends: Path, *, effort: Effort) -> Iterator[ClaimRow]:
    """Stem and head of one image."""
    ours = ServedModel(ends)
    theirs = ServedModel(no_ends)
    view = ours.manifest.file_view
    images = np.zeros((1, view.channels, view.height, view.width), np.float32)
    state = ours.stem(images)
    yield compare(
        f"{name}: stem",
        WHAT,
        a=cpu_timed(lambda: ours.stem(images)),
        b=cpu_timed(lambda: theirs.stem(images)),
        effort=effort,
    )
    yield compare(
        f"{name}: head",
        WHAT,
        a=cpu_timed(lambda: ours.head(state)),
        b=cpu_timed(lambda: theirs.head(state)),
        effort=effort,
    )


async def requests(
    name: str, ends: Path, no_ends: Path, *, count: int, effort: Effort
) -> list[ClaimRow]:
    """Whole requests, one after the other: of all processes, and until the answer is there."""
    body = asset("digit-pair.png").read_bytes()
    spent: list[tuple[float, float]] = []
    took: list[tuple[float, float]] = []
    async with AsyncExitStack() as stack:
        sides = []
        for files in (ends, no_ends):
            swarm = await stack.enter_async_context(swarm_of(str(files), HOSTS))
            port = await stack.enter_async_context(gateway_of(*swarm))
            await asked(port, body, count=count, clients=1)  # warms it up
            sides.append((port, [os.getpid(), *swarm[0].children.pids.values()]))
        for turn in range(effort.pairs):
            cost = [0.0, 0.0]
            time = [0.0, 0.0]
            for place in (0, 1) if turn % 2 else (1, 0):
                port, pids = sides[place]
                before = processor_ms(pids)
                _, time[place] = await asked(port, body, count=count, clients=1)
                cost[place] = (processor_ms(pids) - before) / count
            spent.append((cost[0], cost[1]))
            took.append((time[0], time[1]))
    settings = {"hosts": HOSTS, "requests": count, "confidence": "off"}
    facts = {"unit": "ms", "load": os.getloadavg()[0]}
    rows = []
    for what, pairs in (("processor time of all processes", spent), ("time of a request", took)):
        rows.append(
            ClaimRow(
                name=f"{name}: {what}",
                what=WHAT,
                values=tuple(a / b for a, b in pairs),
                pairs=tuple(pairs),
                settings=settings,
                facts=facts,
            )
        )
    return rows


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Model by model."""
    for name, (spec, precision, count) in (SMOKES if effort is SMOKE else MODELS).items():
        with tempfile.TemporaryDirectory() as place:
            ends = exported(spec, Path(place), precision=precision, fixed=(1, 1))
            no_ends = exported(spec, Path(place), precision=precision, fixed=(0, 0))
            yield from parts(name, ends, no_ends, effort=effort)
            yield from asyncio.run(requests(name, ends, no_ends, count=count, effort=effort))


CLAIM = Claim(theme="swarm-ends", text=__doc__.split("\n")[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
