"""`layershuffle swarm simulate PLAN.yaml`: a plan in virtual time, under load and churn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.serving import require_extra
from layershuffle.errors import UsageError
from layershuffle.swarm.policy import ROUTINGS, Routing

_ABOUT = (
    "Play a plan in virtual time with the policy of the real router: hosts die and come back, "
    "requests arrive, and every routing meets the same of both."
)


@dataclass(kw_only=True)
class Options:
    """Flags of `swarm simulate`."""

    plan: tyro.conf.Positional[Path]
    """The plan, as for `swarm deploy`."""
    profile: Path | None = None
    """HOSTS.yaml that the plan was made from: how fast its hosts are. Default: 5 ms a block, 5 ms a
    visit."""
    hosts: int | None = None
    """So many hosts: those of the plan, in turn, as often as needed."""
    requests: int = 1000
    """Requests."""
    churn: tuple[float, float] | None = None
    """Mean seconds that a host is up, and down."""
    rate: float | None = None
    """Requests per second at random; instead of --clients."""
    clients: int = 4
    """Clients that each send the next request when the last one has ended."""
    kill: float | None = None
    """Kill this share of the hosts at random moments, and none comes back."""
    routings: tuple[Routing, ...] = ROUTINGS
    """Routings to compare."""
    min_blocks: int = 1
    """Fewest blocks that are an answer."""
    seed: int = 0
    """Seed of arrivals and failures."""


def run(argv: Sequence[str]) -> int:
    """Play every routing, and print them side by side."""
    options = parse(Options, argv, command="swarm simulate PLAN", about=_ABOUT)
    require_extra()

    from layershuffle.swarm.chaos import crashes
    from layershuffle.swarm.plan import read_plan
    from layershuffle.swarm.planning import read_hosts
    from layershuffle.swarm.planning.hosts import hosts_of
    from layershuffle.swarm.service import model_facts
    from layershuffle.swarm.simulation import (
        Arrivals,
        Churn,
        Profile,
        outcome_report,
        profile_of,
        scaled,
        simulate,
    )

    plan = read_plan(options.plan)
    facts = model_facts(plan.model, wire=plan.wire)
    profile = Profile()
    if options.profile is not None:
        profile = profile_of(hosts_of(read_hosts(options.profile), facts))
    if options.hosts is not None:
        plan = scaled(plan, options.hosts)
    if options.churn is not None and options.kill is not None:
        raise UsageError("--churn and --kill are two kinds of failures", hint="choose one")
    kill, requests = options.kill, options.requests
    names = list(plan.hosts)
    faults = crashes(names, share=kill, requests=requests, seed=options.seed) if kill else ()
    outcomes = {
        str(routing): simulate(
            plan,
            profile=profile,
            requests=requests,
            seed=options.seed,
            routing=routing,
            arrivals=Arrivals(rate=options.rate, clients=options.clients),
            churn=Churn(up_s=options.churn[0], down_s=options.churn[1]) if options.churn else None,
            faults=faults,
            min_blocks=options.min_blocks,
            accuracy=facts.accuracy or None,
        )
        for routing in options.routings
    }
    print(f"{len(plan.hosts)} hosts, seed {options.seed}\n{outcome_report(outcomes)}")
    return 0
