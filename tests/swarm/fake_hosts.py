"""Hosts that compute by a formula in virtual time, for tests of the health monitor."""

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from layershuffle.swarm.health import Reference
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, HostGone, HostUnavailable

DEPTH = 4
START = np.ones((1, 2, 3), np.float32)
QUICK = Limits(suspect_ms=20, canary_every_ms=60, probe_ms=200, hop_floor_ms=60, audit_share=0.0)


def computed(start, blocks, weights):
    for block in blocks:
        start = 2 * start + (10 * weights[block] + block)
    return start.astype(np.float32)


async def _compute(block, weight, state):
    await asyncio.sleep(0)
    return computed(state, [block], {block: weight})


def references_of(weight, blocks):
    """What hosts with these blocks should answer; the weights are digits."""
    return {
        block: Reference(START, partial(_compute, block, weight), f"{weight} {block}")
        for block in blocks
    }


@dataclass
class Fake:
    """One process: weights by block, and its faults.

    `wrong`: all answers are false. `lies`: so often (0 to 1) those to requests are, and canaries
    are answered rightly, as if it knew them.
    """

    weights: dict = field(default_factory=dict)
    wrong: bool = False
    lies: float = 0.0
    dead: bool = False
    thawed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeHosts:
    """Processes as objects, and their transport."""

    def __init__(self):
        self.processes, self.chance = {}, random.Random(0)

    def add(self, name, blocks, weight=1):
        self.processes[name] = Fake(dict.fromkeys(blocks, weight))
        self.processes[name].thawed.set()

    def freeze(self, name):
        self.processes[name].thawed.clear()

    def thaw(self, name):
        self.processes[name].thawed.set()

    async def visit(self, visit, state, *, form="fp32"):
        process = self.processes[visit.host]
        await process.thawed.wait()
        if process.dead:
            raise HostGone("its process is dead")
        if visit.block not in process.weights:
            raise HostUnavailable("not held")
        await asyncio.sleep(0.001)  # else the clock would stand still while requests go on
        after = computed(state, [visit.block], process.weights)
        # Only the router says how long its request has left: a hint that no real host gets.
        asked = visit.budget is not None
        wrong = process.wrong or (asked and self.chance.random() < process.lies)
        return Answer(after * np.float32(1.5 if wrong else 1), 0.1, 0.0)


def answer_of(order, weights=(1, 1, 1, 1)):
    return computed(START, order, dict(enumerate(weights)))
