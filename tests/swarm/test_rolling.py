"""A swarm rolls to another model and back: every answer is of one of them, and none fails."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from dial_site import TOKEN, hosting, replayed
from safetensors.numpy import load, save
from starlette.applications import Starlette

from layershuffle.bundled import asset
from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.served import ServedModel
from layershuffle.swarm.server.admin import roll
from layershuffle.swarm.server.admission import GatewayLimits
from layershuffle.swarm.server.app import create_app
from layershuffle.swarm.server.gateway import Gateway
from layershuffle.swarm.server.images import Decoder
from layershuffle.swarm.server.run import listening
from layershuffle.swarm.service import Service, SwarmSettings, running_service
from layershuffle.swarm.sureness import probabilities
from refusals import refuses

CHANGED = 5
SLOW = Limits(hop_floor_ms=5000, hop_cap_ms=10_000, probe_ms=10_000, deadline_ms=25_000)


def another(directory: Path, **facts: Any) -> Path:
    """The shipped export with other weights in one block, and other `facts` in its manifest."""
    shutil.copytree(asset("digits-onnx"), directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    name = manifest["blocks"][CHANGED]["weights"]
    tensors = load((directory / name).read_bytes())
    content = save({key: np.float32(0.9) * value for key, value in tensors.items()})
    (directory / name).write_bytes(content)
    manifest["files"][name] = {"sha256": sha256(content).hexdigest(), "bytes": len(content)}
    (directory / "manifest.json").write_text(json.dumps({**manifest, **facts}))
    return directory


@asynccontextmanager
async def served(tmp_path: Path, **how: Any) -> AsyncIterator[tuple[Service, Gateway]]:
    """The shipped model on two hosts, and its gateway."""
    model = ServedModel(asset("digits-onnx"))
    settings = SwarmSettings(limits=SLOW)
    async with (
        running_service(settings, model, token=TOKEN) as service,
        listening(Starlette(routes=service.members.routes()), members=service.members) as (way, _),
        hosting(f"ws://127.0.0.1:{way.port}", cache=tmp_path / "a", name="a", **how),
        hosting(f"ws://127.0.0.1:{way.port}", cache=tmp_path / "b", name="b", **how),
    ):
        assert not await service.coordinator.ready(2, within=60)
        limits = GatewayLimits(rate=1e6, burst=1e6, client_requests=100)
        yield service, Gateway(service.remote_model, calibration=service.calibration, limits=limits)


def chance_of(model: ServedModel, answer: dict[str, Any], image: Any) -> float:
    """The chance that `model` gives along the way of an answer."""
    states = [model.stem(image)]
    for block, version in zip(answer["blocks"], answer["versions"], strict=True):
        before, newest = states[version], version == len(states) - 1
        after = asyncio.run(model.compute(block, before))
        states.append(after if newest else states[-1] + (after - before))
    heat = SHIPPED_TEMPERATURES[len(set(answer["blocks"])) - 1]
    return float(probabilities(model.head(states[-1]), heat).max())


SHIPPED_TEMPERATURES = json.loads((asset("digits-onnx") / "calibration.json").read_text())[
    "sureness"
]["temperatures"]


def test_a_roll_and_the_way_back_fail_no_request(tmp_path: Path) -> None:
    old, new = ServedModel(asset("digits-onnx")), ServedModel(another(tmp_path / "new"))
    body = asset("digit-pair.png").read_bytes()
    answers: dict[str, list[dict[str, Any]]] = {}

    async def main() -> None:
        async with served(tmp_path) as (service, gateway):
            phase, over = "before", False
            transport = httpx.ASGITransport(app=create_app(gateway))

            async def client() -> None:
                async with httpx.AsyncClient(transport=transport, base_url="http://g") as http:
                    while not over:
                        begun = phase
                        answer = await http.post("/v1/classify?confidence=off", content=body)
                        assert answer.status_code == 200, answer.text
                        key = begun if phase == begun else "between"
                        answers.setdefault(key, []).append(answer.json())

            async def some(name: str) -> None:
                async with asyncio.timeout(60):
                    while len(answers.get(name, [])) < 8:
                        await asyncio.sleep(0.01)

            clients = [asyncio.create_task(client()) for _ in range(4)]
            await some(phase)
            for model, name in ((new, "new"), (old, "back")):
                phase = "rolling"
                await roll(service, gateway, directory=model.directory)
                phase = name
                await some(phase)
                assert service.coordinator.model.directory == model.directory
                assert {host.blocks for host in service.router.swarm.values()} == {
                    frozenset(range(12))
                }
            over = True
            await asyncio.gather(*clients)
            assert service.coordinator.health.disagreed == 0

    asyncio.run(main())
    image = Decoder(old.manifest.file_view, GatewayLimits()).batch(body)
    for phase, expected in (("before", [old]), ("new", [new]), ("back", [old])):
        for answer in answers[phase]:
            assert len(set(answer["blocks"])) == 12
            chances = [chance_of(model, answer, image) for model in expected]
            assert answer["chance"] in chances
    assert chance_of(old, answers["new"][0], image) != answers["new"][0]["chance"]
    for answer in answers.get("rolling", []) + answers.get("between", []):
        assert answer["chance"] in [chance_of(model, answer, image) for model in (old, new)]


def test_what_cannot_be_rolled_to_changes_nothing(tmp_path: Path) -> None:
    """Another form of model, and one for which the hosts have no memory."""
    weights = 134_816
    names = json.loads((asset("digits-onnx") / "manifest.json").read_text())["class_names"]
    cases: list[tuple[Path, type[LayerShuffleError]]] = [
        (another(tmp_path / "names", class_names=names[::-1]), UsageError),
        (another(tmp_path / "large"), LayerShuffleError),
    ]

    async def main() -> None:
        async with served(tmp_path, memory=12 * weights + 1000) as (service, gateway):
            before = service.coordinator.model
            for directory, error in cases:
                with refuses(error):
                    await roll(service, gateway, directory=directory)
                assert not service.members.loads_beside
                assert service.coordinator.model is before
                state, route = await service.router.walk(
                    before.sample, deadline=service.router.clock() + 20
                )
                assert len(route.order) == 12
                wanted = await replayed(before.sample, route)
                assert state.tobytes() == wanted.tobytes()

    asyncio.run(main())


@pytest.mark.parametrize("busy", [True, False])
def test_a_pause_waits_for_requests_under_way(tmp_path: Path, busy: bool) -> None:
    async def main() -> None:
        async with served(tmp_path) as (_, gateway):
            walks = gateway._walks
            if busy:
                await walks.acquire()
            async with gateway.paused(0.05) as quiet:
                assert quiet is not busy
            if busy:
                walks.release()
            async with gateway.paused(0.05) as quiet:
                assert quiet

    asyncio.run(main())
