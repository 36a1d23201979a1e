"""The page of a running swarm in chromium: hosts are killed by a click while pairs are answered."""

import json
import os
from pathlib import Path

import pytest
from gateway_site import site
from page_site import NARROW, WIDE, chromium, served, visit

from layershuffle.swarm.chaos import Fault
from layershuffle.swarm.plan import even_plan
from layershuffle.swarm.server.app import create_app
from layershuffle.swarm.server.gateway_page import PageOptions
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.service import swarm_on


@pytest.fixture(scope="module")
def address():
    """A gateway to four hosts of this process, which its page may break."""
    inside = []

    async def make():
        # Left open on purpose: its hosts are tasks of the loop, and end with it.
        swarm = swarm_on(None, even_plan(12, 4))
        service = await swarm.__aenter__()
        inside.append(swarm)

        async def break_host(host, kind):
            await service.faults.inject(Fault(0, host, kind))

        return create_app(
            service.remote_model,
            calibration=service.calibration,
            limits=GatewayLimits(),
            model=service.plan.model,
            page=PageOptions(break_host=break_host, breakable=frozenset(service.plan.hosts)),
        )

    async def leave():
        await inside[0].__aexit__(None, None, None)

    with served(make, leave=leave) as url:
        yield url


def test_a_host_dies_by_a_click_and_the_answers_go_on(address):
    with chromium() as browser, visit(browser, address) as tab:
        tab.settled()
        hosts = tab.page.locator("#hosts .host")
        hosts.nth(3).wait_for()
        assert hosts.count() == 4
        tab.page.check("#send")
        tab.page.locator("#walk-text", has_text="12 of 12 blocks").wait_for()
        first = hosts.first
        with tab.page.expect_response("**/page/break") as broken:
            first.get_by_role("button", name="Kill").click()
        assert broken.value.status == 200
        first.get_by_text("is dead").wait_for()
        tab.page.locator("#walk-text", has_text="9 of 12 blocks").wait_for()
        assert tab.text("#skipped").startswith("Skipped 0, 4, 8: host host-1 is gone")
        tab.page.locator("#line", has_text="100.0 % of").wait_for()
        tab.page.locator("#line", has_text="% right").wait_for()
        assert tab.shifts() == []
        if pictures := os.environ.get("PAGE_PICTURES"):
            tab.page.screenshot(path=Path(pictures) / "page-swarm.png", full_page=True)
        first.get_by_role("button", name="Bring back").focus()
        tab.page.keyboard.press("Enter")
        tab.page.locator("#walk-text", has_text="12 of 12 blocks").wait_for()
        tab.page.uncheck("#send")


MARKUP = "<img src=x onerror=alert(1)>"


def one_of_each():
    """An event with a host in every condition and a visit of every outcome; names are hostile."""
    conditions = ("healthy", "suspect", "shut-out", "draining", "gone")
    outcomes = ("", "answered", "late", "lost", "dropped")
    hosts, visits = [], []
    for place, (condition, outcome) in enumerate(zip(conditions, outcomes, strict=True)):
        name, blocks = f"{condition} {MARKUP}", [place, place + 5]
        host = {"name": name, "condition": condition, "why": MARKUP, "usable": place < 2}
        hosts.append({**host, "blocks": blocks, "compute_ms": 1.5, "visits": {"answered": 3}})
        ended = None if outcome in ("", "late") else 30
        visit = {"host": name, "blocks": blocks, "begun": 0, "ended": ended, "outcome": outcome}
        visits.append({**visit, "late": outcome == "late", "why": MARKUP if place > 1 else ""})
    walk = {"number": 1, "depth": 12, "ms": 40, "over": False, "answered": False, "blocks": 2}
    walk |= {"skipped": [{"block": 3, "why": MARKUP}], "visits": visits}
    counts = {"at": 0, "answered": 3, "failed": 0, "blocks": 30}
    return f"data: {json.dumps({**counts, 'hosts': hosts, 'walk': walk})}\n\n"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1600", "360"])
def test_hosts_in_every_condition_can_be_read_at_every_size(address, size, scheme):
    options = {"viewport": size, "color_scheme": scheme}
    with chromium() as browser, visit(browser, address, **options) as tab:
        tab.page.route(
            "**/page/live",
            lambda route: route.fulfill(content_type="text/event-stream", body=one_of_each()),
        )
        tab.page.reload()
        tab.settled()
        tab.page.locator("#hosts .host").nth(4).wait_for()
        if pictures := os.environ.get("PAGE_PICTURES"):
            name = f"page-conditions-{size['width']}-{scheme}.png"
            tab.page.screenshot(path=Path(pictures) / name, full_page=True)
        assert tab.page.locator("#swarm img").count() == 0
        assert MARKUP in tab.text("#hosts")
        assert MARKUP in tab.text("#skipped")
        assert tab.faint() == {}
        width = tab.page.evaluate("() => document.documentElement.scrollWidth")
        assert width == size["width"]


def test_a_model_of_other_images_answers_through_the_swarm():
    """Its blocks lie on the hosts alone: the gateway has none to try orders on."""
    inside = []

    async def make():
        gateway = site(page=PageOptions(), model="pico")
        inside.append(gateway)
        return (await gateway.__aenter__()).app

    async def leave():
        await inside[0].__aexit__(None, None, None)

    with served(make, leave=leave) as url, chromium() as browser, visit(browser, url) as tab:
        tab.page.locator("#hosts .host").nth(2).wait_for()
        assert not tab.page.is_visible("#ordinary")
        tab.page.fill("#order", "2,0,1")
        tab.page.keyboard.press("Enter")
        with tab.page.expect_response("**/v1/classify") as answered:
            tab.page.click("#canvas")
        answer = answered.value.json()
        assert answer["blocks"] == [2, 0, 1]
        label = answer["images"][0]["top"][0]["label"]
        tab.page.locator("#ours .guess", has_text=label).wait_for()
        assert "never calibrated" in tab.text("#ours .foot")
        tab.page.locator("#walk-text", has_text="3 of 4 blocks").wait_for()
        with tab.page.expect_response("**/v1/classify") as answered:
            tab.page.fill("#order", "2+0,1,1")
            tab.page.keyboard.press("Enter")
        answer = answered.value.json()
        assert (answer["blocks"], answer["versions"]) == ([2, 0, 1, 1], [0, 0, 2, 3])
