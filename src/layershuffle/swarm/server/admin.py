"""The operator's commands, on the port of the API, for who has the operator's key.

A key and not a socket of its own: the page needs it to break hosts, also behind a proxy, and a
second server in the process would need a second set of limits.

`roll` takes a running swarm to another model of the same form, without a failed request. Hosts load
its blocks beside those that they serve, and each block is tested. Then new requests wait until
those under way have ended, some milliseconds, and all that follow run on the new model. The way
back is the same: what hosts had is still on their disks.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.calibration import calibration_of
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.faults import FaultKind
from layershuffle.swarm.health import agrees
from layershuffle.swarm.members import Member
from layershuffle.swarm.messages import Visit, VisitError
from layershuffle.swarm.served import ServedModel
from layershuffle.swarm.server.admission import HTTPError, key_of
from layershuffle.swarm.server.doors import Keys
from layershuffle.swarm.server.gateway import Gateway
from layershuffle.swarm.server.operating import CommandName
from layershuffle.swarm.server.page import join_address, qr_code

LOAD_SECONDS = 300.0
PAUSE_SECONDS = 0.5
_TRIES = 20
_LOOK = 0.05  # seconds


class Fields(BaseModel):
    """The fields of a command. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    host: str = ""
    kind: FaultKind | None = None
    address: str = Field("", max_length=500)
    model: str = ""


def add_operator(app: FastAPI, *, key: str) -> None:
    """Add POST /operator/NAME to the gateway's app, for requests with `key`.

    `drain`: let `host` finish its visits and take no more (`empty`: it has finished); `readmit`:
    start a host again that was shut out, was drained or died; `kill`: kill the process of a host
    that this gateway started; `fault`: let a host of this swarm
    fail, by `kind`; `join`: the address, with the
    token, at which a tab becomes a host of the gateway that it reaches at `address`, and its QR
    code as SVG; `roll`: serve the export in the directory `model` instead of the one in `before`.
    """
    gateway: Gateway = app.state.gateway
    keys = Keys([key])

    async def command(name: CommandName, request: Request) -> dict[str, Any]:
        await gateway.admission.admit(request)  # before the key, so that guessing is slow
        if not keys.accept(key_of(request)):
            raise HTTPError(
                HTTPStatus.UNAUTHORIZED,
                "The operator's key is missing or wrong",
                hint="`layershuffle swarm up` prints the address of the page with the key in it",
            )
        try:  # not as an argument: FastAPI would read the body of anybody, of any size
            fields = Fields.model_validate_json(await request.body())
        except ValidationError as error:
            problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
            raise RequestValidationError(problems) from error
        try:
            return await _carry_out(gateway, name=name, fields=fields)
        except UsageError:
            raise
        except LayerShuffleError as error:
            where, hint = error.place, error.hint or ""
            raise HTTPError(HTTPStatus.CONFLICT, error.cause, place=where, hint=hint) from error

    app.add_api_route("/operator/{name}", command, methods=["POST"], include_in_schema=False)


async def _carry_out(gateway: Gateway, *, name: CommandName, fields: Fields) -> dict[str, Any]:
    """Carry out a command, and return its answer."""
    coordinator, router, host = gateway.coordinator, gateway.router, fields.host
    if name == "drain":
        return {"empty": await coordinator.drain(host)}
    if name == "readmit":
        # The router knows a spare only once it is up.
        if host in router.swarm and router.swarm[host].usable:
            raise UsageError(
                f"Host {host} is healthy, so it was not restarted",
                hint=f"layershuffle swarm drain {host} takes it out of service",
            )
        coordinator.readmit(host)
        return {}
    if name == "kill":
        # Hosts that dialled in from elsewhere may be processes of others.
        if host not in coordinator.children.names:
            raise UsageError(f"This gateway did not start a host {host!r}")
        coordinator.children.signal(host, signal.SIGKILL)
        coordinator.children.hold(host)  # dead until it is readmitted
        return {}
    if name == "fault" and fields.kind is not None:
        # Hosts that joined from elsewhere may be processes of others.
        if host not in coordinator.children.names:
            raise UsageError(f"This swarm did not start a host {host!r}")
        await gateway.faults.inject(host, fields.kind)
        return {}
    if name == "join":
        return qr_code(join_address(fields.address, token=coordinator.members.token))
    if name == "roll":
        before = coordinator.model.directory
        await roll(gateway, directory=Path(fields.model))
        gateway.model = fields.model
        return {"before": str(before)}
    raise UsageError(f"The command {name} lacks a field")


async def roll(gateway: Gateway, *, directory: Path) -> None:
    """Serve the exported model in `directory` from now on.

    Raises `ModelFileError` and `UsageError` for files that are not a model of the same form, and
    `LayerShuffleError` if hosts cannot load it or requests take too long: all is then as before.
    """
    coordinator, model = gateway.coordinator, await asyncio.to_thread(ServedModel, directory)
    members = coordinator.members
    _check_form(coordinator.model, model)
    calibration = calibration_of(model)
    if gateway.remote_model.temperatures and calibration is None:
        raise UsageError(
            "This model has no calibration, and the one that is served has",
            place=directory,
            hint="layershuffle swarm calibrate MODEL --data SPEC, then export it again",
        )
    members.load_beside(model)
    try:
        tested = await _tested(coordinator, model)
        for _ in range(_TRIES):
            async with gateway.paused(PAUSE_SECONDS) as quiet:
                if not quiet:
                    continue
                members.take_over()
                coordinator.take_over(model, tested)
                gateway.remote_model.take_over(model, calibration)
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


async def _tested(coordinator: Coordinator, model: ServedModel) -> dict[Member, frozenset[int]]:
    """Wait until all hosts have loaded their blocks of `model`; those that answer rightly."""
    members, router = coordinator.members, coordinator.router
    tested = defaultdict[Member, frozenset[int]](frozenset)  # a host may have room for none
    end = router.clock() + LOAD_SECONDS
    while True:
        there = [m for m in members.values() if router.swarm[m.name].usable]
        for member in there:
            for block in sorted(member.beside.keys() - tested[member]):
                await _test(coordinator, model, member=member, block=block)
                tested[member] |= {block}
        whole = all(m.assigned <= tested[m] for m in there)
        if whole and len(frozenset[int]().union(*(tested[m] for m in there))) == model.depth:
            return tested
        why = next((m.beside_failed for m in there if m.beside_failed), "")
        if why or router.clock() > end:
            raise LayerShuffleError(
                f"Hosts cannot load this model beside the other: {why or 'it takes too long'}",
                hint="hosts need memory for the blocks of both (--memory)",
            )
        await asyncio.sleep(_LOOK)


async def _test(
    coordinator: Coordinator, model: ServedModel, *, member: Member, block: int
) -> None:
    limits = coordinator.router.limits
    visit = Visit(member.name, block, limits.start_ms / 1000)
    try:
        async with asyncio.timeout(visit.limit):
            answer = await coordinator.members.visit(visit, model.sample, beside=True)
    except (VisitError, TimeoutError) as error:
        raise LayerShuffleError(f"Host {member.name} does not answer for block {block}") from error
    expected = await model.compute(block, model.sample)
    if not agrees(answer.state, expected, tolerance=limits.tolerance):
        raise LayerShuffleError(f"Host {member.name} answers wrongly for block {block}")
