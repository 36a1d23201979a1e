"""A whole swarm: model, bundles, router, coordinator, and the front that requests go through.

The same for every engine: `places` runs the hosts' processes, `transport` carries the visits.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from layershuffle.models import load
from layershuffle.models.digest import weights_digest
from layershuffle.stack import depth_of
from layershuffle.swarm.bundle import Bundle, check_sibling, make_bundle
from layershuffle.swarm.calibration import Calibration, calibration_path, read_calibration
from layershuffle.swarm.coordinator import Coordinator, Places
from layershuffle.swarm.front import Front, served_host
from layershuffle.swarm.messages import Transport
from layershuffle.swarm.plan import SwarmPlan
from layershuffle.swarm.planning.hosts import ModelFacts, facts_of
from layershuffle.swarm.program import read_program
from layershuffle.swarm.router import Router
from layershuffle.swarm.wire import Wire

if TYPE_CHECKING:
    from torch import nn

_TIMED = 30
START_SECONDS = 120.0
"""How long a swarm waits for its first hosts before it goes on with those that are there."""


@dataclass(frozen=True)
class Cargo:
    """What a plan needs on the head: its model, all blocks as they travel, and the calibration.

    `bundles` are keyed by model as the plan names them. `calibration` is `None` for a model that
    was never calibrated.
    """

    model: nn.Module
    bundles: Mapping[str, Bundle]
    calibration: Calibration | None


def load_cargo(plan: SwarmPlan) -> Cargo:
    """The models of a plan, ready to be served.

    Raises what loading raises, `UsageError` for donors that are no siblings and for plans that do
    not fit the model, `StackError` for models that hosts cannot run.
    """
    model = load(plan.model)
    host = served_host(model)
    plan.check(depth_of(host))
    bundles = {plan.model: make_bundle(host)}
    for donor in sorted({one for place in plan.hosts.values() for one in place.donors.values()}):
        bundles[donor] = make_bundle(served_host(load(donor)))
        check_sibling(bundles[plan.model], bundles[donor])
    return Cargo(model, bundles, _calibration(plan.model, host))


def _calibration(model: str, host: nn.Module) -> Calibration | None:
    scheme = model.partition(":")[0]
    if scheme in ("timm", "hf", "torchvision"):
        return None  # no directory of its own
    return read_calibration(calibration_path(model), weights=weights_digest(host))


def model_facts(model: str, *, wire: Wire) -> ModelFacts:
    """What planning and simulation need to know of a model; a block is timed on this machine.

    Raises what loading raises.
    """
    host = served_host(load(model))
    bundle, calibration = make_bundle(host), _calibration(model, host)
    rows = calibration.rows if calibration is not None else ()
    accuracy = {row.kept: row.top1 for row in rows}
    return facts_of(
        bundle.tensors, bundle.shape, wire=wire, block_ms=_block_ms(bundle), accuracy=accuracy
    )


def _block_ms(bundle: Bundle) -> float:
    """Median milliseconds of block 0 on one image, in this process."""
    block = read_program(bundle.program).bind(bundle.tensors[0])
    start, times = torch.from_numpy(bundle.canary.state.copy()), []
    for _ in range(_TIMED):
        begun = time.perf_counter()
        block(start)
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


@dataclass(frozen=True)
class Service:
    """A running swarm. `missing`: hosts of the plan that were not there in time."""

    plan: SwarmPlan
    router: Router
    coordinator: Coordinator
    front: Front
    calibration: Calibration | None
    missing: tuple[str, ...]


@asynccontextmanager
async def running_service(
    plan: SwarmPlan,
    cargo: Cargo,
    *,
    places: Places,
    transport: Transport,
    within: float = START_SECONDS,
) -> AsyncIterator[Service]:
    """The swarm of `plan`, once its hosts are up or `within` seconds have passed.

    Ends its hosts on leaving. `cargo.model` is taken over: it loses its blocks' weights.
    """
    depth = cargo.bundles[plan.model].depth
    router = Router(
        transport, depth=depth, limits=plan.limits, routing=plan.routing, wire=plan.wire
    )
    coordinator = Coordinator(plan, router=router, places=places, bundles=cargo.bundles)
    watch = asyncio.create_task(coordinator.run())
    front = Front(cargo.model, router, asyncio.get_running_loop())
    try:
        missing = await coordinator.ready(within=within)
        yield Service(plan, router, coordinator, front, cargo.calibration, missing)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await coordinator.close()
        await asyncio.to_thread(front.close)
