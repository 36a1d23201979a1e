"""The routes of the gateway over a swarm in this process: answers, refusals, failures, health."""

import asyncio

import pytest
import torch
from gateway_site import HOSTS, LIMITS, VIT, picture, run, run_in_virtual_time, site

from common import CLASSES, DEPTH, assert_close
from layershuffle.cli.swarm.asking import status_table
from layershuffle.core.stack import running
from layershuffle.data.transforms import PixelFinish, PlainTransform
from layershuffle.errors import UsageError
from layershuffle.models import image_view
from layershuffle.models.store import set_class_names
from layershuffle.swarm.messages import HostFailed, HostGone
from layershuffle.swarm.placement import Carrier
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.schemas import SwarmAnswer
from layershuffle.swarm.state import HostView, Swarm
from pictures import file_of

KEY = "a-key-of-some-length"


def tensors(*pictures):
    view = image_view(VIT.wrapped())
    return PixelFinish(view)(torch.stack([PlainTransform(view)(image) for image in pictures]))


def logits(model, batch, order):
    with torch.inference_mode(), running(model, order):
        return model(batch)


def test_answer_equals_the_in_process_forward():
    image = picture(1)

    async def go(place):
        return (await place.classify(file_of(image), top_k=3)).json()

    answer = run(go)
    wanted = logits(VIT.wrapped(), tensors(image), answer["blocks"])[0].double().softmax(-1)
    top = wanted.topk(3)
    assert [g["index"] for g in answer["images"][0]["top"]] == top.indices.tolist()
    assert [g["probability"] for g in answer["images"][0]["top"]] == top.values.tolist()
    assert answer["images"][0]["top"][0]["label"] == str(top.indices[0].item())
    assert sorted(answer["blocks"]) == list(range(DEPTH))
    assert not answer["degraded"]
    assert answer["ending"] == "complete"
    assert answer["expected"] is None
    assert "never calibrated" in answer["expected_why"]
    assert [hop["outcome"] for hop in answer["route"]] == ["answered"] * DEPTH
    assert all(hop["block"] in HOSTS[hop["host"]] for hop in answer["route"])
    assert all(hop["ms"] > 0 and hop["compute_ms"] == 0.5 for hop in answer["route"])
    assert answer["ms"]["total"] >= answer["ms"]["swarm"] > 0


def test_several_images_and_other_formats():
    """Several images at once equal the forward; BMP and TIFF equal PNG; AVIF is refused."""
    pictures = [picture(1), picture(2), picture(3, size=(50, 40))]

    async def go(place):
        place.router.routing = "sequential"
        several = await place.classify(*map(file_of, pictures), top_k=CLASSES)
        kinds = [
            (await place.classify(file_of(pictures[0], kind), top_k=CLASSES)).json()
            for kind in ("PNG", "BMP", "TIFF", "WEBP", "JPEG", "GIF", "AVIF")
        ]
        return several.json(), kinds

    several, (png, bmp, tiff, *lossy, avif) = run(go)
    assert several["blocks"] == [0, 1, 2, 3]
    wanted = logits(VIT.wrapped(), tensors(*pictures), (0, 1, 2, 3)).softmax(-1)
    assert_close(probabilities(several), wanted, tolerance=1e-5)  # one by one they round otherwise
    assert bmp["images"] == tiff["images"] == png["images"]
    assert len(lossy) == 3
    for answer in lossy:
        assert_close(probabilities(answer), wanted[:1], tolerance=0.15)
    assert avif["error"]["hint"] == "send JPEG, PNG, WEBP, BMP, GIF or TIFF"


def probabilities(answer):
    by_index = [
        {guess["index"]: guess["probability"] for guess in image["top"]}
        for image in answer["images"]
    ]
    return torch.tensor([[image[index] for index in range(CLASSES)] for image in by_index])


def test_a_dead_host_degrades_the_answer():
    async def go(place):
        place.blocks.faults["b"] = HostGone("its process is dead")
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
    assert swarm["limits"]["reserve_ms"] == LIMITS.reserve_ms
    assert (swarm["depth"], swarm["classes"], swarm["wire"]) == (4, 5, "fp32")


def test_every_host_says_how_visits_get_there():
    carriers = {"a": Carrier("channel"), "b": Carrier("ray", "10.0.0.2:6506 cannot be used")}
    carriers["d"] = Carrier("ray", "its process has died, and nobody has ended it yet")

    async def go(place):
        dead = HostView("d", frozenset({3}), condition="gone", why="its process is dead")
        place.router.swarm = place.router.swarm.with_host(dead)
        return SwarmAnswer.model_validate((await place.client.get("/v1/swarm")).json())

    swarm = run(go, carriers=lambda: carriers)
    assert [(host.carrier, host.carrier_why) for host in swarm.hosts] == [
        ("channel", ""), ("ray", "10.0.0.2:6506 cannot be used"), (None, ""), (None, ""),
    ]  # fmt: skip
    table = status_table(swarm)
    assert "b over Ray: 10.0.0.2:6506 cannot be used" in table.splitlines()


def test_errors_of_hosts_that_cannot_be_encoded():
    """A file name that is no UTF-8 stands in the error of a host as half a surrogate pair."""

    async def go(place):
        place.blocks.faults["b"] = HostGone("no file /\udcff")
        answers = await place.classify(file_of(picture())), await place.client.get("/v1/swarm")
        refused = await place.classify(file_of(picture()), min_blocks=4, deadline_ms=2000)
        return [(answer.status_code, "no file /?" in answer.text) for answer in (*answers, refused)]

    assert run_in_virtual_time(go) == [(200, True), (200, True), (503, True)]


def test_a_broken_pipeline_fails():
    async def go(place):
        place.router.routing = "sequential"
        place.blocks.faults["b"] = HostGone("its process is dead")
        return await place.classify(file_of(picture()))

    response = run(go)
    assert response.status_code == 503
    assert response.json()["error"]["cause"] == (
        "The pipeline broke at block 1: host b is gone: its process is dead"
    )


def test_retry_after_names_the_next_probe_of_a_suspect():
    async def go(place):
        place.blocks.faults |= {name: HostFailed("it raised") for name in HOSTS}
        return await place.classify(file_of(picture()), deadline_ms=1500)

    limits = LIMITS.model_copy(update={"suspect_ms": 5e5, "suspect_max_ms": 5e5})
    response = run_in_virtual_time(go, swarm=limits)
    assert response.status_code == 503
    assert 499 <= int(response.headers["retry-after"]) <= 500
    assert response.json()["error"]["cause"].startswith("0 of 4 blocks could be run")


def test_numbers_that_are_not_finite_are_no_answer():
    async def go(place):
        with torch.no_grad():
            place.remote_model.model.head.bias.fill_(float("nan"))
        return await place.classify(file_of(picture()))

    response = run(go)
    assert response.status_code == 503
    assert "not finite" in response.json()["error"]["cause"]


def test_health():
    async def go(place):
        healthy = await place.client.get("/healthz")
        place.router.swarm = Swarm()
        return healthy, await place.client.get("/healthz")

    healthy, ill = run(go)
    assert (healthy.status_code, ill.status_code) == (200, 503)
    assert healthy.json() == {
        "ok": True, "why": "", "usable_hosts": 3, "reachable_blocks": 4, "depth": 4,
        "watching": None,
    }  # fmt: skip
    assert ill.json()["why"] == "no usable host holds a block"


@pytest.mark.parametrize("keys", [(), ("a-key-of-some-length",)])
def test_openapi(keys):
    async def go(place):
        return (await place.client.get("/openapi.json")).json()

    schema = run(go, keys=keys)
    post = schema["paths"]["/v1/classify"]["post"]
    assert set(post["requestBody"]["content"]) == {"multipart/form-data"}
    assert {"200", "400", "413", "415", "422", "429", "503"} <= set(post["responses"])
    # An open gateway asks for no key, and says so.
    for path in ("/v1/classify", "/v1/swarm", "/metrics"):
        (operation,) = schema["paths"][path].values()
        assert ("security" in operation, "401" in operation["responses"]) == (bool(keys),) * 2
    assert ("securitySchemes" in schema["components"]) == bool(keys)
    answer = schema["components"]["schemas"]["Classification"]["properties"]
    assert {"images", "route", "blocks", "skipped", "degraded", "expected"} <= set(answer)


def test_query_parameters_are_refused():
    """Options are fields of the form: in the address they would do nothing, without a word."""

    async def go(place):
        image = [("image", ("a.png", file_of(picture())))]
        return [
            await place.client.post("/v1/classify?top_k=1&depth=2", files=image),
            await place.client.get("/v1/swarm?verbose=1"),
            await place.client.get("/healthz?at=12"),
        ]

    classify, swarm, health = run(go)
    assert (classify.status_code, swarm.status_code, health.status_code) == (422, 422, 200)
    assert classify.json()["error"]["cause"] == "The address has parameters: top_k, depth"
    assert "fields of the form" in classify.json()["error"]["hint"]


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

    statuses = run(go, keys=[KEY, "another key, also good"])
    assert statuses == [401, 401, 200, 200, 401, 401, 200, "Bearer", 200]


def test_a_client_beyond_its_rate_gets_retry_after():
    async def go(place):
        statuses = [(await place.client.get("/v1/swarm")).status_code for _ in range(4)]
        last = await place.client.get("/v1/swarm")
        return statuses, last, (await place.client.get("/healthz")).status_code

    statuses, last, health = run(go, limits=GatewayLimits(rate=0.001, burst=3))
    assert statuses == [200, 200, 200, 429]
    assert 900 < int(last.headers["retry-after"]) <= 1000
    assert health == 200


def test_answers_have_the_class_names_that_the_model_was_trained_with():
    names = ["stripe", "disk", "grid", "ring", "cross"]

    def make():
        model = VIT.wrapped()
        set_class_names(model, names)
        return model

    async def go(place):
        return (await place.classify(file_of(picture()), top_k=5)).json()["images"][0]["top"]

    top = run(go, make=make)
    assert [guess["label"] for guess in top] == [names[guess["index"]] for guess in top]
    assert {guess["label"] for guess in top} == set(names)


def test_labels_must_fit():
    async def go():
        async with site(labels=["a", "b"]):
            pass

    with pytest.raises(UsageError, match="2 labels do not name 5 classes"):
        asyncio.run(go())
