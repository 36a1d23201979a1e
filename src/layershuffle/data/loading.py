"""`open_data`: from one spec string to labelled images that fit a model.

The table below lists all sources. A source's module is imported when its scheme is used, so the
digits do not wait for the libraries of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from layershuffle.data.splits import DataOptions, ImageData, SourceRequest
from layershuffle.ground.errors import UsageError
from layershuffle.ground.extras import require
from layershuffle.ground.machine import cores
from layershuffle.ground.text import did_you_mean, nearest, settings_of_query
from layershuffle.images.pixels import pillow_mode
from layershuffle.images.view import ImageView


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One kind of data. `settings`: keys allowed after "?"; `module`: contains `open_source`.

    `generated`: images are made here, so there is no place and no work for loader processes.
    `extra`: the extra that must be installed, and the package of it that is imported.
    """

    form: str
    module: str
    settings: tuple[str, ...] = ()
    generated: bool = False
    extra: tuple[str, str] | None = None


SOURCES: dict[str, DataSource] = {
    "digit-pairs": DataSource(
        form="digit-pairs[?train=N&validation=N&test=N]",
        module="layershuffle.data.digits",
        extra=("study", "sklearn"),
        settings=("train", "validation", "test"),
        generated=True,
    ),
    "folder": DataSource(
        form="folder:DIR",
        module="layershuffle.data.folder",
    ),
    "hf": DataSource(
        form="hf:NAME_OR_DIR[:CONFIG][?image=COLUMN&label=COLUMN]",
        module="layershuffle.data.hub",
        extra=("datasets", "datasets"),
        settings=("image", "label"),
    ),
    "torchvision": DataSource(
        form="torchvision:NAME?root=DIR[&download=yes]",
        module="layershuffle.data.torchvision_sets",
        settings=("root", "download", "split"),
    ),
}


def parse_spec(spec: str) -> tuple[str, str, dict[str, str]]:
    """(scheme, place, settings) of "scheme:place?key=value&key=value".

    A "?" starts settings only if the scheme has any, so it may be in the name of a folder.
    Raises UsageError with the nearest valid name for an unknown scheme or setting.
    """
    # A spec without a place has no colon: digit-pairs?train=2000.
    scheme = spec.split(":", 1)[0].split("?", 1)[0]
    if scheme not in SOURCES:
        raise _unknown_scheme(spec, scheme)
    rest = spec[len(scheme) :]
    query = ""
    if SOURCES[scheme].settings:
        rest, _, query = rest.partition("?")
    return scheme, rest.removeprefix(":"), _settings(query, scheme)


def open_data(spec: str, view: ImageView, *, options: DataOptions | None = None) -> ImageData:
    """The labelled images of `spec`, fitted to `view`.

    Items of every split are (pixels uint8 [C, H, W], class index); `finish`
    of the result converts a batch of them to the model's float32 images.
    Raises UsageError for a bad spec, DataError for missing or broken data.
    """
    scheme, place, settings = parse_spec(spec)
    source = SOURCES[scheme]
    if source.generated == bool(place):
        wanted = "no place" if source.generated else "a place"
        raise UsageError(f"{scheme} takes {wanted}", hint=f"write {source.form}")
    pillow_mode(view.channels)  # for its error, before anything is read
    options = options or DataOptions()
    if source.generated and options.augment:
        raise UsageError(
            f"{scheme} has no augmentation: its images vary anyway", hint="leave out --augment"
        )
    request = SourceRequest(spec=spec, place=place, settings=settings, view=view, options=options)
    if source.extra is not None:
        require(*source.extra)
    function: Callable[[SourceRequest], ImageData] = import_module(source.module).open_source
    return function(request)


def loader_processes(spec: str = "") -> int:
    """The number of processes to load images of `spec`: 0 if they are made here."""
    for name, source in SOURCES.items():
        if source.generated and spec.startswith(name):
            return 0
    # One core is left for the training process; more than 16 loaders only use more memory.
    return min(16, max(0, cores() - 1))


def _settings(query: str, scheme: str) -> dict[str, str]:
    names = SOURCES[scheme].settings
    settings = settings_of_query(query, example="?split=train&download=true")
    for key in settings:
        if key not in names:
            guess = did_you_mean(key, names)
            raise UsageError(
                f"{scheme} has no setting {key!r}",
                hint=f"{guess} known: {', '.join(names)}".lstrip(),
            )
    return settings


def _unknown_scheme(spec: str, scheme: str) -> UsageError:
    match = nearest(scheme, SOURCES)
    guess = f"did you mean {SOURCES[match].form}? " if match else ""
    # A frequent mistake is a path without a scheme.
    if Path(spec).is_dir() or (not match and ":" not in spec and ("/" in spec or "." in spec)):
        guess = f"for class folders write folder:{spec}; "
    return UsageError(
        f"unknown data source {scheme!r}",
        place=f"--data {spec}",
        hint=f"{guess}known: {'; '.join(source.form for source in SOURCES.values())}",
    )
