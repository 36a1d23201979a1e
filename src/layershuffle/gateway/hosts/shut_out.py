"""Who is shut out, kept on disk: a gateway that starts again remembers who has lied."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle.ground.files import write_bytes

_MOST = 10_000  # names; the oldest are forgotten
_log = logging.getLogger(__name__)


class ShutOut:
    """The hosts that are shut out: the reason `why` by name, in the file `path` if there is one.

    Raises `UsageError` for a file that holds something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.why: dict[str, str] = {}
        if path is None or not path.exists():
            return
        try:
            names = json.loads(path.read_bytes())
            if not all(isinstance(why, str) for why in names.values()):
                raise TypeError("a reason is no text")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(
                f"The file of the hosts that are shut out cannot be read ({error})",
                place=path,
                hint="remove it, and all hosts are let in again",
            ) from error
        self.why = names

    def add(self, name: str, why: str) -> None:
        """Remember a host."""
        if name in self.why:
            return
        self.why[name] = why
        while len(self.why) > _MOST:
            del self.why[next(iter(self.why))]
        self._write()

    def remove(self, name: str) -> None:
        """Forget a host."""
        if self.why.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_bytes(self._path, json.dumps(self.why, indent=1).encode(), private=True)
        except LayerShuffleError as error:
            # It stays out as long as this process runs.
            _log.error("Who is shut out is not remembered after a restart: %s", error)
