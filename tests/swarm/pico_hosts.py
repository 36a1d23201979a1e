"""Bundles of tiny models, hosts that hold them, and the models themselves as the slow path."""

import asyncio
import copy
import time
from functools import cache

import numpy as np
import torch

import layershuffle as ls
from common import FAMILIES, WIDTH, images, logits_of
from layershuffle.models.ends import run_stem
from layershuffle.swarm.bundle import make_bundle
from layershuffle.swarm.host import BlockHost
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    pack,
)
from layershuffle.swarm.remote_model import RemoteModel
from layershuffle.swarm.rounds import QUEUE, Rounds, Way
from waiting import HANGS

LONG = 60_000.0  # ms
ORDER = (2, 0, 3, 1)
# Largest difference from the exact answer, relative to its largest value: of a batched answer, and
# of one block's answer by wire (the state is rounded twice).
TOLERANCE = {"batched": 1e-5, "fp16": 1e-3, "int8": 1.5e-2}
# Pauses of a busy machine make no host suspect. A dead host is still noticed at once.
PATIENT = Limits(hop_floor_ms=20_000, hop_cap_ms=20_000, probe_ms=20_000)
CARRIED = ("timm-vit", "timm-beit", "timm-xcit", "hf-vit", "hf-siglip")


@cache
def model_of(family):
    return FAMILIES[family].wrapped()


@cache
def bundle_of(family):
    return make_bundle(model_of(family))


def entrance(model, batch=1):
    """The state before the first block, for `images(batch)`."""
    with torch.no_grad():
        return run_stem(model, images(batch), forward=model)[0].numpy()


def in_process(model, order, batch=1):
    """The state after `order` in the model itself."""
    with ls.running(model, order), ls.tap(model) as records:
        model(images(batch))
    return records.records[-1].tensor.detach().numpy()


def replay_error(model, batch, got):
    """Of a classification: the largest difference from its steps in the model itself."""
    order = ls.ExecutionOrder(got.route.order, got.route.depth, got.route.versions)
    with torch.no_grad(), ls.running(model, order):
        return float((got.logits - logits_of(model(batch))).abs().max())


async def check_side_by_side(model, router, *, reached):
    """`reached` blocks contribute."""
    batch, remote = images(2), RemoteModel(copy.deepcopy(model), router)
    router.rounds = Rounds(otherwise=Way(2, 2), max_age=4)
    got = await remote.classify(batch, deadline=router.clock() + HANGS)
    assert (got.route.kept, len(got.route.order)) == (reached, 4)
    assert replay_error(model, batch, got) == 0
    router.rounds = QUEUE
    remote.close()


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self):
        return self.now


def host_with(bundle, blocks=None, clock=time.monotonic, **limits):
    host = BlockHost("pi", limits=Limits(**limits), clock=clock)
    ids = blocks or range(bundle.depth)
    host.load(bundle.program, ids, *[bundle.tensors[block] for block in ids])
    return host


def run(work, host):
    """The result of `work(host)`, a coroutine function; the host is closed after."""

    async def whole():
        return await asyncio.wait_for(work(host), HANGS)

    try:
        return asyncio.run(whole())
    finally:
        host.close()


def visit(host, blocks, state, *, wire="fp32", budget_ms=LONG):
    return asyncio.create_task(host.visit(blocks, pack(state, wire), budget_ms=budget_ms))


def states(count, images=1, *, seed=3):
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(images, 17, WIDTH)).astype(np.float32) for _ in range(count)]


def error_of(got, wanted):
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())
