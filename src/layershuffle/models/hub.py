"""Files of models on the hub: in the cache of this machine, downloaded into it, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download

# HTTPError is that of the client which this version has: of httpx or of httpx2.
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

from layershuffle.errors import ModelFileError
from layershuffle.text import one_line


@contextmanager
def refused_by_hub(name: str) -> Iterator[None]:
    """Turn what the hub, its cache or the network refuses within into one `ModelFileError`."""
    try:
        yield
    # Offline, no connection, no such name, no token: the library says which.
    except (HTTPError, HFValidationError, OSError) as error:
        raise ModelFileError(
            f"{name} is not in the cache of this machine, and the hub does not give or take it "
            f"({type(error).__name__}: {one_line(error)})",
            place=f"huggingface.co/{name}",
            hint=f"write hf:DIR for a directory, or type hf download {name} (on another machine: "
            "then copy the cache here), after hf auth login for your own and private models; "
            "?pretrained=false takes random weights",
        ) from error


def fetched(name: str, files: Sequence[str], *, revision: str | None = None) -> Path:
    """The directory in the cache with those of `files` (names or patterns) that `name` has.

    Raises `ModelFileError` for a name that the hub does not have, and without cache and network.
    """
    with refused_by_hub(name):
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
