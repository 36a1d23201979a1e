"""Models whose places share the weights of a few blocks."""

import json

import pytest
import torch
from saved_models import assert_same_model, outputs

import layershuffle as ls
from common import FAMILIES, images, logits_of
from layershuffle.core.stack import blocks_of
from layershuffle.core.tying import middle_blocks, places_tied, tie
from layershuffle.errors import ModelFileError, UsageError
from layershuffle.merging.compatibility import check_compatible
from layershuffle.models.files import weights_digest
from refusals import refuses

LIBRARIES = ("timm-vit", "hf-vit", "torchvision-vit")


@pytest.mark.parametrize("name", LIBRARIES)
def test_computes_what_repeats_of_its_blocks_compute(name):
    model, x = FAMILIES[name].wrapped().eval(), images()
    with torch.no_grad(), ls.running(model, (1, 1, 3, 3)):
        wanted = logits_of(model(x))
    tie(model, (1, 1, 3, 3))
    with torch.no_grad():
        assert torch.equal(logits_of(model(x)), wanted)
    assert places_tied(blocks_of(model)) == (0, 0, 2, 2)


@pytest.mark.parametrize("name", LIBRARIES)
def test_saved_and_loaded_it_is_tied_again(name, tmp_path):
    model = tie(FAMILIES[name].wrapped(), (0, 0, 2, 2))
    ls.save(model, tmp_path / "tied")
    assert "4 blocks, of which 2 are different" in (tmp_path / "tied" / "README.md").read_text()
    again = ls.load(f"dir:{tmp_path / 'tied'}")
    assert_same_model(again, model)
    assert places_tied(blocks_of(again)) == (0, 0, 2, 2)
    assert torch.equal(outputs(again), outputs(model))
    # What its library reads has the blocks one by one.
    (tmp_path / "tied" / "layershuffle.json").unlink()
    stock = ls.load(f"dir:{tmp_path / 'tied'}") if name != "torchvision-vit" else None
    if stock is not None:
        assert places_tied(blocks_of(stock)) is None
        assert torch.equal(outputs(stock), outputs(model))


@pytest.mark.parametrize("owned", ["mlp.fc1.bias", "norm1.weight"])
def test_a_place_that_shares_a_part_of_its_weights_is_saved_as_it_is(owned, tmp_path):
    model = tie(FAMILIES["timm-vit"].wrapped(), (0, 0, 2, 2)).eval()
    module, _, name = owned.rpartition(".")
    layer = blocks_of(model)[1].get_submodule(module)
    setattr(layer, name, torch.nn.Parameter(getattr(layer, name).detach() + 1))
    assert places_tied(blocks_of(model)) == (0, 1, 2, 2)
    ls.save(model, tmp_path / "partly")
    again = ls.load(f"dir:{tmp_path / 'partly'}")
    assert places_tied(blocks_of(again)) == (0, 1, 2, 2)
    assert torch.equal(outputs(again), outputs(model))
    # A merge would overwrite the block of one donor with that of another.
    with refuses(UsageError):
        check_compatible([model, model], names=["a", "b"])


def test_tied_places_with_different_weights_are_refused(tmp_path):
    ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "model")
    path = tmp_path / "model" / "layershuffle.json"
    metadata = json.loads(path.read_text())
    for places in ([0, 0, 2, 3], [0]):
        path.write_text(json.dumps({**metadata, "tied": places}))
        with refuses(ModelFileError):
            ls.load(f"dir:{tmp_path / 'model'}")


def test_the_middle_of_a_run_of_places_stands_for_it():
    assert middle_blocks(1, 12) == (5,) * 12
    assert middle_blocks(3, 12) == (1,) * 4 + (5,) * 4 + (9,) * 4
    assert middle_blocks(12, 12) == tuple(range(12))
    # 12 = 2 + 2 + 3 + 2 + 3 places.
    assert middle_blocks(5, 12) == (0, 0, 2, 2, 5, 5, 5, 7, 7, 10, 10, 10)
    for distinct in (0, 13):
        with refuses(UsageError):
            middle_blocks(distinct, 12)


def test_wrong_places_and_merges_are_refused():
    model = FAMILIES["timm-vit"].wrapped().eval()
    before = weights_digest(model)
    for places in ((0, 0), (0, 1, 2, 4)):
        with refuses(UsageError):
            tie(model, places)
    assert weights_digest(model) == before
    tie(model, (0, 0, 0, 0))
    with refuses(UsageError):
        check_compatible([model, model], names=["a", "b"])
