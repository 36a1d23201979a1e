"""A swarm of a model with tied places: whoever lives can run every step."""

from __future__ import annotations

import asyncio

import torch
from engines import pico
from pico_hosts import PATIENT

import layershuffle as ls
from layershuffle.core.tying import tie
from layershuffle.swarm.bundle import make_bundle
from layershuffle.swarm.local import LocalHosts
from layershuffle.swarm.plan import HostPlan, SwarmPlan
from layershuffle.swarm.remote_model import Classified
from layershuffle.swarm.service import Cargo, running_service

PLACES = (0, 0, 2, 2)
PLAN = SwarmPlan(
    model="pico",
    hosts={
        "a": HostPlan(blocks=(0, 2)),
        "b": HostPlan(blocks=(1,)),
        "c": HostPlan(blocks=(3,)),
    },
)


def test_a_plan_gains_the_places_that_share_weights() -> None:
    digests = dict(enumerate("xxyy"))
    hosts = PLAN.with_tied_places(digests).hosts
    assert {name: host.blocks for name, host in hosts.items()} == {
        "a": (0, 2, 1, 3), "b": (1, 0), "c": (3, 2)
    }  # fmt: skip
    assert PLAN.with_tied_places(dict(enumerate("wxyz"))) == PLAN


def test_the_last_host_of_three_answers_like_the_whole_model() -> None:
    model = tie(pico(), PLACES)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    held = {"a": (0, 2), "b": (1,), "c": (3,)}
    hosts = {name: HostPlan(blocks=blocks) for name, blocks in held.items()}
    plan = SwarmPlan(model="pico", hosts=hosts, limits=PATIENT)

    async def go() -> Classified:
        cargo = Cargo(model, make_bundle(model), None)
        backend = LocalHosts(list(plan.hosts), limits=plan.limits)
        async with running_service(plan, cargo, backend=backend, within=60) as service:
            for name in ("b", "c"):
                await service.coordinator.drain(name)
            model_of_swarm = service.remote_model
            deadline = model_of_swarm.router.clock() + 30
            return await model_of_swarm.classify(images, deadline=deadline)

    answer = asyncio.run(go())
    assert sorted(answer.route.order) == [0, 1, 2, 3]
    with torch.inference_mode(), ls.running(tie(pico(), PLACES), answer.route.order):
        wanted = tie(pico(), PLACES)(images)
    assert {hop.host for hop in answer.route.hops} == {"a"}
    assert (answer.logits == wanted).all()
