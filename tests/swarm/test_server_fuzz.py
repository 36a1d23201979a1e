"""2,000 hostile requests: none gets a 500, none goes unanswered, and good ones still work."""

import asyncio
import json
import logging
import random
import time
import zlib
from collections import Counter

import pytest
import torch
from gateway_site import VIT, picture, png_claiming, site

from common import CLASSES
from layershuffle.core.stack import running
from layershuffle.models import image_view
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.server.admission import GatewayLimits
from layershuffle.swarm.server.images import Decoder
from pictures import file_of

REQUESTS, EVERY = 2000, 100
KEY = "the-key-of-this-test"
LIMITS = GatewayLimits(max_body_bytes=200_000, max_pixels=40_000, body_ms=300, rate=1e6, burst=1e6)
SWARM = Limits(reserve_ms=5, deadline_ms=9000, hop_floor_ms=5000, hop_cap_ms=5000)  # never late
GOOD = file_of(picture())
MODEL = VIT.wrapped()
BATCH = Decoder(image_view(MODEL), GatewayLimits()).batch(GOOD)
KINDS = {kind: file_of(picture(), kind) for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")}
WORDS = [
    "", " ", "0", "-1", "1e400", "NaN", "Infinity", "-inf", "0x10", "1_000", "9" * 5000, "null",
    "true", "[]", "{}", "\0", "\r\n", "é\u202e", "\U0001f600", "\ufffe", "%00%ff", "../../etc",
    "'; drop table", "<script>", "${jndi:x}", "0,1,2,3", "3,2,1,0", "0,0", "0,,1", ",", "٣",
    "0+1,2@0,2", '{"blocks": [0, 1], "depth": 4, "versions": [0, 0]}', '{"blocks": ' + "[" * 3000,
    "0," * 3000, "a" * 10_000, "1" * 20, "-0", "+1", "1.5", "4294967296", "18446744073709551616",
]  # fmt: skip
OPTIONS = ["deadline_ms", "min_blocks", "top", "order", "image", "", "class"]
KINDS_OF_BODY = [
    b"", b"image/png", b"application/octet-stream", b"text/html", b"multipart/form-data",
    b"multipart/mixed; boundary=x", b"application/x-www-form-urlencoded", b"a" * 9000, b"\xff",
]  # fmt: skip
BOMB = zlib.compress(bytes(10_000_000), 9)  # 10 kB


def broken_image(rng):
    """The bytes of something that is not quite an image."""
    choice = rng.randrange(8)
    file = bytearray(rng.choice(list(KINDS.values())))
    if choice == 0:
        return bytes(file)
    if choice == 1:
        return bytes(file[: rng.randrange(len(file))])
    if choice == 2:
        sizes = [0, 1, 2, 100, 65_535, 2**31 - 1, 2**31, 2**32 - 1]
        return png_claiming(*rng.choices(sizes, k=2), kind=rng.randrange(8), pixels=BOMB)
    if choice == 3:
        return rng.randbytes(rng.randrange(300))
    if choice == 4:
        return file_of(picture(rng.randrange(9), size=rng.choice([(1, 999), (999, 1), (1, 1)])))
    for _ in range(rng.choice([1, 2, 10])):
        place = rng.randrange(min(len(file), rng.choice([40, len(file)])))
        if rng.random() < 0.5:
            file[place] = rng.randrange(256)
        else:
            file[place : place + rng.randrange(8)] = rng.randbytes(rng.randrange(8))
    return bytes(file)


def odd_headers(rng):
    """Headers that no decent client sends."""
    names = [
        b"host",
        b"accept",
        b"cookie",
        b"x-forwarded-for",
        b"expect",
        b"range",
        b"te",
        b"x" * 50,
    ]
    names += [b"content-length", b"content-encoding", b"authorization", b"transfer-encoding"]
    values = [b"", b"\xff\xfe", b"a" * 20_000, b"[::", b"gzip", b"-1", b"9" * 400, b"Bearer", b"\t"]
    return [(rng.choice(names), rng.choice(values)) for _ in range(rng.randrange(4))]


def odd_query(rng):
    """Options in the address, most of them wrong."""
    if rng.random() < 0.6:
        return b""
    pairs = [(rng.choice(OPTIONS), rng.choice(WORDS)) for _ in range(rng.randrange(4))]
    text = "&".join(f"{name}={word}" for name, word in pairs).encode("utf-8", "replace")
    return text + rng.choice([b"", b"&\xff", b"%", b"&&=&"])


def hostile(rng):
    """(method, path, headers, chunks of the body) of one request."""
    large = rng.random() < 0.1
    body = b" " * rng.choice([200_000, 200_001, 400_000]) if large else broken_image(rng)
    kind = rng.choice(KINDS_OF_BODY) if rng.random() < 0.2 else b"image/png"
    headers = [(b"content-type", kind), *odd_headers(rng)]
    if rng.random() < 0.95:
        headers.append((b"x-api-key", KEY.encode()))
    method = rng.choice(["POST"] * 30 + ["GET", "PUT", "HEAD", "OPTIONS", "BREW"])
    path = rng.choice(["/v1/classify"] * 30 + ["/v1/swarm", "/metrics", "/healthz", "/é\0", "//"])
    cut = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(4)))
    chunks = [body[a:b] for a, b in zip([0, *cut], [*cut, len(body)], strict=True)]
    return method, path, headers, chunks


async def sent(app, request, *, leaves=False, query=b""):
    """The status and body that the app answers; raw ASGI, so that nothing is mended on the way.

    A client that `leaves` does so instead of sending the end of its body.
    """
    method, path, headers, chunks = request
    ended = asyncio.Event()
    messages = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in reversed(chunks)
    ]
    messages.insert(
        0, {"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b""}
    )
    answer = []

    async def receive():
        if messages:
            return messages.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        answer.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": method, "path": path, "raw_path": path.encode("utf-8", "replace"),
        "query_string": query, "root_path": "", "headers": headers,
        "client": ("10.0.0.1", 1), "server": ("gateway", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    ended.set()
    body = b"".join(message.get("body", b"") for message in answer[1:])
    return answer[0]["status"], body


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # about damaged files
def test_two_thousand_hostile_requests(caplog):
    rng = random.Random(0)
    statuses = Counter()
    good = ("POST", "/v1/classify", [(b"x-api-key", KEY.encode())], [GOOD])

    async def go():
        async with site(limits=LIMITS, swarm=SWARM, keys=[KEY]) as place:
            answers = []
            for number in range(REQUESTS):
                request, leaves = hostile(rng), rng.random() < 0.02
                query = odd_query(rng)
                status, body = await sent(place.app, request, leaves=leaves, query=query)
                statuses[status] += 1
                assert status < 500 or (status == 503 and b"error" in body), (number, body)
                if status >= 400 and body and status != 503:
                    assert json.loads(body)["error"]["cause"], number
                if number % EVERY == 0:
                    answers.append(await sent(place.app, good))
            return answers

    begun = time.monotonic()
    answers = asyncio.run(go())
    assert time.monotonic() - begun < 600  # no request hangs, however busy the machine is
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    for status, body in answers:
        assert status == 200
        answer = json.loads(body)
        assert not answer["degraded"]
        with torch.inference_mode(), running(MODEL, answer["blocks"]):
            wanted = MODEL(torch.from_numpy(BATCH))[0].double().softmax(-1)
        got = {guess["index"]: guess["probability"] for guess in answer["top"]}
        assert [got[index] for index in range(CLASSES)] == pytest.approx(wanted.tolist())
    assert sum(statuses.values()) == REQUESTS
    # The requests reach every kind of refusal, and some are good enough to be answered.
    assert {200, 401, 404, 405, 413, 415, 422, 499} <= set(statuses), statuses
