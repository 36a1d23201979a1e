"""The gateway's counters, for Prometheus, /v1/swarm and /healthz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
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
from layershuffle.swarm.coordinator import Coordinator
from layershuffle.swarm.messages import Outcome, State, Visited
from layershuffle.swarm.server import schemas
from layershuffle.swarm.server.scheduler import RequestScheduler
from layershuffle.swarm.server.schemas import Audits, Classification, Health
from layershuffle.swarm.server.upkeep import Upkeep

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OUTCOMES = {
    HTTPStatus.SERVICE_UNAVAILABLE: "unanswered",
    HTTPStatus.TOO_MANY_REQUESTS: "busy",
    HTTPStatus.UNAUTHORIZED: "unauthorised",
    HTTPStatus.INTERNAL_SERVER_ERROR: "failed",
}


class Metrics(Collector):
    """The counters of one gateway, in a Prometheus registry of their own.

    `requests` counts classifications by outcome, `hops` visits by host and outcome. `coordinator`
    knows of watch and audits; `model`: the name of what is served.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        *,
        model: str = "",
        coordinator: Coordinator | None = None,
        upkeep: Upkeep | None = None,
    ) -> None:
        router = scheduler.remote_model.router
        self._router, self._coordinator = router, coordinator
        self._scheduler, self._upkeep = scheduler, upkeep
        self.model = model
        # Not by prometheus_client, which never forgets a label: hosts come and go.
        self.requests: Counter[str] = Counter()
        self.hops: dict[str, Counter[Outcome]] = {}
        self._seconds = prometheus.Histogram(
            "layershuffle_request_seconds",
            "Time of answered requests.",
            buckets=_SECONDS,
            registry=None,
        )
        self._blocks = prometheus.Histogram(
            "layershuffle_blocks_used",
            "Blocks used by answers.",
            # One bucket for each number of blocks, so that nothing is rounded.
            buckets=tuple(range(1, router.depth + 1)),
            registry=None,
        )
        # Not the library's global registry: a process may run several gateways, as drills do.
        self._registry = prometheus.CollectorRegistry()
        for collector in (self, self._seconds, self._blocks):
            self._registry.register(collector)
        router.observers.append(self._count_hop)

    def collect(self) -> Iterator[Metric]:
        """The current values of all metrics but the histograms; prometheus_client calls this."""
        yield from self._counters()
        yield from self._of_hosts()
        health, (expected, _) = self.health(), self._scheduler.expected_now()
        upkeep = self._upkeep
        https = None if upkeep is None else upkeep.https
        # `None`, what is not known, is omitted: an alarm on a zero would never stop.
        gauges = [
            ("reachable_blocks", "Blocks that a usable host holds.", health.reachable_blocks),
            ("depth", "Blocks of the model.", health.depth),
            ("watching", "1 while hosts are watched and brought back.", health.watching),
            ("open_requests", "Classifications under way.", self._scheduler.admission.open),
            (
                "expected_accuracy_ratio",
                "Share of right answers to expect now, by the calibration.",
                None if expected is None else expected.top1 / 100,
            ),
            ("certificate_days", "Days until it expires.", None if https is None else https.days),
            (
                "loop_lag_seconds",
                "Longest recent delay of the event loop.",
                None if upkeep is None else upkeep.lag,
            ),
            (
                "free_bytes",
                "Free on the disk of the state directory.",
                None if upkeep is None else upkeep.free_bytes,
            ),
            (
                "troubles",
                "What /healthz says will fail if nobody acts.",
                None if upkeep is None else len(upkeep.troubles()),
            ),
        ]
        for name, text, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(f"layershuffle_{name}", text, value=value)
        build = {"version": __version__, "python": python_version(), "model": self.model}
        yield InfoMetricFamily("layershuffle_build", "What runs.", value=build)

    def _counters(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "layershuffle_requests", "Classifications asked for.", labels=["outcome"]
        )
        for outcome, count in self.requests.items():
            requests.add_metric([outcome], count)
        hops = CounterMetricFamily(
            "layershuffle_hops", "Visits to hosts.", labels=["host", "outcome"]
        )
        self._forget_hosts()
        for host, outcomes in self.hops.items():
            for visit_outcome, count in outcomes.items():
                hops.add_metric([host, visit_outcome], count)
        yield from (requests, hops)
        if (audits := self.audits()) is not None:
            repeated = "Visits computed again at the gateway and compared."
            differed = "Those whose answers differed."
            yield CounterMetricFamily("layershuffle_audits", repeated, value=audits.audited)
            yield CounterMetricFamily(
                "layershuffle_audits_disagreed", differed, value=audits.disagreed
            )

    def _of_hosts(self) -> Iterator[Metric]:
        condition = GaugeMetricFamily(
            "layershuffle_host_condition", "1 for the current one.", labels=["host", "condition"]
        )
        texts = {
            "waiting": "Images sent to it and not answered yet.",
            "compute_seconds": "Average time of a block and image.",
            "link_seconds": "Average time of a visit beyond compute and queue.",
        }
        gauges = {
            name: GaugeMetricFamily(f"layershuffle_host_{name}", text, labels=["host"])
            for name, text in texts.items()
        }
        for host in self._router.swarm.values():
            condition.add_metric([host.name, host.condition], 1)
            values = (host.waiting, host.compute, host.link)
            for gauge, value in zip(gauges.values(), values, strict=True):
                if value is not None:
                    gauge.add_metric([host.name], value)
        yield from (condition, *gauges.values())

    def health(self) -> Health:
        """Whether requests can be answered now, and what will fail if nobody acts."""
        swarm, depth = self._router.swarm, self._router.depth
        missing = schemas.unreachable(swarm, depth=depth)
        watching = None if self._coordinator is None else self._coordinator.watching
        reasons = []
        if len(missing) == depth:
            reasons.append("no usable host holds a block")
        elif missing:
            reasons.append(f"no usable host holds block {', '.join(map(str, missing))}")
        if watching is False:
            reasons.append("the hosts are not watched now: those that fail do not come back")
        if self._upkeep is not None:
            reasons += self._upkeep.troubles().values()
        return Health(
            # One block is enough for an answer, though a poor one, and answers need no watch.
            ok=len(missing) < depth,
            why="; ".join(reasons),
            usable_hosts=swarm.usable_hosts,
            reachable_blocks=depth - len(missing),
            depth=depth,
            watching=watching,
        )

    def visits(self) -> dict[str, int]:
        """The number of visits to each host that was visited."""
        return {host: outcomes.total() for host, outcomes in self.hops.items()}

    def audits(self) -> Audits | None:
        """How many visits were audited; `None` if they are not counted."""
        if self._coordinator is None:
            return None
        health = self._coordinator.health
        return Audits(audited=health.audited, disagreed=health.disagreed)

    def count_answer(self, answer: Classification) -> None:
        """Count an answer."""
        self.requests["degraded" if answer.degraded else "answered"] += 1
        self._seconds.observe(answer.ms.total / 1000)
        self._blocks.observe(len(set(answer.blocks)))  # some may have run again

    def count_refusal(self, status: HTTPStatus) -> None:
        """Count a classification that ended with `status`."""
        self.requests[_OUTCOMES.get(status, "refused")] += 1

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)

    def _count_hop(self, hop: Visited, before: State, after: State | None) -> None:
        del before, after
        # Also here, not only in `collect`, for gateways whose metrics are never read.
        if hop.host not in self.hops:
            self._forget_hosts()
            self.hops[hop.host] = Counter()
        self.hops[hop.host][hop.outcome] += 1

    def _forget_hosts(self) -> None:
        """Drop the counters of hosts that have left, because spares come and go for years."""
        for host in self.hops.keys() - set(self._router.swarm):
            del self.hops[host]
