"""The page at a gateway: its events are few and shared; only its own visitors break hosts."""

import asyncio
import json
from contextlib import AsyncExitStack

import httpx
import pytest
from gateway_site import classify, file_of, listening, picture, run
from test_page import HEADERS

from layershuffle.swarm.router import Router
from layershuffle.swarm.server.errors import HTTPError
from layershuffle.swarm.server.gateway_page import PageOptions
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.live import CLIENT_VIEWERS, EVERY, VIEWERS, Live
from layershuffle.swarm.server.metrics import Metrics

KEY = "a-key-of-some-length"


def page(**options):
    """Options of a page whose visitors break hosts by adding them to the list `broken`."""
    broken = []

    async def break_host(host, kind):
        broken.append((host, kind))

    return PageOptions(break_host=break_host, breakable=frozenset({"a", "b"}), **options), broken


def local(site):
    """A client on this machine, which calls the gateway by its address."""
    client = site.client_at("127.0.0.1")
    client.base_url = "http://127.0.0.1:8000"
    return client


# --- events ---------------------------------------------------------------------------------------


def state_of(event):
    """What an event says."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


def test_an_event_says_what_the_gateway_counted():
    async def test(site):
        metrics = Metrics(site.router)
        live = Live(site.router, metrics)
        for seed in range(3):
            answer = await classify(site.client, file_of(picture(seed)))
            assert answer.status_code == 200
        async with local(site) as client:
            assert (await client.get("/page/facts")).json()["swarm"]
        hosts, walk = live.events(site.router.clock())
        return state_of(hosts), walk

    options, _ = page()
    state, walk = run(test, page=options)
    # The counters are those of another `Metrics`, which saw the hops but no answers; and nobody
    # watched the requests.
    assert (state["answered"], state["blocks"], walk) == (0, 0, b"")
    visits = {host["name"]: sum(host["visits"].values()) for host in state["hosts"]}
    assert set(visits) == {"a", "b", "c"}
    assert all(3 <= count <= 6 for count in visits.values())  # "a" may be visited once per block
    assert all(host["usable"] for host in state["hosts"])


def test_an_event_is_made_once_for_all_viewers():
    """In virtual time: twenty viewers in half a second get one event, the same bytes."""
    router = Router(None, depth=4, limits=None, clock=lambda: 0.0)
    live = Live(router, Metrics(router))
    events = [live.events(10 * EVERY + viewer * EVERY / 20) for viewer in range(20)]
    assert len({id(hosts) for hosts, _ in events}) == 1
    assert live.events(11 * EVERY)[0] is not events[0][0]


def test_viewers_are_bounded_and_leave_nothing_behind():
    class Asked:
        def __init__(self, address):
            self.client = type("Address", (), {"host": address})

    async def go():
        router = Router(None, depth=4, limits=None, clock=lambda: 0.0)
        live = Live(router, Metrics(router))
        streams = []

        async def watch(address):
            stream = (await live.stream(Asked(address))).body_iterator
            streams.append(stream)
            return await anext(stream)

        for number in range(VIEWERS):
            await watch(f"10.0.0.{number // CLIENT_VIEWERS}")
        for address in ("10.0.0.0", "10.0.0.9"):
            with pytest.raises(HTTPError, match="Too many pages"):
                await watch(address)
        await streams[0].aclose()
        await watch("10.0.0.0")
        # The server ends: no viewer holds it up until its next event.
        live.ending.set()
        ended = [[event async for event in stream] for stream in streams]
        assert ended == [[]] * len(streams)
        return live

    live = asyncio.run(go())
    assert live._viewers.total() == 0


def test_a_viewer_does_not_hold_up_the_end_of_the_server():
    """The stream comes to its end; a server that had to cancel it would break it off."""

    async def test(site):
        async with AsyncExitStack() as inside:
            async with listening(site.app, GatewayLimits()) as (_, port):
                client = await inside.enter_async_context(httpx.AsyncClient())
                stream = client.stream("GET", f"http://127.0.0.1:{port}/page/live")
                lines = (await inside.enter_async_context(stream)).aiter_lines()
                first = await anext(lines)
            return first, [line async for line in lines]

    first, rest = run(test, page=PageOptions())
    assert len(state_of(f"{first}\n\n".encode())["hosts"]) == 3
    assert all(line == "" or line.startswith("data: ") for line in rest)


# --- what the gateway lets through ----------------------------------------------------------------


def test_there_is_no_page_unless_it_is_wanted():
    async def test(site):
        return [(await site.client.get(path)).status_code for path in ("/", "/page/facts")]

    assert run(test) == [404, 404]
    assert run(test, page=PageOptions()) == [200, 200]


def test_the_page_needs_the_keys_of_the_api():
    async def test(site):
        paths = ("/page/facts", "/page/live")
        refused = [(await site.client.get(path)).status_code for path in paths]
        facts = await site.client.get("/page/facts", headers={"X-API-Key": KEY})
        return refused, facts.status_code, (await site.client.get("/")).status_code

    assert run(test, page=PageOptions(), keys=[KEY]) == ([401, 401], 200, 200)


def test_the_page_counts_against_the_rate_of_its_client():
    async def test(site):
        return [(await site.client.get("/page/facts")).status_code for _ in range(4)]

    limits = GatewayLimits(rate=0.001, burst=3)
    assert run(test, page=PageOptions(), limits=limits) == [200, 200, 200, 429]


@pytest.mark.parametrize(
    ("host", "kind", "status"),
    [("a", "crash", 200), ("b", "rejoin", 200), ("c", "crash", 422), ("a", "kill", 422)],
)
def test_only_hosts_that_this_swarm_started_are_broken(host, kind, status):
    options, broken = page()

    async def test(site):
        async with local(site) as client:
            token = (await client.get("/page/facts")).json()["token"]
            form = {"host": (None, host), "kind": (None, kind)}
            headers = {"X-Page-Token": token}
            return (await client.post("/page/break", files=form, headers=headers)).status_code

    assert run(test, page=options) == status
    assert broken == ([(host, kind)] if status == 200 else [])


@pytest.mark.parametrize("way", ["no token", "wrong token", "other name", "other machine"])
def test_nobody_else_breaks_hosts(way):
    options, broken = page()

    async def test(site):
        async with local(site) as client:
            token = (await client.get("/page/facts")).json()["token"]
        client = site.client_at("10.0.0.7" if way == "other machine" else "127.0.0.1")
        # A name that somebody made to stand for this machine reads no token either.
        client.base_url = f"http://{'evil.test' if way == 'other name' else '127.0.0.1'}:8000"
        headers = {"X-Page-Token": {"no token": "", "wrong token": "x" * 32}.get(way, token)}
        async with client:
            if way.startswith("other"):
                assert (await client.get("/page/facts")).json()["token"] == ""
            form = {"host": (None, "a"), "kind": (None, "crash")}
            return (await client.post("/page/break", files=form, headers=headers)).status_code

    assert run(test, page=options) == 403
    assert broken == []


def test_a_page_that_may_break_nothing_has_no_token():
    async def test(site):
        async with local(site) as client:
            form = {"host": (None, "a"), "kind": (None, "crash")}
            refused = await client.post("/page/break", files=form, headers={"X-Page-Token": ""})
            return (await client.get("/page/facts")).json()["token"], refused.status_code

    assert run(test, page=PageOptions()) == ("", 403)


# --- reports --------------------------------------------------------------------------------------


def test_reports_are_found_by_name_and_nothing_else_is(tmp_path):
    for name in ("first study", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.html").write_text(f"<p>{name}</p>", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")

    async def test(site):
        links = (await site.client.get("/page/facts")).json()["links"]
        report = await site.client.get(f"/{links[1][1]}")
        paths = ("/reports/third", "/reports/secret.txt", "/reports/..%2fsecret.txt")
        others = [(await site.client.get(path)).status_code for path in paths]
        return links, report, others

    links, report, others = run(test, page=PageOptions(reports=tmp_path))
    assert [text for text, _ in links] == ["API", "Report: first study", "Report: second"]
    assert report.text == "<p>first study</p>"
    assert "default-src 'none'" in report.headers["Content-Security-Policy"]
    assert HEADERS["X-Content-Type-Options"] == report.headers["X-Content-Type-Options"]
    assert others == [404] * 3
