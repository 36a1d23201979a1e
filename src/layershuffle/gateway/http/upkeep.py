"""Watch the files of a gateway, and say what will fail if nobody acts.

If a disk fills or a cleaner removes a directory, a gateway that runs goes on, and its next start
fails. `/healthz`, `/metrics` and the log say so before that.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from os.path import isfile
from pathlib import Path
from typing import NamedTuple

_LEAST_BYTES = 200 << 20  # a model of this swarm and a log of some weeks
_LOOK = 1.0  # seconds
_REMIND = 86_400.0
_FADE = 0.9  # of the longest lag, from look to look
_log = logging.getLogger(__name__)


class Trouble(NamedTuple):
    """What will fail if nobody acts: `text` for everybody who asks, `place` for the log alone."""

    text: str
    place: Path


class Upkeep:
    """Watches the directory `state` of a gateway, the token of its hosts, and its `model`.

    `model` is the path of the manifest. `lag` is the longest recent time, in seconds, for which the
    event loop was late.
    """

    def __init__(
        self,
        state: Path,
        *,
        token_file: Path,
        model: Path,
    ) -> None:
        self._state = state
        self._token_file = token_file
        self._model = model
        self.lag = 0.0

    @property
    def free_bytes(self) -> int | None:
        """Free bytes on the disk of the state directory; `None` if it is gone."""
        try:
            return shutil.disk_usage(self._state).free
        except OSError:
            return None

    def troubles(self) -> dict[str, Trouble]:
        """What will fail if nobody acts, by its kind: state, token, model, disk."""
        troubles = {}
        free = self.free_bytes
        if free is None:
            troubles["state"] = Trouble(
                "the state directory is gone: drain and readmit do not find this gateway until it "
                "is started again",
                self._state,
            )
        elif free < _LEAST_BYTES:
            troubles["disk"] = Trouble(
                f"the disk of the state directory has {free / 1e6:.0f} MB left", self._state
            )
        # Not by `Path`, which raises an error where a directory above may not be entered.
        if not isfile(self._token_file):
            troubles["token"] = Trouble(
                "the token file is gone: put it back before the next start, or no host of another "
                "machine gets in",
                self._token_file,
            )
        if not isfile(self._model):
            troubles["model"] = Trouble(
                "the exported model is gone: export it there again, or hosts that come serve no "
                "block",
                self._model,
            )
        return troubles

    async def run(self) -> None:
        """Measure the lag, and log each trouble when it begins and every day."""
        loop = asyncio.get_running_loop()
        logged: dict[str, float] = {}
        while True:
            begun = loop.time()
            troubles = self.troubles()
            for kind, trouble in troubles.items():
                if begun - logged.get(kind, -_REMIND) >= _REMIND:
                    logged[kind] = begun
                    text = trouble.text[0].upper() + trouble.text[1:]
                    _log.warning("%s. Where: %s", text, trouble.place)
            for kind in logged.keys() - troubles:
                del logged[kind]
                _log.warning("There is no trouble with the %s any more", kind)
            begun = loop.time()
            await asyncio.sleep(_LOOK)
            self.lag = max(loop.time() - begun - _LOOK, _FADE * self.lag)
