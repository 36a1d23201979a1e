"""Models made of some blocks of another model."""

import pytest
import torch

import layershuffle as ls
from common import DEPTH, FAMILIES, images, logits_of
from layershuffle.errors import UsageError
from layershuffle.models import truncate
from refusals import refuses

# Families whose library can describe another depth; others must be refused unchanged.
PLAIN = ("timm-vit", "hf-vit", "torchvision-vit")


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_pruned_order_or_is_refused_unharmed(name, tmp_path):
    model = FAMILIES[name].wrapped()
    x = images()
    with torch.no_grad(), ls.running(model, "0,3"):
        wanted = logits_of(model(x))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        short = truncate(model, (0, 3))
    except UsageError:
        assert name not in PLAIN
        assert ls.depth_of(model) == DEPTH
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
        return
    assert ls.depth_of(short) == 2
    with torch.no_grad():
        assert torch.equal(logits_of(short(x)), wanted)
    ls.save(short, tmp_path / "short")
    again = ls.load(f"dir:{tmp_path / 'short'}")
    assert ls.depth_of(again) == 2
    with torch.no_grad():
        assert torch.equal(logits_of(again(x)), wanted)


def test_wrong_blocks():
    model = FAMILIES["timm-vit"].wrapped()
    with refuses(UsageError):
        truncate(model, (0, 0))
    positioned = ls.add_position(model, encoding=ls.EncodingForm())
    with refuses(UsageError):
        truncate(positioned, (0, 1))
