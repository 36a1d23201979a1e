"""Files become what a viewer shows: formats, modes and orientation; damaged ones are named."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from packaging.version import Version
from PIL import Image

import layershuffle as ls
from layershuffle.data import DataOptions, ImageView, open_data
from layershuffle.data.transforms import PixelFinish, PlainTransform
from layershuffle.gateway.http.admission import GatewayLimits
from layershuffle.ground.errors import DataError, UsageError
from layershuffle.images import pixels as module
from layershuffle.images.pixels import (
    extensions,
    formats,
    image_batch,
    normalised,
    pillow_mode,
    read_image,
    view_pixels,
)
from pictures import file_of, noise
from refusals import refuses

GRADIENT = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
ORIENTATION = 0x0112

# From the definition in Exif 2.32: where the first row and the first column of the file belong.
UPRIGHT = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: stored[::-1].swapaxes(0, 1),
    7: lambda stored: stored[::-1, ::-1].swapaxes(0, 1),
    8: lambda stored: stored[:, ::-1].swapaxes(0, 1),
}


def read(source: Path | bytes, channels: int = 3) -> np.ndarray:
    return np.asarray(read_image(source, channels, place="here"))


def turned(image: Image.Image, kind: str, orientation: int, **options: object) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return file_of(image, kind, exif=exif, **options)


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 95}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("AVIF", {"quality": 90}),
    ],
)
def test_images_are_turned_as_their_orientation_says(
    kind: str, options: dict, orientation: int
) -> None:
    image = noise(3, size=(6, 4)).resize((48, 32), Image.Resampling.BICUBIC)
    stored = read(file_of(image, kind, **options))
    shown = read(turned(image, kind, orientation, **options))
    assert shown.tolist() == UPRIGHT[orientation](stored).tolist()


@pytest.mark.filterwarnings("ignore:Tag data larger than file:UserWarning:PIL")
@pytest.mark.filterwarnings("ignore:Truncated File Read:UserWarning")
def test_a_damaged_exif_block_does_not_hide_the_image() -> None:
    """The orientation counts if it can be read, and other tags do not matter."""
    exif = Image.Exif()
    exif[ORIENTATION], exif[0x010F] = 6, "maker"
    file = file_of(noise(1, size=(16, 8)), "JPEG", exif=exif)
    # Six characters become six fractions, of which the file has one.
    broken_tag = file.replace(struct.pack(">HHI", 0x010F, 2, 6), struct.pack(">HHI", 0x010F, 5, 6))
    assert broken_tag != file
    # Before Pillow 13 it hides the tags after it, and Pillow warns.
    hides = Version(PIL.__version__) < Version("13")
    assert read(broken_tag).shape == ((8, 16, 3) if hides else (16, 8, 3))
    no_exif = file.replace(b"Exif\0\0MM", b"Exif\0\0??")
    assert read(no_exif).shape == (8, 16, 3)
    for value in (0, 9, 65_535):
        assert read(turned(noise(1, size=(16, 8)), "JPEG", value)).shape == (8, 16, 3)


def test_training_scoring_predict_and_the_gateway_turn_alike(tmp_path: Path) -> None:
    upright = noise(5, size=(20, 12))
    stored = upright.transpose(Image.Transpose.ROTATE_90)  # as a camera on its side stores it
    view = ImageView(channels=1, height=12, width=20, mean=(0.0,), std=(1.0,))
    for split in ("train", "val"):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.png").write_bytes(file_of(upright))
            (tmp_path / split / name / "2.png").write_bytes(turned(stored, "PNG", 6))
    data = open_data(f"folder:{tmp_path}", view, options=DataOptions(holdout=None))
    for split in ("train", "test"):
        plain, rotated = (data.splits[split].dataset[row][0] for row in (0, 1))
        assert torch.equal(plain, rotated)
    files = [str(tmp_path / "val" / "a" / f"{number}.png") for number in (1, 2)]
    plain, rotated = ls.predict("bundled:digits-swarm", files)
    assert plain.top == rotated.top
    most = GatewayLimits().max_pixels
    first, second = (image_batch(Path(f).read_bytes(), view, most_pixels=most)[0] for f in files)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("kind", ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA",
                                  "TIFF", "WEBP", "ICO"])  # fmt: skip
def test_formats_of_pillow_are_opened(kind: str) -> None:
    image = noise(2, size=(16, 16))
    file = file_of(image, kind)
    assert read(file).tolist() == np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).tolist()


def test_endings_of_image_files() -> None:
    for name in (".jpg", ".jpe", ".jfif", ".mpo", ".png", ".gif", ".avif", ".webp", ".tiff"):
        assert name in extensions()
    for name in (".eps", ".ps", ".wmf", ".mpg", ".h5", ".pdf", ".txt", ""):
        assert name not in extensions()


def test_formats_that_another_program_decodes_are_not_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("subprocess.check_call", lambda *_: pytest.fail("Ghostscript was started"))
    file = file_of(noise(1), "EPS")
    assert "EPS" in Image.OPEN
    assert "EPS" not in formats()
    with refuses(DataError, "here"):
        read(file)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_of_an_animation_the_first_picture_is_taken(kind: str) -> None:
    red, blue = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    file = file_of(red, kind, save_all=True, append_images=[blue])
    assert Image.open(io.BytesIO(file)).n_frames == 2
    assert np.abs(read(file).astype(int) - [255, 0, 0]).max() <= 3


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file, with its length and its checksum."""
    checked = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checked


@pytest.mark.parametrize(
    "chunks",
    [
        chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(3_000_000))),
        chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(3_000_000))),
        chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(1_000_000))) * 70,
    ],
    ids=["text", "profile", "texts"],
)
def test_a_whole_png_with_more_text_than_pillow_reads_is_not_called_damaged(chunks: bytes) -> None:
    file = file_of(noise(1), "PNG")
    header = 33  # the signature, and IHDR
    with refuses(DataError, "here") as caught:
        read(file[:header] + chunks + file[header:])
    assert "metadata" in caught.value.hint
    assert read(file).size


ALPHA = np.zeros((8, 8, 4), dtype=np.uint8)
ALPHA[..., 0], ALPHA[..., 3] = GRADIENT, 128
RED = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
SIXTEEN = GRADIENT.astype(np.uint16) * 257


@pytest.mark.parametrize(
    ("image", "kind", "channels", "shown"),
    [
        (GRADIENT, "PNG", 1, GRADIENT),
        (GRADIENT, "PNG", 3, GRADIENT[..., None]),  # grey is repeated
        (SIXTEEN, "PNG", 1, GRADIENT),  # scaled, not clipped
        (SIXTEEN, "TIFF", 3, GRADIENT[..., None]),
        (ALPHA, "PNG", 3, ALPHA[..., :3]),  # the colours under it
        (GRADIENT > 100, "PNG", 1, (GRADIENT > 100) * 255),
        (RED, "TIFF", 3, [255, 0, 0]),
        (RED, "TIFF", 1, 76),  # 0.299 x 255
    ],
)
def test_every_mode_becomes_what_a_viewer_shows(
    image: Any, kind: str, channels: int, shown: Any
) -> None:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    assert (read(file_of(image, kind), channels) == shown).all()


def test_a_palette_with_transparency_and_floating_pixels() -> None:
    image = Image.new("P", (8, 8))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((3, 4), 1)
    palette = read(file_of(image, transparency=bytes([0, 128])))
    assert palette[4, 3].tolist() == [200, 100, 50]
    assert palette[0, 0].tolist() == [10, 20, 30]
    with refuses(DataError, "here"):
        read(file_of(Image.fromarray(GRADIENT.astype(np.float32)), "TIFF"))


def test_damaged_and_absent_files_are_named(tmp_path: Path) -> None:
    whole = file_of(Image.effect_noise((64, 64), 50))
    spider = file_of(Image.new("F", (8, 8)), "SPIDER")
    damaged = {
        "short.png": whole[: len(whole) // 2],
        "text.jpg": b"not an image",
        "empty.png": b"",
        "flipped.png": whole[:60] + bytes(200) + whole[260:],
        "short.avif": file_of(noise(1, size=(64, 64)), "AVIF")[:-300],
        # The 27th number is that of an image within a stack, which the file is not.
        "flipped.spi": spider[:104] + struct.pack("<f", 1) + spider[108:],
        "gone.png": None,
    }
    for name, content in damaged.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError) as error:
            read_image(path, 3, place=path)
        assert str(path) in str(error.value)
        assert "--skip-corrupt" in str(error.value)


def test_an_image_that_is_too_large_is_an_error_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.png"
    Image.new("1", (14_000, 14_000)).save(path)
    assert path.stat().st_size < 100_000
    with refuses(DataError, path):
        read_image(path, 3, place=path)
    # Where Pillow's own limit is lifted.
    monkeypatch.setattr(module, "MAX_PIXELS", 63)
    with refuses(DataError):
        read(file_of(Image.fromarray(GRADIENT)))
    monkeypatch.setattr(module, "MAX_PIXELS", 64)
    assert read(file_of(Image.fromarray(GRADIENT))).shape == (8, 8, 3)


def test_other_channel_counts_are_refused() -> None:
    assert (pillow_mode(1), pillow_mode(3)) == ("L", "RGB")
    with refuses(UsageError):
        pillow_mode(4)


@pytest.mark.parametrize("size", [(40, 30), (17, 90), (24, 24)])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_gateway_prepares_images_as_training_does(size: tuple[int, int], channels: int) -> None:
    """The same bits without torch as with it."""
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(values).convert(pillow_mode(channels))
    view = ImageView(
        channels=channels, height=24, width=24, mean=(0.485, 0.456, 0.406)[:channels],
        std=(0.229, 0.224, 0.225)[:channels], crop_pct=0.9,
    )  # fmt: skip
    wanted = PixelFinish(view)(PlainTransform(view)(image)[None])[0].numpy()
    got = normalised(view_pixels(image, view), view)
    assert got.dtype == np.float32
    assert got.tobytes() == wanted.tobytes()
