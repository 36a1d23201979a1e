"""Files of models on the hub: in the cache of this machine, downloaded into it, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from httpx import HTTPError
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from layershuffle.errors import ModelFileError
from layershuffle.text import one_line


@contextmanager
def refused_by_hub(name: str) -> Iterator[None]:
    """Turn what the hub or the network refuses within into one `ModelFileError`."""
    try:
        yield
    except HFValidationError as error:
        raise ModelFileError(
            f"{name!r} is neither a directory here nor a model name of the hub",
            hint="write hf:DIR for a directory with config.json, or hf:OWNER/NAME",
        ) from error
    # HfHubHTTPError, no token, offline, no connection.
    except (HTTPError, OSError) as error:
        raise ModelFileError(
            f"The hub does not give or take {name} ({type(error).__name__}: {one_line(error)})",
            hint=f"check the name at huggingface.co/{name} and the network; your own and private "
            "models need `hf auth login`",
        ) from error


def fetched(
    name: str, files: Sequence[str], *, revision: str | None = None, random: str = ""
) -> Path:
    """The directory in the cache with those of `files` (names or patterns) that `name` has.

    `random`: the spec of the same model with random weights. Raises `ModelFileError` for a name
    that the hub does not have, and without cache and network.
    """
    try:
        with refused_by_hub(name):
            return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except ModelFileError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError | OfflineModeIsEnabled):
            raise weights_missing(name, download=f"hf download {name}", random=random) from error
        raise


def weights_missing(
    model: str, *, download: str, random: str = "", why: str = "", place: str = ""
) -> ModelFileError:
    """The error for weights that are not in the cache `place` and cannot be downloaded."""
    silent = "the hub cannot be reached over the network"
    offline = "offline mode is set (HF_HUB_OFFLINE)"
    return ModelFileError(
        f"The weights of {model} are not in the cache of this machine, and "
        f"{why or (offline if constants.HF_HUB_OFFLINE else silent)}",
        place=place or constants.HF_HUB_CACHE,
        hint=f"with a network, type {download} (on another machine: then copy the cache here)"
        + (f"; or use {random} for random weights" if random else ""),
    )
