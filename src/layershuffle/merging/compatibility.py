"""Check whether donors can be merged: models of one shape, refined from one base checkpoint.

An ensemble needs less: its members have the same classes and the same image view.

The paper (section 4.4) merges models of one method, "refined from the same base model on the same
data". Shape, image view, position parts and base must always agree, method and data unless the
caller allows mixed donors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from layershuffle.core.position import backbone_of, width_of
from layershuffle.core.stack import blocks_of, depth_of
from layershuffle.core.tying import share_weights
from layershuffle.errors import UsageError
from layershuffle.models.files import shapes_of
from layershuffle.models.origin import origin_of, settings_of
from layershuffle.models.position_files import position_to_json
from layershuffle.models.store import class_names_of, image_view, library_of, num_classes_of

# Settings of modules without effect on evaluation.
_REASONS = {
    "kind of model": "merge models of one architecture",
    "number of blocks": "block i of a merge is block i of a donor",
    "width": "blocks of other widths cannot follow each other",
    **dict.fromkeys(
        ("number of classes", "names of the classes"),
        "take models with the same classes",
    ),
    "image view": "take models with the same image view, because all get the same images",
    "position parts": "blocks that learnt with different position parts do not fit together",
    "base": "only models refined from one base can be merged (paper, section 4.4); with "
    "?pretrained=false every --seed makes another base, so save such a model once and refine that",
    **dict.fromkeys(
        ("method", "order policy", "data"),
        "the paper never mixes them; --mixed (mixed: true in a recipe) allows it",
    ),
}
_LONGEST = 300  # characters of a value in a message: there may be a thousand classes
_SHAPE_REASON = "merge models of one shape and with the same settings"


def check_compatible(
    donors: Sequence[nn.Module], *, names: Sequence[str], mixed: bool = False
) -> None:
    """Raises `UsageError` with the reason if the donors cannot be merged.

    `mixed` allows donors of several methods, order policies and data.
    """
    if len(donors) < 2:
        raise UsageError(
            f"At least two models are needed, got {len(donors)}", hint="name two or more"
        )
    for name, donor in zip(names, donors, strict=True):
        if any(module.training for module in donor.modules()):
            raise UsageError("A donor is in training mode", place=name, hint="call donor.eval()")
        if share_weights(blocks_of(donor)):
            raise UsageError(
                "The blocks of this donor are tied, so a merge cannot choose between them",
                place=name,
                hint="merge models whose blocks have weights of their own",
            )
    # Cheap and informative comparisons come first: a model of another width also differs in the
    # shape of every tensor.
    parts = (
        _architecture,
        _answers,
        _positions,
        _base if mixed else _records,
        _shapes,
        settings_of,
    )
    _check_agree(donors, names, parts)


def check_members(members: Sequence[nn.Module], *, names: Sequence[str]) -> None:
    """Raises `UsageError` for fewer than two models, or different classes or image views."""
    if len(members) < 2:
        raise UsageError(
            f"At least two models are needed, got {len(members)}", hint="name two or more"
        )
    _check_agree(members, names, (_answers,))


def _check_agree(
    donors: Sequence[nn.Module],
    names: Sequence[str],
    parts: Sequence[Callable[[nn.Module], dict[str, Any]]],
) -> None:
    """Raises `UsageError` for the first fact of `parts` in which a donor differs from the first."""
    for describe in parts:
        first = describe(donors[0])
        for name, donor in zip(names[1:], donors[1:], strict=True):
            other = describe(donor)
            for key in [*first, *(other.keys() - first.keys())]:
                ours, theirs = first.get(key), other.get(key)
                # A head whose classes have no names is matched by index, as with data.
                unnamed = key == "names of the classes" and None in (ours, theirs)
                if ours != theirs and not unnamed:
                    raise UsageError(
                        f"{names[0]} and {name} do not fit together: they differ in {key} "
                        f"({'not recorded' if ours is None else str(ours)[:_LONGEST]} and "
                        f"{'not recorded' if theirs is None else str(theirs)[:_LONGEST]})",
                        hint=_REASONS.get(key, _SHAPE_REASON),
                    )


def shared_record(donors: Sequence[nn.Module]) -> dict[str, Any]:
    """The entries of the donors' records (method, policy, base, data) that all of them share."""
    records = [origin_of(backbone_of(donor)).record for donor in donors]
    provenances = [_provenance(record) for record in records]
    keys = ("base", "base_sha256", "blocks_of_base", "data")
    return {
        **_shared(records, ("method", "policy")),
        "provenance": _shared(provenances, keys),
    }


def _shared(records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    first = records[0]
    return {
        key: first[key]
        for key in keys
        if first.get(key) is not None and all(record.get(key) == first[key] for record in records)
    }


def _architecture(donor: nn.Module) -> dict[str, Any]:
    host = backbone_of(donor)
    return {
        "kind of model": f"{type(host).__module__.partition('.')[0]} {type(host).__name__}",
        "number of blocks": depth_of(donor),
        "width": width_of(host),
    }


def _answers(donor: nn.Module) -> dict[str, Any]:
    """The classes and the image view of the model; empty if they are unknown."""
    host = backbone_of(donor)
    try:
        library_of(host)
    except UsageError:
        return {}  # a model of the user
    return {
        "number of classes": num_classes_of(host),
        "names of the classes": class_names_of(host),
        "image view": image_view(host),
    }


def _positions(donor: nn.Module) -> dict[str, Any]:
    return {"position parts": position_to_json(donor)}


def _base(donor: nn.Module) -> dict[str, Any]:
    provenance = _provenance(origin_of(backbone_of(donor)).record)
    # A digest of the weights identifies a base; the name of a randomly initialised one does not.
    base = provenance.get("base_sha256") or provenance.get("base")
    blocks = provenance.get("blocks_of_base")
    return {"base": f"{base}, blocks {blocks}" if blocks else base}


def _records(donor: nn.Module) -> dict[str, Any]:
    record = origin_of(backbone_of(donor)).record
    return {
        **_base(donor),
        "method": record.get("method"),
        "order policy": record.get("policy"),
        "data": _provenance(record).get("data"),
    }


def _shapes(donor: nn.Module) -> dict[str, Any]:
    return {f"the shape of {k}": v for k, v in shapes_of(donor.state_dict()).items()}


def _provenance(record: Mapping[str, Any]) -> Mapping[str, Any]:
    provenance = record.get("provenance")
    return provenance if isinstance(provenance, Mapping) else {}
