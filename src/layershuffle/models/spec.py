"""Parse model specs, "scheme:place?key=value&key=value", and find the directories that they name.

This module imports no model library unless a name has to be guessed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import UsageError
from layershuffle.ground.files import user_path
from layershuffle.ground.text import did_you_mean, settings_of_query
from layershuffle.models.metadata import METADATA_FILE

# The form that users see, by scheme. A "?" in the form means that settings may follow.
FORMS = {
    "bundled": "bundled:digits",
    "timm": "timm:NAME[?pretrained=false&...]",
    "hf": "hf:NAME_OR_DIR[?pretrained=false]",
    "dir": "dir:PATH",
}


@dataclass(frozen=True)
class ModelSpec:
    """The parts of a spec."""

    scheme: str
    place: str
    settings: dict[str, Any] = field(default_factory=dict)


def parse_spec(spec: str) -> ModelSpec:
    """The parts of `spec`; a path that exists is dir:PATH.

    Values are YAML scalars or lists; "12,20" is (12, 20). Raises `UsageError` for unknown schemes,
    with the nearest one, and for malformed settings.
    """
    scheme, colon, place = spec.partition(":")
    # A known scheme has precedence over a path of the same name, which `dir:` can name.
    if not colon or scheme not in FORMS:
        if user_path(spec).exists():
            return ModelSpec("dir", spec)
        near = did_you_mean(scheme, FORMS) if colon else _meant(spec)
        raise UsageError(
            f"{spec!r} is neither a path that exists nor a model spec",
            hint=f"{near} The forms are {', '.join(FORMS.values())}".strip(),
        )
    query = ""
    # Names of directories may contain a "?", and `dir:` has no settings.
    if "?" in FORMS[scheme]:
        place, _, query = place.partition("?")
    if not place:
        raise UsageError(f"{spec!r} names no model", hint=f"write {FORMS[scheme]}")
    settings: dict[str, Any] = {}
    for key, text in settings_of_query(query, example="?pretrained=false&img_size=224").items():
        # A revision is a name, as 1.10 and the commit 5e10293, and no number.
        settings[key] = text if key == "revision" else _value(text, spec)
    return ModelSpec(scheme, place, settings)


def _meant(name: str) -> str:
    """A hint for a model that is named without its library, "" if no library has it."""
    if name.count("/") == 1:
        return f"check the path, or write hf:{name} for a model of the hub."
    # Slow to import, and this is the way to an error.
    import timm

    architecture = name.partition("?")[0].partition(".")[0]
    return f"did you mean timm:{name}?" if timm.is_model(architecture) else ""


def _value(text: str, spec: str) -> Any:
    """A YAML scalar or list; "12,20" is (12, 20)."""
    if "," in text and not text.startswith(("[", "{")):
        return tuple(_value(part, spec) for part in text.split(","))
    try:
        # safe_load, because YAML tags can construct Python objects.
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{text!r} in {spec!r} is not a value", hint="quote it") from error
    # YAML 1.1 parses 1e-5 as a string.
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def own_directory(spec: str) -> Path | None:
    """The directory of a bundled, saved or trained model; `None` for a model of another library.

    Raises `UsageError` for an invalid spec.
    """
    return directory_of(spec) if parse_spec(spec).scheme in ("bundled", "dir") else None


def directory_of(spec: str) -> Path | None:
    """The directory with the files of the model `spec`; `None` for a model that a library makes.

    Raises `UsageError` for an invalid spec.
    """
    parsed = parse_spec(spec)
    if parsed.scheme == "bundled":
        return asset(parsed.place)
    if "checkpoint" in parsed.settings:
        return user_path(str(parsed.settings["checkpoint"])).parent
    path = user_path(parsed.place)
    if parsed.scheme == "dir":
        return model_directory(path)
    # Names of the hub are no paths, unless a directory of that name exists.
    return path if path.is_dir() else None


def model_directory(place: Path) -> Path:
    """`place`; for a directory of `fit` the model in it, one level below its checkpoints."""
    model = place / "model"
    return model if (model / METADATA_FILE).is_file() else place
