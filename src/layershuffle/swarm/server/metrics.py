"""What the gateway counts, for Prometheus and for /v1/swarm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from layershuffle.swarm.messages import Outcome, State, Visited
from layershuffle.swarm.router import Router
from layershuffle.swarm.server.schemas import Audits, Classification, health

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
RequestOutcome = Literal[
    "answered", "degraded", "unanswered", "busy", "unauthorised", "refused", "failed"
]
_BY_STATUS: dict[HTTPStatus, RequestOutcome] = {
    HTTPStatus.SERVICE_UNAVAILABLE: "unanswered",
    HTTPStatus.TOO_MANY_REQUESTS: "busy",
    HTTPStatus.UNAUTHORIZED: "unauthorised",
    HTTPStatus.INTERNAL_SERVER_ERROR: "failed",
}


class Metrics:
    """Counters of one gateway, in a registry of their own."""

    def __init__(
        self,
        router: Router,
        *,
        watching: Callable[[], bool] | None = None,
        audits: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.counters: Counter[str] = Counter()
        self.watching, self._audits = watching, audits
        self._router = router
        self._labelled: dict[str, set[Outcome]] = {}
        self._requests = prometheus.Counter(
            "layershuffle_requests", "Classifications asked for.", ["outcome"],
            registry=self.registry,
        )  # fmt: skip
        self._seconds = prometheus.Histogram(
            "layershuffle_request_seconds", "Time of answered requests.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._blocks = prometheus.Histogram(
            "layershuffle_blocks_used", "Blocks used by answers.",
            buckets=tuple(range(1, router.depth + 1)), registry=self.registry,
        )  # fmt: skip
        self._hops = prometheus.Counter(
            "layershuffle_hops", "Visits to hosts.", ["host", "outcome"], registry=self.registry
        )
        self._gauges(router)
        router.observers.append(self._hop)

    def _gauges(self, router: Router) -> None:
        usable = prometheus.Gauge(
            "layershuffle_usable_hosts", "Hosts that visits may go to.", registry=self.registry
        )
        usable.set_function(lambda: health(router.swarm, depth=router.depth).usable_hosts)
        reachable = prometheus.Gauge(
            "layershuffle_reachable_blocks", "Blocks that a usable host holds.",
            registry=self.registry,
        )  # fmt: skip
        reachable.set_function(lambda: health(router.swarm, depth=router.depth).reachable_blocks)
        if self.watching is not None:
            watched = prometheus.Gauge(
                "layershuffle_watching", "1 while hosts are watched and brought back.",
                registry=self.registry,
            )  # fmt: skip
            watched.set_function(self.watching)
        if self._audits is not None:
            self.registry.register(_AuditCounters(self._audits))

    def _hop(self, hop: Visited, before: State, after: State | None) -> None:
        del before, after
        if hop.host not in self._labelled:
            self._forget()
        self._labelled.setdefault(hop.host, set()).add(hop.outcome)
        self._hops.labels(host=hop.host, outcome=hop.outcome).inc()

    def _forget(self) -> None:
        """Count no more for hosts that are not known any more: spares come and go for years."""
        for host in self._labelled.keys() - {one.name for one in self._router.swarm.values()}:
            for outcome in self._labelled.pop(host):
                self._hops.remove(host, outcome)

    def audits(self) -> Audits | None:
        """How many visits were audited, if anybody counts."""
        if self._audits is None:
            return None
        audited, disagreed = self._audits()
        return Audits(audited=audited, disagreed=disagreed)

    def answered(self, answer: Classification) -> None:
        """Count an answer."""
        self._count("degraded" if answer.degraded else "answered")
        self._seconds.observe(answer.ms.total / 1000)
        self._blocks.observe(len(answer.blocks))

    def turned_away(self, status: HTTPStatus) -> None:
        """Count a classification that ended with `status`."""
        self._count(_BY_STATUS.get(status, "refused"))

    def _count(self, outcome: RequestOutcome) -> None:
        self.counters[outcome] += 1
        self._requests.labels(outcome=outcome).inc()

    def text(self) -> bytes:
        """All of it in Prometheus' format."""
        self._forget()
        return prometheus.generate_latest(self.registry)


@dataclass(frozen=True)
class _AuditCounters(Collector):
    """The counters that the coordinator's health keeps itself."""

    audits: Callable[[], tuple[int, int]]

    def collect(self) -> Iterator[Metric]:
        """Both, as they are now."""
        audited, disagreed = self.audits()
        yield CounterMetricFamily(
            "layershuffle_audits", "Visits repeated on replicas and compared.", value=audited
        )
        yield CounterMetricFamily(
            "layershuffle_audits_disagreed", "Those whose answers differed.", value=disagreed
        )
