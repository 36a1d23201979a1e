"""The pages of the demo and of a swarm in chromium: blocks are rearranged by buttons, by dragging
and by keyboard alone, at both widths; hosts are killed by a click while pairs are answered.

Screenshots go to the directory of the environment variable PAGE_PICTURES, if that is set.
"""

import asyncio
import os
import re
import shutil
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from dial_site import BUSY
from gateway_site import site
from page_site import NARROW, WIDE, chromium, served, visit
from PIL import Image

from exported import HOSTED
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.hosts.service import running_service
from layershuffle.gateway.http.app import create_app
from layershuffle.gateway.http.operator import add_operator
from layershuffle.gateway.http.requests import Gateway
from layershuffle.gateway.http.start import local_hosts
from layershuffle.ground.bundled import asset
from layershuffle.page.app import demo_app
from layershuffle.page.workbench import ORDINARY, OURS, open_workbench
from waiting import STARTS

FIRST = ",".join(map(str, reversed(HOSTED)))
SEQUENTIAL = ",".join(map(str, HOSTED))
BLANK = "\u00a0"


@pytest.fixture(scope="module")
def workbench():
    """The shipped models."""
    return open_workbench(OURS, ordinary=ORDINARY)


@pytest.fixture(scope="module")
def address(workbench):
    """The demo, served by this process."""

    @asynccontextmanager
    async def making():
        loading = asyncio.get_running_loop().create_future()
        loading.set_result(workbench)
        yield demo_app(loading)

    with served(making) as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    """One browser for all tests of this file: it takes a second to start."""
    with chromium() as running:
        yield running


@pytest.fixture
def tab(browser, address):
    """A fresh tab whose first answers are there."""
    with visit(browser, address) as seen:
        seen.settled()
        yield seen


def scores(tab):
    """How many of the 100 pairs both models get right, as the page says it."""
    return [int(tab.text(f"#{card} .right").split()[0]) for card in ("ours", "ordinary")]


def test_the_first_view_of_the_page(tab):
    assert tab.order() == FIRST
    assert tab.text("#ours .verdict") == "\u2713 right"
    assert tab.text("#ordinary .verdict").startswith("\u2717 it is ")
    ours, ordinary = scores(tab)
    assert (ours >= 90, ordinary <= 25) == (True, True)
    assert re.fullmatch(r"A forward pass takes \d+\.?\d* ms", tab.text("#ours .foot"))
    assert tab.text("#ours h2") == "Shuffled model"
    assert tab.text("#ordinary h2") == "Ordinary model"
    assert "8,000 steps on digit-pairs" in tab.text("#training")
    # No button looks chosen.
    buttons = tab.page.locator("[data-order]")
    grounds = buttons.evaluate_all("all => all.map((b) => getComputedStyle(b).backgroundColor)")
    assert len(set(grounds)) == 1


def test_buttons_rearrange_and_the_answer_follows(tab):
    tab.page.click("text=Sequential")
    tab.settled()
    assert tab.order() == SEQUENTIAL
    assert min(scores(tab)) >= 75
    tab.page.click("text=Reverse")
    tab.settled()
    assert tab.order() == FIRST
    assert scores(tab)[0] >= 90
    assert scores(tab)[1] <= 25
    tab.page.click("text=Shuffle")
    tab.settled()
    assert sorted(map(int, tab.order().split(","))) == [*HOSTED]
    assert scores(tab)[0] >= 90


def test_a_block_is_changed_by_buttons_and_left_out(tab):
    """What each change does in general, the test of the keyboard shows."""
    tab.page.click("text=Sequential")
    for button, order in (
        ("Later", "1,2,4,3,5"), ("Earlier", "1,2,3,4,5"), ("Side by side", "1,2+3,4,5"),
        ("Side by side", "1,2,3,4,5"), ("Run twice", "1,2,3,3,4"), ("Leave out", "1,2,3,4,5"),
        ("Leave out", "1,2,4,5,6"),
    ):  # fmt: skip
        tab.page.click("#strip >> text=3")
        tab.page.click(f"role=group >> text={button}")
        assert tab.order().startswith(order), button
    assert "Left out:" in tab.text("#tray")
    tab.page.click("#tray >> text=3")
    assert tab.order().endswith("9,10,3")


def test_blocks_are_dragged(tab):
    tab.page.click("text=Sequential")

    def drag(name, onto, *, share):
        box = tab.page.locator(onto).bounding_box()
        begin = tab.page.locator(f"#strip >> text='{name}'").bounding_box()
        tab.page.mouse.move(begin["x"] + begin["width"] / 2, begin["y"] + begin["height"] / 2)
        tab.page.mouse.down()
        place = box["x"] + share * box["width"], box["y"] + box["height"] / 2
        tab.page.mouse.move(*place, steps=4)
        tab.page.mouse.up()

    drag(1, "#strip li:nth-child(4)", share=0.9)
    assert tab.order().startswith("2,3,4,1,5")
    drag(1, "#strip li:nth-child(1)", share=0.1)
    assert tab.order() == SEQUENTIAL
    drag(5, "#strip li:nth-child(2)", share=0.5)
    assert tab.order().startswith("1,2+5,3,4,6")
    drag(10, "#tray", share=0.5)
    assert "10" not in tab.order().split(",")


def test_everything_is_done_by_keyboard_alone(tab):
    press = tab.page.keyboard.press
    tab.page.locator("[data-order=sequential]").focus()
    press("Enter")
    assert tab.order() == SEQUENTIAL
    press("Tab")  # into the strip, of which one tile is in the row of stops
    assert tab.page.evaluate("() => document.activeElement.textContent") == "1"
    for keys, order in (
        (["ArrowRight", "ArrowRight", "Shift+ArrowRight"], "1,2,4,3,5"),
        (["+"], "1,2,4+3,5"),
        (["Shift+ArrowRight"], "1,2,4,3,5"),
        (["2"], "1,2,4,3,3,5"),
        (["Delete", "Delete"], "1,2,4,5,6,7"),
    ):
        for key in keys:
            press(key)
        assert tab.order().startswith(order), keys
    press("Tab")
    press("Enter")  # the block in the tray comes back
    assert tab.order().endswith(",10,3")
    tab.page.locator("#order").fill("3,12")
    press("Enter")
    assert tab.text("#order-error") == "There is no block 12 to move: they are 1 to 10"
    assert tab.page.get_attribute("#order", "aria-invalid") == "true"
    tab.page.locator("#order").fill("3,1")
    press("Enter")
    assert tab.text("#order-error") == ""
    # A drawing: blank, then a line of ink, which both models answer for.
    tab.page.locator("#clear").focus()
    press("Enter")
    assert (tab.text("#ours .guess"), tab.text("#ours .verdict").strip()) == ("\u2013", "")
    with tab.page.expect_response("**/page/answer?*"):
        press("Shift+ArrowDown")
    tab.page.locator("#ours .guess", has_text=re.compile("[0-9]{2}")).wait_for()
    assert tab.text("#ours .verdict").strip() == ""


def test_other_pictures_are_classified(tab):
    label = tab.text("#picture-text")
    tab.page.click("text=Next picture")
    tab.settled()
    assert tab.text("#picture-text") != label
    tab.page.set_input_files("#file", str(asset("digit-pair.png")))
    tab.page.locator("#picture-text", has_text="digit-pair.png").wait_for()
    canvas = tab.page.locator("#canvas").bounding_box()
    tab.page.click("text=Draw")
    tab.page.mouse.move(canvas["x"] + 50, canvas["y"] + 20)
    tab.page.mouse.down()
    tab.page.mouse.move(canvas["x"] + 50, canvas["y"] + 100, steps=5)
    with tab.page.expect_response("**/page/answer?*") as answered:
        tab.page.mouse.up()
    assert answered.value.status == 200
    assert tab.text("#picture-text") == "Draw two digits, one in each half."


def blank(tab):
    """Whether nothing is painted on the canvas."""
    pixels = tab.page.evaluate(
        "() => [...document.getElementById('canvas').getContext('2d')"
        ".getImageData(0, 0, 20, 12).data]"
    )
    return set(pixels) == {0, 255}


def nothing_is_said(tab):
    """Whether no card has an answer, a score or a caption."""
    parts = [f"#{card} .{part}" for card in ("ours", "ordinary") for part in ("verdict", "right")]
    said = {tab.page.text_content(part) for part in parts}
    guesses = {tab.text(f"#{card} .guess") for card in ("ours", "ordinary")}
    return (said, guesses) == ({BLANK}, {"\u2013"})


def test_what_is_said_of_an_order_goes_with_it(tab):
    """Before the answers for another one are there."""
    asked = []

    def hold(route):
        asked.append(route)

    tab.page.route("**/page/answer?*", hold)
    with tab.page.expect_request("**/page/answer?*"):
        tab.page.click("text=Sequential")
    for card in ("ours", "ordinary"):
        for part in ("verdict", "right", "foot"):
            assert tab.page.text_content(f"#{card} .{part}") == BLANK
    assert tab.page.text_content("#status") == ""
    asked[0].continue_()
    tab.settled()
    assert min(scores(tab)) >= 75


def test_a_refused_order_leaves_no_answer_and_another_picture_its_own_order(tab):
    tab.page.locator("#order").fill("3,12")
    tab.page.keyboard.press("Enter")
    assert tab.text("#order-error") == "There is no block 12 to move: they are 1 to 10"
    assert nothing_is_said(tab)
    tab.page.click("text=Next picture")
    tab.settled()
    assert (tab.order(), tab.text("#order-error")) == (FIRST, "")


def test_a_server_that_is_gone_leaves_no_answer(tab):
    tab.page.route("**/page/answer?*", lambda route: route.abort())
    tab.page.click("text=Reverse")
    tab.page.locator("#ours .foot", has_text="The server does not answer").wait_for()
    assert nothing_is_said(tab)
    assert "The server does not answer" in tab.text("#status")
    tab.errors.clear()  # the browser's own line


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "BMP", "WEBP"])
def test_a_file_is_opened_as_often_as_it_is_chosen(tab, tmp_path, kind):
    path = tmp_path / f"pair.{kind.lower()}"
    with Image.open(asset("digit-pair.png")) as image:
        image.convert("L").save(path, kind)
    for _ in range(2):
        with tab.page.expect_response("**/page/picture") as shown:
            tab.page.set_input_files("#file", str(path))
        assert shown.value.status == 200
        tab.page.locator("#picture-text", has_text=path.name).wait_for()
        tab.settled()
        assert tab.text("#ours .guess") == "42"
        assert not blank(tab)
        tab.page.click("text=Next picture")
        tab.settled()


def test_a_refused_file_leaves_no_picture_and_is_read_out(tab, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no image")
    tab.page.set_input_files("#file", str(path))
    tab.page.locator("#status", has_text="notes.txt: Cannot read image").wait_for()
    assert tab.page.get_attribute("#status", "aria-live") == "polite"
    assert "(it is of no known format): open a JPEG" in tab.text("#picture-text")
    assert blank(tab)
    assert nothing_is_said(tab)
    assert all("422" in error for error in tab.errors)  # the browser's own line
    tab.errors.clear()


def test_clicks_while_the_models_are_loaded_are_carried_out(browser, workbench, tmp_path):
    release = []

    @asynccontextmanager
    async def making():
        loop = asyncio.get_running_loop()
        loading = loop.create_future()
        release.append(lambda: loop.call_soon_threadsafe(loading.set_result, workbench))
        yield demo_app(loading)

    with served(making) as url, visit(browser, url) as tab:
        tab.page.locator("#status", has_text="being loaded").wait_for()
        tab.page.click("text=Next picture")
        tab.page.locator("#order").fill("1,2,3")
        tab.page.locator("#order").press("Enter")
        tab.page.click("text=Reverse")
        release[0]()
        tab.settled()
        assert tab.order() == "3,2,1"
        assert tab.text("#picture-text").startswith("48")  # the second one


def test_without_scripts_the_page_says_so(browser, address, gateway_address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    for url in (address, gateway_address):
        page.goto(url)
        assert page.text_content("noscript").split()[:4] == ["This", "page", "needs", "JavaScript."]
        assert page.is_visible("noscript p")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1600", "360"])
def test_nothing_is_cut_off_or_moves_when_answers_come(browser, address, size, scheme):
    with visit(browser, address, viewport=size, color_scheme=scheme) as tab:
        tab.settled()
        if pictures := os.environ.get("PAGE_PICTURES"):
            for _ in range(10):  # so that the times are medians
                tab.page.click("text=Next picture")
                tab.settled()
            tab.page.wait_for_function("() => !document.getAnimations().length")
            name = Path(pictures) / f"page-{size['width']}-{scheme}.png"
            tab.page.screenshot(path=name, full_page=True)
        root = "() => [document.documentElement.scrollWidth, window.innerWidth]"
        assert tab.page.evaluate(root) == [size["width"], size["width"]]
        place = tab.page.locator("#strip").bounding_box()
        with tab.page.expect_response("**/page/score?*"):
            tab.page.click("text=Next picture")
        tab.settled()
        assert tab.page.locator("#strip").bounding_box() == place
        assert tab.faint() == {}
        assert tab.shifts() == []


def test_answers_and_blocks_are_on_one_screen_of_a_phone(browser, address):
    size = {"width": 390, "height": 844}
    with visit(browser, address, viewport=size) as tab:
        tab.settled()
        for part in ("#ours", "#ordinary", "#strip"):
            box = tab.page.locator(part).bounding_box()
            assert box["y"] >= 0, part
            assert box["y"] + box["height"] <= size["height"], part
        assert tab.page.is_visible("#blocks-title")


def test_a_phone_shows_the_whole_order(browser, address):
    with visit(browser, address, viewport=NARROW) as tab:
        tab.settled()
        for order in (FIRST, ",".join([SEQUENTIAL] * 3)):
            tab.page.locator("#order").fill(order)
            tab.page.locator("#order").press("Enter")
            tab.settled()
            assert tab.order() == order
            inner, outer = tab.page.eval_on_selector(
                "#order",
                "e => [[e.scrollWidth, e.scrollHeight], [e.clientWidth, e.clientHeight]]",
            )
            assert inner == outer


def test_an_error_stands_where_the_answers_would(tab):
    body = '{"error": {"cause": "The models are busy", "hint": "try again"}}'
    tab.page.route("**/page/answer?*", lambda route: route.fulfill(status=503, body=body))
    tab.page.click("text=Next picture")
    tab.page.wait_for_selector("#ours .foot:text('The models are busy: try again')")
    assert tab.text("#ordinary .foot") == "The models are busy: try again"
    assert tab.text("#ours .guess") == "\u2013"
    assert all("503" in error for error in tab.errors)  # the browser's own line
    tab.errors.clear()


def test_the_time_is_the_median_of_the_last_ten(tab):
    times = iter([50, *[3] * 5, *[1] * 5, 7])

    def answer(route):
        got = route.fetch().json()
        got["answers"]["ours"]["ms"] = next(times)
        route.fulfill(json=got)

    tab.page.route("**/page/answer?*", answer)
    seen = []
    for _ in range(11):
        with tab.page.expect_response("**/page/answer?*"):
            tab.page.click("text=Next picture")
        tab.settled()
        seen.append(tab.text("#ours .foot"))
    assert seen[-1] == "A forward pass takes 2.0 ms (median of 10)"  # the 50 is gone
    tab.page.click("text=Reverse")  # of another order other times
    tab.settled()
    assert tab.text("#ours .foot") == "A forward pass takes 7.0 ms"


def test_a_finger_drags_blocks_and_draws(browser, address):
    with visit(browser, address, viewport=NARROW, has_touch=True, is_mobile=True) as tab:
        tab.settled()
        tab.page.tap("text=Sequential")
        assert tab.order() == SEQUENTIAL
        tile = tab.page.locator("#strip >> text='1'")
        tile.scroll_into_view_if_needed()
        target = tab.page.locator("#strip li:nth-child(4)").bounding_box()
        tab.swipe(tile.bounding_box(), (target["x"] + 0.9 * target["width"], target["y"] + 20))
        assert tab.order().startswith("2,3,4,1,5")
        tab.page.tap("text=Draw")
        canvas = tab.page.locator("#canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        before = tab.page.evaluate("() => window.scrollY")
        with tab.page.expect_response("**/page/answer?*") as answered:
            tab.swipe(box, (box["x"] + box["width"] / 2, box["y"] + box["height"] - 6))
        assert answered.value.status == 200
        tab.page.locator("#ours .guess", has_text=re.compile("[0-9]{2}")).wait_for()
        assert tab.page.evaluate("() => window.scrollY") == before  # it drew and did not scroll


def test_reduced_motion_is_respected(browser, address):
    with visit(browser, address, reduced_motion="reduce") as tab:
        tab.settled()
        durations = tab.page.evaluate(
            "() => [...document.querySelectorAll('*')].map((e) => getComputedStyle(e)"
            ".transitionDuration).filter((time) => time !== '0s')"
        )
        assert durations == []


def test_scripts_are_checked_by_node(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    for script in [path for room in ("page", "swarm", "join") for path in asset(room).glob("*.js")]:
        copy = tmp_path / f"{script.stem}.mjs"  # by its name node takes it for a module
        copy.write_bytes(script.read_bytes())
        done = subprocess.run([node, "--check", copy], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


# --- the page of a running swarm ------------------------------------------------------------------

KEY = "an-operators-key-of-this-test"


@pytest.fixture(scope="module")
def gateway_address():
    """A gateway to five hosts with two blocks each, which an operator may break."""

    @asynccontextmanager
    async def making():
        model = ServedModel(asset("digits-onnx"))
        # No room for the blocks of a host that dies.
        memory = 2 * model.weights[0].size
        async with (
            running_service(model, token="a token", copies=1, limits=BUSY) as (coordinator, remote),
            local_hosts(coordinator, 5, memory=memory),
        ):
            assert await coordinator.ready(5, within=STARTS) == []
            gateway = Gateway(remote, coordinator, model="bundled:digits-onnx")
            app = create_app(gateway, page=True)
            add_operator(app, key=KEY)
            yield app

    with served(making) as url:
        yield url


def test_without_the_key_nothing_can_be_broken(browser, gateway_address):
    with visit(browser, gateway_address) as tab:
        tab.page.locator("#hosts .host").nth(4).wait_for()
        assert tab.page.locator("#hosts button").count() == 0
        assert not tab.page.is_visible("#kill-note")


def test_a_transparent_picture_covers_the_one_of_before(browser, gateway_address, tmp_path):
    Image.new("LA", (20, 12)).save(tmp_path / "clear.png")
    with visit(browser, gateway_address) as tab:
        tab.answered()
        assert not blank(tab)
        tab.page.set_input_files("#file", str(tmp_path / "clear.png"))
        tab.page.locator("#picture-text", has_text="clear.png").wait_for()
        assert blank(tab)


def test_a_key_is_asked_for_once(browser):
    """The page looks every second, and would ask every second who gave none."""

    @asynccontextmanager
    async def making():
        async with site(page=True, keys=["a-key-of-this-test"]) as place:
            yield place.app

    asked = []
    with served(making) as url:
        page = browser.new_page()
        page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
        page.goto(url)
        for _ in range(3):
            with page.expect_response("**/v1/swarm") as refused:
                pass
            assert refused.value.status == 401
        page.close()
    assert len(asked) == 1


def until_all_blocks_ran(route):
    """Ask for an answer of all blocks: the model is mostly sure after a few of them."""
    route.continue_(url=f"{route.request.url}&confidence=off")


def test_a_host_dies_by_a_click_and_the_answers_go_on(browser, gateway_address):
    with visit(browser, f"{gateway_address}/#{KEY}") as tab:
        tab.page.route("**/v1/classify?*", until_all_blocks_ran)
        tab.answered()
        assert KEY not in tab.page.evaluate("() => window.location.href")
        hosts = tab.page.locator("#hosts .host")
        hosts.nth(4).wait_for()
        assert hosts.count() == 5
        tab.page.check("#send")
        tab.page.locator("#walk-text", has_text="10 of 10 blocks").wait_for()
        first = hosts.first
        with tab.page.expect_response("**/operator/kill") as broken:
            first.get_by_role("button", name="Kill").click()
        assert broken.value.status == 200
        first.get_by_text("is dead").wait_for()
        tab.page.locator(
            "#now", has_text="4 of 5 hosts work \u00b7 8 of 10 blocks can run"
        ).wait_for()
        eight = '#walk-text:has-text("8 of 10 blocks")'
        gone = '#skipped:has-text("host host-1 is gone")'
        tab.page.locator(f"main:has({eight}):has({gone})").wait_for()
        tab.page.locator("#line", has_text="100.0 % of").wait_for()
        tab.page.locator("#line", has_text="% right").wait_for()
        assert tab.shifts() == []
        if pictures := os.environ.get("PAGE_PICTURES"):
            tab.page.uncheck("#send")
            tab.page.wait_for_function("() => !document.getAnimations().length")
            tab.page.screenshot(path=Path(pictures) / "page-swarm.png", full_page=True)
            tab.page.check("#send")
        first.get_by_role("button", name="Bring back").focus()
        tab.page.keyboard.press("Enter")
        tab.page.locator("#walk-text", has_text="10 of 10 blocks").wait_for()
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
    swarm = {
        "hosts": hosts,
        "counters": {"answered": 3},
        "model": MARKUP,
        "depth": 12,
        "fixed": [0, 0],
    }
    swarm |= {"unreachable_blocks": [10, 11], "expected": None, "expected_why": MARKUP}
    top = [{"label": MARKUP, "index": 0, "probability": 1.0}]
    answer = {
        "top": top,
        "depth": 12,
        "fixed": [0, 0],
        "blocks": [0, 5],
        "route": route,
        "ms": {"total": 70},
    }
    answer |= {"skipped": [{"block": 3, "why": MARKUP}], "expected": None, "expected_why": ""}
    return swarm, answer


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1600", "360"])
def test_hosts_in_every_condition_can_be_read_at_every_size(browser, gateway_address, size, scheme):
    options = {"viewport": size, "color_scheme": scheme}
    with visit(browser, gateway_address, **options) as tab:
        swarm, answer = one_of_each()
        tab.page.route("**/v1/swarm", lambda route: route.fulfill(json=swarm))
        tab.page.route("**/v1/classify?*", lambda route: route.fulfill(json=answer))
        tab.page.reload()
        tab.answered()
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


def test_a_model_of_other_images_answers_through_the_swarm(browser):
    @asynccontextmanager
    async def making():
        async with site(page=True, model="pico") as place:
            yield place.app

    with served(making) as url, visit(browser, url) as tab:
        tab.page.locator("#hosts .host").nth(2).wait_for()
        with tab.page.expect_response("**/v1/classify?*") as answered:
            tab.page.click("#canvas")
        answer = answered.value.json()
        assert sorted(answer["blocks"]) == [0, 1, 2, 3]
        label = answer["top"][0]["label"]
        tab.page.locator("#answer .guess", has_text=label).wait_for()
        assert "never calibrated" in tab.text("#answer .foot")
        tab.page.locator("#walk-text", has_text="4 of 4 blocks").wait_for()
        assert tab.page.locator(".visit").count() == len(answer["route"])
