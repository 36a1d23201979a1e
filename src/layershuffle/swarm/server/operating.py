"""The word on what will fail of what a gateway keeps on its machine.

A certificate expires, a disk fills, a cleaner removes a directory: none of them stops a gateway
that runs, and each stops its next start or all new connections. `/healthz`, `/metrics` and the log
say so before that (`Upkeep`).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from os.path import isfile
from pathlib import Path

from layershuffle.swarm.server.doors import Https

_SOON_DAYS = 30
_LEAST_BYTES = 200 << 20  # a model of this swarm and a log of some weeks
_LOOK = 1.0  # seconds
_REMIND = 86_400.0
_FADE = 0.9  # of the longest lag, from look to look
_log = logging.getLogger(__name__)


class Upkeep:
    """Watches over the files of a gateway: its directory `state`, its hosts' token, its `https`,
    and the manifest of its `model`.

    `lag`: the longest recent time, in seconds, for which the event loop was late.
    """

    def __init__(
        self,
        state: Path,
        *,
        token_file: Path,
        model: Path,
        https: Https | None = None,
    ) -> None:
        self._state, self._token_file, self._model, self.https = state, token_file, model, https
        self.lag = 0.0

    @property
    def free_bytes(self) -> int | None:
        """Free bytes on the disk of the state directory; `None` if it is gone."""
        try:
            return shutil.disk_usage(self._state).free
        except OSError:
            return None

    def troubles(self) -> dict[str, str]:
        """What will fail if nobody acts, by its kind: state, token, model, disk,
        certificate."""
        troubles, free = {}, self.free_bytes
        if free is None:
            troubles["state"] = (
                f"the state directory {self._state} is gone: drain and readmit do not find "
                "this gateway until it is started again"
            )
        elif free < _LEAST_BYTES:
            troubles["disk"] = f"the disk of {self._state} has {free / 1e6:.0f} MB left"
        # Not by `Path`, which raises an error where a directory above may not be entered.
        if not isfile(self._token_file):
            troubles["token"] = (
                f"the token file {self._token_file} is gone: put it back before the next start, "
                "or no host of another machine gets in"
            )
        if not isfile(self._model):
            troubles["model"] = (
                f"the exported model {self._model} is gone: export it there again, or hosts that "
                "come serve no block"
            )
        days = _SOON_DAYS if self.https is None else self.https.days
        if self.https is not None and days < _SOON_DAYS:
            place = f"the certificate {self.https.certificate}"
            troubles["certificate"] = (
                f"{place} expires in {days:.0f} days: renew it and send SIGHUP"
                if days > 0
                else f"{place} has expired: clients cannot connect"
            )
        return troubles

    async def run(self) -> None:
        """Measure the lag, and log each trouble when it begins and every day."""
        loop, logged = asyncio.get_running_loop(), dict[str, float]()
        while True:
            begun = loop.time()
            troubles = self.troubles()
            for kind, trouble in troubles.items():
                if begun - logged.get(kind, -_REMIND) >= _REMIND:
                    logged[kind] = begun
                    _log.warning("%s", trouble[0].upper() + trouble[1:])
            for kind in logged.keys() - troubles:
                del logged[kind]
                _log.warning("There is no trouble with the %s any more", kind)
            begun = loop.time()
            await asyncio.sleep(_LOOK)
            self.lag = max(loop.time() - begun - _LOOK, _FADE * self.lag)
