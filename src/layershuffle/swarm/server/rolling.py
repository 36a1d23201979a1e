"""Roll a running swarm to another model of the same form, without a failed request.

Hosts load its blocks beside those that they serve, and each block is tested. Then new requests wait
until those under way have ended, some milliseconds, and all that follow run on the new model. The
way back is the same: what hosts had is still on their disks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.calibration import calibration_of
from layershuffle.swarm.expectations import rounds_of
from layershuffle.swarm.health import agrees
from layershuffle.swarm.members import Member
from layershuffle.swarm.messages import Visit, VisitError
from layershuffle.swarm.served import ServedModel
from layershuffle.swarm.server.scheduler import RequestScheduler
from layershuffle.swarm.service import Service

LOAD_SECONDS = 300.0
PAUSE_SECONDS = 0.5
_TRIES = 20
_LOOK = 0.05  # seconds


async def roll(service: Service, scheduler: RequestScheduler, *, directory: Path) -> None:
    """Serve the exported model in `directory` from now on.

    Raises `ModelFileError` and `UsageError` for files that are not a model of the same form, and
    `LayerShuffleError` if hosts cannot load it or requests take too long: all is then as before.
    """
    members, model = service.members, await asyncio.to_thread(ServedModel, directory)
    _check_form(service.coordinator.model, model)
    calibration = calibration_of(model)
    if service.remote_model.temperatures and calibration is None:
        raise UsageError(
            "This model has no calibration, and the one that is served has",
            place=directory,
            hint="layershuffle swarm calibrate MODEL --data SPEC, then export it again",
        )
    members.load_beside(model)
    try:
        tested = await _tested(service, model)
        for _ in range(_TRIES):
            async with scheduler.paused(PAUSE_SECONDS) as quiet:
                if not quiet:
                    continue
                members.take_over()
                service.coordinator.take_over(model, tested)
                temperatures = () if calibration is None else calibration.temperatures
                service.remote_model.take_over(model, temperatures)
                service.router.rounds = rounds_of(calibration)
                scheduler.take_over(calibration)
                return
        raise LayerShuffleError(
            f"Requests were under way for {PAUSE_SECONDS:g} s, {_TRIES} times",
            hint="roll again when deadlines are short",
        )
    finally:
        if members.loads_beside:
            members.load_beside(None)


def _check_form(before: ServedModel, after: ServedModel) -> None:
    """Raises `UsageError` for a model that clients or hosts would have to know of."""
    old, new = before.manifest, after.manifest
    for what, same in (
        ("number of blocks", before.depth == after.depth),
        ("shape of the states", before.shape == after.shape),
        ("classes", (old.classes, old.class_names) == (new.classes, new.class_names)),
        ("view of images", old.image_view == new.image_view),
    ):
        if not same:
            raise UsageError(
                f"This model differs in the {what} from the one that is served",
                place=after.directory,
                hint="serve it with a gateway of its own: layershuffle swarm up --model DIR",
            )


async def _tested(service: Service, model: ServedModel) -> dict[Member, frozenset[int]]:
    """Wait until all hosts have loaded their blocks of `model`; those that answer rightly."""
    members, router = service.members, service.router
    tested = dict[Member, frozenset[int]]()
    end = router.clock() + LOAD_SECONDS
    while True:
        there = [m for m in members.values() if router.swarm[m.name].usable]
        for member in there:
            for block in sorted(member.beside.keys() - tested.get(member, frozenset())):
                await _test(service, model, member=member, block=block)
                tested[member] = tested.get(member, frozenset()) | {block}
        whole = all(m.assigned <= tested.get(m, frozenset()) for m in there)
        if whole and len(frozenset[int]().union(*(tested[m] for m in there))) == model.depth:
            return tested
        why = next((m.beside_failed for m in there if m.beside_failed), "")
        if why or router.clock() > end:
            raise LayerShuffleError(
                f"Hosts cannot load this model beside the other: {why or 'it takes too long'}",
                hint="hosts need memory for the blocks of both (--memory)",
            )
        await asyncio.sleep(_LOOK)


async def _test(service: Service, model: ServedModel, *, member: Member, block: int) -> None:
    limits = service.router.limits
    visit = Visit(member.name, block, limits.start_ms / 1000)
    try:
        async with asyncio.timeout(visit.limit):
            answer = await service.members.visit(visit, model.sample, beside=True)
    except (VisitError, TimeoutError) as error:
        raise LayerShuffleError(f"Host {member.name} does not answer for block {block}") from error
    expected = await model.compute(block, model.sample)
    if not agrees(answer.state, expected, tolerance=limits.tolerance):
        raise LayerShuffleError(f"Host {member.name} answers wrongly for block {block}")
