"""`layershuffle swarm head`: the machine that the others join; it holds no blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.serving import require_extra
from layershuffle.errors import UsageError

if TYPE_CHECKING:
    from layershuffle.swarm.ray_config import Tls

_ABOUT = (
    "Start the head of a swarm of several machines, in the foreground. Makes the token on the "
    "first start; copy it to every machine that is to hold blocks (mode 0600). Who holds the token "
    "can run code on every machine of the swarm."
)


@dataclass
class Security:
    """Flags about who may take part."""

    token: Path | None = None
    """The swarm's token (default: ~/.config/layershuffle/swarm-token)."""
    tls_certificate: Path | None = None
    """Encrypt everything: this machine's certificate, with its addresses in it; needs all three."""
    tls_key: Path | None = None
    """Key of the certificate."""
    tls_authority: Path | None = None
    """Certificate of the authority that signed all of them."""


@dataclass(kw_only=True)
class Options(Security):
    """Flags of `swarm head`."""

    ip: str
    """Address of this machine, in its private network, by which the others reach it."""
    port: int = 6400
    """First of the hundred ports that the head uses."""
    store: Path | None = None
    """Directory of the head's state, by which a restarted head loses nothing (default:
    ~/.local/state/layershuffle/swarm/store)."""


def run(argv: Sequence[str]) -> int:
    """Become Ray's head with the swarm's settings; ends when it is told to."""
    options = parse(Options, argv, command="swarm head", about=_ABOUT)
    require_extra()

    from layershuffle.swarm.ray_config import default_token, environment, head_command, new_token
    from layershuffle.swarm.server.admin import scratch_directory, state_directory

    token = options.token or default_token()
    if not token.exists():
        new_token(token)
    tls = tls_of(options)
    store = options.store or state_directory() / "store"
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = scratch_directory(f"head-{options.port}")
    command = head_command(scratch, ip=options.ip, port=options.port)
    address = f"{options.ip}:{options.port}"
    print(
        f"The head is at {address}; its token is {token}.\n"
        f"On every machine that is to hold blocks: copy the token, then\n"
        f"  layershuffle swarm host --address {address} --name NAME --ip ITS-IP\n"
        f"Here, in another shell: layershuffle swarm deploy PLAN.yaml --address {address}",
        flush=True,
    )
    become(command, environment(token, tls=tls, store=store))


def tls_of(options: Security) -> Tls | None:
    """The TLS files of the flags, all three or none. Raises `UsageError` for some of them."""
    from layershuffle.swarm.ray_config import Tls, check_tls

    given = (options.tls_certificate, options.tls_key, options.tls_authority)
    if not any(given):
        return None
    certificate, key, authority = given
    if certificate is None or key is None or authority is None:
        raise UsageError(
            "TLS needs a certificate, its key and the authority",
            hint="give --tls-certificate, --tls-key and --tls-authority, or none",
        )
    tls = Tls(certificate, key, authority)
    check_tls(tls)
    return tls


def become(command: Sequence[str], settings: dict[str, str]) -> NoReturn:
    """This process becomes `command`, so that its supervisor watches Ray itself."""
    os.execve(command[0], list(command), {**os.environ, **settings})
