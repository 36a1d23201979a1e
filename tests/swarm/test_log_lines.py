"""What a gateway writes into its log of a month: what hosts do, a line each, and no more."""

import asyncio
import json
import logging
from datetime import UTC, datetime

import pytest
from dial_site import dialled, gateway, hosting, states
from gateway_site import picture, run

from layershuffle.cli.serving import JsonLines
from layershuffle.swarm import coordinator, members
from layershuffle.swarm.messages import HostFailed, Visited
from layershuffle.swarm.state import Swarm
from pictures import file_of


@pytest.fixture
def lines(caplog):
    """The lines on hosts so far."""
    caplog.set_level(logging.INFO, "layershuffle.swarm")
    places = ("layershuffle.swarm.coordinator", "layershuffle.swarm.members")
    return lambda: [record.getMessage() for record in caplog.records if record.name in places]


def hop(name, outcome, why):
    return Visited(name, 0, outcome, 1.0, why=why, lag_ms=0.0)


def test_what_becomes_of_a_host_is_a_line_each(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(coordinator, "_QUIET", 0.0)

    async def go():
        async with gateway() as site, hosting(site.url, cache=tmp_path, name="pi"):
            await site.until(lambda: min(site.holders()) == 1)
            # Longer than the time between two looks, or nobody might see the suspicion.
            site.router.limits = site.router.limits.model_copy(update={"suspect_ms": 1000.0})
            site.router.report(hop("pi", "late", "no answer in time"))
            await site.until(lambda: "Host pi is back" in lines())  # its probe was answered
            site.members.cut("pi")
            await site.until(lambda: lines().count("Host pi is back") == 2)
            site.router.report(hop("pi", "wrong", "it lied"))
            await site.until(lambda: "Host pi is shut out: it lied" in lines())

    asyncio.run(go())
    assert lines()[:6] == [
        "Host pi has joined",
        "Host pi is suspected: no answer in time",
        "Host pi is back",
        "Host pi has gone: the gateway has cut its connection",
        "Host pi is back",
        "Host pi is shut out: it lied",
    ]


def test_a_host_that_comes_and_goes_is_one_line_in_ten_seconds(tmp_path, lines):
    """A hundred changes within a second add nothing to the line of its arrival."""

    async def go():
        async with gateway() as site, hosting(site.url, cache=tmp_path, name="pi"):
            await site.until(lambda: min(site.holders()) == 1)
            for _ in range(50):
                site.router.report(hop("pi", "late", "no answer in time"))
                await asyncio.sleep(0.01)
                site.router.update("pi", lambda host: host._replace(condition="healthy"))
                await asyncio.sleep(0.01)
            await site.walk(states())

    asyncio.run(go())
    assert lines() == ["Host pi has joined"]


def test_the_last_word_on_a_host_is_said(tmp_path, lines, monkeypatch):
    """Also if it changed while nothing might be said."""
    monkeypatch.setattr(coordinator, "_QUIET", 0.5)

    async def go():
        async with gateway() as site, hosting(site.url, cache=tmp_path, name="pi"):
            await site.until(lambda: "Host pi has joined" in lines())
            site.router.report(hop("pi", "wrong", "it lied"))
            await asyncio.sleep(0.2)
            assert len(lines()) == 1
            await site.until(lambda: len(lines()) == 2)
        assert lines()[1] == "Host pi is shut out: it lied"

    asyncio.run(go())


def test_hosts_that_are_refused_are_said_now_and_then(lines):
    async def go():
        async with gateway() as site:
            for _ in range(20):
                async with dialled(site) as stranger:
                    await stranger.hello(token="another")
                    await stranger.socket.wait_closed()

    asyncio.run(go())
    assert members._QUIET == 10
    assert lines() == ["A host at 127.0.0.1 is refused: another token"]


def test_a_block_that_cannot_be_loaded_is_said_once(lines):
    async def go():
        async with gateway() as site, dialled(site) as stranger:
            await stranger.hello()
            (first, *_) = await stranger.assigned()
            for _ in range(20):
                text = {"type": "failed", "slot": first["slot"], "why": "the disk is full"}
                await stranger.socket.send(json.dumps(text))
            await site.until(lambda: len(lines()) > 1)
            await asyncio.sleep(0.2)

    asyncio.run(go())
    loads = [line for line in lines() if "load" in line]
    assert len(loads) == 1
    assert loads[0].startswith("Host odd cannot load block ")
    assert loads[0].endswith("the disk is full")


def test_a_request_without_an_answer_has_an_id_and_floods_do_not_fill_the_log(caplog):
    async def go(place):
        place.router.swarm = Swarm()
        options = {"deadline_ms": 100}
        return [await place.classify(file_of(picture()), **options) for _ in range(14)]

    answers = run(go)
    assert {answer.status_code for answer in answers} == {503}
    ids = [answer.json()["error"]["id"] for answer in answers]
    assert len(set(ids)) == 14
    said = [r for r in caplog.records if "was not answered" in r.getMessage()]
    assert 10 <= len(said) <= 12, "ten at once, and one in ten seconds"
    assert [record.request for record in said][:10] == ids[:10]


def test_lines_of_json():
    record = logging.LogRecord(
        "layershuffle", logging.WARNING, __file__, 1, "Host %s has gone", ("pi",), None
    )
    record.host, record.created = "pi", 1_790_000_000.25
    fields = json.loads(JsonLines().format(record))
    time = datetime.fromisoformat(fields.pop("time"))
    assert time == datetime.fromtimestamp(1_790_000_000.25, UTC)
    assert fields == {"level": "warning", "message": "Host pi has gone", "host": "pi"}
    try:
        raise HostFailed("it raised")
    except HostFailed as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert "it raised" in json.loads(JsonLines().format(record))["traceback"]
