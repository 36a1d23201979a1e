"""`layershuffle swarm up` and `deploy`: a swarm that answers clients until it is told to end.

The server takes the requests of clients. The operator's socket takes those of `drain`, `readmit`,
`swap` and `drill`, from the owner of this process alone.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from layershuffle.cli.swarm import DEFAULT_MODEL, RoutingFlag, WireFlag
from layershuffle.cli.swarm.options import (
    HttpsOptions,
    TlsOptions,
    check_reports,
    context_of,
    read_keys,
    tls_of,
)
from layershuffle.errors import Interrupted, UsageError
from layershuffle.extras import require
from layershuffle.machine import collector_paused
from layershuffle.text import listing

if TYPE_CHECKING:
    import ssl

    from layershuffle.swarm.plan import SwarmPlan
    from layershuffle.swarm.ray_session import RaySession
    from layershuffle.swarm.server.gateway_page import PageOptions
    from layershuffle.swarm.service import Cargo, Service


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does: everything is cleaned up, exit code 143."""

    def stop(number: int, frame: Any) -> None:
        del number, frame
        # An exception and no exit: the blocks around it end Ray and the hosts.
        raise Interrupted("The swarm was told to end; its hosts have ended with it")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@asynccontextmanager
async def operator_endpoint(service: Service, state: Path) -> AsyncIterator[None]:
    """The operator's socket in `state`, open inside. Raises `UsageError` if a swarm is using it."""
    import asyncio
    import socket

    import uvicorn

    from layershuffle.swarm.server.admin import free_socket, operator_app

    class Quiet(uvicorn.Server):
        def capture_signals(self) -> Any:  # the clients' server has them
            return nullcontext()

    path = free_socket(state)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        # Before it listens, so that no other user can connect in between.
        path.chmod(0o600)
        listener.listen()
        app = operator_app(service)
        server = Quiet(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # first: Ctrl-C cancels what is awaited here
            server.should_exit = True
            await asyncio.wait({task})  # which, unlike others, does not cancel it in turn


async def serve_service(
    service: Service,
    *,
    state: Path,
    host: str,
    port: int,
    keys: tuple[str, ...],
    public: bool,
    tls: ssl.SSLContext | None,
    ready: Callable[[str], None],
    page: PageOptions | None,
) -> None:
    """Take the requests of clients and of the operator, until SIGINT or SIGTERM."""
    from layershuffle.swarm.server.app import create_app
    from layershuffle.swarm.server.run import serve

    coordinator, health = service.coordinator, service.coordinator.health
    app = create_app(
        service.remote_model,
        calibration=service.calibration,
        keys=keys,
        model=service.plan.model,
        # Functions, because the server asks for these while they change.
        foreign_blocks=lambda: coordinator.foreign_blocks,
        watching=lambda: coordinator.watching,
        audits=lambda: (health.audited, health.disagreed),
        carriers=coordinator.backend.carriers,
        trouble=lambda: service.trouble,
        page=page,
    )
    async with operator_endpoint(service, state):
        await serve(app, host=host, port=port, public=public, tls=tls, ready=ready)


def describe_service(service: Service, url: str, *, state: str | None, keyed: bool = False) -> str:
    """What a user should know once a swarm answers, and what to type next."""
    plan = service.plan
    hosts = [(name, f"blocks {', '.join(map(str, h.blocks))}") for name, h in plan.hosts.items()]
    # With all flags that the address needs, so that the printed lines can be copied as they are.
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
            f"{missing}It answers at {url} (API: {url}/docs). In another shell:",
            f"  layershuffle classify IMAGE{address}",
            f"  layershuffle swarm status{address}",
            f"  layershuffle swarm drill{address} --requests 300" + state_flag(state),
            "Ctrl-C ends it, with all its hosts.",
        ]
    )


def state_flag(state: str | None) -> str:
    """The flag, with a space before it, that names the operator's directory in a printed command;
    nothing for the default one."""
    return f" --state {quote(state)}" if state else ""


def steps() -> Callable[[str], None]:
    """What prints the steps of a start, each with the seconds since this call."""
    import time

    begun = time.monotonic()

    def say(step: str) -> None:
        print(f"{time.monotonic() - begun:5.1f} s  {step}", flush=True)

    return say


@dataclass(frozen=True, kw_only=True)
class _ServingCommand(HttpsOptions):
    """What `up` and `deploy` have in common."""

    port: int = 8000
    """Port of the server; 0 takes a free one."""
    threads: int | None = None
    """Threads of torch in each host (default: what `swarm host --threads` says on its machine)."""
    state: str | None = None
    """Directory of the operator's socket (default: ~/.local/state/layershuffle/swarm)."""
    page: bool = True
    """Show the page at the server's address."""
    reports: Path | None = None
    """Directory of studies whose reports the page links."""

    def page_options(self, service: Service) -> PageOptions | None:
        """What the page offers, `None` for no page; its visitors may break nothing."""
        from layershuffle.swarm.server.gateway_page import PageOptions

        del service
        return PageOptions(reports=self.reports) if self.page else None

    def announce(self, text: str, url: str) -> None:
        """Say that the server answers at `url`."""
        del url
        print(text, flush=True)

    async def serve(
        self,
        plan: SwarmPlan,
        session: AbstractContextManager[RaySession],
        *,
        say: Callable[[str], None],
        tls: ssl.SSLContext | None,
        host: str = "127.0.0.1",
        keys: tuple[str, ...] = (),
        public: bool = False,
        wait: float = 120.0,
    ) -> None:
        """Serve the plan by the hosts of a Ray session, until SIGINT or SIGTERM.

        `wait`: seconds until the server starts without the hosts that are not up by then; `say`
        gets the steps until then.
        """
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        from layershuffle.swarm.placement import started_early
        from layershuffle.swarm.ray_hosts import RayHosts
        from layershuffle.swarm.server.admin import state_directory

        state = state_directory(self.state)
        say(f"Loading {plan.model}, and connecting to Ray ...")
        # Side by side: Ray mostly waits for its processes, and those of the hosts import torch
        # while this one does. So nothing above may import torch.
        with ThreadPoolExecutor(1) as loader:
            loading = loader.submit(_loaded, plan)
            with session as ray_session:
                backend = RayHosts(ray_session.ray, limits=plan.limits, threads=self.threads)
                say(f"Starting {len(plan.hosts)} block hosts ...")
                async with started_early(backend, plan):
                    cargo = await asyncio.wrap_future(loading)
                    # It imports torch: now that is there, and the loop is not held up.
                    from layershuffle.swarm.service import running_service

                    async with running_service(
                        plan, cargo, backend=backend, session=ray_session, within=wait, say=say
                    ) as service:

                        def ready(url: str) -> None:
                            keyed, shown = bool(keys), self.state
                            text = describe_service(service, url, state=shown, keyed=keyed)
                            self.announce(text, url)

                        await serve_service(
                            service,
                            state=state,
                            host=host,
                            port=self.port,
                            keys=keys,
                            public=public,
                            tls=tls,
                            ready=ready,  # with port 0 the address is known once the server listens
                            page=self.page_options(service),
                        )


def _loaded(plan: SwarmPlan) -> Cargo:
    """`service.load_cargo`, for a thread that imports torch by it."""
    with collector_paused():
        from layershuffle.swarm.service import load_cargo

        return load_cargo(plan)


@dataclass(frozen=True, kw_only=True)
class UpCommand(_ServingCommand):
    """Start a swarm on this machine: Ray, a process per block host, router and server.

    It listens on the loopback network alone. Prints the address and what to type next.
    """

    model: str = DEFAULT_MODEL
    """Model to serve, best one refined by layershuffle-depth."""
    plan: Path | None = None
    """A plan to start instead of an even one; it replaces --model, --hosts, --replicas, --routing
    and --wire."""
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
    """Type of states on the wire."""
    page_may_break: bool = False
    """Let visitors of the page kill, freeze and slow down these hosts, from this machine alone."""

    def page_options(self, service: Service) -> PageOptions | None:
        """What the page offers; with the flag, visitors may break the hosts of the plan."""
        from layershuffle.swarm.chaos import Fault, FaultKind

        options = super().page_options(service)
        if options is None or not self.page_may_break:
            return options

        async def break_host(host: str, kind: FaultKind) -> None:
            await service.faults.inject(Fault(0, host, kind))

        return replace(options, break_host=break_host, breakable=frozenset(service.plan.hosts))

    def run(self) -> int:
        """Start it, print where it answers, and wait for Ctrl-C."""
        require("swarm")

        import asyncio

        from layershuffle.swarm.ray_session import local_ray
        from layershuffle.swarm.server.admin import free_socket, state_directory

        say, tls = steps(), context_of(self)
        if self.page_may_break and not self.page:
            raise UsageError("--page-may-break needs the page", hint="leave --no-page out")
        check_reports(self.reports, keyed=False)
        # Before hosts are started, which takes seconds.
        free_socket(state_directory(self.state))
        plan = self._plan(say)
        with ended_by_signals(), suppress(KeyboardInterrupt):
            asyncio.run(self.serve(plan, local_ray(list(plan.hosts)), say=say, tls=tls))
        print("The swarm has ended, with all its hosts.")
        return 0

    def _plan(self, say: Callable[[str], None]) -> SwarmPlan:
        from layershuffle.swarm.plan import SwarmPlan, even_plan, noted_depth, read_plan

        if self.plan is not None:
            return read_plan(self.plan)
        if (depth := noted_depth(self.model)) is None:
            say(f"Loading {self.model}, to see how many blocks it has ...")

            from layershuffle.models import load
            from layershuffle.stack import depth_of

            depth = depth_of(load(self.model))
        plan = even_plan(depth, self.hosts, model=self.model, replicas=self.replicas)
        # Built anew, not copied: a copy of a pydantic model would not check the two values.
        return SwarmPlan(**{**dict(plan), "routing": self.routing, "wire": self.wire})


@dataclass(frozen=True, kw_only=True)
class DeployCommand(TlsOptions, _ServingCommand):
    """Serve a plan from the machines that joined a head; run this on the machine of the head.

    Hosts may come and go at any time. Hosts that come are given their blocks; the swarm goes on
    without those that leave.
    """

    plan: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """The plan: YAML with the model, the hosts and their blocks."""
    address: str
    """Address of the head, as the head printed it."""
    bind: str = "127.0.0.1"
    """Address on which the server listens; addresses that other machines reach need --keys. Nothing
    is encrypted on the way there without --https-certificate."""
    keys: Path | None = None
    """File with the API keys of the clients, one per line; only its owner may read it (mode
    0600)."""
    public: bool = False
    """Answer everybody who reaches --bind, without a key."""
    wait: float = 120.0
    """Seconds to wait for the hosts of the plan; then the server starts with those that are up."""

    def run(self) -> int:
        """Serve until told to end."""
        require("swarm")

        import asyncio

        from layershuffle.swarm.plan import read_plan
        from layershuffle.swarm.ray_config import default_token
        from layershuffle.swarm.ray_session import check_answers, joined_ray
        from layershuffle.swarm.server.admin import free_socket, state_directory
        from layershuffle.swarm.server.tls import check_address, in_clear

        say = steps()
        plan = read_plan(self.plan)
        keys, tls = read_keys(self.keys), context_of(self)
        check_reports(self.reports, keyed=bool(keys))
        # Before torch is imported, which takes seconds.
        free_socket(state_directory(self.state))
        check_answers(self.address)
        check_address(self.bind, keyed=bool(keys), public=self.public)
        if warning := in_clear(self.bind, keyed=bool(keys), encrypted=tls is not None):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        with ended_by_signals(), suppress(KeyboardInterrupt):
            session = joined_ray(
                self.address, token=self.token or default_token(), tls=tls_of(self)
            )
            asyncio.run(
                self.serve(
                    plan,
                    session,
                    say=say,
                    tls=tls,
                    host=self.bind,
                    keys=keys,
                    public=self.public,
                    wait=self.wait,
                )
            )
        print("The server has ended, with the block hosts; the machines stay members of the head.")
        return 0
