"""Fetch the files of a model by their SHA-256 over HTTP, store them on disk, and check them."""

from __future__ import annotations

import fcntl
import hashlib
import io
import ipaddress
import os
import ssl
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layershuffle_host.wire import FILE_PATH

_CHUNK = 1 << 16
_ABANDONED = 24 * 3600.0  # seconds after which nobody continues a transfer
_SECONDS = 10.0  # a transfer without a byte for this long has failed


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, because the token is for the gateway alone."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def is_loopback(name: str) -> bool:
    """Whether a host name or address is this machine itself, which no proxy reaches."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


@dataclass(frozen=True)
class Source:
    """Where files come from: the address of a gateway, its token, and how TLS is checked.

    `proxied`: whether the proxy of the environment is asked, if it names one.
    """

    address: str
    token: str
    tls: ssl.SSLContext | None
    proxied: bool = True

    def open(self, digest: str, *, start: int) -> Any:
        """The response with the file from byte `start` on."""
        headers = {"Authorization": f"Bearer {self.token}"}
        if start:
            headers["Range"] = f"bytes={start}-"
        request = urllib.request.Request(self.address + FILE_PATH + digest, headers=headers)
        proxies = urllib.request.ProxyHandler(None if self.proxied else {})
        handlers = (_NoRedirect(), urllib.request.HTTPSHandler(context=self.tls), proxies)
        return urllib.request.build_opener(*handlers).open(request, timeout=_SECONDS)


def usual_cache() -> Path | None:
    """The directory for files that the user did not name, `None` where none can be written: a
    service may have no home directory, or one that is read-only."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = caches / "layershuffle-host"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):  # the second one: nobody knows the home directory
        return None
    return directory if os.access(directory, os.W_OK) else None


class Cache:
    """A directory of files by digest, of `limit` bytes; several hosts may share it.

    Without a directory, files are fetched anew by every process.
    """

    def __init__(self, directory: Path | None, *, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._prune(directory)

    def digests(self) -> list[str]:
        """The digests of the files that are there."""
        if self._directory is None:
            return []
        return sorted(p.name for p in self._directory.iterdir() if len(p.name) == 64)

    def content(self, digest: str, size: int, *, source: Source, stopped: threading.Event) -> bytes:
        """The content of a file of `size` bytes, fetched where it is not there.

        A transfer that was cut off goes on where it ended. Raises `OSError` if the transfer fails
        or is `stopped`, and if the disk cannot be written.
        """
        if self._directory is None:
            memory = io.BytesIO()
            _fetch(memory, digest, size=size, source=source, stopped=stopped)
            fetched = memory.getvalue()
            if hashlib.sha256(fetched).hexdigest() != digest:
                raise OSError(f"what came is not the file {digest[:12]}: other SHA-256")
            return fetched
        path = self._directory / digest
        part = self._directory / f"{digest}.part"
        if (content := self._read(path, digest)) is not None:
            return content
        with part.open("ab") as file:
            # Another host of this machine may be fetching the same file.
            _lock(file.fileno(), stopped)
            if (content := self._read(path, digest)) is not None:
                part.unlink(missing_ok=True)
                return content
            if file.seek(0, os.SEEK_END) > size:
                file.truncate(0)
            if file.seek(0, os.SEEK_END) < size:
                _fetch(file, digest, size=size, source=source, stopped=stopped)
            file.flush()
            os.fsync(file.fileno())
            content = part.read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                # From the beginning next time, because nobody knows which part is wrong.
                file.truncate(0)
                raise OSError(f"what came is not the file {digest[:12]}: other SHA-256")
            os.replace(part, path)
        self._prune(self._directory, keep=path)
        return content

    def _read(self, path: Path, digest: str) -> bytes | None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(content).hexdigest() != digest:
            path.unlink(missing_ok=True)  # The disk has damaged it.
            return None
        os.utime(path)
        return content

    def _prune(self, directory: Path, *, keep: Path | None = None) -> None:
        """Remove transfers that nobody continues, and files beyond the limit, the one unused for
        longest first."""
        for part in directory.glob("*.part"):
            with suppress(FileNotFoundError):  # another host may remove files, too
                if time.time() - part.stat().st_mtime > _ABANDONED:
                    part.unlink()
        facts = []
        total = 0
        for path in directory.glob("?" * 64):
            with suppress(FileNotFoundError):
                size = path.stat().st_size
                facts.append((path.stat().st_mtime, size, path))
                total += size
        for _, size, path in sorted(facts):
            if total > self._limit and path != keep:
                path.unlink(missing_ok=True)
                total -= size


def _fetch(file: Any, digest: str, *, size: int, source: Source, stopped: threading.Event) -> None:
    start = file.tell()
    with source.open(digest, start=start) as response:
        # A server that knows no ranges begins anew.
        if start and response.status != 206:
            file.truncate(0)
            start = 0
        while chunk := response.read(_CHUNK):
            start += len(chunk)
            if stopped.is_set():
                raise OSError("the transfer was stopped")
            if start > size:
                file.truncate(0)
                raise OSError(f"the file {digest[:12]} is longer than the gateway said")
            file.write(chunk)
    if start < size:
        raise OSError(f"the transfer of {digest[:12]} ended after {start} of {size} bytes")


def _lock(descriptor: int, stopped: threading.Event) -> None:
    while not stopped.is_set():
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stopped.wait(0.1)
    raise OSError("the transfer was stopped")
