"""`layershuffle swarm up`: a swarm that answers clients until it is stopped.

The server takes the requests of clients, the connections of hosts, and the commands of who has the
operator's key.
"""

from __future__ import annotations

import io
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from shlex import quote
from typing import TYPE_CHECKING

from layershuffle.cli.command import Command, Inline
from layershuffle.gateway.brain.settings import SwarmSettings
from layershuffle.ground.extras import require
from layershuffle.ground.text import counted

if TYPE_CHECKING:
    from layershuffle.gateway.hosts.coordinator import Coordinator
    from layershuffle.gateway.http.start import Serving


class JsonLines(logging.Formatter):
    """A record of a log as a line of JSON: time (UTC), level, message, host or request."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for a record."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        for name in ("host", "request"):
            if name in vars(record):
                fields[name] = vars(record)[name]
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


@contextmanager
def logged(*, as_json: bool) -> Iterator[None]:
    """A context in which the log shows what hosts do, with times, as text or as lines of JSON."""
    log = logging.getLogger("layershuffle")
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    for handler in log.handlers:
        handler.setFormatter(JsonLines() if as_json else plain)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)


def steps() -> Callable[[str], None]:
    """A function that prints a step of a start with the seconds since this call."""
    begun = time.monotonic()

    def say(step: str) -> None:
        print(f"{time.monotonic() - begun:5.1f} s  {step}", flush=True)

    return say


def qr_code(address: str) -> str:
    """The QR code of an address as lines of text, for a terminal."""
    import segno

    text = io.StringIO()
    segno.make(address, micro=False).terminal(out=text, compact=True)
    return text.getvalue().rstrip("\n")


@dataclass(frozen=True, kw_only=True)
class UpCommand(Command):
    """Serve a model from hosts: API, page, and the place where hosts dial in.

    Starts --hosts processes on this machine, which end with it. Hosts on other machines run
    `layershuffle-host ws://THIS:PORT --token-file FILE` and may come and go at any time. Prints the
    address and the next commands.
    """

    settings: Inline[SwarmSettings] = field(default_factory=SwarmSettings)
    log_json: bool = False
    """Write the log, on standard error, as lines of JSON."""

    def run(self) -> int:
        """Start the swarm, print its address, and wait for Ctrl-C."""
        require("swarm")

        import asyncio

        from layershuffle.gateway.hosts.served_model import ServedModel, served_directory
        from layershuffle.gateway.http.start import Serving, serve_swarm

        say = steps()

        def ready(coordinator: Coordinator, url: str, key: str) -> None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, serving.reload)
            # Only for eyes: what is printed elsewhere becomes a log, which others may read.
            shown = key if self.settings.page and sys.stdout.isatty() else ""
            print(self.described(coordinator, url, serving=serving, key=shown), flush=True)

        with logged(as_json=self.log_json):
            serving = Serving(self.settings)
            model = ServedModel(served_directory(self.settings.model, say=say))
            # A service manager ends it as Ctrl-C does: the blocks below end the hosts.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with suppress(KeyboardInterrupt):
                asyncio.run(serve_swarm(serving, model, say=say, ready=ready))
        print("The swarm has ended, with all its hosts.")
        return 0

    def described(
        self, coordinator: Coordinator, url: str, *, serving: Serving, key: str = ""
    ) -> str:
        """A description of a running swarm for its user, with the next commands.

        `key`: the key of the operator, or "" if it must not be shown.
        """
        from layershuffle.gateway.http.files import join_address
        from layershuffle.gateway.http.secrets import is_loopback

        # With all flags that the address needs, so that the printed lines can be copied.
        address = f" --address {url}"
        authority = ""
        if serving.tls is not None:
            address += " --authority FILE"
            authority = " --ca FILE"
        if serving.keys:
            address += " --api-key-file FILE"
        hosts = counted(len(coordinator.connected), "host")
        dial = serving.hosts_url.replace("http", "ws", 1)
        # Only for eyes, as the key: elsewhere its reader takes it from the file.
        token = coordinator.connected.token if key else "TOKEN"
        blocks = counted(len(coordinator.model.hosted), "block")
        lines = [
            f"{self.settings.model}, {blocks} on {hosts}. It answers at {url} "
            f"(API: {url}/openapi.json). In another shell:",
            f"  layershuffle classify IMAGE{address}",
            f"  layershuffle swarm status{address}",
            f"  layershuffle-host {dial} --token-file {quote(str(serving.token_file))}{authority}",
            f"A browser tab as a host: {join_address(url, token=token)}",
        ]
        if key:
            if not is_loopback(self.settings.listen):
                lines.append(f"The same for a phone:\n{qr_code(join_address(url, token=token))}")
            lines.append(f"The page, to kill hosts by a click: {url}/#{key}")
        return "\n".join([*lines, "Ctrl-C ends it, with all its hosts."])
