"""Hostile requests: small files that are dear to decode, random ones, and those that the
description allows or forbids."""

import asyncio
import io
import json
import logging
import random
import re
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from gateway_site import VIT, picture, png_chunk, png_claiming, run, sent, site, started
from hypothesis import HealthCheck, Phase, given, settings
from PIL import ExifTags, Image, PngImagePlugin

from common import CLASSES
from layershuffle.core.stack import running
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.gateway.http.listening import listening
from layershuffle.gateway.http.operator import add_operator
from layershuffle.ground.errors import DataError
from layershuffle.images import pixels
from layershuffle.images.pixels import (
    MAX_CHUNKS,
    MAX_EXIF,
    count_markers,
    image_batch,
    without_metadata,
)
from layershuffle.models import image_view
from pictures import file_of
from waiting import HANGS

SMALL = GatewayLimits(max_pixels=10_000)


@pytest.mark.parametrize(
    ("size", "words"),
    [((200, 51), "200x51 pixels"), ((60_000, 60_000), "too large"), ((2, 400), "model's size")],
)
def test_bombs_are_not_decoded(size, words):
    """Many pixels; so many that Pillow warns; few, but a long thin image grows when resized."""

    async def go(place):
        return await place.classify(png_claiming(*size))

    response = run(go, limits=SMALL)
    assert response.status_code == 422
    assert words in response.json()["error"]["cause"]
    assert "(image" not in response.json()["error"]["cause"]


def png_with(*chunks):
    """A small PNG with these chunks behind its head."""
    file = file_of(picture())
    return file[:33] + b"".join(png_chunk(kind, data) for kind, data in chunks) + file[33:]


def test_texts_and_profiles_of_a_png_are_not_unpacked(monkeypatch):
    packed = zlib.compress(bytes(1 << 20), 9)
    dear = png_with(*[(b"zTXt", b"a\0\0" + packed)] * 60, *[(b"iCCP", b"a\0\0" + packed)] * 60)
    unpacked = []
    monkeypatch.setattr(PngImagePlugin, "_safe_zlib_decompress", unpacked.append)

    async def go(place):
        answers = [await place.classify(file) for file in (dear, file_of(picture()))]
        return [answer.json()["top"] for answer in answers]

    with_texts, without = run(go, {"a": {0, 1, 2, 3}})  # one host, so that both run in one order
    assert with_texts == without
    assert unpacked == []
    clear = png_with((b"tRNS", b"\0\1" * 3))
    assert without_metadata(clear) == clear
    assert without_metadata(clear[:60]) == clear[:60]


def test_pngs_of_many_chunks_are_not_read():
    """Empty ones take 12 bytes of the file and a step of Python each: 16 MB took 2.5 s."""
    few, many = (png_with(*[(b"teXt", b"")] * count) for count in (MAX_CHUNKS - 3, MAX_CHUNKS - 2))
    pixels = png_with(*[(b"IDAT", b"")] * (MAX_CHUNKS - 2))

    async def go(place):
        return [await place.classify(file) for file in (few, many, pixels)]

    answers = run(go)
    assert [answer.status_code for answer in answers] == [200, 422, 422]
    assert answers[1].json()["error"]["cause"] == "The image cannot be read"


def test_jpegs_of_many_scans_are_not_decoded():
    """Each goes over the whole image, and takes 42 bytes of the file."""
    buffer = io.BytesIO()
    picture(size=(64, 64)).save(buffer, "JPEG", progressive=True, icc_profile=b"\xff\xda" * 500)
    file = buffer.getvalue()
    *_, last = [match.start() for match in re.finditer(rb"\xff\xda\0", file)]

    def with_scans(count):
        return file[:last] + file[last:-2] * (count - 9) + file[-2:]

    assert [count_markers(with_scans(count))[0] for count in (10, 32, 33, 99)] == [10, 32, 33, 33]
    assert count_markers(file_of(picture(), "JPEG")) == (1, 9)
    assert count_markers(file_of(picture())) == count_markers(b"") == (0, 0)

    async def go(place):
        return [await place.classify(with_scans(count)) for count in (10, 32, 33)]

    usual, most, many = run(go)
    assert (usual.status_code, most.status_code) == (200, 200)
    assert many.status_code == 422
    assert many.json()["error"]["cause"] == "The image has more than 32 scans"


@pytest.mark.parametrize(
    ("head", "cause"),
    [
        (b"\xff\xfe\0\2" * 2000, "The image has more than 2000 markers"),
        (b"\xff" * 9000, "The image cannot be read"),  # filling
        (b"\xff\xfe\0\2" + bytes(9000), "The image cannot be read"),  # no marker at all
        (b"\xff\xf0\x30\0" + bytes(0x2FFE), "The image cannot be read"),  # unknown to Pillow
        # Behind its end.
        (b"\xff\xd9" + b"\xff\xfe\0\2" * 3000, "The image has more than 2000 markers"),
    ],
)
def test_jpegs_whose_head_takes_long_to_walk_are_refused(head, cause):
    """Each piece takes Pillow a step of Python: 16 MB of them 5 to 8 s."""
    file = file_of(picture(), "JPEG")

    async def go(place):
        usual = file[:2] + b"\xff\xfe\0\2" * 1900 + file[2:]
        return [await place.classify(file[:2] + head + file[2:]), await place.classify(usual)]

    refused, usual = run(go)
    assert usual.status_code == 200
    assert refused.status_code == 422
    assert refused.json()["error"]["cause"] == cause


def turned_by(count):
    """EXIF data whose orientation is so many fractions; right is one whole number."""
    head = b"MM\0*" + struct.pack(">I", 8)
    return (
        head
        + struct.pack(">HHHIII", 1, ExifTags.Base.Orientation, 5, count, 26, 0)
        + bytes(8 * count)
    )


def segment(kind, content):
    """A segment of a JPEG."""
    return bytes((0xFF, kind)) + struct.pack(">H", len(content) + 2) + content


def exif_segments(exif):
    """Segments of a JPEG with this EXIF data, of which Pillow makes one."""
    pieces = [exif[start : start + 65_000] for start in range(0, len(exif), 65_000)]
    return b"".join(segment(0xE1, b"Exif\0\0" + piece) for piece in pieces)


MUCH = turned_by(MAX_EXIF // 8)
JPEG = file_of(picture(), "JPEG")
PNG = file_of(picture())


@pytest.mark.parametrize(
    "file",
    [
        JPEG[:2] + exif_segments(MUCH) + JPEG[2:],
        JPEG[:2] + b"\xff\xd9" + exif_segments(MUCH) + JPEG[2:],
        JPEG[:20] + b"junk" + exif_segments(MUCH) + JPEG[20:],
        JPEG[:2] + b"\xff\xf0\xff\xf0" + exif_segments(MUCH) + JPEG[2:],
        PNG[:33] + png_chunk(b"eXIf", MUCH) + PNG[33:],
        PNG[:-12] + png_chunk(b"eXIf", MUCH) + PNG[-12:],
        file_of(picture(), "WEBP", exif=b"Exif\0\0" + MUCH),
    ],
    ids=["JPEG", "behind an end", "behind junk", "behind no segment", "PNG", "PNG, last", "WEBP"],
)
def test_images_with_much_exif_data_are_refused(file, monkeypatch):
    """Pillow makes a number of every 8 bytes: 15 MB took 3 s, which nothing could interrupt for
    0.2 s at a time."""
    monkeypatch.setattr(Image.Exif, "load", lambda *_: pytest.fail("read"))

    async def go(place):
        return await place.classify(file)

    response = run(go)
    assert response.status_code == 422
    cause = "The image has more than 262144 bytes of EXIF data"
    assert response.json()["error"]["cause"] == cause
    with pytest.raises(DataError, match="EXIF"):
        image_batch(file, image_view(MODEL), most_pixels=10_000)


def test_of_a_jpeg_stays_what_its_picture_needs():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    plain = file_of(picture(size=(60, 40)), "JPEG", exif=exif)
    xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")
    adobe = segment(0xEE, b"Adobe\0\x64\0\0\0\0\1")
    kept = plain[:2] + xmp + adobe + plain[2:]
    assert without_metadata(kept) == kept
    resources = b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 5000
    dear = b"".join(segment(kind, resources) for kind in (0xE2, 0xED, 0xEF, 0xFE))
    assert without_metadata(plain[:2] + dear + xmp + adobe + dear + plain[2:]) == kept
    assert without_metadata(plain[:40]) == plain[:40]
    view = image_view(MODEL)
    taken, _ = image_batch(plain[:2] + dear + plain[2:], view, most_pixels=10_000)
    wanted, size = image_batch(plain, view, most_pixels=10_000)
    np.testing.assert_array_equal(taken, wanted)
    assert size == (60, 40)  # as it is stored


def test_scans_behind_what_is_left_out_are_counted():
    """A byte that fills up, and behind a comment the rest of a scan's marker: where nothing of the
    comment is left, the two would be the marker."""
    start = JPEG.index(b"\xff\xda")
    scan = JPEG[start:-2]
    hidden = b"\xff" + segment(0xFE, b"") + scan[1:]
    file = JPEG[:start] + 40 * hidden + JPEG[start:]
    assert count_markers(file)[0] == 1
    assert count_markers(without_metadata(file))[0] == 1
    both = JPEG[:2] + segment(0xFE, b"") + JPEG[2:start] + 40 * scan + JPEG[start:]
    with pytest.raises(DataError, match="more than 32 scans"):
        image_batch(both, image_view(MODEL), most_pixels=10_000)


def grey(width, height):
    """A grey PNG of so many black pixels."""
    pixels = zlib.compress(bytes((width + 1) * height), 9)
    return png_claiming(width, height, kind=0, pixels=pixels)


@pytest.mark.parametrize("size", [(1, 24_999_999), (24_999_999, 1), (2, 16_385), (16_385, 1500)])
def test_long_sides_are_refused_before_anything_is_decoded(size, monkeypatch):
    """Resizing one side of them would take 40 to 1,600 bytes for each pixel of the other."""
    monkeypatch.setattr(pixels, "upright", lambda image: pytest.fail("decoded"))

    async def go(place):
        return await place.classify(grey(*size))

    response = run(go)
    assert response.status_code == 422
    assert f"{size[0]}x{size[1]} pixels; at most 16384 a side" in response.json()["error"]["cause"]


MEASURE = """
import json, sys
from pathlib import Path
from layershuffle.ground.errors import DataError
from layershuffle.images.view import ImageView
from layershuffle.images.pixels import image_batch

def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

for path in sys.argv[1:]:
    file = Path(path).read_bytes()
    for resize, channels in (("squash", 1), ("crop", 3)):
        numbers = (0.5,) * channels
        view = ImageView(channels=channels, height=224, width=224, mean=numbers, std=numbers,
                         resize=resize)
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        try:
            shape = image_batch(file, view, most_pixels=25_000_000)[0].shape
        except DataError:
            shape = None
        print(json.dumps([Path(path).name, resize, channels, shape, peak() - before]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measured by Linux")
def test_no_image_takes_more_than_150_megabytes(tmp_path):
    """Measured in a process of its own, squashed to grey and cropped in colour, for wide and tall
    images, each about as large as its kind may be."""
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    rng = np.random.default_rng(0)
    full = Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8)).resize((6000, 4000))
    wide = full.resize((5200, 3500))
    tall = wide.transpose(Image.Transpose.ROTATE_90)
    small = full.resize((4500, 3300))
    progressive = {"progressive": True, "subsampling": 0}
    png = {"compress_level": 1}
    for name, image, options in (
        ("full.jpeg", full, {}),
        ("full-turned.jpeg", full, {"exif": turned}),
        ("wide.jpeg", wide, {"exif": turned}),
        ("tall.jpeg", tall, {"exif": turned}),
        ("progressive.jpeg", small, {"exif": turned, **progressive}),
        ("cmyk-progressive.jpeg", small.convert("CMYK"), progressive),
        ("cmyk.jpeg", small.convert("CMYK"), {}),
        ("full.webp", full, {"method": 0}),
        ("smaller.webp", full.resize((3500, 2600)), {"method": 0, "exif": turned}),
        ("palette.png", small.convert("P"), {**png, "exif": turned}),
        ("sixteen.png", small.convert("I;16"), {**png, "exif": turned}),
        ("alpha.png", small.convert("RGBA"), {**png, "exif": turned}),
        ("alpha-grey.png", small.convert("LA"), {**png, "exif": turned}),
        ("bits.png", full.convert("1"), png),
        ("grey.png", full.convert("L"), {**png, "exif": turned}),
        ("longest.png", full.resize((16_384, 1100)), png),
        ("tallest.png", full.resize((1100, 16_384)), png),
    ):
        image.save(tmp_path / name, **options)
    (tmp_path / "thin.png").write_bytes(grey(1, 24_999_999))
    # Its first scan alone: libjpeg expects others all the same.
    full.save(tmp_path / "one-scan.jpeg", **progressive)
    content = (tmp_path / "one-scan.jpeg").read_bytes()
    second = content.index(b"\xff\xda", content.index(b"\xff\xda") + 2)
    (tmp_path / "one-scan.jpeg").write_bytes(content[:second] + b"\xff\xd9")
    files = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *files],
        check=True, capture_output=True, text=True, timeout=10 * HANGS,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(files)
    assert [row for row in rows if row[-1] > 150e6] == []
    refused = {name for name, _, _, shape, _ in rows if shape is None}
    assert refused == {
        "thin.png", "full-turned.jpeg", "full.webp", "cmyk-progressive.jpeg", "one-scan.jpeg"
    }  # fmt: skip
    assert max(taken for name, _, _, _, taken in rows if name in refused) < 25e6


# --- 2,000 random requests ------------------------------------------------------------------------

REQUESTS, EVERY = 2000, 100
KEY = "the-key-of-this-test"
RIGHT_KEY = (b"authorization", f"Bearer {KEY}".encode())
LIMITS = GatewayLimits(max_body_bytes=200_000, max_pixels=40_000, body_ms=300)
SWARM = Limits(reserve_ms=5, deadline_ms=9000, hop_floor_ms=5000, hop_cap_ms=5000)  # never late
GOOD = file_of(picture())
MODEL = VIT.wrapped()
BATCH, _ = image_batch(GOOD, image_view(MODEL), most_pixels=10_000)
KINDS = {kind: file_of(picture(), kind) for kind in ("PNG", "JPEG", "WEBP", "BMP")}
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
        b"host", b"accept", b"cookie", b"x-forwarded-for", b"expect", b"range", b"te", b"x" * 50,
        b"content-length", b"content-encoding", b"authorization", b"transfer-encoding",
    ]  # fmt: skip
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
    """The chunks of the body and what else makes one request."""
    large = rng.random() < 0.1
    body = b" " * rng.choice([200_000, 200_001, 400_000]) if large else broken_image(rng)
    kind = rng.choice(KINDS_OF_BODY) if rng.random() < 0.2 else b"image/png"
    headers = [(b"content-type", kind), *odd_headers(rng)]
    if rng.random() < 0.95:
        headers.append(RIGHT_KEY)
    method = rng.choice(["POST"] * 30 + ["GET", "PUT", "HEAD", "OPTIONS", "BREW"])
    others = ["/v1/swarm", "/metrics", "/healthz", "/operator/drain", "/operator/é", "/é\0", "//"]
    path = rng.choice(["/v1/classify"] * 30 + others)
    cut = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(4)))
    chunks = [body[a:b] for a, b in zip([0, *cut], [*cut, len(body)], strict=True)]
    facts = {"method": method, "path": path, "headers": headers, "query": odd_query(rng)}
    return chunks, {**facts, "whole": rng.random() >= 0.02}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # about damaged files
def test_two_thousand_hostile_requests(caplog):
    rng = random.Random(0)
    statuses = Counter()

    async def go():
        async with site(limits=LIMITS, swarm=SWARM, keys=[KEY]) as place:
            add_operator(place.app, key=KEY)
            answers = []
            for number in range(REQUESTS):
                chunks, facts = hostile(rng)
                status, body = await sent(place.app, facts.pop("path"), *chunks, **facts)
                statuses[status] += 1
                assert status < 500 or (status == 503 and b"error" in body), (number, body)
                if status >= 400 and body and status != 503:
                    assert json.loads(body)["error"]["cause"], number
                if number % EVERY == 0:
                    answers.append(await sent(place.app, "/v1/classify", GOOD, headers=[RIGHT_KEY]))
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


# --- requests made from the description -----------------------------------------------------------
# Requests of each operation, valid ones and others, the same ones in every run.
BOUNDS = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["open", "with keys"])
@pytest.mark.filterwarnings("default")  # those of schemathesis are its own
def test_no_request_that_the_description_allows_or_forbids_breaks_it(keys):
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    asked = set()
    headers = {"Authorization": f"Bearer {KEY}"} if keys else {}

    def check(case):
        asked.add((case.method, case.path))
        # No description says which bytes are an image; and an address has no types: an empty list,
        # or null, is an option that is not sent.
        unfit = [negative_data_rejection, positive_data_acceptance] if case.method == "POST" else []
        case.call_and_validate(headers=headers, excluded_checks=unfit, timeout=60)

    async def serving(tell):
        async with (
            site(keys=keys) as place,
            listening(place.app) as (listener, _),
        ):
            tell(f"http://127.0.0.1:{listener.port}")
            await asyncio.Event().wait()

    with started(serving) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json", timeout=60)
        for result in schema.get_all_operations():
            operation = result.ok()
            # The other operations have no invalid requests.
            takes_options = operation.path == "/v1/classify"
            for mode in list(GenerationMode) if takes_options else [GenerationMode.POSITIVE]:
                BOUNDS(given(case=operation.as_strategy(mode))(check))()
    assert ("POST", "/v1/classify") in asked
    assert ("GET", "/v1/swarm") in asked
