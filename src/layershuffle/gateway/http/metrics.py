"""What is known of a gateway now: its health, its hosts, its counters; also for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from platform import python_version

import prometheus_client as prometheus
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from layershuffle._version import __version__
from layershuffle.gateway.brain.state import Outcome
from layershuffle.gateway.http.answers import (
    Audits,
    Health,
    HostAnswer,
    SwarmAnswer,
)
from layershuffle.gateway.http.requests import Gateway

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST


class Metrics(Collector):
    """What a gateway shows of itself; its counters in a Prometheus registry of their own."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        # Not the library's global registry: a process may run several gateways, as tests do.
        self._registry = prometheus.CollectorRegistry()
        for collector in (self, gateway.counters.seconds, gateway.counters.blocks):
            self._registry.register(collector)

    def health(self) -> Health:
        """Whether requests can be answered now, and what will fail if nobody acts."""
        gateway = self._gateway
        router = gateway.router
        missing = router.swarm.lacking(router.hosted)
        reasons = []
        if len(missing) == len(router.hosted):
            reasons.append("no usable host holds a block")
        elif missing:
            reasons.append(f"no usable host holds block {', '.join(map(str, missing))}")
        if not gateway.coordinator.watching:
            reasons.append("the hosts are not watched now: those that fail do not come back")
        if gateway.upkeep is not None:
            for trouble in gateway.upkeep.troubles().values():
                reasons.append(trouble.text)
        return Health(
            # One block is enough for an answer, though a poor one, and answers need no watch.
            ok=len(missing) < len(router.hosted),
            why="; ".join(reasons),
        )

    def readiness(self) -> Health:
        """The health; it is not ok if the accuracy to expect now is below `min_accuracy`."""
        health = self.health()
        least = self._gateway.min_accuracy
        if least is None or not health.ok:
            return health
        expected, why = self._gateway.expected_now()
        if expected is not None and expected.top1 >= least:
            return health
        low = f"{expected.top1:.1f} % are expected" if expected else f"unknown ({why})"
        reason = f"the accuracy of answers is below {least:g} %: {low}"
        whys = [health.why, reason] if health.why else [reason]
        return health.model_copy(update={"ok": False, "why": "; ".join(whys)})

    def swarm(self) -> SwarmAnswer:
        """The answer of /v1/swarm."""
        gateway = self._gateway
        router = gateway.router
        expected, why = gateway.expected_now()
        health = gateway.coordinator.health
        counters = gateway.counters
        counters.keep(router.swarm)
        hosts: list[HostAnswer] = []
        for host in router.swarm.values():
            visits = counters.visits.get(host.name, Counter()).total()
            started_here = host.name in gateway.coordinator.children.names
            hosts.append(HostAnswer.from_state(host, visits=visits, started_here=started_here))
        return SwarmAnswer(
            model=gateway.model,
            depth=router.depth,
            fixed=router.fixed,
            unreachable_blocks=router.swarm.lacking(router.hosted),
            hosts=hosts,
            counters=dict(counters.requests),
            audits=Audits(audited=health.audited, disagreed=health.disagreed),
            expected=expected,
            expected_why=why,
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The current values of all metrics but the histograms; prometheus_client calls this."""
        swarm = self.swarm()
        upkeep = self._gateway.upkeep
        hosted = swarm.depth - sum(swarm.fixed)
        reachable = hosted - len(swarm.unreachable_blocks)
        yield from _counters(swarm, self._gateway.counters.visits)
        yield from _host_gauges(swarm.hosts)
        gauges = {
            "reachable_blocks": ("Blocks that a usable host holds.", reachable),
            "depth": ("Blocks that hosts serve.", hosted),
            "watching": (
                "1 while hosts are watched and brought back.",
                self._gateway.coordinator.watching,
            ),
            "open_requests": ("Classifications under way.", self._gateway.admission.open),
            "expected_accuracy_ratio": (
                "Share of right answers to expect now, by the calibration.",
                None if swarm.expected is None else swarm.expected.top1 / 100,
            ),
        }
        if upkeep is not None:
            gauges |= {
                "loop_lag_seconds": ("Longest recent delay of the event loop.", upkeep.lag),
                "free_bytes": ("Free on the disk of the state directory.", upkeep.free_bytes),
                "troubles": ("What will fail if nobody acts.", len(upkeep.troubles())),
            }
        for name, (text, value) in gauges.items():
            # What is not known is omitted: an alarm on a zero would never stop.
            if value is not None:
                yield GaugeMetricFamily(f"layershuffle_{name}", text, value=value)
        build = {"version": __version__, "python": python_version(), "model": swarm.model}
        yield InfoMetricFamily("layershuffle_build", "What runs.", value=build)


def _counters(swarm: SwarmAnswer, visits: dict[str, Counter[Outcome]]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "layershuffle_requests", "Classifications asked for.", labels=["outcome"]
    )
    for outcome, count in swarm.counters.items():
        requests.add_metric([outcome], count)
    hops = CounterMetricFamily("layershuffle_hops", "Visits to hosts.", labels=["host", "outcome"])
    for host, outcomes in visits.items():
        for visit_outcome, count in outcomes.items():
            hops.add_metric([host, visit_outcome], count)
    yield from (requests, hops)
    for name, text, value in (
        ("audits", "Visits computed again at the gateway and compared.", swarm.audits.audited),
        ("audits_disagreed", "Those whose answers differed.", swarm.audits.disagreed),
    ):
        yield CounterMetricFamily(f"layershuffle_{name}", text, value=value)


def _host_gauges(hosts: list[HostAnswer]) -> Iterator[Metric]:
    condition = GaugeMetricFamily(
        "layershuffle_host_condition", "1 for the current one.", labels=["host", "condition"]
    )
    for host in hosts:
        condition.add_metric([host.name, host.condition], 1)
    yield condition
    for name, field, unit, text in (
        ("waiting", "waiting", 1, "Images sent to it and not answered yet."),
        ("compute_seconds", "compute_ms", 1000, "Average time of a block and image."),
        ("link_seconds", "link_ms", 1000, "Average time of a visit beyond compute and queue."),
    ):
        gauge = GaugeMetricFamily(f"layershuffle_host_{name}", text, labels=["host"])
        for host in hosts:
            if (value := getattr(host, field)) is not None:
                gauge.add_metric([host.name], value / unit)
        yield gauge
