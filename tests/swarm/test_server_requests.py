"""Forms that clients send: broken, too large, too slow, or with wrong fields."""

import asyncio

import pytest
from gateway_site import picture, run

from layershuffle.swarm.server.limits import GatewayLimits
from pictures import file_of

SMALL = GatewayLimits(max_body_bytes=50_000, max_images=3, max_pixels=10_000)
FILE = file_of(picture())
KIND = "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
FIELD = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
END = b"--x--\r\n"


def post(body, **headers):
    async def go(place):
        return await place.client.post("/v1/classify", content=body, headers=headers)

    return run(go, limits=SMALL)


FIELDS = {
    "unknown field": ({"dead_line_ms": 5}, "dead_line_ms is unknown, did you mean deadline_ms?"),
    "deadline NaN": ({"deadline_ms": "NaN"}, "deadline_ms: "),
    "deadline infinite": ({"deadline_ms": "1e999"}, "deadline_ms: "),
    "deadline negative": ({"deadline_ms": -1}, "deadline_ms: "),
    "deadline short": ({"deadline_ms": 1}, "deadline_ms is 1"),
    "deadline long": ({"deadline_ms": 1e6}, "deadline_ms is 1e+06"),
    "deadline text": ({"deadline_ms": "soon"}, "deadline_ms: "),
    "min_blocks": ({"min_blocks": 5}, "min_blocks is 5, but the model has 4 blocks"),
    "top_k": ({"top_k": 0}, "top_k: "),
    "top_k text": ({"top_k": "True"}, "top_k: "),
    "several": ({"top_k": 0, "a": 1, "b": 2, "deadline_ms": 0}, "; a is unknown"),
}


def test_wrong_fields_are_named():
    async def go(place):
        return {name: await place.classify(FILE, **fields) for name, (fields, _) in FIELDS.items()}

    for name, response in run(go, limits=SMALL).items():
        error = response.json()["error"]
        assert response.status_code == 422, name
        assert FIELDS[name][1] in error["cause"], name
        assert error["hint"], name
        assert error["id"] is None
        assert "Traceback" not in response.text


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [
        ("text/plain", None),
        ("application/json", None),
        ("application/x-www-form-urlencoded", None),
        ("", None),
        ("multipart/mixed; boundary=x", None),
        (KIND, "gzip"),
    ],
)
def test_other_bodies_are_not_read(kind, encoding):
    headers = {"content-type": kind} | ({"content-encoding": encoding} if encoding else {})
    response = post(b"{}", **headers)
    assert response.status_code == 415
    assert "multipart/form-data" in response.json()["error"]["hint"]


FORMS = {
    "no boundary": (400, "multipart/form-data", b""),
    "long boundary": (400, "multipart/form-data; boundary=" + "x" * 300, b""),
    "odd boundary": (400, 'multipart/form-data; boundary="a;b"', b""),
    "empty": (400, KIND, b""),
    "only the end": (422, KIND, END),
    "cut short": (400, KIND, PART + b"abc"),
    "cut short behind an image": (400, KIND, PART + FILE + b"\r\n" + PART + FILE[:100]),
    "no name": (400, KIND, b"--x\r\nA: b\r\n\r\nabc\r\n--x--"),
    "another boundary": (400, "multipart/form-data; boundary=y", PART + b"abc\r\n--x--"),
    "too many images": (400, KIND, (PART + b"abc\r\n") * 4 + END),
    "image as text": (422, KIND, FIELD % (b"image", b"abc") + END),
    "option as a file": (422, KIND, PART.replace(b"image", b"top_k") + b"3\r\n" + END),
    "field twice": (422, KIND, FIELD % (b"top_k", b"3") * 2 + END),
    "many fields": (400, KIND, b"".join(FIELD % (b"f%d" % i, b"3") for i in range(50)) + END),
    "long field": (400, KIND, FIELD % (b"top_k", b"0" * 9000) + END),
    "long header": (400, KIND, b"--x\r\nA: " + b"b" * 9000 + b"\r\n\r\n--x--"),
    "not an image": (422, KIND, PART + b"hello\r\n" + END),
    "cut image": (422, KIND, PART + FILE[:400] + b"\r\n" + END),
    "too large": (413, KIND, b" " * 50_001),
}


@pytest.mark.parametrize("name", FORMS)
def test_broken_forms_are_refused(name):
    status, kind, body = FORMS[name]
    response = post(body, **{"content-type": kind})
    assert response.status_code == status, response.text
    assert response.json()["error"]["cause"]
    assert response.json()["error"]["hint"]


@pytest.mark.parametrize("charset", ["undefined", "idna", "punycode", "zlib", "utf-16", "nonsense"])
def test_a_charset_changes_nothing(charset):
    """Some of these codecs raise, and one takes quadratic time: none is ever asked."""
    body = FIELD % (b"top_k", b"2") + PART + FILE + b"\r\n" + END
    response = post(body, **{"content-type": f"{KIND}; charset={charset}"})
    assert response.status_code == 200, response.text
    assert len(response.json()["images"][0]["top"]) == 2


def test_large_images_are_not_written_to_a_disk(monkeypatch):
    """Starlette's own bound is 1 MB, above which it writes to a temporary file."""
    monkeypatch.setattr("tempfile.SpooledTemporaryFile.rollover", None)

    async def go(place):
        return (await place.classify(FILE + bytes(3_000_000))).status_code

    assert run(go) == 200


def test_a_body_is_measured_as_it_comes():
    """Without a Content-Length the body is cut off where it grows too large, not at its end."""
    chunks_sent = []

    async def chunks():
        yield PART
        for _ in range(1000):
            chunks_sent.append(1)
            yield b" " * 10_000

    async def go(place):
        return await place.client.post(
            "/v1/classify", content=chunks(), headers={"content-type": KIND}
        )

    response = run(go, limits=SMALL)
    assert response.status_code == 413
    assert len(chunks_sent) == 5
    announced = post(b"", **{"content-type": KIND, "content-length": "9" * 5000})
    assert announced.status_code == 413


def test_a_missing_body_times_out():
    async def chunks():
        yield PART
        await asyncio.Event().wait()

    async def go(place):
        return await place.client.post(
            "/v1/classify", content=chunks(), headers={"content-type": KIND}
        )

    response = run(go, limits=GatewayLimits(body_ms=50))
    assert response.status_code == 408
    assert response.json()["error"]["cause"] == "The body did not arrive within 0.05 s"


def test_bodies_share_the_memory():
    async def go(place):
        full = await place.classify(FILE)
        return full, await place.classify(FILE[:500])

    full, fits = run(go, limits=GatewayLimits(held_bytes=1000))
    assert full.status_code == 429
    assert "fill the memory" in full.json()["error"]["cause"]
    assert fits.status_code == 422  # the bytes of the first were given back
