"""The exceptions of this package: one paragraph with cause, place and next step.

The library raises them; `layershuffle.cli` alone turns them into exit codes.
"""

from __future__ import annotations

import re
from pathlib import Path

_MOST_CHARACTERS = 570  # of cause, place and hint together; the longest of our own have 444
_ROOM = "make room there, or give another place"


class LayerShuffleError(Exception):
    """A failure with a known cause. Exit code 1.

    `cause` says what is wrong, `place` where (a file, a flag, a module path), `hint` what to
    type or change next. `str()` joins them into one paragraph of at most 600 characters: what is
    longer holds somebody's data (a column, a setting), and loses its middle.
    """

    exit_code = 1

    def __init__(
        self, cause: str, *, place: str | Path | None = None, hint: str | None = None
    ) -> None:
        own_words = self._own_words(cause)
        where = "" if place is None else str(place)
        self.cause, where, next_step = _fitting(own_words, where, hint or "")
        self.place = place
        self.hint = next_step or None
        parts = [_sentence(self.cause)]
        if where:
            parts.append(f"Where: {where}.")
        if next_step:
            parts.append(f"Next: {_sentence(next_step)}")
        super().__init__(" ".join(parts))

    @classmethod
    def _own_words(cls, cause: str) -> str:
        # A loader process of torch sends an error as the text of its whole traceback, and the main
        # process makes a new error of it. Our paragraph follows the last mention of the class.
        traceback, _, paragraph = cause.rpartition(f"{cls.__module__}.{cls.__qualname__}: ")
        if "Traceback (most recent" not in traceback:
            return cause
        return " ".join(paragraph.split())


def _fitting(*texts: str) -> tuple[str, ...]:
    """The texts; where they are too many characters, the longest lose their middles."""
    room = _MOST_CHARACTERS
    fitted = {}
    for rank, text in enumerate(sorted(texts, key=len)):
        share = room // (len(texts) - rank)
        shown = text
        if len(text) > share:
            half = (share - len(" ... ")) // 2
            shown = f"{text[:half]} ... {text[-half:]}"
        fitted[text] = shown
        room -= len(shown)
    return tuple(fitted[text] for text in texts)


def _sentence(text: str) -> str:
    """The text with a full stop, unless it is a question."""
    if text.endswith("?"):
        return text
    return text.rstrip(".") + "."


class UsageError(LayerShuffleError, ValueError):
    """The request is wrong: an unknown name, an impossible order, a bad setting. Exit code 2."""

    exit_code = 2


class SettingsError(LayerShuffleError):
    """A setting is unknown or has an impossible value. Exit code 2.

    Not a `ValueError`: pydantic and cyclopts would wrap it in reports of their own.
    """

    exit_code = 2


class StackError(LayerShuffleError, TypeError):
    """The model's blocks cannot run in any order (or cannot be found)."""


class DataError(LayerShuffleError):
    """Images or labels are missing, corrupt or do not fit the model."""


class ModelFileError(LayerShuffleError):
    """A saved model is missing, truncated, of another shape, or in a format that is refused."""


class TrainingError(LayerShuffleError):
    """Training cannot go on; the last good checkpoint stays on disk."""


class Interrupted(LayerShuffleError):
    """Stopped by SIGTERM or Ctrl-C after a checkpoint was saved. Exit code 143."""

    exit_code = 143


def of_the_machine(error: BaseException) -> LayerShuffleError | None:
    """The error to show where this machine is the cause, `None` for all other errors.

    Such causes are a full disk or shared memory, a path that is too long, and a cache that cannot
    be written. The text is searched as well, because a worker process sends an error as text, and
    libraries wrap those of the system.

    >>> str(of_the_machine(OSError(errno.ENOSPC, "No space left on device", "/data/run/model")))
    'The disk is full. Where: /data/run/model. Next: make room there, or give another place.'
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    text = " ".join(str(link) for link in chain)
    place = None
    for link in chain:
        if isinstance(link, OSError):
            place = link.filename
            break
    for mark, cause, hint in _OF_THE_MACHINE:
        if re.search(mark, text):
            return LayerShuffleError(cause, place=place, hint=hint)
    return None


# Most special first: full shared memory is "no space" or a bus error, too.
_OF_THE_MACHINE = (
    (
        r"Bus error|(No space left|Errno 28).*/dev/shm|/torch_\d|shared memory",
        "The shared memory of this machine or container is full, in which loader processes hand "
        "over batches",
        "start the container with --shm-size=2g or --ipc=host; a smaller --batch-size needs less, "
        "and so do fewer --workers of fit",
    ),
    (r"No space left|Errno 28|os error 28", "The disk is full", _ROOM),
    (
        r"File too large|Errno 27\b|os error 27\b",
        "A file would be larger than this shell or file system allows",
        "raise the limit of files (ulimit -f unlimited), or give another place",
    ),
    (r"Disk quota|Errno 122", "The quota of this disk is used up", _ROOM),
    (
        r"AF_UNIX path too long|socket path|File name too long",
        "A path is too long for this system",
        "give a shorter one; for sockets and temporary files, set TMPDIR=/tmp",
    ),
    (
        r"no locator available|NUMBA_CACHE_DIR",
        "numba finds no directory for its cache that this user may write",
        "set NUMBA_CACHE_DIR to one, such as /tmp/numba",
    ),
    (
        r"Read-only file system|Permission denied|Operation not permitted",
        "This user may not read or write there",
        "give another place; for caches set HF_HOME, MPLCONFIGDIR and XDG_CACHE_HOME",
    ),
    (
        r"Too many open files",
        "This process may open no more files",
        "raise the limit in this shell (ulimit -n 4096), or give fewer --workers",
    ),
)
