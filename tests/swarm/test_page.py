"""The page's files and answers without a browser, and refused requests."""

import asyncio
import io
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from gateway_site import run, sent
from PIL import Image

import layershuffle as ls
from common import SIZE
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.tensors import logits_of
from layershuffle.data.digits import DigitPairs
from layershuffle.data.transforms import PixelFinish, PlainTransform
from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.gateway.http.files import HEADERS, pair_names, runtime
from layershuffle.ground.bundled import asset
from layershuffle.ground.errors import LayerShuffleError
from layershuffle.images.pixels import read_image
from layershuffle.models import read_record, truncate
from layershuffle.page.app import demo_app
from layershuffle.page.workbench import (
    ORDINARY,
    OURS,
    Workbench,
    model_title,
    open_workbench,
    same_training,
)
from layershuffle.scoring.predict import predict
from pictures import DIGIT_VIEW
from waiting import HANGS, until

FIRST = "10,9,8,7,6,5,4,3,2,1"
MOST_BYTES = 60_000


@pytest.fixture(scope="module")
def workbench():
    """The shipped models."""
    return open_workbench(OURS, ordinary=ORDINARY)


def ask(workbench, method, path, **options):
    """The answer of the demo to one request."""

    async def go():
        loading = asyncio.get_running_loop().create_future()
        loading.set_result(workbench)
        wire = httpx.ASGITransport(demo_app(loading))
        async with httpx.AsyncClient(transport=wire, base_url="http://127.0.0.1:7860") as client:
            return await client.request(method, path, **options)

    return asyncio.run(go())


def post(workbench, path, order, file=b""):
    """POST a file in an order."""
    return ask(workbench, "POST", path, content=file, params={"order": order})


# --- files ----------------------------------------------------------------------------------------


def test_scripts_and_styles_are_small_and_stand_in_no_page():
    rooms = asset("page"), asset("swarm")
    files = {path: path.read_text("utf-8") for room in rooms for path in room.glob("*.[hjc][ts]*")}
    assert sum(len(text.encode()) for text in files.values()) <= MOST_BYTES
    inline = r"<style|\son\w+=|\sstyle=|javascript:|<script(?! type=\"module\" src)"
    for path, text in files.items():
        # Nothing comes from elsewhere; no link leads there while the project has no address.
        assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[^\"]+", text) == []
        assert re.findall(inline, text) == [] or path.suffix != ".html"


def test_every_file_of_the_page_goes_out_under_its_policy(workbench):
    for path in asset("page").iterdir():
        answer = ask(workbench, "GET", f"/page/{path.name}")
        assert answer.status_code == 200
        assert answer.content == path.read_bytes() or path.name.startswith("pairs.")
        assert HEADERS.items() <= {k: answer.headers[k] for k in HEADERS}.items()
    assert "default-src 'self'" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    with Image.open(asset("page", "pairs.png")) as packaged:
        answer = ask(workbench, "GET", "/page/pairs.png")
        with Image.open(io.BytesIO(answer.content)) as sheet:
            assert sheet.convert("L").tobytes() == packaged.convert("L").tobytes()


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2f..%2fpyproject.toml", "%2e%2e", "page.css%00"]
)
def test_other_names_are_not_looked_up_on_the_disk(workbench, name):
    assert ask(workbench, "GET", f"/page/{name}").status_code == 404


# --- what is said of the models -------------------------------------------------------------------


def test_the_shipped_models_were_trained_for_as_long_and_the_page_says_it(workbench):
    facts = ask(workbench, "GET", "/page/facts").json()
    assert facts["models"] == {
        "ours": {"name": OURS, "title": "Shuffled model"},
        "ordinary": {"name": ORDINARY, "title": "Ordinary model"},
    }
    records = [read_record(asset(name.removeprefix("bundled:"))) for name in (OURS, ORDINARY)]
    ours, ordinary = (record["settings"] for record in records)
    same = ("model", "data", "steps", "batch_size", "lr", "schedule")
    assert [ours[name] for name in same] == [ordinary[name] for name in same]
    assert f"for {ours['steps']:,} steps on digit-pairs" in facts["training"]


@pytest.mark.parametrize("specs", [(ORDINARY, OURS), (OURS, "bundled:digits"), (OURS, OURS)])
def test_a_packaged_name_alone_makes_no_claim(specs):
    """The second of `digits` was trained for 3,000 steps, and two others are not compared."""
    first, second = specs
    facts = open_workbench(first, ordinary=second).facts()
    titles = {
        ORDINARY: "Ordinary model",
        OURS: "Shuffled model",
        "bundled:digits": "Ordinary model",
    }
    assert facts["models"]["ours"]["title"] == titles[first]
    assert facts["models"]["ordinary"]["title"] == titles[second]
    assert facts["training"] == ""


@pytest.mark.parametrize(
    ("record", "title"),
    [
        ({}, "Model"),
        ({"method": "baseline", "policy": {"policy": "sequential"}}, "Ordinary model"),
        ({"method": "anyorder", "policy": {"policy": "shuffled"}}, "Shuffled model"),
        ({"method": "baseline", "policy": {"policy": "shuffled", "p": 0.2}}, "Shuffled model"),
        (
            {"method": "layerdrop", "policy": {"policy": "layerdrop", "p": 0.2}},
            "Model of layerdrop",
        ),
        (
            {"method": "baseline", "policy": {"policy": "sequential", "kept": [3, None]}},
            "Model of baseline",
        ),
    ],
)
def test_a_title_says_how_a_model_was_trained(record, title):
    assert model_title(record) == title


def test_the_length_of_a_training_is_in_steps_or_in_epochs():
    shuffled = {"policy": {"policy": "shuffled"}}
    ordinary = {"policy": {"policy": "sequential"}}
    settings = {"model": "m", "data": "d", "steps": None, "epochs": 2.0, "lr": 0.1}
    of_both = same_training({**shuffled, "settings": settings}, {**ordinary, "settings": settings})
    assert of_both.startswith("Both were fine-tuned for 2 epochs on d: ")
    longer = {**settings, "epochs": 3.0}
    for other in ({**ordinary, "settings": longer}, ordinary, {}):
        assert same_training({**shuffled, "settings": settings}, other) == ""


# --- answers --------------------------------------------------------------------------------------


def right_by_hand(spec, order):
    """How many of the first test pictures come out right, one image after the other.

    `order` has the blocks between the ends.
    """
    model, pairs = ls.wrap(ls.load(spec)).eval(), DigitPairs("test", len(pair_names()))
    count = 0
    with torch.inference_mode(), ls.running(model, f"0,{order},11"):
        for pixels, label in pairs:
            logits = logits_of(model(PixelFinish(DIGIT_VIEW, 16)(pixels[None])), model)
            count += int(logits.argmax()) == label
    return count


@pytest.mark.parametrize("order", [FIRST, "1+2,3+4,5,6,6,6"])
def test_scores_are_those_of_the_model_image_by_image(workbench, order):
    answer = post(workbench, "/page/score", order).json()
    assert answer["of"] == 100
    assert answer["right"]["ours"] == right_by_hand(OURS, order)
    assert answer["right"]["ordinary"] == right_by_hand(ORDINARY, order)
    if order == FIRST:  # the first look, which shows what the page is for
        assert answer["right"]["ours"] >= 90
        assert answer["right"]["ordinary"] <= 25


def test_a_failure_of_the_page_gives_an_id_and_keeps_its_cause(workbench, monkeypatch, caplog):
    def broken(*_):
        raise LayerShuffleError("no room in /secret")

    monkeypatch.setattr(workbench, "scores", broken)
    answer = post(workbench, "/page/score", FIRST)
    problem = answer.json()["error"]
    assert answer.status_code == 500
    assert problem["id"] in caplog.text
    assert "/secret" in caplog.text
    assert "/secret" not in answer.text


def test_visitors_who_wait_for_the_models_are_told_of_the_end():
    """By an answer: a request that is cancelled is a traceback in the log."""

    class Loading(asyncio.Future):
        def add_done_callback(self, *args, **options):
            super().add_done_callback(*args, **options)
            waited_for.set()

    waited_for = asyncio.Event()

    async def ended():
        loading = Loading()
        wire = httpx.ASGITransport(demo_app(loading))
        async with httpx.AsyncClient(transport=wire, base_url="http://127.0.0.1") as client:
            asked = asyncio.ensure_future(client.get("/page/facts"))
            await waited_for.wait()
            loading.cancel()
            return await asked

    answer = asyncio.run(ended())
    assert answer.status_code == 503
    assert "ended" in answer.json()["error"]["cause"]


def test_an_answer_has_classes_and_times(workbench):
    file = asset("digit-pair.png").read_bytes()
    answers = post(workbench, "/page/answer", "3,2,1,5,4", file).json()["answers"]
    for answer in answers.values():
        chances = [guess["probability"] for guess in answer["top"]]
        assert chances == sorted(chances, reverse=True)
        assert len(chances) == 5
        assert answer["ms"] > 0
    model = ls.wrap(ls.load(OURS)).eval()
    (prediction,) = predict(model, asset("digit-pair.png"), order="0,3,2,1,5,4,11")
    named = [guess["label"] for guess in answers["ours"]["top"]]
    assert named == [guess.label for guess in prediction.top]


def test_every_thread_has_run_every_model_before_the_first_time_is_shown(workbench):
    class Watched(Workbench):
        def _logits(self, role, batch, order):
            runs.add((threading.current_thread().name, role))
            return super()._logits(role, batch, order)

    runs = set()
    Watched(workbench.models, names=workbench.names).pool.shutdown()
    assert sorted(role for _, role in runs) == ["ordinary", "ordinary", "ours", "ours"]
    assert len(runs) == 4


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_the_picture_of_a_file_is_what_the_models_see(workbench, tmp_path, kind):
    """A photograph on its side, larger than the model's images, in every format."""
    pixels = torch.randint(0, 256, (100, 60, 3), generator=torch.Generator().manual_seed(0))
    turned = Image.Exif()
    turned[0x0112] = 6
    path = tmp_path / f"photograph.{kind.lower()}"
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(path, kind, exif=turned)
    answer = post(workbench, "/page/picture", "", path.read_bytes())
    with Image.open(io.BytesIO(answer.content)) as seen:
        shown = torch.from_numpy(np.array(seen))[None]
    expected = PlainTransform(workbench.view)(read_image(path, 1, place=path))
    assert torch.equal(shown, expected)


@pytest.mark.parametrize("order", ["", "12", "0,1", "1,x", "3+3", ",".join(["1"] * 97)])
def test_invalid_orders_are_refused_with_the_reason(workbench, order):
    answer = post(workbench, "/page/answer", order, asset("digit-pair.png").read_bytes())
    assert answer.status_code == 422
    assert answer.json()["error"]["cause"]


def test_files_that_are_no_images_are_refused_with_the_reason(workbench):
    for path in ("/page/answer", "/page/picture"):
        assert post(workbench, path, "1").status_code == 422
        answer = post(workbench, path, "1", b"no image")
        assert answer.status_code == 422
        assert "Cannot read image" in answer.json()["error"]["cause"]
        assert "TIFF" in answer.json()["error"]["hint"]
        large = post(workbench, path, "1", bytes(17 << 20))
        assert large.status_code == 413


@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin", "none"])
def test_requests_of_other_sites_keep_no_model_busy(workbench, site):
    headers = {"Sec-Fetch-Site": site}
    for path in ("/page/score", "/page/answer", "/page/picture"):
        file = asset("digit-pair.png").read_bytes()
        answer = ask(workbench, "POST", f"{path}?order=1", content=file, headers=headers)
        assert answer.status_code == (200 if site in ("same-origin", "none") else 403)


def test_models_that_differ_do_not_share_a_page(workbench):
    other = truncate(ls.load(OURS), "0,1,11")
    with pytest.raises(ls.UsageError, match="differ in depth"):
        Workbench({"ours": workbench.models["ours"], "ordinary": other}, names={})


# --- bounds: the work of the page counts with that of the API -------------------------------------


async def asked_for(app, query, **how):
    status, _ = await sent(app, "/page/score", query=query.encode(), **how)
    return status


def test_the_page_has_the_bounds_of_the_api(workbench, monkeypatch):
    """Requests that one address leaves behind end with it; another is answered meanwhile, with the
    bodies of all in one memory."""
    free, begun = threading.Event(), []

    def scores(order, body):
        del body
        begun.append(str(order))
        assert free.wait(HANGS)
        return {}

    monkeypatch.setattr(workbench, "scores", scores)
    limits = GatewayLimits(client_requests=10, held_bytes=1000)

    async def go():
        loading = asyncio.get_running_loop().create_future()
        loading.set_result(workbench)
        app, gone = demo_app(loading, limits=limits), asyncio.Event()
        asked = [
            asyncio.ensure_future(asked_for(app, f"order={1 + number % 10}", leave=gone))
            for number in range(12)
        ]
        await until(lambda: begun and sum(task.done() for task in asked) == 2)
        beyond = [task.result() for task in asked if task.done()]
        other = asyncio.ensure_future(asked_for(app, "order=10", address="10.0.0.2"))
        await until(lambda: len(begun) == 2)
        few, _ = await sent(app, "/page/answer", bytes(1001), query=b"order=1", address="10.0.0.3")
        more = [
            asyncio.ensure_future(asked_for(app, "order=5", address="10.0.0.4")) for _ in range(2)
        ]
        gone.set()
        left = await asyncio.gather(*asked)
        free.set()
        answers = [await other, *await asyncio.gather(*more)]
        return beyond, few, left, sorted(answers)

    beyond, few, left, answers = asyncio.run(go())
    assert beyond == [429, 429], "ten of one client"
    assert few == 429, "bodies beyond the memory"
    assert left.count(499) == 10
    assert answers == [200, 200, 200]
    # Of the ten that left, one thread had begun; the nine others never ran.
    assert len(begun) == 4


def test_a_model_of_ones_own_answers_beside_another_for_pictures_of_its_data(tmp_path):
    spec = (
        "timm:vit_tiny_patch16_224?pretrained=false&img_size=16&patch_size=8&embed_dim=8"
        "&num_heads=2&depth=3&num_classes=2"
    )
    for split in ("train", "test"):
        for shade, name in enumerate(("black", "white")):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                image = Image.new("RGB", (20, 20), (250 * shade, number, 0))
                image.save(tmp_path / split / name / f"{number}.png")
    bench = open_workbench(spec, ordinary=spec, data=f"folder:{tmp_path}")
    facts = ask(bench, "GET", "/page/facts").json()
    assert facts["pairs"]
    foreign = {"name": spec, "title": "Model"}  # nobody knows how it was trained
    assert facts["models"] == {"ours": foreign, "ordinary": foreign}
    labels = ask(bench, "GET", "/page/pairs.json").json()
    assert sorted(labels) == ["black"] * 3 + ["white"] * 3
    with Image.open(io.BytesIO(ask(bench, "GET", "/page/pairs.png").content)) as sheet:
        # Six pictures of 16 x 16 in the first row of ten.
        assert [sheet.getpixel((16 * n + 8, 8))[0] > 200 for n in range(6)] == [
            label == "white" for label in labels
        ]
    answer = post(bench, "/page/score", "2,0,1").json()
    model = ls.wrap(ls.load(spec)).eval()
    with torch.no_grad(), ls.running(model, ExecutionOrder((2, 0, 1), 3)):
        guesses = logits_of(model(bench.pictures.images), model).argmax(-1)
    right = int((guesses == bench.pictures.classes).sum())
    assert answer == {"order": "2,0,1", "right": {"ours": right, "ordinary": right}, "of": 6}


# --- the page of a swarm --------------------------------------------------------------------------


def test_no_visitor_brings_torch_into_a_gateway():
    """Pages, files, answers, status, metrics and commands, in a process of their own."""
    words = [sys.executable, Path(__file__).with_name("visited.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=4 * HANGS, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["imported"] == []
    of_the_demo = {f"/page/{name}" for name in ("page.js", "strip.js")}
    no_runtime = {"/join"} if runtime() is None else set()
    expected = dict.fromkeys(of_the_demo, 404) | dict.fromkeys(no_runtime, 501) | {"no image": 422}
    assert seen["statuses"] == dict.fromkeys(seen["statuses"], 200) | expected
    assert len(seen["statuses"]) > 20


def test_the_page_of_a_swarm_knows_the_size_of_its_pictures_and_nothing_of_other_models():
    async def go(place):
        facts = (await place.client.get("/page/facts")).json()
        asked = [
            (await place.client.post(f"/page/{name}?order=0")).status_code
            for name in ("answer", "score", "picture")
        ]
        strip = await place.client.get("/page/strip.js")
        return facts, asked, strip.status_code

    facts, asked, strip = run(go, page=True)
    assert facts == {"width": SIZE, "height": SIZE, "pairs": False}
    assert asked == [405, 405, 405]
    assert strip == 404
