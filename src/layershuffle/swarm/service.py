"""A whole swarm: model, bundles, router, coordinator, and the remote model that serves requests.

It is the same for every engine: a `placement.HostBackend` runs the hosts and carries the visits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from layershuffle.core.stack import depth_of
from layershuffle.models import load
from layershuffle.models.files import weights_digest
from layershuffle.models.output import own_directory
from layershuffle.swarm.bundle import Bundle, make_bundle
from layershuffle.swarm.calibration import Calibration, calibration_path, read_calibration
from layershuffle.swarm.chaos import FaultInjector
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.expectations import rounds_of
from layershuffle.swarm.placement import HostBackend
from layershuffle.swarm.plan import SwarmPlan
from layershuffle.swarm.program import read_program
from layershuffle.swarm.remote_model import RemoteModel, served_host
from layershuffle.swarm.router import Router
from layershuffle.swarm.speed import stored_ms

if TYPE_CHECKING:
    from torch import nn

    from layershuffle.swarm.planning import ModelFacts
    from layershuffle.swarm.ray_session import RaySession

_TIMED = 30
_MILLI = 1000.0
_log = logging.getLogger(__name__)
START_SECONDS = 120.0
"""Seconds that a swarm waits for all of its hosts before it starts with those that are up."""


@dataclass(frozen=True)
class Cargo:
    """The data for a plan at the head: the model, all blocks in packed form, the calibration.

    `calibration` is `None` for a model that was never calibrated.
    """

    model: nn.Module
    bundle: Bundle
    calibration: Calibration | None


def load_cargo(plan: SwarmPlan) -> Cargo:
    """Load and check the model of a plan.

    Raises the errors of `load`, `UsageError` for plans that do not fit the
    model, `StackError` for models that hosts cannot run.
    """
    model = load(plan.model)
    host = served_host(model)
    plan.check(depth_of(host))
    return Cargo(model, make_bundle(host), calibration_of(plan.model, host))


def calibration_of(model: str, host: nn.Module) -> Calibration | None:
    """The calibration of the model with this spec, loaded as `host`; `None` if it has none.

    Raises `ModelFileError` if it is damaged, or was measured on other weights.
    """
    if own_directory(model) is None:
        return None
    return read_calibration(calibration_path(model), weights=weights_digest(host))


def model_facts(model: str, *, parallel: int | None = None) -> ModelFacts:
    """The facts of a model for planning and simulation; a block is timed on this machine, once.

    `parallel`: blocks in flight (default: as the calibration allows). Raises the errors of `load`.
    """
    # It imports scipy's solvers, which takes half a second and which no gateway needs.
    from layershuffle.swarm.assignment import BlockFile
    from layershuffle.swarm.planning import ModelFacts

    host = served_host(load(model))
    bundle, calibration = make_bundle(host), calibration_of(model, host)
    rows = calibration.rows if calibration is not None else ()
    return ModelFacts(
        blocks=[
            BlockFile(digest, len(bundle.tensors[block]))
            for block, digest in sorted(bundle.digests.items())
        ],
        block_ms=stored_ms(bundle.program, lambda: _block_ms(bundle)),
        cells={row.cell: row.top1 for row in rows},
        rounds=rounds_of(calibration, parallel=parallel),
    )


def _block_ms(bundle: Bundle) -> float:
    """Milliseconds of block 0 on one image, in this process.

    The least of several times, because other work of the machine only adds to them.
    """
    block = read_program(bundle.program).bind(bundle.tensors[0])
    start, times = torch.from_numpy(bundle.sample.copy()), []
    for _ in range(_TIMED):
        begun = time.perf_counter()
        block(start)
        times.append((time.perf_counter() - begun) * 1000)
    return min(times)


@dataclass(frozen=True)
class Service:
    """A running swarm. `missing`: hosts of the plan that did not start in time.

    `coordinator.watching`: whether its hosts are watched; `session`: the connection to Ray, if its
    hosts run there.
    """

    plan: SwarmPlan
    router: Router
    coordinator: Coordinator
    remote_model: RemoteModel
    calibration: Calibration | None
    missing: tuple[str, ...]
    session: RaySession | None

    @cached_property
    def faults(self) -> FaultInjector:
        """Injects faults into the hosts, for drills. It wraps their backend at its first use."""
        ray = None if self.session is None else self.session.ray
        return FaultInjector(self.coordinator, ray=ray)

    @property
    def trouble(self) -> str:
        """The fault of the system that runs the hosts, "" if there is none."""
        return "" if self.session is None else self.session.trouble


@asynccontextmanager
async def running_service(
    plan: SwarmPlan,
    cargo: Cargo,
    *,
    backend: HostBackend,
    session: RaySession | None = None,
    within: float = START_SECONDS,
    say: Callable[[str], object] = _log.info,
) -> AsyncIterator[Service]:
    """The swarm of `plan`, once its hosts are up or `within` seconds have passed.

    `session`: the connection to Ray if `backend` is a `RayHosts` on it, which is watched and
    renewed within. `say` is called with a sentence for every host that is up. The hosts end with
    the context. `cargo.model` loses its blocks' weights. Raises `UsageError` for a plan that does
    not fit the model.
    """
    base = cargo.bundle
    # A host stores the weights of tied places once, so further places cost it nothing.
    plan = plan.with_tied_places(base.digests)
    router = Router(
        backend.transport,
        depth=base.depth,
        limits=plan.limits,
        routing=plan.routing,
        wire=plan.wire,
        most_blocks=plan.most_blocks,
        rounds=rounds_of(cargo.calibration, parallel=plan.parallel),
    )
    coordinator = Coordinator(plan, router=router, backend=backend, bundle=base)
    # Before anything runs, because the model may be refused.
    remote_model = RemoteModel(cargo.model, router)
    # Before `ready`, which only waits for the hosts that the watch starts.
    watches: dict[str, Callable[[], Awaitable[None]]] = {"The host monitor": coordinator.run}
    if session is not None:
        forget, begin_anew = backend.forget, coordinator.begin_anew
        watches["The watch over Ray"] = partial(session.keep, forget=forget, begin_anew=begin_anew)
    pause = plan.limits.watch_ms / _MILLI
    runs = (keep_running(what, watch, pause=pause) for what, watch in watches.items())
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        missing = await coordinator.ready(within=within, say=say)
        yield Service(plan, router, coordinator, remote_model, cargo.calibration, missing, session)
    finally:
        # First, because the watch would restart the hosts that `close` ends.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await coordinator.close()
        # In a thread, because it waits for stems and heads that still compute.
        await asyncio.to_thread(remote_model.close)


async def keep_running(what: str, watch: Callable[[], Awaitable[None]], *, pause: float) -> None:
    """Run `watch` until cancelled, and restart it `pause` seconds after an error."""
    while True:
        try:
            await watch()
        except Exception as error:  # noqa: BLE001 -- logged with its traceback
            _log.error("%s failed and is started again", what, exc_info=error)
        # With a pause, because an error that repeats at once would fill the log.
        await asyncio.sleep(pause)


@asynccontextmanager
async def swarm_on(session: RaySession | None, plan: SwarmPlan) -> AsyncIterator[Service]:
    """The swarm of `plan` on the members of a Ray cluster, or in this process without a session.

    For demonstrations and measurements: hosts that the plan does not name take no part. Raises the
    errors of `load_cargo`.
    """
    if session is None:
        from layershuffle.swarm.local import LocalHosts

        backend: HostBackend = LocalHosts(list(plan.hosts), limits=plan.limits)
    else:
        from layershuffle.swarm.ray_hosts import RayHosts

        backend = RayHosts(session.ray, limits=plan.limits, only=plan.hosts)
    cargo = load_cargo(plan)
    async with running_service(plan, cargo, backend=backend, session=session) as service:
        yield service
