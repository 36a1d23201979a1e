"""Bundles: their content, which models are refused, and which blocks are compatible."""

import json
import os

import numpy as np
import pytest
import torch
from pico_hosts import (
    CARRIED,
    LONG,
    ORDER,
    TOLERANCE,
    bundle_of,
    entrance,
    error_of,
    host_with,
    in_process,
    model_of,
    run,
)
from torch import nn

import layershuffle as ls
from common import FAMILIES, WIDTH
from layershuffle.core.position import add_position
from layershuffle.core.position_forms import EncodingForm, PredictionForm
from layershuffle.core.stack import blocks_of
from layershuffle.errors import ModelFileError, StackError, UsageError
from layershuffle.swarm.bundle import bound_block, make_bundle
from layershuffle.swarm.messages import (
    pack,
    unpack,
)
from layershuffle.swarm.program import pack_tensors, read_program


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", CARRIED)
def test_a_route_equals_the_model_bit_for_bit(family, batch):
    model, bundle = model_of(family), bundle_of(family)
    state = entrance(model, batch)

    async def route(host):
        return await host.visit(ORDER, pack(state, "fp32"), budget_ms=LONG)

    answer = run(route, host_with(bundle))
    with torch.no_grad():
        wanted = in_process(model, ORDER, batch)
    assert unpack(answer.packet).tobytes() == wanted.tobytes()
    assert (answer.batch, answer.packet.wire) == (batch, "fp32")


def test_torchvision_equals_the_model_where_gradients_are_asked_for():
    """Without gradients torchvision's attention is fused and differs in the last bits."""
    model, bundle = model_of("torchvision-vit"), bundle_of("torchvision-vit")
    state = entrance(model, 3)

    async def route(host):
        return await host.visit(ORDER, pack(state, "fp32"), budget_ms=LONG)

    got = unpack(run(route, host_with(bundle)).packet)
    assert got.tobytes() == in_process(model, ORDER, 3).tobytes()
    with torch.no_grad():
        assert 0 < error_of(got, in_process(model, ORDER, 3)) < TOLERANCE["batched"]


def test_a_bundle_computes_its_blocks_as_the_model_does():
    bundle, model = bundle_of("timm-vit"), model_of("timm-vit")
    sample = bundle.sample
    assert sample.shape == (1, *bundle.shape) == (1, 17, WIDTH)
    assert sample.dtype == np.float32
    assert 0.3 < sample.std() < 3
    with torch.no_grad():
        for block, module in enumerate(blocks_of(model)):
            wanted = module(torch.tensor(sample)).numpy()
            assert bundle.compute(block, sample).tobytes() == wanted.tobytes()
    again = make_bundle(model)
    assert again.sample.tobytes() == sample.tobytes()
    assert again.program == bundle.program
    assert again.tensors == bundle.tensors


def test_a_block_is_bound_once():
    bundle = bundle_of("timm-vit")
    first, *others = [bound_block(bundle.program, bundle.tensors[block]) for block in range(4)]
    assert first.digest == bundle.digests[0]
    assert all(first is not other for other in others)
    same = bytes(bytearray(bundle.tensors[0]))  # of another bundle with equal weights
    assert bound_block(bundle.program, same) is first


@pytest.mark.parametrize("family", ["timm-eva02", "timm-dinov3"])
def test_blocks_that_get_more_than_the_state_are_refused(family):
    with pytest.raises(StackError, match=r"Block 0 gets more than the state: rope float32"):
        bundle_of(family)


class Moody(nn.Module):
    """Computes one thing or another, depending on the numbers."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, state):
        return self.inside(state) if state.mean() > 0 else state


def test_models_that_hosts_cannot_run_are_refused():
    family = FAMILIES["timm-vit"]
    model = add_position(family.wrapped(), encoding=EncodingForm()).eval()
    with pytest.raises(UsageError, match="need a position encoding"):
        make_bundle(model)
    with pytest.raises(UsageError, match="training mode"):
        make_bundle(family.wrapped().train())
    with pytest.raises(UsageError, match="float32"):
        make_bundle(family.wrapped().half())
    shifted = family.wrapped()
    blocks_of(shifted)[2].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    with pytest.raises(StackError, match="changes the state between the blocks 1 and 2"):
        make_bundle(shifted)
    moody = family.plain()
    for block in moody.blocks:
        block.mlp = Moody(block.mlp).eval()
    with pytest.raises(StackError, match=r"torch\.export cannot follow"):
        make_bundle(ls.wrap(moody))


def test_prediction_parts_stay_at_home():
    model = add_position(FAMILIES["timm-vit"].wrapped(), prediction=PredictionForm()).eval()
    assert make_bundle(model).tensors == bundle_of("timm-vit").tensors


def test_programs_hold_operations_of_torch_and_nothing_else():
    content = bundle_of("timm-vit").program
    assert len(content) < 10_000
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    data = json.loads(header["__metadata__"]["program"])
    assert str(os.getcwd()) not in content.decode("latin-1")

    def refused(message, **changes):
        metadata = {"program": json.dumps({**data, **changes})}
        with pytest.raises(ModelFileError, match=message):
            read_program(pack_tensors({}, metadata))

    refused("format 2", format=2)
    refused("not an operation", steps=[["os.system.default", ["true"], {}]])
    refused("has no attribute", steps=[["aten.no_such_thing.default", [], {}]])
    refused("not an identifier", steps=[["aten.relu.default", [], {"x=print(1), y": 1}]])
    refused("no type or layout", steps=[["aten.relu.default", [{"torch": "load"}], {}]])
    refused("KeyError", inputs=[["constant", "absent"]])
    with pytest.raises(ModelFileError, match="whole safetensors"):
        read_program(content[:100])
    with pytest.raises(ModelFileError, match="not a block's program"):
        read_program(pack_tensors({}))
