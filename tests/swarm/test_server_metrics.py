"""The metrics and the health of the gateway."""

from types import SimpleNamespace

from gateway_site import picture, run

from common import DEPTH
from layershuffle.swarm.messages import HostFailed
from layershuffle.swarm.server.metrics import Metrics
from layershuffle.swarm.state import HostView, Swarm, retry_after
from pictures import file_of

FILE = file_of(picture())


def test_metrics():
    async def go(place):
        await place.classify(FILE)
        place.blocks.faults["b"] = HostFailed("it raised")
        await place.classify(FILE)
        await place.classify(b"no image")
        await place.client.get("/v1/classify")
        return (await place.client.get("/metrics")).text

    lines = set(run(go).splitlines())
    assert {
        'layershuffle_requests_total{outcome="answered"} 1.0',
        'layershuffle_requests_total{outcome="degraded"} 1.0',
        'layershuffle_requests_total{outcome="refused"} 1.0',
        'layershuffle_hops_total{host="b",outcome="failed"} 1.0',
        'layershuffle_blocks_used_bucket{le="3.0"} 1.0',
        'layershuffle_blocks_used_bucket{le="4.0"} 2.0',
        "layershuffle_request_seconds_count 2.0",
        'layershuffle_host_condition{condition="suspect",host="b"} 1.0',
        'layershuffle_host_waiting{host="a"} 0.0',
        "layershuffle_open_requests 0.0",
        "layershuffle_reachable_blocks 3.0",
    } <= lines


def test_health_says_whether_hosts_are_watched():
    coordinator = SimpleNamespace(watching=True, health=SimpleNamespace(audited=0, disagreed=0))

    async def go(place):
        before = await place.client.get("/healthz")
        coordinator.watching = False
        after = await place.client.get("/healthz")
        return before, after, (await place.client.get("/metrics")).text

    before, after, metrics = run(go, coordinator=coordinator)
    assert (before.status_code, before.json()["watching"], before.json()["why"]) == (200, True, "")
    assert (after.status_code, after.json()["watching"]) == (200, False)  # requests are answered
    assert after.json()["why"] == "the hosts are not watched now: those that fail do not come back"
    assert "layershuffle_watching 0.0" in metrics.splitlines()


def test_audits_are_counted():
    async def go(place):
        return [await place.client.get(path) for path in ("/metrics", "/v1/swarm")]

    health = SimpleNamespace(audited=12, disagreed=3)
    metrics, swarm = run(go, coordinator=SimpleNamespace(watching=True, health=health))
    assert {
        "layershuffle_audits_total 12.0", "layershuffle_audits_disagreed_total 3.0",
    } <= set(metrics.text.splitlines())  # fmt: skip
    assert swarm.json()["audits"] == {"audited": 12, "disagreed": 3}
    metrics, swarm = run(go)
    assert "audits" not in metrics.text
    assert swarm.json()["audits"] is None


def test_hosts_that_left_are_not_counted_any_more():
    """Neither those shown, nor those in memory when nobody asks."""

    async def go(place):
        for number in range(50):
            name = f"spare-{number}"
            place.router.swarm = Swarm([HostView(name, frozenset(range(DEPTH)))])
            await place.classify(FILE)
        observers = [getattr(observer, "__self__", None) for observer in place.router.observers]
        (metrics,) = [observer for observer in observers if isinstance(observer, Metrics)]
        remembered = len(metrics.hops)
        last = (await place.client.get("/metrics")).text
        place.router.swarm = Swarm()
        return remembered, last, (await place.client.get("/metrics")).text

    remembered, last, empty = run(go)
    hosts = {line.split('"')[1] for line in last.splitlines() if "hops_total{" in line}
    assert remembered <= 2
    assert hosts == {"spare-49"}
    assert "hops_total{" not in empty


def test_retry_after_is_the_next_probe():
    hosts = [
        HostView("a", frozenset({0}), condition="suspect", retry_at=7.5),
        HostView("b", frozenset({1}), condition="suspect", retry_at=6.0),
        HostView("c", frozenset({2}), condition="gone", retry_at=1.0),
    ]
    assert retry_after(Swarm(hosts), now=3.5) == 3, "2.5 seconds, in whole ones"
    assert retry_after(Swarm(hosts), now=5) == 1
    assert retry_after(Swarm(hosts), now=9) == 1, "at least one"
    assert retry_after(Swarm(hosts[2:]), now=5) == 1
