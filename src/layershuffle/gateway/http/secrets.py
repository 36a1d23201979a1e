"""Files of secrets and certificates, and whether an address is open to other machines.

It imports no web framework, because clients read key files and certificates too.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from datetime import datetime
from pathlib import Path

from layershuffle.ground.errors import UsageError

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_TIME = rb"\x17\x0d\d{12}Z|\x18\x0f\d{14}Z"  # with a year of two or of four digits
_VALIDITY = re.compile(rb"\x30.(?:%s)(%s)" % (_TIME, _TIME), re.DOTALL)
_SHORT_YEAR = 12  # digits


def read_keys(path: Path) -> tuple[str, ...]:
    """The lines of a file of API keys.

    Raises `UsageError` if it cannot be read, holds none, or others may read it.
    """
    lines = read_secret(path, what="API keys", hint="one key per line, mode 0600").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def certificate_expiry(certificate: Path) -> datetime | None:
    """When the first certificate of a PEM file expires; `None` if its form is not the usual one."""
    block = _PEM.search(certificate.read_text(encoding="latin-1"))
    content = b"" if block is None else ssl.PEM_cert_to_DER_cert(block[0])
    # X.509 writes both ends of the validity behind each other, as text (RFC 5280, 4.1.2.5).
    validity = _VALIDITY.search(content)
    if validity is None:
        return None
    digits = validity[1][2:-1].decode("ascii")
    if len(digits) == _SHORT_YEAR:
        digits = ("19" if digits >= "5" else "20") + digits
    return datetime.strptime(f"{digits}Z", "%Y%m%d%H%M%S%z")


def pinned(certificate: Path) -> ssl.SSLContext:
    """The TLS context of a client that trusts this certificate alone.

    It does not check the name by which the gateway is called on its own machine.
    """
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
    read_secret(key, what="key", hint="name the key that belongs to the certificate")

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


def read_secret(path: Path, *, what: str, hint: str) -> str:
    """The text of a file that only this user may read.

    The group may read a file of another user: so Kubernetes and systemd hand over secrets. Raises
    `UsageError` for a file that is missing, unreadable, empty or open to others.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError as error:
        raise UsageError(
            f"There is no file of the swarm's {what}", place=path, hint=hint
        ) from error
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
