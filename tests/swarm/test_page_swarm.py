"""The page of a running swarm in chromium: hosts are killed by a click while pairs are answered."""

import os
import re
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from gateway_site import site
from page_site import NARROW, WIDE, chromium, served, visit

from layershuffle.bundled import asset
from layershuffle.swarm.served import ServedModel
from layershuffle.swarm.server.admin import add_operator
from layershuffle.swarm.server.app import create_app
from layershuffle.swarm.server.gateway import Gateway
from layershuffle.swarm.server.start import local_hosts
from layershuffle.swarm.service import SwarmSettings, running_service

KEY = "an-operators-key-of-this-test"


@pytest.fixture(scope="module")
def address():
    """A gateway to four hosts with three blocks each, which an operator may break."""

    @asynccontextmanager
    async def making():
        model = ServedModel(asset("digits-onnx"))
        # No room for the blocks of a host that dies.
        memory = 3 * model.weights[0].size
        async with (
            running_service(SwarmSettings(copies=1), model, token="a token") as service,
            local_hosts(service, 4, memory=memory),
        ):
            assert await service.coordinator.ready(4, within=60) == frozenset()
            calibration = service.calibration
            gateway = Gateway(
                service.remote_model, calibration=calibration, model="bundled:digits-onnx"
            )
            app = create_app(gateway, page=True)
            add_operator(app, service, key=KEY)
            yield app

    with served(making) as url:
        yield url


def test_without_the_key_nothing_can_be_broken(address):
    with chromium() as browser, visit(browser, address) as tab:
        tab.page.locator("#hosts .host").nth(3).wait_for()
        assert tab.page.locator("#hosts button").count() == 0
        assert not tab.page.is_visible("#break-note")


def test_the_operator_alone_gets_the_code_that_makes_a_phone_a_host(address):
    refused = httpx.post(f"{address}/operator/join", json={"address": address})
    assert refused.status_code == 401
    with chromium() as browser, visit(browser, f"{address}/#{KEY}") as tab:
        tab.page.click("#lend")
        tab.page.locator("#code svg path").first.wait_for()
        (link,) = tab.page.eval_on_selector_all("#code a", "all => all.map((a) => a.href)")
        assert re.fullmatch(f"{address}/join#a%20token", link)


def test_a_host_dies_by_a_click_and_the_answers_go_on(address):
    with chromium() as browser, visit(browser, f"{address}/#{KEY}") as tab:
        tab.settled()
        assert KEY not in tab.page.evaluate("() => window.location.href")
        hosts = tab.page.locator("#hosts .host")
        hosts.nth(3).wait_for()
        assert hosts.count() == 4
        tab.page.check("#send")
        tab.page.locator("#walk-text", has_text="12 of 12 blocks").wait_for()
        first = hosts.first
        with tab.page.expect_response("**/operator/fault") as broken:
            first.get_by_role("button", name="Kill").click()
        assert broken.value.status == 200
        first.get_by_text("is dead").wait_for()
        tab.page.locator("#walk-text", has_text="9 of 12 blocks").wait_for()
        assert "host host-1 is gone" in tab.text("#skipped")
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
    """A swarm with a host in every condition, and an answer with a visit of every outcome; names
    are hostile."""
    conditions = ("healthy", "suspect", "shut-out", "draining", "gone")
    outcomes = ("answered", "late", "lost", "failed", "wrong")
    hosts, route = [], []
    for place, (condition, outcome) in enumerate(zip(conditions, outcomes, strict=True)):
        name, blocks = f"{condition} {MARKUP}", [place, place + 5]
        host = {"name": name, "condition": condition, "why": MARKUP, "blocks": blocks}
        hosts.append({**host, "compute_ms": 1.5, "visits": 3})
        hop = {"host": name, "block": place, "begun_ms": 9 * place, "ms": 30, "outcome": outcome}
        route.append({**hop, "why": MARKUP if place else ""})
    swarm = {"hosts": hosts, "counters": {"answered": 3}}
    top = [{"label": MARKUP, "index": 0, "probability": 1.0}]
    answer = {"top": top, "depth": 12, "blocks": [0, 5], "route": route, "ms": {"total": 70}}
    answer |= {"skipped": [{"block": 3, "why": MARKUP}], "expected": None, "expected_why": ""}
    return swarm, answer


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1600", "360"])
def test_hosts_in_every_condition_can_be_read_at_every_size(address, size, scheme):
    options = {"viewport": size, "color_scheme": scheme}
    with chromium() as browser, visit(browser, address, **options) as tab:
        swarm, answer = one_of_each()
        tab.page.route("**/v1/swarm", lambda route: route.fulfill(json=swarm))
        tab.page.route("**/v1/classify?*", lambda route: route.fulfill(json=answer))
        tab.page.reload()
        tab.settled()
        tab.page.locator("#hosts .host").nth(4).wait_for()
        tab.page.check("#send")
        tab.page.locator("#walk-text", has_text="2 of 12 blocks in 70 ms").wait_for()
        tab.page.uncheck("#send")
        tab.page.locator(".visit").nth(4).wait_for()
        # The bars appear one after the other, and a faint one is not to be read yet.
        tab.page.wait_for_function("() => !document.getAnimations().length")
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

    @asynccontextmanager
    async def making():
        async with site(page=True, model="pico") as place:
            yield place.app

    with served(making) as url, chromium() as browser, visit(browser, url) as tab:
        tab.page.locator("#hosts .host").nth(2).wait_for()
        assert not tab.page.is_visible("#ordinary")
        assert not tab.page.is_visible("#blocks")
        with tab.page.expect_response("**/v1/classify?*") as answered:
            tab.page.click("#canvas")
        answer = answered.value.json()
        assert sorted(answer["blocks"]) == [0, 1, 2, 3]
        label = answer["top"][0]["label"]
        tab.page.locator("#ours .guess", has_text=label).wait_for()
        assert "never calibrated" in tab.text("#ours .foot")
        tab.page.locator("#walk-text", has_text="4 of 4 blocks").wait_for()
        assert tab.page.locator(".visit").count() == len(answer["route"])
