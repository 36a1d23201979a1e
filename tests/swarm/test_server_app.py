"""The routes of the gateway over a swarm in this process: answers, refusals, failures, health,
metrics."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from gateway_site import HOSTS, VIT, made_up, picture, run, run_in_virtual_time

from common import CLASSES, DEPTH
from layershuffle.core.stack import running
from layershuffle.data.transforms import PixelFinish, PlainTransform
from layershuffle.gateway.brain.state import HostState, Swarm, VisitError, retry_after
from layershuffle.gateway.hosts import served_model
from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.gateway.http.app import Quiet
from layershuffle.gateway.http.listening import listening
from layershuffle.gateway.http.operator import add_operator
from layershuffle.models import image_view
from pictures import file_of

KEY, OTHER = "a-key-of-some-length", "another-key-also-good"
GETS = ("/v1/swarm", "/livez", "/readyz", "/healthz", "/metrics", "/openapi.json", "/")


def tensors(*pictures):
    view = image_view(VIT.wrapped())
    return PixelFinish(view)(torch.stack([PlainTransform(view)(image) for image in pictures]))


def logits(model, batch, order):
    with torch.inference_mode(), running(model, order):
        return model(batch)


def test_answer_equals_the_in_process_forward():
    image = picture(1)

    async def go(place):
        return (await place.classify(file_of(image), top=3)).json()

    answer = run(go)
    wanted = logits(VIT.wrapped(), tensors(image), answer["blocks"])[0].double().softmax(-1)
    top = wanted.topk(3)
    assert [g["index"] for g in answer["top"]] == top.indices.tolist()
    # Sums of exponentials in another order differ in the last bits.
    assert [g["probability"] for g in answer["top"]] == pytest.approx(top.values.tolist())
    assert answer["top"][0]["label"] == str(top.indices[0].item())
    assert sorted(answer["blocks"]) == list(range(DEPTH))
    assert not answer["degraded"]
    assert answer["ending"] == "complete"
    assert answer["expected"] is None
    assert "never calibrated" in answer["expected_why"]
    assert [hop["outcome"] for hop in answer["route"]] == ["answered"] * DEPTH
    ran = {name: {h["block"] for h in answer["route"] if h["host"] == name} for name in HOSTS}
    assert ran == HOSTS
    assert all(hop["ms"] > 0 and hop["compute_ms"] == 0.5 for hop in answer["route"])
    assert answer["ms"]["total"] >= answer["ms"]["swarm"] > 0


def test_a_dead_host_degrades_the_answer():
    async def go(place):
        place.blocks.faults["b"] = VisitError("its process is dead", outcome="lost")
        first = (await place.classify(file_of(picture()))).json()
        second = await place.classify(file_of(picture()), min_blocks=4, deadline_ms=2000)
        swarm = (await place.client.get("/v1/swarm")).json()
        return first, second, swarm

    first, second, swarm = run_in_virtual_time(go)
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
    assert swarm["hosts"][0]["compute_ms"] == pytest.approx(0.5)


def test_a_head_that_stalled_once_does_not_refuse_all_later_requests():
    """Of two seconds the blocks need 1.2, and a head of ten has made the average 2.5."""

    async def go(place):
        visit = place.blocks.visit

        async def slowly(*asked, **how):
            await asyncio.sleep(0.3)
            return await visit(*asked, **how)

        place.blocks.visit, place.remote_model._head.seconds = slowly, 2.5
        body, options = file_of(picture()), {"deadline_ms": 2000}
        first = (await place.classify(body, **options)).json()
        answers = [await place.classify(body, **options, min_blocks=4) for _ in range(8)]
        return len(first["blocks"]), [answer.status_code for answer in answers]

    blocks, (second, *_, last) = run_in_virtual_time(go)
    assert (blocks, second, last) == (3, 503, 200), "it had half of the time"


def test_the_first_time_of_a_head_counts_whole(monkeypatch):
    """It is kept for the next head, which a fifth of it would be too short for."""
    moments = iter([0.0, 0.1, 5.0, 5.2])
    monkeypatch.setattr(served_model.time, "perf_counter", lambda: next(moments))
    with ThreadPoolExecutor(1) as pool:
        head = served_model._Timed(pool)
        assert head.seconds == 0
        assert head.run(lambda state: state, "a") == "a"
        assert head.seconds == pytest.approx(0.1)
        head.run(lambda state: state, "b")
        assert head.seconds == pytest.approx(0.8 * 0.1 + 0.2 * 0.2)


def test_errors_that_cannot_be_encoded():
    """A file name that is no UTF-8 stands in an error as half a surrogate pair."""

    async def go(place):
        place.blocks.faults["b"] = VisitError("no file /\udcff", outcome="lost")
        refused = await place.classify(file_of(picture()), min_blocks=4, deadline_ms=2000)
        return refused.status_code, "no file /?" in refused.text

    assert run_in_virtual_time(go) == (503, True)


def test_numbers_that_are_not_finite_are_no_answer():
    async def go(place):
        place.remote_model.model.head = lambda state: np.full((1, CLASSES), np.nan, np.float32)
        return await place.classify(file_of(picture()))

    response = run(go)
    assert response.status_code == 503
    assert "not finite" in response.json()["error"]["cause"]


def test_the_doors_for_machines():
    """Alive, ready and healthy are three things; `why` says what is wrong, also where it is ok."""

    async def go(place):
        async def doors():
            paths = ("/livez", "/readyz", "/healthz")
            return [await place.client.get(path) for path in paths]

        whole = await doors()
        place.router.swarm = Swarm(host for host in place.router.swarm.values() if host.name != "b")
        part = await doors()
        place.router.swarm = Swarm()
        return whole, part, await doors()

    whole, part, empty = run(go, calibration=made_up(), min_accuracy=70.0)
    assert [answer.status_code for answer in whole] == [200, 200, 200]
    assert whole[2].json() == {"ok": True, "why": ""}
    assert [answer.status_code for answer in part] == [200, 503, 200]
    missing = "no usable host holds block 1"
    low = "the accuracy of answers is below 70 %: 60.0 % are expected"
    assert [answer.json()["why"] for answer in part[1:]] == [f"{missing}; {low}", missing]
    assert [answer.status_code for answer in empty] == [200, 503, 503]
    assert empty[1].json()["why"] == "no usable host holds a block"
    # Nothing is known of a model without a calibration, so it cannot be accurate enough.
    (_, unknown, _), *_ = run(go, min_accuracy=70.0)
    assert unknown.status_code == 503
    assert "never calibrated" in unknown.json()["why"]
    (_, asked_nothing, _), *_ = run(go)
    assert asked_nothing.status_code == 200


def test_head_is_answered_where_get_is():
    async def go(place):
        async with (
            listening(place.app) as (listener, _),
            httpx.AsyncClient(base_url=listener.url) as client,
        ):
            heads = [await client.head(path) for path in GETS]
            return heads, (await client.head("/v1/classify")).status_code

    heads, classify = run(go, page=True)
    assert [(head.status_code, head.content) for head in heads] == [(200, b"")] * len(GETS)
    assert classify == 405


@pytest.mark.parametrize("keys", [(), ("a-key-of-some-length",)])
def test_openapi(keys):
    async def go(place):
        return (await place.client.get("/openapi.json")).json()

    schema = run(go, keys=keys)
    post = schema["paths"]["/v1/classify"]["post"]
    assert set(post["requestBody"]["content"]) == {"image/*"}
    names = ["deadline_ms", "min_blocks", "confidence", "top"]
    assert [option["name"] for option in post["parameters"]] == names
    assert {"200", "413", "415", "422", "429", "503"} <= set(post["responses"])
    # An open gateway asks for no key, and says so.
    for path in ("/v1/classify", "/v1/swarm", "/metrics"):
        (operation,) = schema["paths"][path].values()
        assert ("security" in operation, "401" in operation["responses"]) == (bool(keys),) * 2
    assert ("securitySchemes" in schema["components"]) == bool(keys)
    answer = schema["components"]["schemas"]["Classification"]["properties"]
    assert {"top", "route", "blocks", "skipped", "degraded", "expected"} <= set(answer)


def test_an_unexpected_failure_shows_an_id_only(caplog):
    async def go(place):
        async def broken(start, **options):
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
        "cause": "Method Not Allowed",
        "hint": "see /openapi.json for the paths and methods",
        "id": None,
    }


def test_keys_guard_all_but_the_health():
    async def go(place):
        async def ask(path, word=None):
            headers = {} if word is None else {"Authorization": word}
            return (await place.client.get(path, headers=headers)).status_code

        words = (f"Bearer {KEY}x", "Bearer ", f"Bearer {KEY}", f"bearer {KEY}", f"Basic {KEY}")
        refused = await place.classify(file_of(picture()))
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert [await ask("/v1/swarm", word) for word in words] == [401, 401, 200, 200, 401]
        assert [await ask(path) for path in ("/v1/swarm", "/metrics")] == [401, 401]
        assert await ask("/healthz") == 200
        assert await ask("/metrics", f"Bearer {OTHER}") == 200

    run(go, keys=[KEY, OTHER])


def test_refusals_in_the_log_against_a_slow_count():
    """Lines at random times: as many are written as a plain token bucket lets through."""
    quiet = Quiet(3, every=0.2)
    rng = np.random.default_rng(0)
    now, tokens, written = 100.0, 3.0, 0
    for gap in rng.exponential(0.1, 500):
        now += gap
        tokens = min(3.0, tokens + gap * 5)
        spoken = quiet.may_speak(now)
        assert spoken == (tokens >= 1)
        tokens -= spoken
        written += spoken
    assert 100 < written <= 3 + 5 * (now - 100)
    assert not any(quiet.may_speak(5.0) for _ in range(9)), "a clock that steps back gives nothing"


# --- options and bodies ---------------------------------------------------------------------------

SMALL = GatewayLimits(max_body_bytes=50_000)
OPTIONS = {
    "unknown": ({"dead_line_ms": 5}, "dead_line_ms is unknown, did you mean deadline_ms?"),
    "deadline NaN": ({"deadline_ms": "NaN"}, "deadline_ms: "),
    "deadline infinite": ({"deadline_ms": "1e999"}, "deadline_ms: "),
    "deadline negative": ({"deadline_ms": -1}, "deadline_ms: "),
    "deadline short": ({"deadline_ms": 1}, "deadline_ms is 1"),
    "deadline long": ({"deadline_ms": 1e6}, "deadline_ms is 1e+06"),
    "deadline text": ({"deadline_ms": "soon"}, "deadline_ms: "),
    "min_blocks": ({"min_blocks": 5}, "min_blocks is 5, but at most 4 blocks can run"),
    "confidence 0": ({"confidence": 0}, "confidence: "),
    "confidence above 1": ({"confidence": 1.5}, "confidence: "),
    "confidence text": ({"confidence": "on"}, "confidence: "),
    "confidence NaN": ({"confidence": "nan"}, "confidence: "),
    "top": ({"top": 0}, "top: "),
    "top text": ({"top": "True"}, "top: "),
    "order": ({"order": "3,0,2"}, "order is unknown"),
    "several": ({"top": 0, "a": 1, "b": 2, "deadline_ms": 0}, "; "),
}
BODIES = {
    "no image": (422, b"", {}, "There is no image in the request"),
    "text": (422, b"hello", {}, "The image cannot be read"),
    "cut": (422, file_of(picture())[:400], {}, "The image cannot be read"),
    "AVIF": (422, file_of(picture(), "AVIF"), {}, "The image cannot be read"),
    "too large": (413, b" " * 50_001, {}, "The body is larger than 50000 bytes"),
    "announced": (413, b"", {"content-length": "9" * 5000}, "The body is larger than"),
    "a form": (415, b"x", {"content-type": "multipart/form-data; boundary=x"}, "not an image"),
    "compressed": (415, b"x", {"content-encoding": "gzip"}, "not an image alone"),
}


def test_wrong_options_are_named():
    async def go(place):
        return [await place.classify(b"", **options) for options, _ in OPTIONS.values()]

    for (name, (_, cause)), response in zip(OPTIONS.items(), run(go, limits=SMALL), strict=True):
        error = response.json()["error"]
        assert response.status_code == 422, name
        assert cause in error["cause"], name
        assert error["hint"], name
        assert error["id"] is None


def test_wrong_bodies_are_refused():
    async def go(place):
        return [
            await place.client.post("/v1/classify", content=body, headers=headers)
            for _, body, headers, _ in BODIES.values()
        ]

    for (name, wanted), response in zip(BODIES.items(), run(go, limits=SMALL), strict=True):
        assert response.status_code == wanted[0], name
        assert wanted[3] in response.json()["error"]["cause"], name
        assert response.json()["error"]["hint"], name


def test_images_of_all_formats_are_taken_whatever_the_body_is_called():
    """`curl --data-binary @FILE` says that it sends fields of a form."""
    kinds = {
        "": ("PNG", {}),
        "image/png": ("WEBP", {"lossless": True}),
        "application/x-www-form-urlencoded": ("PNG", {}),
        "\xff;;": ("JPEG", {}),
        "text/html": ("WEBP", {}),
    }

    async def go(place):
        answers = []
        for name, (kind, options) in kinds.items():
            headers, file = (
                {"content-type": name.encode("latin-1")},
                file_of(picture(), kind, **options),
            )
            answers.append(await place.client.post("/v1/classify", content=file, headers=headers))
        bitmap = await place.client.post("/v1/classify", content=file_of(picture(), "BMP"))
        return answers, bitmap

    answers, bitmap = run(go, {"a": range(DEPTH)})
    png, webp, form, *lossy = [answer.json()["top"] for answer in answers]
    assert png == webp == form
    assert len(lossy) == 2
    assert bitmap.status_code == 422
    assert bitmap.json()["error"]["hint"] == "send JPEG, PNG or WEBP"


@pytest.mark.parametrize(
    ("path", "status", "read"), [("/v1/classify", 413, 6), ("/operator/drain", 401, 0)]
)
def test_a_body_is_measured_as_it_comes(path, status, read):
    """Without a Content-Length the body is cut off where it grows too large, not at its end; that
    of a command is not read without the operator's key."""
    sent = []

    async def chunks():
        for _ in range(1000):
            sent.append(1)
            yield b" " * 10_000

    async def go(place):
        add_operator(place.app, key=KEY)
        return await place.client.post(path, content=chunks())

    assert run(go, limits=SMALL).status_code == status
    assert len(sent) == read


def test_a_missing_body_times_out():
    async def chunks():
        yield b"x"
        await asyncio.Event().wait()

    async def go(place):
        return await place.client.post("/v1/classify", content=chunks())

    response = run(go, limits=GatewayLimits(body_ms=50))
    assert response.status_code == 408
    assert response.json()["error"]["cause"] == "The body did not arrive within 0.05 s"


def test_bodies_share_the_memory():
    async def go(place):
        full = await place.classify(file_of(picture()))
        return full, await place.classify(file_of(picture())[:500])

    full, fits = run(go, limits=GatewayLimits(held_bytes=1000))
    assert full.status_code == 429
    assert "fill the memory" in full.json()["error"]["cause"]
    assert fits.status_code == 422  # the bytes of the first were given back


# --- metrics and health ---------------------------------------------------------------------------

FILE = file_of(picture())


def test_metrics():
    async def go(place):
        await place.classify(FILE)
        place.blocks.faults["b"] = VisitError("it raised", outcome="failed")
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


def test_a_gateway_knows_of_its_hosts_watch_and_audits():
    health = SimpleNamespace(audited=12, disagreed=3)
    children = SimpleNamespace(names=("a",))
    coordinator = SimpleNamespace(watching=True, health=health, children=children)

    async def go(place):
        before = await place.client.get("/healthz")
        coordinator.watching = False
        return before, *[await place.client.get(p) for p in ("/healthz", "/metrics", "/v1/swarm")]

    before, after, metrics, swarm = run(go, coordinator=coordinator)
    assert (before.status_code, before.json()["why"]) == (200, "")
    assert after.status_code == 200, "requests are answered"
    assert after.json()["why"] == "the hosts are not watched now: those that fail do not come back"
    assert {
        "layershuffle_watching 0.0", "layershuffle_audits_total 12.0",
        "layershuffle_audits_disagreed_total 3.0",
    } <= set(metrics.text.splitlines())  # fmt: skip
    assert swarm.json()["audits"] == {"audited": 12, "disagreed": 3}


def test_hosts_that_left_are_not_counted_any_more():
    """Neither those shown, nor those in memory when nobody asks."""

    async def go(place):
        for number in range(50):
            name = f"spare-{number}"
            place.router.swarm = Swarm([HostState(name, frozenset(range(DEPTH)))])
            await place.classify(FILE)
        remembered = len(place.app.state.gateway.counters.visits)
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
        HostState("a", frozenset({0}), condition="suspect", retry_at=7.5),
        HostState("b", frozenset({1}), condition="suspect", retry_at=6.0),
        HostState("c", frozenset({2}), condition="gone", retry_at=1.0),
    ]
    assert retry_after(Swarm(hosts), now=3.5) == 3, "2.5 seconds, in whole ones"
    assert retry_after(Swarm(hosts), now=5) == 1
    assert retry_after(Swarm(hosts), now=9) == 1, "at least one"
    assert retry_after(Swarm(hosts[2:]), now=5) == 1


# --- gateways without keys ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "statuses"),
    [
        ({"host": "127.0.0.1:8000"}, (200, 200)),
        ({"host": "[::1]:8000"}, (200, 200)),
        ({"host": "LOCALHOST"}, (200, 200)),
        ({"host": "10.1.2.3:8000"}, (200, 200)),
        ({"host": "attacker.example:8000"}, (403, 200)),
        ({"host": "localhost.attacker.example"}, (403, 200)),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, (200, 200)),
        ({"host": "swarm.example", "origin": "https://swarm.example"}, (403, 200)),
        ({"host": "127.0.0.1:8000", "origin": "https://attacker.example"}, (403, 403)),
        ({"host": "127.0.0.1:8000", "origin": "null"}, (403, 403)),
        ({"host": "127.0.0.1:8000", "origin": "http://["}, (403, 403)),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "cross-site"}, (403, 403)),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "same-origin"}, (200, 200)),
    ],
    ids=str,
)
def test_a_gateway_without_keys_looks_at_host_and_origin(headers, statuses):
    """A page that visitors open may send requests to what their browser reaches, also by a name
    that leads there. `statuses`: of a gateway for this machine, and of one for all."""

    async def go(place):
        asked = await place.client.post("/v1/classify", content=FILE, headers=headers)
        looked = await place.client.get("/v1/swarm", headers=headers)
        alive = await place.client.get("/livez", headers=headers)
        assert alive.status_code == 200
        assert asked.status_code == looked.status_code
        return asked

    for local, status in zip((True, False), statuses, strict=True):
        answer = run(go, local=local)
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["hint"]


def test_a_gateway_with_keys_is_called_by_any_name():
    async def go(place):
        headers = {"host": "swarm.example", "origin": "https://page.example"}
        headers["authorization"] = f"Bearer {KEY}"
        return (await place.client.get("/v1/swarm", headers=headers)).status_code

    assert run(go, keys=[KEY], local=True) == 200
