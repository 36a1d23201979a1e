"""Parse model specs, "scheme:place?key=value&key=value". This module imports no model library
unless a name has to be guessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from layershuffle.errors import UsageError
from layershuffle.models.origin import unknown_name

# The form that users see, by scheme. A "?" in the form means that settings may follow.
FORMS = {
    "bundled": "bundled:digits",
    "timm": "timm:NAME[?pretrained=false&...]",
    "hf": "hf:NAME_OR_DIR[?pretrained=false]",
    "torchvision": "torchvision:NAME[?weights=none]",
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
        if Path(spec).expanduser().exists():
            return ModelSpec("dir", spec)
        raise _unknown(spec, scheme if colon else "")
    query = ""
    # Names of directories may contain a "?", and `dir:` has no settings.
    if "?" in FORMS[scheme]:
        place, _, query = place.partition("?")
    if not place:
        raise UsageError(f"{spec!r} names no model", hint=f"write {FORMS[scheme]}")
    return ModelSpec(scheme, place, _settings(query, spec))


def _unknown(spec: str, scheme: str) -> UsageError:
    forms = f"The forms are {', '.join(FORMS.values())}"
    if not scheme:
        cause = f"{spec!r} is neither a path that exists nor a model spec"
        return UsageError(cause, hint=_meant(spec) or forms)
    error = unknown_name("kind of model", scheme, names=list(FORMS), listing=forms)
    return UsageError(
        error.cause, hint=error.hint if error.hint == forms else f"{error.hint} {forms}"
    )


def _meant(spec: str) -> str | None:
    """A hint for a model that is named without its library, `None` if no library has it."""
    name = spec.partition("?")[0]
    if name.count("/") == 1:
        return f"check the path, or write hf:{spec} for a model of the hub"
    # Slow to import, and this is the way to an error.
    import timm
    import torchvision

    if timm.is_model(name.partition(".")[0]):
        return f"did you mean timm:{spec}?"
    is_torchvision = name in torchvision.models.list_models(include="vit_*")
    return f"did you mean torchvision:{spec}?" if is_torchvision else None


def _settings(query: str, spec: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in query.split("&") if query else ():
        key, equals, text = pair.partition("=")
        if not key or not equals or key in settings:
            raise UsageError(
                f"{pair!r} in {spec!r} is not one setting",
                hint="write each once, as in ?pretrained=false&img_size=224",
            )
        settings[key] = _value(text, spec)
    return settings


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
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
