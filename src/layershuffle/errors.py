"""The exceptions of this package: one paragraph with cause, place and next step.

The library raises them; `layershuffle.cli` alone turns them into exit codes.
"""

from __future__ import annotations

from pathlib import Path

_MOST_CHARACTERS = 400  # the longest cause of our own has 350


class LayerShuffleError(Exception):
    """A failure with a known cause. Exit code 1.

    `cause` says what is wrong, `place` where (a file, a flag, a module path), `hint` what to
    type or change next. `str()` joins them into one paragraph. A cause of more than 400 characters
    holds somebody's data (a column, a setting), and loses its middle.
    """

    exit_code = 1

    def __init__(
        self, cause: str, *, place: str | Path | None = None, hint: str | None = None
    ) -> None:
        self.cause, self.place, self.hint = _shortened(self._own_words(cause)), place, hint
        parts = [_sentence(self.cause)]
        if place is not None:
            parts.append(f"Where: {place}.")
        if hint is not None:
            parts.append(f"Next: {_sentence(hint)}")
        super().__init__(" ".join(parts))

    @classmethod
    def _own_words(cls, cause: str) -> str:
        # A loader process of torch sends an error as the text of its whole traceback, and the main
        # process makes a new error of it. Our paragraph follows the last mention of the class.
        traceback, _, paragraph = cause.rpartition(f"{cls.__module__}.{cls.__qualname__}: ")
        return " ".join(paragraph.split()) if "Traceback (most recent" in traceback else cause


def _shortened(cause: str) -> str:
    if len(cause) <= _MOST_CHARACTERS:
        return cause
    half = _MOST_CHARACTERS // 2
    return f"{cause[:half]} ... {cause[-half:]}"


def _sentence(text: str) -> str:
    return text if text.endswith("?") else text.rstrip(".") + "."


class UsageError(LayerShuffleError, ValueError):
    """The request is wrong: an unknown name, an impossible order, a bad setting. Exit code 2."""

    exit_code = 2


class SettingsError(LayerShuffleError):
    """A setting is unknown or has an impossible value. Exit code 2.

    Not a `ValueError`: pydantic and tyro would wrap it in reports of their own.
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
