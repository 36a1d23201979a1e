"""Which donors fit together: a merge needs models of one shape, refined from one base.

The paper (section 4.4) merges models of one method, "refined from the same base model on the same
data". Shape, image view, position parts and base must agree; method and data unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from layershuffle.errors import UsageError
from layershuffle.models import host_of
from layershuffle.models.files import shapes_of
from layershuffle.models.origin import origin_of
from layershuffle.models.position_files import position_to_json
from layershuffle.models.store import image_view, library_of, num_classes_of
from layershuffle.position import width_of
from layershuffle.stack import depth_of

# Settings of modules that change nothing at evaluation.
_IGNORED = frozenset({"training", "name_or_path", "grad_checkpointing", "gradient_checkpointing"})
_RECORDED = ("method", "policy")
_WHY = {
    "kind of model": "a merge is made of models of one architecture",
    "number of blocks": "block i of a merge is block i of a donor",
    "width": "blocks of other widths cannot follow each other",
    "number of classes": "the heads of a merge say the same classes",
    "image view": "a merge gets the same images as its donors",
    "position parts": "blocks learnt with other position parts do not understand each other",
    "base": "only models refined from one base can be merged (paper, section 4.4)",
    **dict.fromkeys(
        ("method", "order policy", "data"),
        "the paper never mixes them; --mixed (mixed: true in a recipe) does it all the same",
    ),
}
_WHY_SHAPE = "a merge is made of models of one shape and the same settings"


def check_family(donors: Sequence[nn.Module], *, names: Sequence[str], mixed: bool = False) -> None:
    """Raises `UsageError` in one paragraph if the donors do not fit together, with the reason.

    `mixed` allows other methods, order policies and data.
    """
    if len(donors) < 2:
        raise UsageError(f"At least two models are needed, {len(donors)} given")
    for name, donor in zip(names, donors, strict=True):
        if any(module.training for module in donor.modules()):
            raise UsageError("A donor is in training mode", place=name, hint="call donor.eval()")
    first = donors[0]
    for name, donor in zip(names[1:], donors[1:], strict=True):
        for what, one, two in _differences(first, donor, mixed=mixed):
            raise UsageError(
                f"{names[0]} and {name} do not fit together: {what} is {_told(one)} there and "
                f"{_told(two)} here",
                hint=_WHY.get(what, _WHY_SHAPE),
            )


def shared_record(donors: Sequence[nn.Module]) -> dict[str, Any]:
    """Of the donors' records (method, policy, base, data): what all of them say alike."""
    records = [origin_of(host_of(donor)).record for donor in donors]
    provenances = [_provenance(record) for record in records]
    kept = {key: records[0].get(key) for key in _RECORDED if _alike(records, key)}
    keys = ("base", "base_sha256", "blocks_of_base", "data")
    told = {key: provenances[0][key] for key in keys if _alike(provenances, key)}
    return {**kept, "provenance": told}


def _alike(records: Sequence[Mapping[str, Any]], key: str) -> bool:
    return records[0].get(key) is not None and all(
        record.get(key) == records[0][key] for record in records
    )


def _differences(one: nn.Module, two: nn.Module, *, mixed: bool) -> list[tuple[str, Any, Any]]:
    """(what, its value in the first, in the second), the most telling difference first."""
    for facts in (_facts, _records if not mixed else _bases, _tensors, _settings):
        ours, theirs = facts(one), facts(two)
        found = [
            (what, ours.get(what), theirs.get(what))
            for what in [*ours, *(theirs.keys() - ours.keys())]
            if ours.get(what) != theirs.get(what)
        ]
        if found:
            return found
    return []


def _facts(donor: nn.Module) -> dict[str, Any]:
    host = host_of(donor)
    facts = {
        "kind of model": f"{type(host).__module__.partition('.')[0]} {type(host).__name__}",
        "number of blocks": depth_of(donor),
        "width": width_of(host),
    }
    if _has_library(host):
        facts |= {"number of classes": num_classes_of(host), "image view": image_view(host)}
    return {**facts, "position parts": position_to_json(donor)}


def _has_library(host: nn.Module) -> bool:
    """Models of none can be merged as well: what is not known of them is not compared."""
    try:
        library_of(host)
    except UsageError:
        return False
    return True


def _bases(donor: nn.Module) -> dict[str, Any]:
    said = _provenance(origin_of(host_of(donor)).record)
    # The fingerprint of the weights says more than the name, which may stand for random ones.
    base = said.get("base_sha256") or said.get("base")
    blocks = said.get("blocks_of_base")
    return {"base": f"{base}, blocks {blocks}" if blocks else base}


def _records(donor: nn.Module) -> dict[str, Any]:
    record = origin_of(host_of(donor)).record
    told = {"method": record.get("method"), "order policy": record.get("policy")}
    return {**_bases(donor), **told, "data": _provenance(record).get("data")}


def _tensors(donor: nn.Module) -> dict[str, Any]:
    return {f"the shape of {k}": v for k, v in shapes_of(donor.state_dict()).items()}


def _settings(donor: nn.Module) -> dict[str, Any]:
    """Numbers, words and tuples of every module: what shapes do not show, as numbers of heads."""
    return {
        f"{path}.{key}": value
        for path, module in donor.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple)
        and not key.startswith("_")
        and key not in _IGNORED
        and "drop" not in key
    }


def _provenance(record: Mapping[str, Any]) -> Mapping[str, Any]:
    said = record.get("provenance")
    return said if isinstance(said, Mapping) else {}


def _told(value: object) -> str:
    return "not recorded" if value is None else str(value)
