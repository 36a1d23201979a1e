"""`layershuffle swarm up` and `deploy`: a swarm that answers clients until it is stopped.

The server takes the requests of clients, and those of `drain`, `readmit` and `drill` from who has
the operator's key.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from layershuffle.cli.swarm import DEFAULT_MODEL, RoutingFlag, WireFlag
from layershuffle.cli.swarm.options import (
    HttpsOptions,
    TlsOptions,
    context_of,
    read_keys,
    tls_of,
)
from layershuffle.errors import Interrupted
from layershuffle.extras import require
from layershuffle.text import listing

if TYPE_CHECKING:
    from layershuffle.swarm.plan import SwarmPlan
    from layershuffle.swarm.ray_session import RaySession
    from layershuffle.swarm.server.start import Serving
    from layershuffle.swarm.service import Service


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the `with` block as Ctrl-C does, with cleanup and exit code 143."""

    def stop(number: int, frame: Any) -> None:
        del number, frame
        # An exception instead of an exit, so that the surrounding blocks end Ray and the hosts.
        raise Interrupted("The swarm was stopped, together with its hosts")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def describe_service(
    service: Service, url: str, *, state: str | None, keyed: bool = False, key: str = ""
) -> str:
    """A description of a running swarm for its user, with the next commands.

    `key`: the operator's, "" where it must not be shown.
    """
    plan = service.plan
    hosts = [(name, f"blocks {', '.join(map(str, h.blocks))}") for name, h in plan.hosts.items()]
    # With all flags that the address needs, so that the printed lines can be copied.
    address = f" --address {url}"
    if url.startswith("https:"):
        address += " --authority FILE"
    if keyed:
        address += " --api-key-file FILE"
    missing = f"Not up yet: {', '.join(service.missing)}. " if service.missing else ""
    return "\n".join(
        [
            f"{plan.model}, {plan.routing}, {plan.wire} on the wire:",
            listing(hosts),
            f"{missing}It answers at {url} (API: {url}/openapi.json). In another shell:",
            f"  layershuffle classify IMAGE{address}",
            f"  layershuffle swarm status{address}",
            f"  layershuffle swarm drill{address} --requests 300" + state_flag(state),
            *([f"The page, to break hosts by a click: {url}/#{key}"] if key else []),
            "Ctrl-C ends it, with all its hosts.",
        ]
    )


def state_flag(state: str | None) -> str:
    """The flag for the swarm's directory in a printed command, with a leading space; empty for
    the default directory."""
    return f" --state {quote(state)}" if state else ""


def steps() -> Callable[[str], None]:
    """A function that prints a step of a start with the seconds since this call."""
    import time

    begun = time.monotonic()

    def say(step: str) -> None:
        print(f"{time.monotonic() - begun:5.1f} s  {step}", flush=True)

    return say


@dataclass(frozen=True, kw_only=True)
class _ServingCommand(HttpsOptions):
    """The flags and methods that `up` and `deploy` share."""

    port: int = 8000
    """Port of the server; 0 takes a free one."""
    threads: int | None = None
    """Threads of torch in each host (default: the value of `swarm host --threads` there)."""
    state: str | None = None
    """Directory of the operator's key (default: ~/.local/state/layershuffle/swarm)."""
    page: bool = True
    """Show the page at the server's address."""
    min_accuracy: float | None = None
    """Say at /readyz that the swarm is not ready while its answers are expected to be less accurate
    than this, in percent."""
    trusted_proxy: tuple[str, ...] = ()
    """Addresses or networks of reverse proxies: for requests from there the client is the one that
    X-Forwarded-For names."""

    def serving(self) -> Serving:
        """The settings of these flags. Raises `UsageError` if a swarm uses that state directory."""
        from layershuffle.swarm.server.admin import Operated, state_directory
        from layershuffle.swarm.server.start import Serving

        return Serving(
            operated=Operated(state_directory(self.state)),
            port=self.port,
            tls=context_of(self),
            threads=self.threads,
            certificate=self.https_certificate,
            page=self.page,
            trusted_proxies=self.trusted_proxy,
            min_accuracy=self.min_accuracy,
        )

    def serve(
        self,
        plan: SwarmPlan,
        session: AbstractContextManager[RaySession],
        *,
        serving: Serving,
        say: Callable[[str], None],
    ) -> None:
        """Serve the plan by the hosts of a Ray session, until Ctrl-C or SIGTERM."""
        import asyncio

        from layershuffle.swarm.server.start import serve_plan

        def ready(service: Service, url: str, key: str) -> None:
            # Only for eyes: what is printed elsewhere becomes a log, which others may read.
            shown = key if self.page and sys.stdout.isatty() else ""
            text = describe_service(
                service, url, state=self.state, keyed=bool(serving.keys), key=shown
            )
            print(text, flush=True)

        with ended_by_signals(), suppress(KeyboardInterrupt):
            asyncio.run(serve_plan(plan, session, serving=serving, say=say, ready=ready))


@dataclass(frozen=True, kw_only=True)
class UpCommand(_ServingCommand):
    """Start a swarm on this machine: Ray, a process per block host, router and server.

    It listens only on the loopback network. Prints the address and the next commands.
    """

    model: str = DEFAULT_MODEL
    """Model to serve, preferably one refined by anyorder."""
    plan: Path | None = None
    """A plan to start instead of an even distribution of the blocks; it replaces --model, --hosts,
    --replicas, --routing and --wire."""
    hosts: int = 4
    """Number of block hosts."""
    threads: int | None = 1
    """Threads of torch in each host."""
    replicas: int = 1
    """Hosts that hold each block."""
    routing: RoutingFlag = "order-free"
    """How blocks are ordered: order-free, order-free-serial (one visit at a time), sequential (a
    classical pipeline) or replicated-sequential (the same over several holders of each block)."""
    wire: WireFlag = "fp32"
    """Number format of states on the wire."""

    def run(self) -> int:
        """Start the swarm, print its address, and wait for Ctrl-C."""
        require("swarm")

        from layershuffle.swarm.ray_session import local_ray

        say = steps()
        serving = self.serving()  # before hosts are started, which takes seconds
        plan = self._plan(say)
        self.serve(plan, local_ray(list(plan.hosts)), serving=serving, say=say)
        print("The swarm has ended, with all its hosts.")
        return 0

    def _plan(self, say: Callable[[str], None]) -> SwarmPlan:
        from layershuffle.swarm.plan import SwarmPlan, even_plan, noted_depth, read_swarm_plan

        if self.plan is not None:
            return read_swarm_plan(self.plan)
        if (depth := noted_depth(self.model)) is None:
            say(f"Loading {self.model} to count its blocks ...")

            from layershuffle.core.stack import depth_of
            from layershuffle.models import load

            depth = depth_of(load(self.model))
        plan = even_plan(depth, self.hosts, model=self.model, replicas=self.replicas)
        # Built anew, because a copy of a pydantic model would not check the two values.
        return SwarmPlan(**{**dict(plan), "routing": self.routing, "wire": self.wire})


@dataclass(frozen=True)
class DeployCommand(TlsOptions, _ServingCommand):
    """Serve a plan from the machines that joined a head; run this on the machine of the head.

    Hosts may join and leave at any time. Hosts that join receive their blocks; the swarm continues
    without those that leave.
    """

    plan: Path
    """The plan: YAML with the model, the hosts and their blocks."""
    _: KW_ONLY
    address: str
    """Address of the head, as the head printed it."""
    bind: str = "127.0.0.1"
    """Address on which the server listens; addresses that other machines can reach need --keys.
    Without --https-certificate nothing is encrypted on the way there."""
    keys: Path | None = None
    """File with the API keys of the clients, one per line; only its owner may read it (mode
    0600)."""
    public: bool = False
    """Answer every client that reaches --bind, without a key."""
    wait: float = 120.0
    """Seconds to wait for the hosts of the plan; then the server starts with those that are up."""

    def run(self) -> int:
        """Serve until stopped."""
        require("swarm")

        from layershuffle.swarm.plan import read_swarm_plan
        from layershuffle.swarm.ray_config import default_token
        from layershuffle.swarm.ray_session import check_answers, joined_ray
        from layershuffle.swarm.server.tls import check_address, in_clear

        say = steps()
        plan, keys = read_swarm_plan(self.plan), read_keys(self.keys)
        # Before torch is imported, which takes seconds.
        serving = replace(
            self.serving(), host=self.bind, keys=keys, public=self.public, wait=self.wait
        )
        check_answers(self.address)
        check_address(self.bind, keyed=bool(keys), public=self.public)
        if warning := in_clear(self.bind, keyed=bool(keys), encrypted=serving.tls is not None):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        session = joined_ray(self.address, token=self.token or default_token(), tls=tls_of(self))
        self.serve(plan, session, serving=serving, say=say)
        print("The server has ended, with the block hosts; the machines stay members of the head.")
        return 0
