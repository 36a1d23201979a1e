"""API keys, and how often they may be used.

It imports no web framework, because clients read key files too.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from layershuffle.errors import UsageError
from layershuffle.swarm.server.tls import check_secret

_SHORTEST_KEY = 16
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}


class Rate:
    """At most `burst` events at once, and `rate` a second in the long run.

    This is the generic cell rate algorithm, a token bucket in one number: every event pays for
    1 / rate seconds, and may be `burst` payments ahead of the clock.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst, self._paid_until = rate, burst, 0.0

    def wait(self, now: float) -> float:
        """Count an event; return the seconds that it has to wait, 0 if it is admitted at `now`.

        An event that has to wait pays nothing.
        """
        begin = max(self._paid_until, now)
        wait = begin - now - (self._burst - 1) / self._rate
        # Sums of many payments are rounded: without this margin an event would wait for 1e-16 s.
        if wait > 1e-9:
            return wait
        self._paid_until = begin + 1 / self._rate
        return 0.0


class Keys:
    """The API keys that open the gateway; without any it is open to everybody.

    `lines`: a key each, and behind it the requests that it may make, if there is a bound:
    `KEY 1000/day` (second, minute, hour, day). Raises `UsageError` for another line, and for keys
    that are short enough to be guessed.
    """

    def __init__(self, lines: Sequence[str] = ()) -> None:
        self._path: Path | None = None
        self._quotas = dict(map(_parsed, lines))

    @staticmethod
    def of_file(path: Path | None) -> Keys:
        """The keys of a file, none without one. Raises what `load` raises."""
        keys = Keys()
        keys._path = path
        keys.load()
        return keys

    def load(self) -> None:
        """Read the file again; what keys have used is forgotten.

        Raises what `read_keys` raises, and `UsageError` for a line that is none; then the keys of
        before stay.
        """
        if self._path is not None:
            self._quotas = dict(map(_parsed, read_keys(self._path)))

    def __bool__(self) -> bool:
        return bool(self._quotas)

    def accept(self, key: bytes | None) -> bool:
        """Whether `key` is one of the keys; a wrong key takes as long as a right one."""
        return not self._quotas or (key is not None and self._matching(key) is not None)

    def wait(self, key: bytes | None, *, now: float) -> float:
        """Count a request of a key that is accepted; return the seconds that it has to wait."""
        match = None if key is None else self._matching(key)
        quota = None if match is None else self._quotas[match]
        return 0.0 if quota is None else quota.wait(now)

    def _matching(self, key: bytes) -> bytes | None:
        # Digests have equal length, and the loop never ends early: the time does not depend on the
        # length of a key, its first letters, or its place in the list.
        digest, match = _digest(key), None
        for valid in self._quotas:
            if hmac.compare_digest(digest, valid):
                match = valid
        return match


def _parsed(line: str) -> tuple[bytes, Rate | None]:
    """The digest of a key, and its quota."""
    key, _, quota = line.partition(" ")
    if len(key) < _SHORTEST_KEY:
        raise UsageError(
            f"An API key needs at least {_SHORTEST_KEY} characters",
            hint='make one: python -c "import secrets; print(secrets.token_urlsafe(24))"',
        )
    if not quota:
        return _digest(key.encode()), None
    match = re.fullmatch(r"([1-9]\d{0,8})/(second|minute|hour|day)", quota.strip())
    if match is None:
        raise UsageError(
            f"{quota.strip()[:40]!r} is no quota of an API key", hint="write KEY 1000/day"
        )
    number = int(match[1])
    return _digest(key.encode()), Rate(number / _UNITS[match[2]], number)


def key_in(authorization: str | None, x_api_key: str | None) -> bytes | None:
    """The key in `Authorization: Bearer KEY`, else in `X-API-Key: KEY`, else `None`."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip().encode("latin-1", "replace")
    return None if x_api_key is None else x_api_key.strip().encode("latin-1", "replace")


def read_keys(path: Path) -> tuple[str, ...]:
    """The lines of a file of API keys.

    Raises `UsageError` if it cannot be read, holds none, or others may read it.
    """
    # Checked before they are read, because keys that others can read are not secret.
    check_secret(path, what="API keys", hint="one key per line, mode 0600")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The API keys cannot be read ({error})", place=path, hint="one key per line, in ASCII"
        ) from error
    return tuple(" ".join(line.split()) for line in lines if line.strip())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
