"""`layershuffle swarm up`: a swarm that answers clients until it is stopped.

The server takes the requests of clients, the connections of hosts, and the commands of `drain`,
`readmit` and `drill` from who has the operator's key.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Literal, get_args

from layershuffle.cli.command import Command
from layershuffle.errors import UsageError
from layershuffle.extras import require

if TYPE_CHECKING:
    from layershuffle.swarm.server.start import Serving
    from layershuffle.swarm.service import Service

# Flags need these names for --help. The modules that own them (swarm.policy, messages, service)
# import pydantic and numpy, which take 0.15 to 0.24 s of the half second that --help may take. So
# they are spelled out once more; a test and mypy compare them.
DEFAULT_MODEL = "bundled:digits-onnx"
RoutingFlag = Literal["order-free", "sequential"]
ROUTINGS: tuple[RoutingFlag, ...] = get_args(RoutingFlag)


class JsonLines(logging.Formatter):
    """A record of a log as a line of JSON: time (UTC), level, message, host or request."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        fields |= {name: vars(record)[name] for name in ("host", "request") if name in vars(record)}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


@contextmanager
def logged(*, as_json: bool) -> Iterator[None]:
    """Show what hosts do, with times, as text or as lines of JSON, within."""
    log = logging.getLogger("layershuffle")
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    for handler in log.handlers:
        handler.setFormatter(JsonLines() if as_json else plain)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)


def state_flag(state: str | None) -> str:
    """The flag for the swarm's directory in a printed command, with a leading space; empty for
    the default directory."""
    return f" --state {quote(state)}" if state else ""


def steps() -> Callable[[str], None]:
    """A function that prints a step of a start with the seconds since this call."""
    begun = time.monotonic()

    def say(step: str) -> None:
        print(f"{time.monotonic() - begun:5.1f} s  {step}", flush=True)

    return say


@dataclass(frozen=True, kw_only=True)
class UpCommand(Command):
    """Serve a model from hosts: API, page, and the place where hosts dial in, on one port.

    Starts --hosts processes on this machine, which end with it. Hosts on other machines run
    `layershuffle-host ws://THIS:PORT --token-file FILE` and may come and go at any time. Prints the
    address and the next commands.
    """

    model: str = DEFAULT_MODEL
    """Model to serve: a directory of `layershuffle export`, or any model, which is exported
    first."""
    hosts: int = 4
    """Hosts to start on this machine; 0 if others dial in."""
    ray: str | None = None
    """Address of a Ray cluster (or auto): a host on each of its nodes, which need layershuffle-host
    and reach --listen."""
    copies: int = 2
    """Hosts that hold each block, where they have room."""
    memory_mb: float = 200.0
    """Megabytes of weights that each host of this machine, or of Ray, takes."""
    token_file: Path | None = None
    """File with what hosts have to know; it is made if it is not there (default: host-token in the
    directory of --state)."""
    routing: RoutingFlag = "order-free"
    """How blocks are ordered: order-free, or sequential (a classical pipeline)."""
    wire: Literal["fp32", "fp16", "int8"] = "fp32"
    """Number format of states on the wire."""
    listen: str = "127.0.0.1"
    """Address on which the server listens; addresses that other machines can reach need --keys.
    Without --https-certificate nothing is encrypted on the way there."""
    port: int = 8000
    """Port of the server; 0 takes a free one."""
    https_certificate: Path | None = None
    """Serve https: the server's certificate (PEM), with the names by which clients call it. It is
    read again on SIGHUP, as the keys are."""
    https_key: Path | None = None
    """Key of that certificate; only its owner may read it (mode 0600)."""
    keys: Path | None = None
    """File with the API keys of the clients, one per line, each with a quota if it has one (KEY
    1000/day); only its owner may read it (mode 0600)."""
    public: bool = False
    """Answer every client that reaches --listen, without a key."""
    state: str | None = None
    """Directory of the operator's key (default: ~/.local/state/layershuffle/swarm)."""
    log_json: bool = False
    """Write the log, on standard error, as lines of JSON."""
    page: bool = True
    """Show the page at the server's address."""
    min_accuracy: float | None = None
    """Say at /readyz that the swarm is not ready while its answers are expected to be less accurate
    than this, in percent."""
    trusted_proxy: tuple[str, ...] = ()
    """Addresses or networks of reverse proxies: for requests from there the client is the one that
    X-Forwarded-For names."""

    def run(self) -> int:
        """Start the swarm, print its address, and wait for Ctrl-C."""
        require("swarm")

        import asyncio

        from layershuffle.swarm.served import ServedModel, served_directory
        from layershuffle.swarm.server.doors import in_clear
        from layershuffle.swarm.server.start import serve_swarm
        from layershuffle.swarm.service import SwarmSettings

        say = steps()
        serving = self.serving()
        keyed, encrypted = self.keys is not None, serving.https is not None
        if warning := in_clear(serving.host, keyed=keyed, encrypted=encrypted):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        settings = SwarmSettings(
            model=self.model, copies=self.copies, routing=self.routing, wire=self.wire
        )
        model = ServedModel(served_directory(self.model, say=say))

        def ready(service: Service, url: str, key: str) -> None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, serving.reload)
            # Only for eyes: what is printed elsewhere becomes a log, which others may read.
            shown = key if self.page and sys.stdout.isatty() else ""
            print(self.described(service, url, serving=serving, key=shown), flush=True)

        # A service manager ends it as Ctrl-C does: the blocks below end the hosts.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with logged(as_json=self.log_json), suppress(KeyboardInterrupt):
            asyncio.run(serve_swarm(settings, model, serving=serving, say=say, ready=ready))
        print("The swarm has ended, with all its hosts.")
        return 0

    def serving(self) -> Serving:
        """The settings of the flags. Raises `UsageError` for a certificate without its key, and if
        a swarm uses that state directory."""
        from layershuffle.swarm.server.doors import Https, Keys
        from layershuffle.swarm.server.operating import Operated, state_directory
        from layershuffle.swarm.server.start import Serving

        certificate, key = self.https_certificate, self.https_key
        if (certificate is None) != (key is None):
            raise UsageError(
                "https needs a certificate and its key",
                hint="give --https-certificate and --https-key, or neither",
            )
        state = state_directory(self.state)
        return Serving(
            https=Https(certificate, key) if certificate and key else None,
            operated=Operated(state),
            token_file=self.token_file or state / "host-token",
            hosts=self.hosts,
            ray=self.ray,
            memory=int(1e6 * self.memory_mb),
            host=self.listen,
            port=self.port,
            public=self.public,
            keys=Keys(file=self.keys),
            page=self.page,
            trusted_proxies=self.trusted_proxy,
            min_accuracy=self.min_accuracy,
        )

    def described(self, service: Service, url: str, *, serving: Serving, key: str = "") -> str:
        """A description of a running swarm for its user, with the next commands.

        `key`: the operator's, "" where it must not be shown.
        """
        from layershuffle.swarm.server.page import join_address

        # With all flags that the address needs, so that the printed lines can be copied.
        address, authority = f" --address {url}", ""
        if serving.https is not None:
            address += " --authority FILE"
            authority = " --ca FILE"
        if serving.keys:
            address += " --api-key-file FILE"
        hosts = len(service.members)
        dial = url.replace("http", "ws", 1)
        # Only for eyes, as the key: elsewhere its reader takes it from the file.
        token = service.members.token if key else "TOKEN"
        lines = [
            f"{self.model}, {service.router.depth} blocks on {hosts} hosts. It answers at {url} "
            f"(API: {url}/openapi.json). In another shell:",
            f"  layershuffle classify IMAGE{address}",
            f"  layershuffle swarm status{address}",
            f"  layershuffle swarm drill{address} --requests 300{state_flag(self.state)}",
            f"  layershuffle-host {dial} --token-file {quote(str(serving.token_file))}{authority}",
            f"A browser tab as a host: {join_address(url, token=token)}",
        ]
        if key:
            lines.append(f"The page, to break hosts by a click: {url}/#{key}")
        return "\n".join([*lines, "Ctrl-C ends it, with all its hosts."])
