"""Check whether donors can be merged: models of one shape, refined from one base checkpoint.

An ensemble needs less: its members have the same classes and the same image view.

The paper (section 4.4) merges models of one method, "refined from the same base model on the same
data". Shape, settings, image view, position parts and base must always agree, method and data
unless the caller allows mixed donors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layershuffle.core.position import backbone_of
from layershuffle.core.stack import blocks_of, depth_of, fixed_of
from layershuffle.core.tying import share_weights
from layershuffle.ground.errors import UsageError
from layershuffle.models.files import check_finite
from layershuffle.models.libraries import class_names_of, image_view, library_of, num_classes_of
from layershuffle.models.onnx_models import ExportedModel
from layershuffle.models.origin import origin_of, settings_of, training_settings
from layershuffle.models.position_files import forms_of

_CLASSES = "names of the classes"
_OF_TRAINING = ("method", "order policy", "data")
# Fact -> what to do about it.
_HINTS = {
    "base": "only models refined from one base can be merged (paper, section 4.4); with "
    "?pretrained=false every --seed makes another base, so save such a model once and refine that",
    _CLASSES: "take models with the same classes in the same order; --classes FILE "
    "names those of models that name none",
    "ends, the blocks that keep their place": "train the donors with one --fixed",
    **dict.fromkeys(
        _OF_TRAINING, "the paper never mixes them; in Python MergeGroup(donors, mixed=True) does"
    ),
}
_HINT = "take models of one architecture, with the same settings, classes and image view"


def check_compatible(
    donors: Sequence[nn.Module], *, names: Sequence[str], mixed: bool = False
) -> None:
    """Raises `UsageError` with the reason if the donors cannot be merged.

    `mixed` allows donors of several methods, order policies and data. Raises `ModelFileError` for
    weights that are not finite.
    """
    if len(donors) < 2:
        raise UsageError(
            f"At least two models are needed, got {len(donors)}", hint="name two or more"
        )
    for name, donor in zip(names, donors, strict=True):
        if isinstance(backbone_of(donor), ExportedModel):
            hint = "merge the models that they were exported from"
            raise UsageError("Exported files cannot be merged", place=name, hint=hint)
        if share_weights(blocks_of(donor)):
            raise UsageError(
                "The blocks of this donor are tied, so a merge cannot choose between them",
                place=name,
                hint="merge models whose blocks have weights of their own",
            )
    _check_agree(donors, names, _facts, ignored=_OF_TRAINING if mixed else ())


def check_members(members: Sequence[nn.Module], *, names: Sequence[str]) -> None:
    """Raises `UsageError` unless the members of an ensemble have the same classes and image view.

    Raises `ModelFileError` for weights that are not finite.
    """
    _check_agree(members, names, _answers)


def _check_agree(
    donors: Sequence[nn.Module],
    names: Sequence[str],
    facts_of: Callable[[nn.Module], dict[str, Any]],
    *,
    ignored: Sequence[str] = (),
) -> None:
    """Raises `UsageError` for the first fact in which a donor differs from the first donor.

    A head whose classes have no names is matched by index, as with data, so the names of classes
    are compared with those of the first donor that has any.
    """
    facts = []
    for name, donor in zip(names, donors, strict=True):
        check_finite(donor, name)
        facts.append(facts_of(donor))
    named = 0
    while named < len(donors) - 1 and facts[named].get(_CLASSES) is None:
        named += 1
    for name, other in zip(names[1:], facts[1:], strict=True):
        for key in facts[0] | other:
            against = named if key == _CLASSES else 0
            ours = facts[against].get(key)
            theirs = other.get(key)
            unnamed = key == _CLASSES and theirs is None
            if ours != theirs and not unnamed and key not in ignored:
                # Cut, because there may be a thousand classes.
                first_value = str("not recorded" if ours is None else ours)[:200]
                other_value = str("not recorded" if theirs is None else theirs)[:200]
                raise UsageError(
                    f"{names[against]} and {name} do not fit together: they differ in {key} "
                    f"({first_value} and {other_value})",
                    hint=_HINTS.get(key, _HINT),
                )


def shared_record(donors: Sequence[nn.Module]) -> dict[str, Any]:
    """The entries of the donors' records (method, policy, base, data) that all of them share.

    With the settings that say how images are prepared, and which none of the donors was trained on.
    """
    records: list[Mapping[str, Any]] = []
    provenances: list[Mapping[str, Any]] = []
    trainings: list[Mapping[str, Any]] = []
    for donor in donors:
        record = origin_of(backbone_of(donor)).record
        records.append(record)
        provenances.append(record.get("provenance") or {})
        trainings.append(training_settings(backbone_of(donor)))

    def shared(mappings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key in keys:
            value = mappings[0].get(key)
            if value is not None and all(each.get(key) == value for each in mappings):
                entries[key] = value
        return entries

    entries = shared(records, ("method", "policy"))
    settings = shared(trainings, ("data", "resize"))
    if all("holdout" in training for training in trainings):
        # Held-out parts of the same data contain each other.
        settings["holdout"] = min(training["holdout"] for training in trainings)
    if any(training.get("paper_protocol") for training in trainings):
        settings["paper_protocol"] = True
    if settings:
        entries["settings"] = settings
    entries["provenance"] = shared(provenances, ("base", "base_sha256", "blocks_of_base", "data"))
    return entries


def _answers(donor: nn.Module) -> dict[str, Any]:
    """The classes and the image view of the model; empty if they are unknown."""
    try:
        library_of(backbone_of(donor))
    except UsageError:
        return {}  # a model of the user
    return {
        "number of classes": num_classes_of(donor),
        _CLASSES: class_names_of(donor),
        "image view": image_view(donor),
    }


def _facts(donor: nn.Module) -> dict[str, Any]:
    """What models that are merged have in common, the most telling facts first.

    The shape of every tensor tells the width, which a model of the user need not name.
    """
    backbone = backbone_of(donor)
    record = origin_of(backbone).record
    provenance = record.get("provenance") or {}
    # A digest of the weights identifies a base; the name of a randomly initialised one does not.
    base = provenance.get("base_sha256") or provenance.get("base")
    blocks = provenance.get("blocks_of_base")
    facts = {
        "kind of model": f"{type(backbone).__module__.partition('.')[0]} {type(backbone).__name__}",
        "number of blocks": depth_of(donor),
        "ends, the blocks that keep their place": fixed_of(donor),
        **_answers(donor),
        "position parts": forms_of(donor).model_dump(),
        "base": f"{base}, blocks {blocks}" if blocks else base,
        "method": record.get("method"),
        "order policy": record.get("policy"),
        "data": provenance.get("data"),
    }
    stored = donor.state_dict()
    kinds = sorted({str(weight.dtype) for weight in stored.values()})
    facts["the dtypes of the weights"] = ", ".join(kinds)
    for key, tensor in stored.items():
        facts[f"the shape of {key}"] = tuple(tensor.shape)
    for name, buffer in donor.named_buffers():
        if name not in stored:  # no file holds it, as frequencies
            plain = buffer.detach().cpu().float().contiguous().view(torch.uint8).numpy()
            facts[f"the buffer {name}"] = hashlib.sha256(plain.tobytes()).hexdigest()[:12]
    return facts | settings_of(donor)
