"""Small files that are dear to decode: none is decoded."""

import io
import re
import struct
import zlib

import pytest
from gateway_site import picture, png_chunk, png_claiming, run
from PIL import PngImagePlugin

from layershuffle.swarm.server.admission import GatewayLimits
from layershuffle.swarm.server.images import MAX_CHUNKS, count_markers, without_metadata
from pictures import file_of

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
        place.router.routing = "sequential"
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
        (b"\xff\xd9" + b"\xff\xfe\0\2" * 3000, "The image cannot be read"),  # behind its end
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


def test_tiffs_of_large_tiles_and_other_compressions_are_not_decoded(monkeypatch):
    """A tile may be larger than the image, and JPEG files in a TIFF have scans of their own."""
    plain = bytearray(file_of(picture(), "TIFF"))
    for own, tile in ((278, 322), (279, 323)):  # rows and bytes of the strip
        (entry,) = re.finditer(struct.pack("<H", own) + rb"[\x03\x04]\x00\x01\x00{3}", plain)
        struct.pack_into("<HHII", plain, entry.start(), tile, 4, 1, 20_000)
    jpeg = file_of(picture().convert("RGB"), "TIFF", compression="jpeg")
    monkeypatch.setattr("PIL.TiffImagePlugin.TiffImageFile.load", lambda self: pytest.fail("read"))

    async def go(place):
        return [await place.classify(bytes(plain)), await place.classify(jpeg)]

    causes = [response.json()["error"]["cause"] for response in run(go, limits=SMALL)]
    assert causes == [
        "The image is too large (tiles of 20000x20000 pixels; at most 10000)",
        "The TIFF file is compressed unusually",
    ]
