"""Decoding: every mode becomes RGB or grey with the right numbers, every bad file is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from layershuffle.data import pixels as module
from layershuffle.data.pixels import mode_for, read_image
from layershuffle.errors import DataError, UsageError
from refusals import refuses

GRADIENT = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4


def saved(tmp_path: Path, image: Image.Image, name: str, **options: object) -> Path:
    path = tmp_path / name
    image.save(path, **options)
    return path


def read(path: Path, channels: int = 3) -> np.ndarray:
    return np.asarray(read_image(path, channels, place=path))


def test_grey_is_repeated_for_rgb_and_kept_for_one_channel(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(GRADIENT), "grey.png")
    assert (read(path) == GRADIENT[..., None]).all()
    assert (read(path, 1) == GRADIENT).all()


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    deep = GRADIENT.astype(np.uint16) * 257
    path = saved(tmp_path, Image.fromarray(deep), "deep.png")
    assert (read(path, 1) == GRADIENT).all()
    assert (read(path, 3) == GRADIENT[..., None]).all()


def test_alpha_is_dropped_as_torchvision_does(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 4), dtype=np.uint8)
    pixels[..., 0], pixels[..., 3] = GRADIENT, 128
    path = saved(tmp_path, Image.fromarray(pixels), "alpha.png")
    assert (read(path) == pixels[..., :3]).all()


def test_a_palette_with_transparency_gives_its_colours(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((3, 4), 1)
    path = saved(tmp_path, image, "palette.png", transparency=bytes([0, 128]))
    pixels = read(path)
    assert pixels[4, 3].tolist() == [200, 100, 50]
    assert pixels[0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("channels", [1, 3])
def test_cmyk_is_converted(tmp_path: Path, channels: int) -> None:
    path = saved(tmp_path, Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "print.tif")
    expected = [255, 0, 0] if channels == 3 else [76]  # 0.299 x 255
    assert np.atleast_1d(read(path, channels)[0, 0]).tolist() == expected


def test_one_bit_images(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(GRADIENT > 100), "bits.png")
    assert set(read(path, 1).flatten().tolist()) == {0, 255}


def test_floating_pixels_have_no_known_range(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(GRADIENT.astype(np.float32)), "float.tif")
    with refuses(DataError):
        read(path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = saved(tmp_path, Image.effect_noise((64, 64), 50), "whole.png").read_bytes()
    damaged = {
        "short.png": whole[: len(whole) // 2],
        "text.jpg": b"not an image",
        "empty.png": b"",
        "flipped.png": whole[:60] + bytes(200) + whole[260:],
    }
    for name, content in damaged.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError) as error:
            read(path)
        assert str(path) in str(error.value)
        assert "--skip-corrupt" in str(error.value)
        with refuses(DataError, "row 5"):
            read_image(content, 3, place="row 5")


def test_a_decompression_bomb_is_an_error_before_it_is_decoded(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.new("1", (14_000, 14_000)), "bomb.png")
    assert path.stat().st_size < 100_000
    with refuses(DataError, path):
        read(path)


def test_our_own_limit_holds_where_pillows_is_lifted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, Image.fromarray(GRADIENT), "grey.png")
    monkeypatch.setattr(module, "MAX_PIXELS", 63)
    with refuses(DataError):
        read(path)
    monkeypatch.setattr(module, "MAX_PIXELS", 64)
    assert read(path).shape == (8, 8, 3)


def test_other_channel_counts_are_refused() -> None:
    assert (mode_for(1), mode_for(3)) == ("L", "RGB")
    with refuses(UsageError):
        mode_for(4)
