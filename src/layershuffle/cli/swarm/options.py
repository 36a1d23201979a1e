"""Flags that several commands of a swarm share, and their values after the checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layershuffle.cli.command import Command
from layershuffle.errors import UsageError

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, kw_only=True)
class HttpsOptions(Command):
    """Flags about the encryption between clients and the server."""

    https_certificate: Path | None = None
    """Serve https: the server's certificate (PEM), with the names by which clients call it."""
    https_key: Path | None = None
    """Key of that certificate; only its owner may read it (mode 0600)."""


def context_of(options: HttpsOptions) -> ssl.SSLContext | None:
    """The encryption that the flags request; `None` for plain http. Raises `UsageError` for one
    file without the other, and for files that cannot be used."""
    from layershuffle.swarm.server.tls import server_context

    certificate, key = options.https_certificate, options.https_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UsageError(
            "https needs a certificate and its key",
            hint="give --https-certificate and --https-key, or neither",
        )
    return server_context(certificate, key)


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The lines of a file of API keys; empty without a file.

    Raises `UsageError` if it cannot be read, holds none, or others may read it.
    """
    from layershuffle.swarm.server.tls import check_secret

    if path is None:
        return ()
    # Checked before they are read, because keys that others can read are not secret.
    check_secret(path, what="API keys", hint="one key per line, mode 0600")
    try:
        return tuple(path.read_text(encoding="utf-8").split())
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The API keys cannot be read ({error})", place=path, hint="one key per line, in ASCII"
        ) from error
