"""The fast decoder against Pillow, bit for bit, and the files that Pillow decodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.io
from PIL import Image

from layershuffle.data import DataOptions, ImageView, decode, open_data
from layershuffle.data.decode import NO_JPEG, decodes_jpeg, pixel_tensor, read_image, read_pixels
from layershuffle.errors import DataError
from pictures import file_of
from refusals import refuses


def picture(mode: str = "RGB", *, size: tuple[int, int] = (53, 38)) -> Image.Image:
    """Soft colours of an odd size, where the subsampled chroma of a JPEG has to be enlarged."""
    coarse = np.random.default_rng(3).integers(0, 256, (6, 7, 4), dtype=np.uint8)
    return Image.fromarray(coarse, "RGBA").convert(mode).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the files that torchvision decoded."""
    decodes_jpeg()
    given, decoder = [], torchvision.io.decode_jpeg

    def count(encoded: torch.Tensor, **options: object) -> torch.Tensor:
        given.append(len(encoded))
        return decoder(encoded, **options)

    monkeypatch.setattr(torchvision.io, "decode_jpeg", count)
    return given


@pytest.mark.parametrize(
    ("mode", "channels", "options"),
    [
        ("RGB", 3, {"quality": 90}),
        ("RGB", 3, {"quality": 75, "subsampling": 2}),
        ("RGB", 3, {"quality": 95, "subsampling": 0}),
        ("RGB", 3, {"progressive": True}),
        ("L", 1, {}),
    ],
)
def test_torchvision_decodes_jpegs_of_the_models_channels_like_pillow(
    asked: list[int], mode: str, channels: int, options: dict
) -> None:
    content = file_of(picture(mode), "JPEG", **options)
    pixels = read_pixels(content, channels, place="here")
    assert asked == [len(content)]
    assert pixels.shape == (channels, 38, 53)
    assert torch.equal(pixels, pixel_tensor(read_image(content, channels, place="here")))


@pytest.mark.parametrize(
    ("content", "channels"),
    [
        (file_of(picture("RGB"), "JPEG"), 1),  # grey is made of decoded colours, as everywhere
        (file_of(picture("L"), "JPEG"), 3),
        (file_of(picture("CMYK"), "JPEG"), 3),
        (file_of(picture("RGB"), "PNG"), 3),
        (file_of(picture("RGBA"), "PNG"), 3),
        (file_of(picture("P"), "PNG"), 3),
        (file_of(Image.fromarray(np.full((4, 4), 40_000, np.uint16)), "PNG"), 1),
        (file_of(picture("RGB"), "WEBP"), 3),
    ],
)
def test_pillow_decodes_all_other_images(asked: list[int], content: bytes, channels: int) -> None:
    pixels = read_pixels(content, channels, place="here")
    assert asked == []
    assert torch.equal(pixels, pixel_tensor(read_image(content, channels, place="here")))


def test_rotation_in_exif_is_ignored_by_both() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    content = file_of(picture(), "JPEG", exif=exif)
    assert read_pixels(content, 3, place="here").shape == (3, 38, 53)
    assert read_image(content, 3, place="here").size == (53, 38)


@pytest.mark.parametrize("damage", ["truncated", "empty", "no image", "too large", "gone"])
def test_bad_files_have_pillows_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    path, whole = tmp_path / "bad.jpg", file_of(picture(), "JPEG")
    content = {"truncated": whole[:-200], "empty": b"", "no image": b"hello" * 20}
    if damage != "gone":
        path.write_bytes(content.get(damage, whole))
    if damage == "too large":
        monkeypatch.setattr(decode, "MAX_PIXELS", 100)
    errors = []
    for read in (read_pixels, read_image):
        with refuses(DataError, path) as caught:
            read(path, 3, place=path)
        errors.append(caught.value.cause)
    assert errors[0] == errors[1]


def test_a_torchvision_without_the_decoder_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "val"):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            for k in range(2):
                (tmp_path / split / name / f"{k}.jpg").write_bytes(file_of(picture(), "JPEG"))
    view = ImageView(channels=3, height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3)

    def opened() -> tuple[tuple[str, ...], torch.Tensor]:
        data = open_data(f"folder:{tmp_path}", view, options=DataOptions(holdout=0.4))
        return data.notes, data.splits["train"].dataset[0][0]

    notes, with_it = opened()
    assert NO_JPEG not in notes
    monkeypatch.delattr(torchvision.io, "decode_jpeg")
    decodes_jpeg.cache_clear()
    try:
        notes, without = opened()
    finally:
        decodes_jpeg.cache_clear()
    assert NO_JPEG in notes
    assert torch.equal(with_it, without)
