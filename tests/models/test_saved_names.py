"""Class names are saved with a model, in its library's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import transformers
from saved_models import CONFIG, edit, refused

import layershuffle as ls
from common import FAMILIES
from layershuffle.errors import UsageError
from layershuffle.models import class_names_of, replace_head, set_class_names
from refusals import refuses

NAMES = ("ant", "bee", "cat", "dog", "elk")
LIBRARIES = ("timm-vit", "timm-deit-distilled", "hf-vit", "hf-timm-wrapper", "torchvision-vit")


def stock_names(place: Path, library: str) -> list[str]:
    """The names that the library itself reads."""
    if library == "timm":
        return timm.create_model(f"local-dir:{place}", pretrained=True).pretrained_cfg[
            "label_names"
        ]
    if library == "transformers":
        config: Any = transformers.AutoConfig.from_pretrained(place)
        assert config.label2id == {name: index for index, name in enumerate(NAMES)}
        return list(config.id2label.values())
    return json.loads((place / CONFIG).read_text())["categories"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_names_are_saved_where_the_library_reads_them(name: str, tmp_path: Path) -> None:
    model = FAMILIES[name].wrapped()
    assert class_names_of(model) is None
    set_class_names(model, NAMES)
    ls.save(model, tmp_path / "m")
    assert stock_names(tmp_path / "m", FAMILIES[name].library) == list(NAMES)
    again = ls.load(str(tmp_path / "m"))
    assert class_names_of(again) == NAMES
    ls.save(again, tmp_path / "again")
    assert stock_names(tmp_path / "again", FAMILIES[name].library) == list(NAMES)
    # With as many other classes, none of the old names stays.
    replace_head(again, 5, seed=0)
    assert class_names_of(again) is None
    ls.save(again, tmp_path / "new")
    assert class_names_of(ls.load(str(tmp_path / "new"))) is None


def test_as_many_names_as_classes() -> None:
    with refuses(UsageError):
        set_class_names(FAMILIES["timm-vit"].wrapped(), ("ant", "bee"))


@pytest.mark.parametrize(
    ("name", "key"), [("timm-vit", "label_names"), ("torchvision-vit", "categories")]
)
@pytest.mark.parametrize("names", [["ant", "bee"], "antbe"])
def test_names_of_other_classes_are_refused(
    name: str, key: str, names: object, tmp_path: Path
) -> None:
    ls.save(FAMILIES[name].wrapped(), tmp_path / "m")
    edit(CONFIG, key, value=names)(tmp_path / "m")
    assert refused(tmp_path / "m").place


@pytest.mark.parametrize(
    ("keys", "names"), [("43210", NAMES[::-1]), (("n01", "n02", "n03", "n04", "n05"), None)]
)
def test_timm_s_names_may_be_a_mapping(
    keys: Sequence[str], names: Sequence[str] | None, tmp_path: Path
) -> None:
    ls.save(FAMILIES["timm-vit"].wrapped(), tmp_path / "m")
    edit(CONFIG, "label_names", value=dict(zip(keys, NAMES, strict=True)))(tmp_path / "m")
    assert class_names_of(ls.load(str(tmp_path / "m"))) == names


def test_the_bundled_models_know_their_classes() -> None:
    for spec in ("bundled:digits", "bundled:digits-swarm"):
        assert class_names_of(ls.load(spec)) == tuple(f"{pair:02d}" for pair in range(100))
