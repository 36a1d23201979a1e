# Ran at commit 8550626.
"""Claim: a host that lies is out before it spoils many answers, with replicas or without."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Literal

import numpy as np
import torch
from _harness import Bound, Claim, ClaimRow, run_claim

from layershuffle.bench.timing import SMOKE, Effort
from layershuffle.core.tensors import logits_of
from layershuffle.data import DataOptions, open_data
from layershuffle.models import file_view, load
from layershuffle.models.ends import run_stem
from layershuffle.swarm.bundle import Bundle, make_bundle
from layershuffle.swarm.health import HealthMonitor, Reference
from layershuffle.swarm.messages import Answer, Packet, State, Visit, pack, unpack
from layershuffle.swarm.plan import DEFAULT_MODEL, SwarmPlan, even_plan
from layershuffle.swarm.remote_model import served_host
from layershuffle.swarm.router import Router
from layershuffle.swarm.simulation.clock import VirtualTimeLoop
from layershuffle.swarm.state import HostView, Swarm

DEPTH, HOSTS, CLIENTS, IMAGES, LIAR = 12, 6, 4, 200, "host-4"
MOST = 3000
SEEDS = 10
HONEST = 200
PASSED = 100  # audits after which a host is audited as little as any
NOISE = 0.01  # of the spread of a state
Falsehood = Literal["-x", "noise", "another's"]


@dataclass(frozen=True)
class Lie:
    """A way to lie: what is answered, in which share of the visits, and in canaries too or not.

    `within`: requests that it may last. `steady`: the hosts passed `PASSED` audits before, so that
    2 % of the visits are audited, and the liar answered `HONEST` visits rightly.
    """

    share: float
    within: float
    answer: Falsehood = "-x"
    canaries: bool = False
    steady: bool = False


LIES = {
    "new process: every answer is -x": Lie(1.0, 200, canaries=True),
    "new process: every answer but canaries is -x": Lie(1.0, 200),
    "new process: 1 % of the answers are -x": Lie(0.01, 3000),
    "old process: every answer is -x": Lie(1.0, 200, steady=True),
    "old process: every answer is another image's": Lie(1.0, 200, "another's", steady=True),
    "old process: every answer has 1 % noise": Lie(1.0, 200, "noise", steady=True),
    "old process: 1 % of the answers are -x": Lie(0.01, 3000, steady=True),
    "old process: 1 % are another image's": Lie(0.01, 3000, "another's", steady=True),
}


class LyingHosts:
    """A transport of hosts that compute the model's blocks; `LIAR` lies after `honest` visits."""

    def __init__(self, bundle: Bundle, lie: Lie, *, honest: int, seed: int) -> None:
        self._bundle, self._lie, self._honest = bundle, lie, honest
        self._chance = np.random.default_rng((seed, 1))
        self._last: State | None = None
        self.visits = self.own_visits = self.lies = 0

    @property
    def lying(self) -> bool:
        """Whether the liar has begun to lie."""
        return self.own_visits >= self._honest

    async def visit(self, visit: Visit, packet: Packet) -> Answer:
        """The answer after a millisecond per block."""
        await asyncio.sleep(0.001 * len(visit.blocks))
        after = unpack(packet)
        for block in visit.blocks:
            after = self._bundle.compute(block, after)
        canary = visit.budget is None  # only visits of requests have one
        self.visits += not canary
        if visit.host == LIAR and self.lying and self._lies(canary):
            self.lies += not canary
            after = self._false(after)
        elif visit.host == LIAR:
            self._last = after
        self.own_visits += visit.host == LIAR and not canary
        return Answer(pack(after, "fp32"), float(len(visit.blocks)), 0.0)

    def _false(self, after: State) -> State:
        if self._lie.answer == "-x":
            return -after
        if self._lie.answer == "noise":
            noise = self._chance.standard_normal(after.shape, np.float32)
            return after + noise * np.float32(NOISE * after.std())
        assert self._last is not None  # it was honest before
        return self._last

    def _lies(self, canary: bool) -> bool:
        drawn = bool(self._chance.random() < self._lie.share)
        return drawn and (self._lie.canaries or not canary)


def stems(images: int) -> tuple[Bundle, State]:
    """The blocks of the model, and the states of test images before them."""
    model = served_host(load(DEFAULT_MODEL)).eval()
    data = open_data(
        "digit-pairs", file_view(model), options=DataOptions(train=False, max_test=images)
    )
    items = data.splits["test"].dataset
    pixels = torch.cat([data.finish(items[index][0][None]) for index in range(images)])
    with torch.inference_mode():
        states, _ = run_stem(model, pixels, forward=lambda inputs: logits_of(model(inputs)))
    return make_bundle(model), states.numpy()


@dataclass(frozen=True)
class Exposure:
    """When the liar was out (requests), how often it had lied, and the share of audited visits
    (of all that were made)."""

    requests: int
    out: bool
    lies: int
    audited: float


async def played(
    plan: SwarmPlan,
    lie: Lie,
    *,
    bundle: Bundle,
    states: Sequence[State],
    seed: int,
    honest: int,
    most: int,
) -> Exposure:
    """Requests until the liar is shut out, by the real router and health check."""
    clock = asyncio.get_running_loop().time
    hosts = LyingHosts(bundle, lie, honest=honest if lie.steady else 0, seed=seed)
    router = Router(hosts, depth=DEPTH, limits=plan.limits, clock=clock)
    router.swarm = Swarm(
        HostView(name, frozenset(host.blocks)) for name, host in plan.hosts.items()
    )
    health = HealthMonitor(router, seed=seed)

    async def compute(block: int, state: State) -> State:
        return bundle.compute(block, state)  # no thread: virtual time does not wait for one

    for name, host in plan.hosts.items():
        health.expect(
            name,
            {b: Reference(bundle.sample, partial(compute, b), str(b)) for b in host.blocks},
        )
        for _ in range(PASSED if lie.steady else 0):
            health._draw.passed(name)  # as after 5,000 honest visits
    watch, numbers, requests = asyncio.ensure_future(health.run()), count(), 0

    async def client() -> None:
        nonlocal requests
        while requests < most and router.swarm[LIAR].condition != "shut-out":
            requests += hosts.lying
            state = states[next(numbers) % len(states)][None]
            await router.walk(state, deadline=clock() + 2)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await health.close()
    out = router.swarm[LIAR].condition == "shut-out"
    return Exposure(requests, out, hosts.lies, health.audited / hosts.visits)


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Every lie with one, two and three holders of every block."""
    smoke = effort is SMOKE
    bundle, states = stems(4 if smoke else IMAGES)
    for title, lie in LIES.items():
        for replicas in (1, 2, 3):
            plan = even_plan(DEPTH, HOSTS, replicas=replicas)
            ends = []
            for seed in range(1 if smoke else SEEDS):
                play = played(
                    plan, lie, bundle=bundle, states=list(states), seed=seed,
                    honest=1 if smoke else HONEST, most=10 if smoke else MOST,
                )  # fmt: skip
                with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                    ends.append(runner.run(play))
            yield ClaimRow(
                name=f"{title}, {replicas} of each block",
                what="requests until it is out",
                values=tuple(float(end.requests) for end in ends),
                unit="requests",
                bound=Bound("at_most", lie.within),
                settings={"hosts": HOSTS, "clients": CLIENTS, "most": MOST},
                facts={
                    "out": [end.out for end in ends],
                    "lies": [end.lies for end in ends],
                    "audited": [round(end.audited, 4) for end in ends],
                },
            )


CLAIM = Claim(theme="swarm-liars", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
