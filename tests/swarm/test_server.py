"""The gateway over a swarm in this process: answers, routes, limits, keys, errors."""

import asyncio
import base64
import io
import json
import re
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress

import numpy as np
import pytest
import torch
from gateway_site import (
    HOSTS,
    LIMITS,
    VIT,
    Blocks,
    classify,
    file_of,
    listening,
    picture,
    site,
)
from PIL import PngImagePlugin

import layershuffle as ls
from common import CLASSES, DEPTH, FAMILIES, SIZE, assert_close
from layershuffle.data.transforms import PlainTransform
from layershuffle.data.view import Finish
from layershuffle.errors import LayerShuffleError, StackError, UsageError
from layershuffle.models import image_view
from layershuffle.models.origin import Origin, remember
from layershuffle.position import add_position
from layershuffle.position_forms import EncodingForm, PredictionForm
from layershuffle.stack import running
from layershuffle.swarm.calibration import Calibration, Row
from layershuffle.swarm.messages import HostFailed, HostGone, Route
from layershuffle.swarm.remote_model import (
    RemoteModel,
    class_names,
    drop_blocks,
    resize_of,
)
from layershuffle.swarm.router import Router
from layershuffle.swarm.server import auth, bombs, schemas
from layershuffle.swarm.server import run as serving
from layershuffle.swarm.server.auth import Bucket, Keys, Rates, take
from layershuffle.swarm.server.clients import Clients
from layershuffle.swarm.server.errors import Refused
from layershuffle.swarm.server.images import Decoder
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.metrics import Metrics
from layershuffle.swarm.server.run import serve, server_config
from layershuffle.swarm.state import HostView, Swarm

KEY = "a-key-of-some-length"


def run(test, *args, **options):
    """`test(site)` on a fresh gateway."""

    async def go():
        async with site(*args, **options) as place:
            return await test(place)

    return asyncio.run(go())


def tensors(*pictures):
    view = image_view(VIT.wrapped())
    return Finish(view)(torch.stack([PlainTransform(view)(one) for one in pictures]))


def logits(model, batch, order):
    with torch.inference_mode(), running(model, order):
        return model(batch)


# --- the front ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["timm-vit", "hf-vit", "torchvision-vit"])
def test_front_equals_the_forward_of_the_route(family):
    """Bit-equal over an fp32 wire, one image; the blocks are only at the hosts."""
    whole = FAMILIES[family].wrapped()
    batch = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(3))

    async def go():
        router = Router(Blocks(FAMILIES[family].wrapped()), depth=DEPTH, limits=LIMITS)
        router.swarm = Swarm(HostView(name, frozenset(held)) for name, held in HOSTS.items())
        front = RemoteModel(FAMILIES[family].wrapped(), router)
        now = router.clock()
        free = await front.classify(batch, deadline=now + 5)
        asked = await front.classify(batch, deadline=now + 5, order=(3, 0, 1))
        front.close()
        return free, asked

    free, asked = asyncio.run(go())
    assert sorted(free.route.order) == list(range(DEPTH))
    assert asked.route.order == (3, 0, 1)
    for found in (free, asked):
        with torch.inference_mode(), running(whole, found.route.order):
            wanted = ls.models.logits_of(whole(batch))
        assert torch.equal(found.logits, wanted)
        assert min(found.stem_ms, found.swarm_ms, found.head_ms) > 0


def test_front_drops_the_blocks():
    model = VIT.wrapped()
    block_bytes = sum(p.nbytes for p in model.blocks.parameters())
    rest = sum(p.nbytes for p in model.parameters()) - block_bytes
    front = RemoteModel(model, Router(Blocks(model), depth=DEPTH, limits=LIMITS))
    assert front.saved_bytes == block_bytes
    assert sum(p.nbytes for p in model.parameters() if not p.is_meta) == rest
    assert all(p.is_meta for p in model.blocks.parameters())
    front.close()


def test_drop_blocks_keeps_what_is_shared():
    model = VIT.wrapped()
    model.blocks.block(0).norm1 = model.norm
    kept = sum(p.nbytes for p in model.norm.parameters())
    inside = sum(p.nbytes for p in model.blocks.parameters())
    assert drop_blocks(model) == inside - kept
    assert not any(p.is_meta for p in model.norm.parameters())
    assert all(p.is_meta for p in model.blocks.block(1).norm1.parameters())


def test_front_refuses_position_encoding_and_other_depths():
    router = Router(Blocks(VIT.wrapped()), depth=DEPTH, limits=LIMITS)
    encoded = add_position(VIT.wrapped(), encoding=EncodingForm())
    with pytest.raises(StackError, match="something else at every position"):
        RemoteModel(encoded, router)
    predicted = add_position(VIT.wrapped(), prediction=PredictionForm())
    RemoteModel(predicted, router).close()
    with pytest.raises(UsageError, match="3 blocks, the model has 4"):
        RemoteModel(VIT.wrapped(), Router(Blocks(None), depth=3, limits=LIMITS))


def test_front_cancels_the_walk():
    async def go():
        async with site() as place:
            place.blocks.delay = 30
            now = place.router.clock()
            work = asyncio.ensure_future(
                place.front.classify(torch.zeros(1, 3, 32, 32), deadline=now + 20)
            )
            while not place.blocks.visits:
                await asyncio.sleep(0.005)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            while not place.blocks.cancelled:
                await asyncio.sleep(0.005)
            place.front.close()  # its threads are free
            return place.router.clock() - now

    assert asyncio.run(go()) < 5


def test_a_slow_head_moves_the_routers_deadline():
    async def go():
        async with site() as place:
            seen = []
            walk = place.router.walk

            async def spied(start, *, deadline, **asked):
                seen.append(deadline)
                return await walk(start, deadline=deadline, **asked)

            place.router.walk = spied
            deadline = place.router.clock() + 5
            for head in (0.0, 0.010, 0.310):
                place.front.head_seconds = head
                await place.front.classify(torch.zeros(1, 3, 32, 32), deadline=deadline)
            return [deadline - one for one in seen]

    assert asyncio.run(go()) == pytest.approx([0, 0, 0.3], abs=1e-6)


def test_class_names_and_resize():
    assert class_names(VIT.wrapped()) == tuple("01234")
    hf = FAMILIES["hf-vit"].wrapped()
    assert class_names(hf) == tuple("01234")  # LABEL_0 and so on say nothing
    hf.config.id2label = dict(enumerate(["ant", "bee", "cat", "dog", "elk"]))
    assert class_names(hf) == ("ant", "bee", "cat", "dog", "elk")
    digits = ls.load("bundled:digits")
    assert class_names(digits)[:3] == ("00", "01", "02")
    assert resize_of(digits) == "squash"
    assert resize_of(VIT.wrapped()) == "crop"
    squashed = remember(VIT.wrapped(), Origin(record={"settings": {"resize": "squash"}}))
    assert resize_of(squashed) == "squash"


# --- answers --------------------------------------------------------------------------------------


def test_answer_equals_the_in_process_forward():
    one = picture(1)

    async def go(place):
        return (await place.classify(file_of(one), top_k=3)).json()

    answer = run(go)
    wanted = logits(VIT.wrapped(), tensors(one), answer["blocks"])[0].double().softmax(-1)
    top = wanted.topk(3)
    assert [g["index"] for g in answer["images"][0]["top"]] == top.indices.tolist()
    assert [g["probability"] for g in answer["images"][0]["top"]] == top.values.tolist()
    assert answer["images"][0]["top"][0]["label"] == str(top.indices[0].item())
    assert sorted(answer["blocks"]) == list(range(DEPTH))
    assert not answer["degraded"]
    assert answer["ending"] == "complete"
    assert answer["expected"] is None
    assert "never calibrated" in answer["expected_why"]
    assert [hop["outcome"] for hop in answer["route"]] == ["answered"] * 3
    assert {hop["host"]: set(hop["blocks"]) for hop in answer["route"]} == HOSTS
    assert all(hop["ms"] > 0 and hop["compute_ms"] == 0.5 for hop in answer["route"])
    assert answer["ms"]["total"] >= answer["ms"]["swarm"] > 0


def test_form_and_json_and_formats_agree():
    """The same images as a form, as JSON, as PNG, BMP and WebP; JPEG loses a little."""
    pictures = [picture(1), picture(2), picture(3, size=(50, 40))]
    files = [file_of(one) for one in pictures]

    async def go(place):
        form = (await place.classify(*files, order="2,1,0", top_k=5)).json()
        texts = [base64.b64encode(file).decode() for file in files]
        body = {"images": texts, "order": [2, 1, 0], "deadline_ms": 900, "min_blocks": 2}
        plain = (await place.client.post("/v1/classify", json=body)).json()
        single = {"image": texts[0], "order": "2,1,0"}
        single = (await place.client.post("/v1/classify", json=single)).json()
        kinds = [
            (await place.classify(file_of(pictures[0], kind), order="2,1,0")).json()
            for kind in ("BMP", "WEBP", "JPEG", "GIF")
        ]
        return form, plain, single, kinds

    form, plain, single, kinds = run(go)
    assert form["images"] == plain["images"]
    assert len(form["images"]) == 3
    assert form["blocks"] == plain["blocks"] == [2, 1, 0]
    assert [one["block"] for one in form["skipped"]] == [3]
    assert not form["degraded"]  # all that was asked for ran
    found = torch.tensor(
        [
            [
                {g["index"]: g["probability"] for g in image["top"]}[index]
                for index in range(CLASSES)
            ]
            for image in form["images"]
        ]
    )
    wanted = logits(VIT.wrapped(), tensors(*pictures), (2, 1, 0)).softmax(-1)
    assert_close(found, wanted, tolerance=1e-5)  # one by one they round otherwise than together
    assert single["images"][0]["top"][0]["index"] == form["images"][0]["top"][0]["index"]
    assert kinds[0]["images"] == single["images"]
    assert kinds[1]["images"][0]["top"][0]["index"] < CLASSES  # lossy as JPEG
    assert kinds[3]["error"]["hint"] == "send JPEG, PNG, WEBP or BMP."[:-1]


def test_a_dead_host_degrades_the_answer():
    async def go(place):
        place.blocks.faults["b"] = HostGone("its process is dead")
        first = (await place.classify(file_of(picture()))).json()
        second = await place.classify(file_of(picture()), min_blocks=4)
        swarm = (await place.client.get("/v1/swarm")).json()
        return first, second, swarm

    first, second, swarm = run(go)
    assert first["degraded"]
    assert sorted(first["blocks"]) == [0, 2, 3]
    assert first["ending"] == "unreachable"
    assert first["skipped"] == [{"block": 1, "why": "host b is gone: its process is dead"}]
    lost = [hop for hop in first["route"] if hop["host"] == "b"]
    assert [(hop["outcome"], hop["why"]) for hop in lost] == [("lost", "its process is dead")]
    assert second.status_code == 503
    assert second.headers["retry-after"] == "1"
    assert second.json()["error"]["cause"] == (
        "3 of 4 blocks could be run, 4 are needed (host b is gone: its process is dead)"
    )
    assert "min_blocks" in second.json()["error"]["hint"]
    assert swarm["unreachable_blocks"] == [1]
    assert [(h["name"], h["condition"]) for h in swarm["hosts"]] == [
        ("a", "healthy"), ("b", "gone"), ("c", "healthy"),
    ]  # fmt: skip
    assert swarm["counters"] == {"degraded": 1, "unanswered": 1}
    assert swarm["hosts"][0]["compute_ms"] == pytest.approx(0.25)
    assert swarm["limits"]["reserve_ms"] == LIMITS.reserve_ms
    assert (swarm["depth"], swarm["classes"], swarm["wire"]) == (4, 5, "fp32")


def calibrated(**options):
    """A gateway with a made-up calibration of the pico model."""
    rows = tuple(
        Row(kept=kept, top1=20.0 * kept, low=1.0, high=90.0, sd_orders=1.0)
        for kept in range(1, DEPTH + 1)
    )
    facts = {"schema": 1, "weights": "w", "data": "made-up", "split": "test", "seed": 0}
    classes = tuple("abcde")
    known = Calibration(**facts, orders=2, images=9, classes=classes, rows=rows)
    return {"calibration": known, **options}


def test_blocks_of_other_models_have_no_expected_accuracy():
    """Neither with a donor from the start nor one that comes or goes while the request runs; an
    answer without such a block is as calibrated."""
    strange = set()

    async def go(place):
        async def ask(order):
            return (await place.classify(file_of(picture()), order=order)).json()

        calibrated = await ask("0,1,2,3")
        strange.update({("a", 2), ("a", 0), ("c", 3), ("b", 0)})  # b does not hold block 0
        several, one, without = [await ask(order) for order in ("0,1,2,3", "1,3", "1")]
        walk = place.front.classify

        async def swapped_back(images, **asked):
            found = await walk(images, **asked)
            strange.clear()
            return found

        place.front.classify = swapped_back
        return calibrated, several, one, without, await ask("2")

    found = run(go, **calibrated(strangers=lambda: frozenset(strange)))
    why = "blocks of another model than the calibrated one took part"
    assert [(one["expected"] or {}).get("top1") for one in found] == [80.0, None, None, 20.0, None]
    assert [one["expected_why"] for one in found] == [
        "", f"{why} (a: 0, 2; c: 3)", f"{why} (c: 3)", "", f"{why} (a: 2)",
    ]  # fmt: skip


def test_an_order_with_a_hole_is_degraded():
    """The policy calls such a route complete; the client asked for a block that did not run."""

    async def go(place):
        return (await place.classify(file_of(picture()), order="3,1,0")).json()

    answer = run(go, {"a": {0, 2}, "c": {3}})
    assert answer["blocks"] == [3, 0]
    assert answer["degraded"]


def test_a_broken_pipeline_is_lost():
    async def go(place):
        place.router.routing = "sequential"
        place.blocks.faults["b"] = HostGone("its process is dead")
        return await place.classify(file_of(picture()))

    response = run(go)
    assert response.status_code == 503
    assert response.json()["error"]["cause"] == (
        "The pipeline broke at block 1: host b is gone: its process is dead"
    )


def test_a_suspect_host_says_when_to_come_back():
    async def go(place):
        place.blocks.faults |= {name: HostFailed("it raised") for name in HOSTS}
        return await place.classify(file_of(picture()), deadline_ms=400)

    response = run(go, swarm=LIMITS.model_copy(update={"suspect_ms": 5000.0}))
    assert response.status_code == 503
    assert response.headers["retry-after"] in ("4", "5")
    assert response.json()["error"]["cause"].startswith("0 of 4 blocks could be run")


def test_numbers_that_are_not_finite_are_no_answer():
    async def go(place):
        with torch.no_grad():
            place.front.model.head.bias.fill_(float("nan"))
        return await place.classify(file_of(picture()))

    response = run(go)
    assert response.status_code == 503
    assert "not finite" in response.json()["error"]["cause"]


def test_health():
    async def go(place):
        fine = await place.client.get("/healthz")
        place.router.swarm = Swarm()
        return fine, await place.client.get("/healthz")

    fine, ill = run(go)
    assert (fine.status_code, ill.status_code) == (200, 503)
    assert fine.json() == {
        "ok": True, "why": "", "usable_hosts": 3, "reachable_blocks": 4, "depth": 4,
        "watching": None,
    }  # fmt: skip
    assert ill.json()["why"] == "no usable host holds a block"


def test_health_says_whether_hosts_are_watched():
    watched = [True]

    async def go(place):
        fine = await place.client.get("/healthz")
        watched[0] = False
        return fine, await place.client.get("/healthz"), (await place.client.get("/metrics")).text

    fine, left, metrics = run(go, watching=lambda: watched[0])
    assert (fine.status_code, fine.json()["watching"], fine.json()["why"]) == (200, True, "")
    assert (left.status_code, left.json()["watching"]) == (200, False)  # requests are answered
    assert left.json()["why"] == "nobody watches the hosts now: those that fail do not come back"
    assert "layershuffle_watching 0.0" in metrics.splitlines()


def test_audits_are_told():
    async def go(place):
        return [await place.client.get(path) for path in ("/metrics", "/v1/swarm")]

    metrics, swarm = run(go, audits=lambda: (12, 3))
    assert {
        "layershuffle_audits_total 12.0", "layershuffle_audits_disagreed_total 3.0",
    } <= set(metrics.text.splitlines())  # fmt: skip
    assert swarm.json()["audits"] == {"audited": 12, "disagreed": 3}
    metrics, swarm = run(go)
    assert "audits" not in metrics.text
    assert swarm.json()["audits"] is None


def test_hosts_that_left_are_not_counted_any_more():
    """Neither those told, nor those kept in memory when nobody asks."""

    async def go(place):
        for number in range(50):
            name = f"spare-{number}"
            place.router.swarm = Swarm([HostView(name, frozenset(range(DEPTH)))])
            await place.classify(file_of(picture()))
        kept = len(metrics_of(place.router)._labelled)
        last = (await place.client.get("/metrics")).text
        place.router.swarm = Swarm()
        return kept, last, (await place.client.get("/metrics")).text

    kept, last, empty = run(go)
    hosts = {line.split('"')[1] for line in last.splitlines() if "hops_total{" in line}
    assert kept <= 2
    assert hosts == {"spare-49"}
    assert "hops_total{" not in empty


def metrics_of(router):
    """The gateway's counters, by what they have the router tell them."""
    return next(one.__self__ for one in router.observers if isinstance(one.__self__, Metrics))


def test_metrics():
    async def go(place):
        await place.classify(file_of(picture()))
        place.blocks.faults["b"] = HostFailed("it raised")
        await place.classify(file_of(picture()))
        await place.classify(b"no image")
        await place.client.get("/v1/classify")
        return (await place.client.get("/metrics")).text

    lines = set(run(go).splitlines())
    assert {
        'layershuffle_requests_total{outcome="answered"} 1.0',
        'layershuffle_requests_total{outcome="degraded"} 1.0',
        'layershuffle_requests_total{outcome="refused"} 1.0',
        'layershuffle_hops_total{host="a",outcome="answered"} 2.0',
        'layershuffle_hops_total{host="b",outcome="failed"} 1.0',
        'layershuffle_blocks_used_bucket{le="3.0"} 1.0',
        'layershuffle_blocks_used_bucket{le="4.0"} 2.0',
        "layershuffle_request_seconds_count 2.0",
        "layershuffle_usable_hosts 2.0",
        "layershuffle_reachable_blocks 3.0",
    } <= lines


def test_openapi():
    async def go(place):
        return (await place.client.get("/openapi.json")).json(), await place.client.get("/docs")

    schema, page = run(go)
    post = schema["paths"]["/v1/classify"]["post"]
    assert set(post["requestBody"]["content"]) == {"multipart/form-data", "application/json"}
    assert {"200", "400", "401", "413", "415", "422", "429", "503"} <= set(post["responses"])
    assert post["security"]
    answer = schema["components"]["schemas"]["Classification"]["properties"]
    assert {"images", "route", "blocks", "skipped", "degraded", "expected"} <= set(answer)
    assert page.status_code == 200


# --- limits ---------------------------------------------------------------------------------------

ONE = base64.b64encode(file_of(picture())).decode()
WRONG = {
    "bad JSON": (400, b'{"image": '),
    "not an object": (422, b"[1]"),
    "no image": (422, b"{}"),
    "unknown field": (422, json.dumps({"image": ONE, "dead_line_ms": 5})),
    "two kinds": (422, json.dumps({"image": ONE, "images": [ONE]})),
    "bad base64": (400, json.dumps({"image": "@@@"})),
    "data URL": (400, json.dumps({"image": f"data:image/png;base64,{ONE}"})),
    "not an image": (422, json.dumps({"image": base64.b64encode(b"hello").decode()})),
    "cut image": (422, json.dumps({"image": ONE[:400]})),
    "deadline NaN": (422, f'{{"image": "{ONE}", "deadline_ms": NaN}}'),
    "deadline inf": (422, f'{{"image": "{ONE}", "deadline_ms": 1e999}}'),
    "deadline negative": (422, json.dumps({"image": ONE, "deadline_ms": -1})),
    "deadline short": (422, json.dumps({"image": ONE, "deadline_ms": 1})),
    "deadline long": (422, json.dumps({"image": ONE, "deadline_ms": 1e6})),
    "deadline text": (422, json.dumps({"image": ONE, "deadline_ms": "100"})),
    "order unknown": (422, json.dumps({"image": ONE, "order": "0,9"})),
    "order twice": (422, json.dumps({"image": ONE, "order": [0, 0]})),
    "order empty": (422, json.dumps({"image": ONE, "order": []})),
    "order words": (422, json.dumps({"image": ONE, "order": "a,b"})),
    "min_blocks": (422, json.dumps({"image": ONE, "min_blocks": 5})),
    "min_blocks of order": (422, json.dumps({"image": ONE, "min_blocks": 3, "order": "0,1"})),
    "top_k": (422, json.dumps({"image": ONE, "top_k": 0})),
    "top_k true": (422, json.dumps({"image": ONE, "top_k": True})),
    "too many": (413, json.dumps({"images": [ONE] * 4})),
    "too large": (413, b" " * 50_001),
    "many things": (422, b'{"images": [' + b"0," * 20_000 + b"0]}"),
    "deep": (400, b'{"order": ' + b"[" * 20_000),
}  # fmt: skip
SMALL = GatewayLimits(max_body_bytes=50_000, max_images=3, max_pixels=10_000)


def test_wrong_requests_are_told():
    async def go(place):
        headers = {"content-type": "application/json"}
        return {
            name: await place.client.post("/v1/classify", content=body, headers=headers)
            for name, (_, body) in WRONG.items()
        }

    responses = run(go, limits=SMALL)
    assert {name: r.status_code for name, r in responses.items()} == {
        name: status for name, (status, _) in WRONG.items()
    }
    for name, response in responses.items():
        error = response.json()["error"]
        assert error["cause"], name
        assert error["hint"], name
        assert error["id"] is None
        assert "Traceback" not in response.text
    assert responses["many things"].json()["error"]["cause"] == "The body holds too many values"
    assert "did you mean deadline_ms?" in responses["unknown field"].json()["error"]["cause"]


def post(body, **headers):
    async def go(place):
        return await place.client.post("/v1/classify", content=body, headers=headers)

    return run(go, limits=SMALL)


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [
        ("text/plain", None),
        ("application/x-www-form-urlencoded", None),
        ("", None),
        ("multipart/mixed; boundary=x", None),
        ("application/json", "gzip"),
    ],
)
def test_other_bodies_are_not_read(kind, encoding):
    headers = {"content-type": kind} | ({"content-encoding": encoding} if encoding else {})
    response = post(b"{}", **headers)
    assert response.status_code == 415
    assert "multipart/form-data" in response.json()["error"]["hint"]


PART = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
FORMS = {
    "no boundary": (400, "multipart/form-data", b""),
    "long boundary": (400, "multipart/form-data; boundary=" + "x" * 300, b""),
    "empty": (400, "multipart/form-data; boundary=x", b""),
    "only the end": (422, "multipart/form-data; boundary=x", b"--x--\r\n"),
    "cut short": (400, "multipart/form-data; boundary=x", PART + b"abc"),
    "no name": (400, "multipart/form-data; boundary=x", b"--x\r\nA: b\r\n\r\nabc\r\n--x--"),
    "another boundary": (400, "multipart/form-data; boundary=y", PART + b"abc\r\n--x--"),
    "too many": (413, "multipart/form-data; boundary=x", (PART + b"abc\r\n") * 4 + b"--x--"),
    "field twice": (
        422, "multipart/form-data; boundary=x",
        b'--x\r\nContent-Disposition: form-data; name="top_k"\r\n\r\n3\r\n' * 2 + b"--x--",
    ),
    "many fields": (
        422, "multipart/form-data; boundary=x",
        b"".join(
            b'--x\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n3\r\n' % i
            for i in range(50)
        ) + b"--x--",
    ),
    "long header": (
        400, "multipart/form-data; boundary=x", b"--x\r\nA: " + b"b" * 9000 + b"\r\n\r\n--x--"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_broken_forms_are_told(name):
    status, kind, body = FORMS[name]
    response = post(body, **{"content-type": kind})
    assert response.status_code == status, response.text
    assert response.json()["error"]["cause"]


def test_a_body_is_measured_as_it_comes():
    """Without a Content-Length the body is cut off where it grows too large, not at its end."""
    sent = []

    async def chunks():
        for _ in range(1000):
            sent.append(1)
            yield b" " * 10_000

    async def go(place):
        return await place.client.post(
            "/v1/classify", content=chunks(), headers={"content-type": "application/json"}
        )

    response = run(go, limits=SMALL)
    assert response.status_code == 413
    assert len(sent) == 6
    told = post(b"{}", **{"content-type": "application/json", "content-length": "9" * 5000})
    assert told.status_code == 413


def test_a_body_that_does_not_come():
    async def chunks():
        yield b"{"
        await asyncio.sleep(30)

    async def go(place):
        return await place.client.post(
            "/v1/classify", content=chunks(), headers={"content-type": "application/json"}
        )

    assert run(go, limits=GatewayLimits(body_ms=50)).status_code == 408


def png_claiming(width, height):
    """A PNG of a few bytes that says it is that large."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("size", "word"),
    [((200, 51), "200x51 pixels"), ((60_000, 60_000), "too large"), ((2, 400), "model's size")],
)
def test_bombs_are_not_decoded(size, word):
    """Many pixels; so many that Pillow warns; few, but a long thin image grows when resized."""

    async def go(place):
        return await place.classify(png_claiming(*size))

    response = run(go, limits=SMALL)
    assert response.status_code == 422
    assert word in response.json()["error"]["cause"]
    assert "image 1 of 1" in response.json()["error"]["cause"]


def test_too_many_at_once():
    """One runs, one waits, the third is told to come later; the deadline holds while waiting."""

    async def go(place):
        place.blocks.delay = 0.5
        file = file_of(picture())
        slow = asyncio.ensure_future(place.classify(file, deadline_ms=2000))
        while not place.blocks.visits:
            await asyncio.sleep(0.005)
        waits = asyncio.ensure_future(place.classify(file, deadline_ms=60))
        await asyncio.sleep(0.02)
        third = await place.classify(file)
        return await slow, await waits, third

    slow, waits, third = run(go, {"a": range(DEPTH)}, limits=GatewayLimits(running=1, waiting=1))
    assert slow.status_code == 200
    assert waits.status_code == 503
    assert "before it was the request's turn" in waits.json()["error"]["cause"]
    assert third.status_code == 429
    assert third.headers["retry-after"] == "1"


class SlowDecoding:
    """Images as wide as `WIDTH` are decoded only when they may; `decoded` are those begun."""

    WIDTH = 60

    def __init__(self, monkeypatch):
        self.free, self.decoded = threading.Event(), []
        genuine = Decoder._decoded

        def decoded(decoder, image, place):
            self.decoded.append(image.width)
            if image.width == self.WIDTH:
                assert self.free.wait(5)
            return genuine(decoder, image, place)

        monkeypatch.setattr(Decoder, "_decoded", decoded)

    async def begun(self, count=1):
        while self.decoded.count(self.WIDTH) < count:
            await asyncio.sleep(0.005)


SLOW = file_of(picture(size=(SlowDecoding.WIDTH, 32)))


def test_the_wait_for_a_decoder_ends_at_the_deadline(monkeypatch):
    """A request behind one that decodes for long is told in time, and is never decoded."""
    decoding = SlowDecoding(monkeypatch)

    async def go(place):
        first = asyncio.ensure_future(place.classify(SLOW, deadline_ms=8000))
        await decoding.begun()
        begun = time.monotonic()
        late = await place.classify(file_of(picture()), deadline_ms=100)
        waited = time.monotonic() - begun
        decoding.free.set()
        return (await first).status_code, late, waited

    first, late, waited = run(go, limits=GatewayLimits(decoders=1))
    assert first == 200
    assert decoding.decoded == [SlowDecoding.WIDTH]
    assert 0.1 <= waited < 2
    assert late.status_code == 503
    assert late.json()["error"]["cause"] == "The deadline passed before the images were decoded"
    assert "fewer or smaller images" in late.json()["error"]["hint"]
    assert late.headers["retry-after"]


def test_decoding_ends_with_its_deadline(monkeypatch):
    """The answer is out in time although a thread decodes, which then leaves the rest alone."""
    decoding = SlowDecoding(monkeypatch)

    async def go(place):
        begun = time.monotonic()
        late = await place.classify(SLOW, file_of(picture()), deadline_ms=100)
        waited = time.monotonic() - begun
        decoding.free.set()
        fine = await place.classify(file_of(picture(size=(40, 40))))
        return late.status_code, waited, fine.status_code

    status, waited, fine = run(go, limits=GatewayLimits(decoders=1))
    assert (status, fine) == (503, 200)
    assert 0.1 <= waited < 2
    assert decoding.decoded == [SlowDecoding.WIDTH, 40]  # not the second image of the first


def test_one_client_leaves_decoders_for_others(monkeypatch):
    """Also one that gives up at once and asks again."""
    decoding = SlowDecoding(monkeypatch)

    async def go(place):
        async with place.client_at("10.0.0.1") as greedy, place.client_at("10.0.0.2") as other:
            for _ in range(3):
                assert (await classify(greedy, SLOW, deadline_ms=100)).status_code == 503
            fine = await classify(other, file_of(picture()), deadline_ms=5000)
            begun = list(decoding.decoded)
            decoding.free.set()
            again = await classify(greedy, file_of(picture()), deadline_ms=5000)
        return begun, fine.status_code, again.status_code

    found = run(go, limits=GatewayLimits(decoders=2))
    assert found == ([SlowDecoding.WIDTH, SIZE], 200, 200)


def test_clients_are_forgotten():
    """When they have nothing under way any more, a thread that still decodes for them included."""
    free = threading.Event()

    async def go():
        clients = Clients(GatewayLimits(client_requests=1))
        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            stack.callback(free.set)
            with pytest.raises(TimeoutError), clients.request_of("::ffff:10.0.0.1") as one:
                async with asyncio.timeout(0.01):
                    await one.decode(pool, free.wait)
            assert len(clients) == 1
            with clients.request_of("10.0.0.1") as again:
                assert again is one
                with pytest.raises(Refused) as told, clients.request_of("10.0.0.1"):
                    pass
                assert told.value.status == 429
                with clients.request_of("10.0.0.2"):
                    assert len(clients) == 2
            free.set()
            while len(clients):
                await asyncio.sleep(0.005)

    asyncio.run(go())


def test_the_pixels_of_a_request_are_bounded():
    """Each image may be that large, all together not; none is decoded: none could be."""
    fits, wide = png_claiming(90, 100), png_claiming(1, 7)

    async def go(place):
        return [
            await place.classify(fits, fits),
            await place.classify(fits, fits, fits),
            await place.classify(fits, wide, fits),  # 1 x 7 is made 36 x 252
        ]

    limits = SMALL.model_copy(update={"max_images": 4, "max_request_pixels": 20_000})
    few, many, resized = [one.json()["error"]["cause"] for one in run(go, limits=limits)]
    assert few == "The image cannot be read (image 1 of 2)"
    assert many == (
        "The images of the request have too many pixels together (27000 and more; at most 20000) "
        "(image 3 of 3)"
    )
    assert "too many pixels together (27072 and more" in resized


def png_with(*chunks):
    """A small PNG with these chunks behind its head."""
    file = file_of(picture())
    made = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return file[:33] + made + file[33:]


def test_texts_and_profiles_of_a_png_are_not_unpacked(monkeypatch):
    packed = zlib.compress(bytes(1 << 20), 9)
    dear = png_with(*[(b"zTXt", b"a\0\0" + packed)] * 60, *[(b"iCCP", b"a\0\0" + packed)] * 60)
    unpacked = []
    monkeypatch.setattr(PngImagePlugin, "_safe_zlib_decompress", unpacked.append)

    async def go(place):
        answers = [await place.classify(one, order="0,1") for one in (dear, file_of(picture()))]
        return [one.json()["images"] for one in answers]

    with_texts, without = run(go)
    assert with_texts == without
    assert unpacked == []
    clear = png_with((b"tRNS", b"\0\1" * 3))
    assert bombs.lean(clear) == clear
    assert bombs.lean(clear[:60]) == clear[:60]


def test_jpegs_of_many_scans_are_not_decoded():
    """Each goes over the whole image, and takes 42 bytes of the file."""
    buffer = io.BytesIO()
    picture(size=(64, 64)).save(buffer, "JPEG", progressive=True, icc_profile=b"\xff\xda" * 500)
    file = buffer.getvalue()
    *_, last = [one.start() for one in re.finditer(rb"\xff\xda\0", file)]

    def with_scans(count):
        return file[:last] + file[last:-2] * (count - 9) + file[-2:]

    assert [bombs.scans_of(with_scans(count)) for count in (10, 32, 33, 99)] == [10, 32, 33, 33]
    assert bombs.scans_of(file_of(picture(), "JPEG")) == 1
    assert bombs.scans_of(file_of(picture())) == bombs.scans_of(b"") == 0

    async def go(place):
        return [await place.classify(with_scans(count)) for count in (10, 32, 33)]

    fine, most, many = run(go)
    assert (fine.status_code, most.status_code) == (200, 200)
    assert many.status_code == 422
    assert many.json()["error"]["cause"] == "The image has more than 32 scans (image 1 of 1)"


def test_bodies_that_trickle_take_no_places():
    """One place, and a client whose bodies do not come: another is answered, the first is told."""

    async def go(place):
        sent = asyncio.Event()

        async def trickle():
            yield b"{"
            sent.set()
            await asyncio.sleep(1)

        json_kind = {"content-type": "application/json"}
        async with place.client_at("10.0.0.1") as slow, place.client_at("10.0.0.2") as other:
            ask = slow.post("/v1/classify", content=trickle(), headers=json_kind)
            trickling = asyncio.ensure_future(ask)
            await sent.wait()
            more = await classify(slow, file_of(picture()))
            fine = await classify(other, file_of(picture()))
            return more, fine.status_code, (await trickling).status_code

    limits = GatewayLimits(running=1, waiting=0, client_requests=1, body_ms=800)
    more, fine, trickled = run(go, limits=limits)
    assert (more.status_code, fine, trickled) == (429, 200, 408)
    assert "from your address are under way" in more.json()["error"]["cause"]
    assert more.headers["retry-after"] == "1"


def test_bodies_share_the_memory():
    async def go(place):
        file = file_of(picture())
        full = await place.classify(file)
        return full, await place.classify(file[:500])

    full, fits = run(go, limits=GatewayLimits(held_bytes=1000))
    assert full.status_code == 429
    assert "fill the memory" in full.json()["error"]["cause"]
    assert fits.status_code == 422  # the bytes of the first were given back


def test_a_client_that_goes_away_ends_its_walk():
    async def go(place):
        place.blocks.delay = 20
        body = json.dumps({"image": ONE, "deadline_ms": 25_000}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive():
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        sent = []

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/classify", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1),
            "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("gateway", 80),
        }  # fmt: skip
        call = asyncio.ensure_future(place.app(scope, receive, send))
        while not place.blocks.visits:
            await asyncio.sleep(0.005)
        gone.set()
        await call
        while not place.blocks.cancelled:
            await asyncio.sleep(0.005)
        place.blocks.delay = 0
        return sent[0]["status"], (await place.classify(file_of(picture()))).status_code

    assert run(go) == (499, 200)


def test_an_unexpected_failure_tells_an_id_only(caplog):
    async def go(place):
        async def broken(start, **asked):
            raise ZeroDivisionError("a secret")

        place.router.walk = broken
        return await place.classify(file_of(picture()))

    response = run(go, raises=False)
    assert response.status_code == 500
    error = response.json()["error"]
    assert len(error["id"]) == 32
    assert "secret" not in response.text
    assert error["id"] in caplog.text
    assert "ZeroDivisionError: a secret" in caplog.text


def test_wrong_paths_and_methods():
    async def go(place):
        return [
            await place.client.get("/v1/classify"),
            await place.client.get("/nothing"),
            await place.client.get("/healthz/"),
            await place.client.get("/healthz", headers={"host": "[::"}),
        ]

    responses = run(go)
    assert [r.status_code for r in responses] == [405, 404, 404, 200]
    assert responses[0].json()["error"] == {
        "cause": "Method Not Allowed", "hint": "see /docs for what there is", "id": None,
    }  # fmt: skip


# --- keys and rates -------------------------------------------------------------------------------


def test_keys():
    async def go(place):
        ask = place.client.get
        return [
            (await ask("/v1/swarm")).status_code,
            (await ask("/v1/swarm", headers={"X-API-Key": KEY + "x"})).status_code,
            (await ask("/v1/swarm", headers={"X-API-Key": KEY})).status_code,
            (await ask("/v1/swarm", headers={"Authorization": f"bearer {KEY}"})).status_code,
            (await ask("/v1/swarm", headers={"Authorization": f"Basic {KEY}"})).status_code,
            (await ask("/metrics")).status_code,
            (await ask("/healthz")).status_code,
            (await place.classify(file_of(picture()))).headers["www-authenticate"],
            (await ask("/metrics", headers={"X-API-Key": "another key, also good"})).status_code,
        ]

    found = run(go, keys=[KEY, "another key, also good"])
    assert found == [401, 401, 200, 200, 401, 401, 200, "Bearer", 200]


def test_keys_compare_in_constant_time(monkeypatch):
    """Every comparison is hmac's, of digests of one length, and all keys are compared."""
    compared = []
    genuine = auth.hmac.compare_digest

    def spy(one, two):
        compared.append((len(one), len(two)))
        return genuine(one, two)

    monkeypatch.setattr(auth.hmac, "compare_digest", spy)
    keys = Keys([KEY, KEY + "2", KEY + "3"])
    assert keys.open_for(KEY.encode())
    assert not keys.open_for(b"x")
    assert compared == [(32, 32)] * 6
    assert Keys([]).open_for(None)
    assert not keys.open_for(None)
    with pytest.raises(UsageError, match="at least 16 characters"):
        Keys(["short"])


def test_bucket_against_a_slow_count():
    """Requests at random times: the bucket lets through what a plain simulation does."""
    limits = GatewayLimits(rate=5, burst=3)
    rng = np.random.default_rng(0)
    bucket, now = None, 0.0
    level, passed, total = 3.0, 0, 0
    for gap in rng.exponential(0.1, 500):
        now += gap
        level = min(3.0, level + gap * 5)
        bucket, wait = take(bucket, now=now, limits=limits)
        assert (wait == 0) == (level >= 1)
        if wait:
            assert wait == pytest.approx((1 - level) / 5)
            later, none = take(bucket, now=now + wait + 1e-9, limits=limits)
            assert none == 0
            assert later.tokens == pytest.approx(0, abs=1e-6)
        else:
            level -= 1
            passed += 1
        total += 1
    assert passed <= 3 + 5 * now
    assert passed < total


def test_a_clock_that_steps_back_gives_nothing():
    limits = GatewayLimits(rate=1, burst=1)
    bucket, _ = take(Bucket(1, 10.0), now=10.0, limits=limits)
    assert take(bucket, now=5.0, limits=limits)[1] == 1


def test_rates_are_per_client_and_bounded():
    limits = GatewayLimits(rate=0.001, burst=1, max_clients=10)
    rates = Rates(limits)
    assert rates.wait("10.0.0.1", now=0) == 0
    assert rates.wait("10.0.0.1", now=0) > 0
    assert rates.wait("::ffff:10.0.0.1", now=0) > 0
    assert rates.wait("10.0.0.2", now=0) == 0
    assert rates.wait("2001:db8::1", now=0) == 0
    assert rates.wait("2001:db8::ffff", now=0) > 0  # one network, one client
    assert rates.wait("2001:db8:0:1::1", now=0) == 0
    assert rates.wait("unix", now=0) == 0
    for number in range(100):
        rates.wait(f"10.1.0.{number}", now=0)
    assert len(rates) == 10


def test_too_fast():
    async def go(place):
        one = [(await place.client.get("/v1/swarm")).status_code for _ in range(4)]
        last = await place.client.get("/v1/swarm")
        return one, last, (await place.client.get("/healthz")).status_code

    statuses, last, health = run(go, limits=GatewayLimits(rate=0.25, burst=3))
    assert statuses == [200, 200, 200, 429]
    assert last.headers["retry-after"] in ("3", "4")
    assert health == 200


# --- serving --------------------------------------------------------------------------------------


def test_other_machines_need_a_key():
    async def go(place):
        with pytest.raises(UsageError, match="without an API key"):
            await serve(place.app, host="0.0.0.0", port=0)
        with pytest.raises(UsageError, match="without an API key"):
            await serve(place.app, host="example.org", port=0)

    run(go)
    for host, keyed, encrypted in [
        ("10.0.0.1", False, False), ("10.0.0.1", True, True), ("127.0.0.1", True, False),
    ]:  # fmt: skip
        assert auth.in_clear(host, keyed=keyed, encrypted=encrypted) == ""
    warning = auth.in_clear("10.0.0.1", keyed=True, encrypted=False)
    assert warning.startswith("API keys, images and answers travel to and from 10.0.0.1 in clear")
    for host, keyed, public in [
        ("0.0.0.0", True, False), ("0.0.0.0", False, True), ("127.0.0.1", False, False),
        ("::1", False, False), ("localhost", False, False), ("127.8.8.8", False, False),
    ]:  # fmt: skip
        auth.check_address(host, keyed=keyed, public=public)


def test_the_listener():
    """It names its protocol, or asyncio leaves Nagle's algorithm on: 40 ms per answer."""
    limits = GatewayLimits()
    with serving._listening("127.0.0.1", 0, limits) as listener:
        taken = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", taken)):
            accepted, _ = listener.accept()
        with accepted:
            assert listener.proto == accepted.proto == socket.IPPROTO_TCP
        with pytest.raises(LayerShuffleError, match=f"cannot listen on 127.0.0.1:{taken}"):
            serving._listening("127.0.0.1", taken, limits)


def test_the_server_believes_no_forwarded_address():
    config = server_config(lambda: None)
    assert not config.proxy_headers
    assert not config.server_header


HEAD = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"
QUICK = GatewayLimits(head_ms=200)
PATIENCE = 5  # seconds that a test waits for what takes a fraction of one


async def plain(scope, receive, send):
    """Answers "/wait" after half a second, "/large" with 20 MB, all else at once."""
    if scope["type"] == "lifespan":
        return
    if scope["path"] == "/wait":
        await asyncio.sleep(0.5)
    body = bytes(20_000_000 if scope["path"] == "/large" else 2)
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def closed_after(reader):
    """Seconds until the other side closes."""
    begun = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
    return time.monotonic() - begun


async def answered(reader, writer, path="/"):
    writer.write(HEAD.replace(b"/healthz", path.encode()))
    async with asyncio.timeout(PATIENCE):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
    return head.startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def connected(port, **options):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield reader, writer
    finally:
        writer.close()


def test_silent_connections_are_closed():
    """Never a request, never a whole head, nothing after an answer, or the rest of a body."""

    async def trickle(writer, text):
        with suppress(ConnectionError):
            for byte in text:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)

    async def after(port, first, rest=b""):
        async with connected(port) as (reader, writer):
            writer.write(first)
            trickling = asyncio.ensure_future(trickle(writer, rest))
            took = await closed_after(reader)
            trickling.cancel()
            return took

    async def go():
        async with listening(plain, QUICK) as (_, port):
            unread = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n"
            return await asyncio.gather(
                after(port, b""),
                after(port, b"", HEAD * 9),
                after(port, HEAD, b"GET /" + b"x" * 200),
                after(port, unread, b"x" * 200),
                after(port, unread + b"x"),
            )

    assert all(0.15 < took < 1.5 for took in asyncio.run(go()))


def test_connections_in_use_stay():
    """A request may take longer than its head, and the next may come at once or later."""

    async def go():
        async with listening(plain, QUICK) as (_, port), connected(port) as (reader, writer):
            assert await answered(reader, writer, "/wait")
            await asyncio.sleep(0.1)
            assert await answered(reader, writer, "/wait")
            writer.write(HEAD * 3)  # pipelined
            for _ in range(3):
                await reader.readuntil(b"\r\n\r\n\0\0")
            return await answered(reader, writer)

    assert asyncio.run(go())


def test_answers_that_are_not_fetched_are_dropped():
    async def go():
        async with listening(plain, QUICK) as (server, port):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setblocking(False)
                client.send(HEAD.replace(b"/healthz", b"/large"))
                async with asyncio.timeout(PATIENCE):
                    while server.server_state.total_requests < 1:
                        await asyncio.sleep(0.01)
                    assert server.server_state.connections
                    while server.server_state.connections:
                        await asyncio.sleep(0.01)

    asyncio.run(go())


def test_one_address_leaves_connections_for_others():
    """Those beyond are closed at once; one that closes makes room; others are let in, up to all."""
    limits = GatewayLimits(head_ms=60_000, client_connections=2, connections=3)

    async def go():
        async with AsyncExitStack() as stack, listening(plain, limits) as (server, port):

            async def connect(address):
                return await stack.enter_async_context(connected(port, local_addr=(address, 0)))

            first = await connect("127.0.0.1")
            assert await answered(*await connect("127.0.0.1"))
            assert await closed_after((await connect("127.0.0.1"))[0]) < 1
            assert await answered(*await connect("127.0.0.2"))
            assert await closed_after((await connect("127.0.0.3"))[0]) < 1
            assert await answered(*first)
            first[1].close()
            async with asyncio.timeout(PATIENCE):
                while len(server.server_state.connections) > 2:
                    await asyncio.sleep(0.01)
            return await answered(*await connect("127.0.0.1"))

    assert asyncio.run(go())


# --- pure -----------------------------------------------------------------------------------------


def test_degraded_is_about_what_was_asked():
    def route(*order):
        return Route(4, order, {}, (), "complete", 1.0)

    assert not schemas.is_degraded(route(3, 1, 0, 2), order=None)
    assert schemas.is_degraded(route(3, 1, 0), order=None)
    assert not schemas.is_degraded(route(3, 1), order=(3, 1))
    assert schemas.is_degraded(route(3), order=(3, 1))


def test_retry_after_is_the_next_probe():
    hosts = [
        HostView("a", frozenset({0}), condition="suspect", retry_at=7.5),
        HostView("b", frozenset({1}), condition="suspect", retry_at=6.0),
        HostView("c", frozenset({2}), condition="gone", retry_at=1.0),
    ]
    assert schemas.retry_after(Swarm(hosts), now=5) == 1
    assert schemas.retry_after(Swarm(hosts), now=9) == 0
    assert schemas.retry_after(Swarm(hosts[2:]), now=5) == 1


def test_labels_must_fit():
    async def go():
        async with site(labels=["a", "b"]):
            pass

    with pytest.raises(UsageError, match="2 labels do not name 5 classes"):
        asyncio.run(go())
