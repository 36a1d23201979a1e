"""What a gateway keeps on its machine: the operator's key, a lock, and the word on what will fail.

The key is made anew at every start and lies, with the address, in a directory that no other user
may enter (`state_directory`), where the command line finds both.

A certificate expires, a disk fills, a cleaner removes a directory: none of them stops a gateway
that runs, and each stops its next start or all new connections. `/healthz`, `/metrics` and the log
say so before that (`Upkeep`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

import httpx
from filelock import FileLock, Timeout

from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle.ground.files import explained, user_path, write_bytes
from layershuffle.swarm.server.doors import Https, pinned

CommandName = Literal["drain", "readmit", "fault", "join", "roll"]
_FILE = "operator.json"
_KEY_BYTES = 24
# Seconds; a roll answers when hosts have loaded another model (`admin.LOAD_SECONDS`).
_TIMEOUT = 330.0
_SOON_DAYS = 30
_LEAST_BYTES = 200 << 20  # a model of this swarm and a log of some weeks
_LOOK = 1.0  # seconds
_REMIND = 86_400.0
_FADE = 0.9  # of the longest lag, from look to look
_log = logging.getLogger(__name__)


class Operated:
    """The operator's file of one gateway, in the directory `state`; it is locked until `close`.

    Raises `UsageError` if a swarm is using the directory.
    """

    def __init__(self, state: Path) -> None:
        self.key = secrets.token_urlsafe(_KEY_BYTES)
        self.state, self._path = state, state / _FILE
        self._lock = FileLock(state / "lock", mode=0o600)
        try:
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise UsageError(
                "A swarm of this user runs already",
                place=state,
                hint="end it, or name another --state",
            ) from error

    def publish(self, url: str, *, hosts: Sequence[str], certificate: Path | None) -> None:
        """Write where the gateway is, which hosts are its own, the key and, for https, its
        certificate."""
        facts = {"url": url, "key": self.key, "process": os.getpid(), "hosts": hosts}
        if certificate is not None:
            facts["certificate"] = str(certificate.absolute())
        write_bytes(self._path, json.dumps(facts).encode(), private=True)

    def close(self) -> None:
        """Remove the file and let another swarm use the directory."""
        self._path.unlink(missing_ok=True)
        self._lock.release()


class Operator:
    """Gives commands to the swarm of the directory `state` (default: this user's). Each may raise
    `LayerShuffleError`.

    `process`: that of the gateway; `hosts`: its own. Raises `UsageError` if no swarm uses the
    directory.
    """

    def __init__(self, state: str | None = None) -> None:
        self._place = state_directory(state) / _FILE
        try:
            facts = json.loads(self._place.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UsageError(
                "No swarm of this user runs on this machine",
                place=self._place,
                hint="start one with `layershuffle swarm up`, or name its --state directory",
            ) from error
        self.process: int = facts["process"]
        self.hosts: list[str] = facts["hosts"]
        self._http = httpx.Client(
            base_url=facts["url"],
            headers={"Authorization": f"Bearer {facts['key']}"},
            timeout=_TIMEOUT,
            trust_env=False,  # a proxy cannot reach this machine's loopback
            verify=pinned(facts["certificate"]) if "certificate" in facts else True,
        )

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def command(self, name: CommandName, **fields: Any) -> dict[str, Any]:
        """Give the swarm a command and return its answer; `add_operator` has the fields of each."""
        try:
            response = self._http.post(f"/operator/{name}", json=fields)
        except httpx.HTTPError as error:
            raise LayerShuffleError(
                f"The swarm does not answer its operator ({type(error).__name__})",
                place=self._place,
                hint="it may have been killed; start it again",
            ) from error
        answer: dict[str, Any] = response.json()
        if response.is_success:
            return answer
        kind = UsageError if response.status_code == 422 else LayerShuffleError
        raise kind(answer["error"]["cause"], hint=answer["error"]["hint"] or None)


def state_directory(path: str | None = None) -> Path:
    """The directory where a swarm of this user keeps its address, key and token; it is created if
    needed.

    Default: $XDG_STATE_HOME/layershuffle/swarm, or ~/.local/state/... . Raises `UsageError` if
    other users may enter it.
    """
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    hint = "name a directory of this user with --state, or set HOME"
    directory = user_path(path or f"{base}/layershuffle/swarm", hint=hint).absolute()
    with explained(directory, flag="--state"):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    # An existing directory keeps its mode and owner.
    status = directory.stat()
    if status.st_mode & 0o077 or status.st_uid != os.getuid():
        raise UsageError(
            "Other users may enter the swarm's directory and could control it",
            place=directory,
            hint=f"chmod 700 {directory}, or remove it if it is not yours",
        )
    return directory


class Upkeep:
    """Watches over the files of a gateway: its directory `state`, its hosts' token, its `https`,
    and `model`, the manifest of what it serves now.

    `lag`: the longest recent time, in seconds, for which the event loop was late.
    """

    def __init__(
        self,
        state: Path,
        *,
        token_file: Path,
        model: Callable[[], Path],
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
                f"the state directory {self._state} is gone: drain, readmit and drill do not find "
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
        if not isfile(manifest := self._model()):
            troubles["model"] = (
                f"the exported model {manifest} is gone: export it there again, or hosts that "
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
