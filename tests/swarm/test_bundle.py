"""Bundles: their content, which models are refused, and which blocks are compatible."""

import json
import os
import resource
from dataclasses import replace

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
from common import FAMILIES, WIDTH, redraw
from layershuffle.core.position import add_position
from layershuffle.core.position_forms import EncodingForm, PredictionForm
from layershuffle.core.stack import blocks_of
from layershuffle.errors import ModelFileError, StackError, UsageError
from layershuffle.swarm.bundle import bound_block, check_sibling, make_bundle
from layershuffle.swarm.lineage import read_block
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


@pytest.mark.parametrize("family", ["timm-vit", "hf-vit", "hf-siglip", "torchvision-vit"])
def test_one_block_is_read_from_a_saved_model(family, tmp_path):
    bundle = bundle_of(family)
    ls.save(model_of(family), tmp_path / "model")
    # The directory of a run holds the model.
    assert read_block(tmp_path, 2) == read_block(tmp_path / "model", 2) == bundle.tensors[2]
    with pytest.raises(UsageError, match=r"has no block 4 \(0 to 3 exist\)"):
        read_block(tmp_path, 4)


def test_reading_a_block_leaves_the_rest_of_the_file_alone(tmp_path):
    """The file has another tensor of 4 GiB (a hole), and reading it would be noticed."""
    ls.save(model_of("timm-vit"), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    hole = [len(data), len(data) + (4 << 30)]
    header["blocks.9.hole"] = {"dtype": "U8", "shape": [4 << 30], "data_offsets": hole}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    os.truncate(path, 8 + len(text) + hole[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_block(tmp_path, 1) == bundle_of("timm-vit").tensors[1]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024, f"{grown} KiB"


def test_damaged_directories_are_named(tmp_path):
    with pytest.raises(ModelFileError, match="no such file"):
        read_block(tmp_path, 0)
    ls.save(model_of("timm-vit"), tmp_path / "model")
    path = tmp_path / "model" / "layershuffle.json"
    path.write_text(path.read_text().replace('"blocks": "blocks"', '"blocks": "stages"'))
    with pytest.raises(ModelFileError, match="not where"):
        read_block(tmp_path, 0)


def test_siblings_and_strangers(tmp_path):
    """Blocks come from models refined from one base, of one depth, shape and view."""
    model, record = FAMILIES["timm-vit"].wrapped(), {"provenance": {"base_sha256": "ab"}}
    ls.save(model, tmp_path / "one", record=record)
    bundle = make_bundle(ls.load(str(tmp_path / "one")))
    assert bundle.base == "ab"
    ls.save(redraw(model, seed=5), tmp_path / "two", record=record)
    check_sibling(bundle, tmp_path / "two")
    sibling = make_bundle(ls.load(str(tmp_path / "two")))
    check_sibling(bundle, sibling)
    assert sibling.tensors != bundle.tensors

    stranger = {"provenance": {"base_sha256": "cd"}}
    ls.save(model, tmp_path / "three", record=stranger)
    with pytest.raises(UsageError, match="the base is cd in the donor and ab in the swarm"):
        check_sibling(bundle, tmp_path / "three")
    ls.save(model, tmp_path / "four", record={})
    with pytest.raises(UsageError, match="not recorded in the donor"):
        check_sibling(bundle, tmp_path / "four")
    base = bundle_of("timm-vit").base
    assert base is not None
    assert len(base) == 64  # a model that tells no base is its own
    shapes = {**bundle.lineage.shapes, "norm1.weight": (48,)}
    for change, message in (
        ({"depth": 12}, "number of blocks is 12 in the donor and 4 in the swarm"),
        ({"depth": 12, "base": "cd"}, "number of blocks is 12 in the donor"),
        ({"shapes": shapes}, r"norm1\.weight is \(48,\) in the donor and \(32,\) in the"),
        ({"view": replace(bundle.lineage.view, mean=(0.0,) * 3)}, "image view"),
    ):
        other = replace(bundle, lineage=replace(bundle.lineage, **change))
        with pytest.raises(UsageError, match=message):
            check_sibling(bundle, other)
    with pytest.raises(UsageError, match="computation"):
        check_sibling(bundle, replace(bundle, program=b"other"))


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
