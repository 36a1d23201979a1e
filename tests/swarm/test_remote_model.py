"""The host model whose blocks run in a swarm: equal to the forward of the route, bit for bit."""

import asyncio
import threading

import pytest
import timm
import torch
from gateway_site import HOSTS, LIMITS, VIT, Blocks, site

import layershuffle as ls
from common import DEPTH, FAMILIES, logits_of
from layershuffle.core.position import add_position
from layershuffle.core.position_forms import EncodingForm, PredictionForm
from layershuffle.core.stack import running
from layershuffle.errors import StackError, UsageError
from layershuffle.image_view import uncropped_size
from layershuffle.models import file_view, image_view
from layershuffle.swarm.remote_model import (
    NotAnswered,
    RemoteModel,
    drop_blocks,
    served_host,
)
from layershuffle.swarm.router import Router
from layershuffle.swarm.state import HostView, Swarm
from waiting import HANGS, until


def router_of(model, depth=DEPTH):
    return Router(Blocks(model), depth=depth, limits=LIMITS)


@pytest.mark.parametrize("family", ["timm-vit", "hf-vit", "torchvision-vit"])
def test_it_equals_the_forward_of_the_route(family):
    """Bit-equal over an fp32 wire, one image; the blocks are only at the hosts."""
    whole = FAMILIES[family].wrapped()
    batch = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(3))

    async def go():
        router = router_of(FAMILIES[family].wrapped())
        router.swarm = Swarm(HostView(name, frozenset(blocks)) for name, blocks in HOSTS.items())
        remote_model = RemoteModel(FAMILIES[family].wrapped(), router)
        deadline = router.clock() + HANGS
        classified = await remote_model.classify(batch, deadline=deadline)
        remote_model.close()
        return classified

    classified = asyncio.run(go())
    assert sorted(classified.route.order) == list(range(DEPTH))
    with torch.inference_mode(), running(whole, classified.route.order):
        wanted = logits_of(whole(batch))
    assert torch.equal(classified.logits, wanted)
    assert min(classified.stem_ms, classified.swarm_ms, classified.head_ms) > 0


def test_a_model_of_two_states_cannot_be_taken_apart():
    """The patches' state would stay behind as it was before the first block."""
    model = timm.create_model(
        "tnt_s_legacy_patch16_224", embed_dim=8, inner_dim=4, depth=2, num_heads_inner=2,
        num_heads_outer=2,
    )  # fmt: skip
    with pytest.raises(StackError, match="into stem, blocks and head"):
        served_host(model)


def test_it_drops_the_blocks():
    model = VIT.wrapped()
    block_bytes = sum(p.nbytes for p in model.blocks.parameters())
    rest = sum(p.nbytes for p in model.parameters()) - block_bytes
    remote_model = RemoteModel(model, router_of(model))
    assert remote_model.saved_bytes == block_bytes
    assert sum(p.nbytes for p in model.parameters() if not p.is_meta) == rest
    assert all(p.is_meta for p in model.blocks.parameters())
    remote_model.close()


def test_drop_blocks_keeps_what_is_shared():
    model = VIT.wrapped()
    model.blocks.blocks[0].norm1 = model.norm
    shared = sum(p.nbytes for p in model.norm.parameters())
    inside = sum(p.nbytes for p in model.blocks.parameters())
    assert drop_blocks(model) == inside - shared
    assert not any(p.is_meta for p in model.norm.parameters())
    assert all(p.is_meta for p in model.blocks.blocks[1].norm1.parameters())


def test_it_refuses_position_encoding_and_other_depths():
    router = router_of(VIT.wrapped())
    encoded = add_position(VIT.wrapped(), encoding=EncodingForm())
    with pytest.raises(StackError, match="something else at every position"):
        RemoteModel(encoded, router)
    predicted = add_position(VIT.wrapped(), prediction=PredictionForm())
    RemoteModel(predicted, router).close()
    with pytest.raises(UsageError, match="3 blocks, but the model has 4"):
        RemoteModel(VIT.wrapped(), router_of(None, depth=3))


def test_being_cancelled_ends_the_walk():
    async def go():
        async with site() as place:
            place.blocks.gate = asyncio.Event()
            deadline = place.router.clock() + 25
            images = torch.zeros(1, 3, 32, 32)
            work = asyncio.ensure_future(place.remote_model.classify(images, deadline=deadline))
            await until(lambda: place.blocks.visits)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            await until(lambda: place.blocks.cancelled)

    asyncio.run(go())


def test_a_slow_head_moves_the_routers_deadline():
    async def go():
        async with site() as place:
            deadlines = []
            walk = place.router.walk

            async def spy(start, *, deadline, **options):
                deadlines.append(deadline)
                return await walk(start, deadline=deadline, **options)

            place.router.walk = spy
            deadline = place.router.clock() + 25
            for head in (0.0, 0.010, 0.310):
                place.remote_model.head_seconds = head
                await place.remote_model.classify(torch.zeros(1, 3, 32, 32), deadline=deadline)
            return [deadline - moved for moved in deadlines]

    assert asyncio.run(go()) == pytest.approx([0, 0, 0.3], abs=1e-6)


def test_a_head_that_stalled_once_is_forgiven():
    """While it is expected to take longer than requests have, none comes to its head."""

    async def go():
        async with site() as place:
            place.remote_model.head_seconds = 100.0
            for refused in range(30):
                deadline = place.router.clock() + 25
                try:
                    await place.remote_model.classify(torch.zeros(1, 3, 32, 32), deadline=deadline)
                except NotAnswered:
                    continue
                return refused

    assert asyncio.run(go()) == 7  # 100 s x 0.8^7 = 21 s


def test_a_stem_that_waits_past_its_deadline_never_runs():
    """With all threads busy it is refused at its deadline, and costs no time afterwards."""
    model, gate, forwards = VIT.wrapped(), threading.Event(), []

    def note(module, inputs):
        forwards.append(inputs[0].shape[0])
        assert gate.wait(HANGS)

    async def go():
        router = router_of(VIT.wrapped())
        router.swarm = Swarm(HostView(name, frozenset(blocks)) for name, blocks in HOSTS.items())
        remote_model = RemoteModel(model, router, workers=1)
        # Not before: a new remote model tries its host once.
        model.register_forward_pre_hook(note)

        def asked(images, *, seconds):
            deadline = router.clock() + seconds
            return remote_model.classify(torch.zeros(images, 3, 32, 32), deadline=deadline)

        first = asyncio.ensure_future(asked(1, seconds=HANGS))
        await until(lambda: forwards)
        with pytest.raises(NotAnswered, match="deadline passed before the model's stem"):
            await asked(2, seconds=0.05)
        gate.set()
        await first
        remote_model.close()

    asyncio.run(go())
    assert forwards == [1, 1]  # stem and head of the first request


def test_image_files_fill_the_view_of_a_model_of_digit_pairs():
    """As its training images did; other models get the view that they were saved with."""
    digits = ls.load("bundled:digits")
    view = file_view(digits)
    assert (view.resize, uncropped_size(view)) == ("squash", (20, 12))
    assert file_view(VIT.wrapped()) == image_view(VIT.wrapped())
