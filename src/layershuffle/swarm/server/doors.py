"""Who may come in: API keys with their rates, certificates, files of secrets, open addresses.

It imports no web framework, because clients read key files and certificates too.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from layershuffle.ground.errors import UsageError

_SHORTEST_KEY = 16
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which ssl has no name for


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

    `lines`, or those of a `file`: a key each, and behind it the requests that it may make, if there
    is a bound: `KEY 1000/day` (second, minute, hour, day). Raises `UsageError` for another line,
    for keys that are short enough to be guessed, and for those that no header carries.
    """

    def __init__(self, lines: Sequence[str] = (), *, file: Path | None = None) -> None:
        self._file = file
        self._quotas = dict(map(_parsed, lines))
        self.load()

    def load(self) -> None:
        """Read the file again; what keys have used is forgotten.

        Raises what `read_keys` raises, and `UsageError` for a line that is none; then the keys of
        before stay.
        """
        if self._file is not None:
            self._quotas = dict(_parsed(line, place=self._file) for line in read_keys(self._file))

    def __bool__(self) -> bool:
        return bool(self._quotas)

    def accept(self, key: bytes) -> bool:
        """Whether `key` is one of the keys; a wrong key takes as long as a right one."""
        return not self._quotas or bool(self._matching(key))

    def wait(self, key: bytes, *, now: float) -> float:
        """Count a request of a key that is accepted; return the seconds that it has to wait."""
        return max((quota.wait(now) for quota in self._matching(key) if quota), default=0.0)

    def _matching(self, key: bytes) -> list[Rate | None]:
        # Digests have equal length, and all are compared: the time does not depend on the length of
        # a key, its first letters, or its place in the list.
        digest = _digest(key)
        return [rate for valid, rate in self._quotas.items() if hmac.compare_digest(digest, valid)]


def _parsed(line: str, *, place: Path | None = None) -> tuple[bytes, Rate | None]:
    """The digest of a key, and its quota. Raises `UsageError` for another line of `place`."""
    key, _, quota = line.partition(" ")
    if len(key) < _SHORTEST_KEY or not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"An API key needs at least {_SHORTEST_KEY} ASCII letters, digits and signs",
            place=place,
            hint='make one: python -c "import secrets; print(secrets.token_urlsafe(24))"',
        )
    if not quota:
        return _digest(key.encode()), None
    match = re.fullmatch(r"([1-9]\d{0,8})/(second|minute|hour|day)", quota.strip())
    if match is None:
        raise UsageError(
            f"{quota.strip()[:40]!r} is no quota of an API key",
            place=place,
            hint="write KEY 1000/day",
        )
    number = int(match[1])
    return _digest(key.encode()), Rate(number / _UNITS[match[2]], number)


def read_keys(path: Path) -> tuple[str, ...]:
    """The lines of a file of API keys.

    Raises `UsageError` if it cannot be read, holds none, or others may read it.
    """
    lines = secret_in(path, what="API keys", hint="one key per line, mode 0600").splitlines()
    return tuple(" ".join(line.split()) for line in lines if line.strip())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Https:
    """The certificate of a gateway with its key, from two files, and the context that shows it.

    Raises what `server_context` raises.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate, self._key = certificate, key
        self.context = server_context(certificate, key)
        self._expires = _expires(self.context, certificate)

    @property
    def days(self) -> float:
        """Days until the certificate that is shown expires."""
        return (self._expires - time.time()) / _UNITS["day"]

    def load(self) -> None:
        """Read the files again, for new connections. Raises what `server_context` raises; then the
        certificate of before stays."""
        # First into another context: half of a pair would stay in the one that serves.
        expires = _expires(server_context(self.certificate, self._key), self.certificate)
        self.context.load_cert_chain(self.certificate, self._key)
        self._expires = expires


def _expires(context: ssl.SSLContext, certificate: Path) -> float:
    """When the certificate of a server's context expires, in seconds since 1970."""
    # ssl reads the certificate of a peer alone, so this is a handshake in memory.
    trusting = pinned(certificate)
    trusting.verify_flags |= _NO_CHECK_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = trusting.wrap_bio(back, there), context.wrap_bio(there, back, server_side=True)
    for end in (client, server, client):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    facts = client.getpeercert()
    assert facts is not None
    return ssl.cert_time_to_seconds(str(facts["notAfter"]))


def pinned(certificate: Path) -> ssl.SSLContext:
    """Trusts this certificate alone, whatever name the gateway is called by on its own machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """The TLS context (1.2 or later) of a gateway; the file `certificate` may contain its chain.

    Raises `UsageError` for files that are missing, broken or no pair, and for a key that is
    encrypted or that others may read.
    """
    secret_in(key, what="key", hint="name the key that belongs to the certificate")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # OpenSSL would ask for the password of a key on the terminal, which a service has not.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl's own errors as well
        raise UsageError(
            f"The certificate and its key cannot be used ({error.strerror or error})",
            place=certificate,
            hint="give PEM files, and the key that belongs to the certificate; without a password: "
            f"openssl pkey -in {key} -out NEW.pem",
        ) from error
    return context


def client_context(authority: Path) -> ssl.SSLContext:
    """The TLS context of a client that trusts only the certificates in this file.

    Raises `UsageError` if it cannot be read.
    """
    try:
        # With `cafile`, the authorities of the system are not trusted.
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise UsageError(
            f"The authority's certificate cannot be read ({error.strerror or error})",
            place=authority,
            hint="give a PEM file",
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, an address or "localhost"."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # Other names are not looked up: their addresses may change until they are used.
        return host == "localhost"


def secret_in(path: Path, *, what: str, hint: str) -> str:
    """The text of a file; raises `UsageError` for one that is missing, unreadable, empty or open to
    others.

    The group may read what belongs to another user: so Kubernetes and systemd hand over secrets.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError as error:
        raise UsageError(f"The swarm's {what} does not exist", place=path, hint=hint) from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"The swarm's {what} cannot be read ({why})", place=path, hint=hint
        ) from error
    if not content.strip():
        raise UsageError(f"The swarm's {what} file is empty", place=path, hint=hint)
    status = path.stat()
    if status.st_mode & (0o077 if status.st_uid == os.getuid() else 0o037):
        raise UsageError(
            f"Other users may read or change the swarm's {what}",
            place=path,
            hint=f"chmod 600 {path}; if others use this machine, make a new one",
        )
    return content
