"""The page at a gateway: its events are few and shared; only its own visitors break hosts."""

import asyncio
import json
import os
import socket
from contextlib import AsyncExitStack

import httpx
import pytest
from gateway_site import classify, listening, picture, run
from test_page import HEADERS

from layershuffle.swarm.router import Router
from layershuffle.swarm.server.errors import HTTPError
from layershuffle.swarm.server.gateway_page import PageOptions
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.live import CLIENT_VIEWERS, EVERY, VIEWERS, Live
from layershuffle.swarm.server.metrics import Metrics
from pictures import file_of
from waiting import until

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
    """The content of an event."""
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


def test_a_viewer_who_never_reads_is_dropped_and_holds_nobody_up():
    """Events of 100 kB fill what sockets hold; the server keeps two of them at most."""
    many = {"a": {0, 1, 2, 3}, **{f"host-{number}": {0} for number in range(500)}}

    async def test(site):
        limits = GatewayLimits(head_ms=1000)
        async with listening(site.app, limits) as (server, port):
            await until(lambda: server.started)
            for listener in server.servers:
                for end in listener.sockets:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            viewer = socket.socket()
            # Before the connection, which else takes megabytes: half a minute of events.
            viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            viewer.connect(("127.0.0.1", port))
            viewer.sendall(b"GET /page/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await until(lambda: site.router.watcher is not None)
            unsent, statuses = [], []

            def dropped():
                open_now = list(server.server_state.connections)
                unsent.extend(
                    connection.transport.get_write_buffer_size() for connection in open_now
                )
                return site.router.watcher is None and not open_now

            for seed in range(3):
                statuses.append((await classify(site.client, file_of(picture(seed)))).status_code)
            await until(dropped)
            viewer.close()
        return statuses, max(unsent), len(Live(site.router, Metrics(site.router)).events(0.0)[0])

    statuses, unsent, event = run(test, many, page=PageOptions())
    assert statuses == [200] * 3
    assert event > 50_000
    assert 0 < unsent <= 2 * event + (1 << 16)


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


def test_the_page_is_off_by_default():
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


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://swarm.example"}, 403),  # by a proxy, which looks like this machine
        ({"Origin": "https://127.0.0.1:8000"}, 403),
        ({"Origin": "null"}, 403),  # a form in a sandbox
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_the_token_works_from_the_page_itself_alone(headers, status):
    options, broken = page()

    async def test(site):
        async with local(site) as client:
            token = (await client.get("/page/facts")).json()["token"]
            form = {"host": (None, "a"), "kind": (None, "crash")}
            headers["X-Page-Token"] = token
            return (await client.post("/page/break", files=form, headers=headers)).status_code

    assert run(test, page=options) == status
    assert broken == [("a", "crash")] * (status == 200)


def test_a_form_breaks_nothing_and_wrong_methods_are_refused():
    """Any site may send GET, and forms without custom headers."""
    options, broken = page()

    async def test(site):
        async with local(site) as client:
            token = (await client.get("/page/facts")).json()["token"]
            form = {"host": "a", "kind": "crash", "X-Page-Token": token, "token": token}
            statuses = [(await client.post("/page/break", data=form)).status_code]
            for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE"):
                statuses.append((await client.request(method, "/page/break")).status_code)
            preflight = {"Origin": "http://evil.test", "Access-Control-Request-Method": "POST"}
            asked = await client.options("/page/break", headers=preflight)
            head = await client.head("/")
        return statuses, asked, head

    statuses, asked, head = run(test, page=options)
    assert statuses == [403, 404, 404, 405, 405, 405]
    assert not [name for name in asked.headers if name.startswith("access-control")]
    assert (head.status_code, head.content) == (200, b"")
    assert "frame-ancestors 'none'" in head.headers["Content-Security-Policy"]
    assert broken == []


def test_what_has_a_token_is_shared_with_no_other_site():
    async def test(site):
        async with local(site) as client:
            return (await client.get("/page/facts", headers={"Origin": "http://evil.test"})).headers

    headers = run(test, page=page()[0])
    assert "access-control-allow-origin" not in headers
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-content-type-options"] == "nosniff"


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


def test_the_report_of_the_directory_itself_is_linked(tmp_path):
    (tmp_path / "report.html").write_text("<p>all</p>", encoding="utf-8")

    async def test(site):
        links = (await site.client.get("/page/facts")).json()["links"]
        return links[1], (await site.client.get(f"/{links[1][1]}")).text

    link, text = run(test, page=PageOptions(reports=tmp_path))
    assert (link, text) == ([f"Report: {tmp_path.name}", "reports/"], "<p>all</p>")


def test_links_out_of_the_directory_and_names_that_are_no_text_are_left_out(tmp_path):
    """A report comes from whoever ran a study: it must not show other files of this machine."""
    reports, elsewhere = tmp_path / "reports", tmp_path / "elsewhere"
    for folder in (reports / "good", reports / "linked", reports / "folder", elsewhere):
        folder.mkdir(parents=True)
    for file in (elsewhere, reports / "good"):
        (file / "report.html").write_text("text", encoding="utf-8")
    (reports / "linked" / "report.html").symlink_to(elsewhere / "report.html")
    (reports / "away").symlink_to(elsewhere)
    (reports / "same").symlink_to(reports / "good")
    (reports / "folder" / "report.html").mkdir()
    for name in (b"\xff", b"line\nbreak"):
        odd = os.fsencode(reports) + b"/" + name
        os.mkdir(odd)
        with open(odd + b"/report.html", "w") as file:
            file.write("text")

    async def test(site):
        facts = await site.client.get("/page/facts")
        paths = [
            "linked",
            "away",
            "folder",
            "",
            "..",
            "%2e%2e",
            "good/..",
            "%2fetc%2fpasswd",
            "%ff",
        ]
        return facts.json()["links"], [
            (await site.client.get(f"/reports/{path}")).status_code for path in paths
        ]

    links, statuses = run(test, page=PageOptions(reports=reports))
    assert [text for text, _ in links] == ["API", "Report: good", "Report: same"]
    # httpx resolves "..": /reports/.. is the page itself.
    assert [status for status in statuses if status != 404] == [200]


def test_a_report_has_no_script_no_origin_and_no_frame(tmp_path):
    (tmp_path / "report.html").write_text("<script>alert(1)</script>", encoding="utf-8")

    async def test(site):
        return (await site.client.get("/reports/")).headers

    headers = run(test, page=PageOptions(reports=tmp_path))
    policy = headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "frame-ancestors 'none'", "form-action 'none'"} < set(policy)
    assert "sandbox" in policy  # without allow-scripts and allow-same-origin
    assert not [rule for rule in policy if rule.startswith(("script-src", "connect-src"))]
    assert headers["Content-Type"] == "text/html; charset=utf-8"
