"""`cifar100:DIR`: CIFAR-100 (Krizhevsky 2009), the python version, read by torchvision.

The archive holds pickles. torchvision unpickles them only if their MD5 sums equal the published
ones (`CIFAR10.__init__` checks all files before it opens any; a test verifies that). Nothing else
in this package unpickles a file. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR100

from layershuffle.data.contract import ImageData, SourceRequest
from layershuffle.data.decode import mode_for, pixel_tensor, to_mode
from layershuffle.data.tables import Tables, assemble
from layershuffle.errors import DataError

FOLDER = "cifar-100-python"
ARCHIVE = "cifar-100-python.tar.gz"


class ArrayTable:
    """RGB images in one uint8 array [n, H, W, 3]."""

    def __init__(
        self,
        array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
        labels: Sequence[int],
        channels: int,
    ) -> None:
        self.array, self.labels, self.channels = array, labels, channels

    def image(self, index: int) -> Image.Image:
        """Image `index` in the mode of the view."""
        image = Image.fromarray(self.array[index])
        return to_mode(image, self.channels, place=self.name(index))

    def pixels(self, index: int) -> Tensor:
        """Image `index` as pixels uint8 [C, H, W]."""
        # Through Pillow, because the grey of a one-channel model must be that of `image`.
        return pixel_tensor(self.image(index))

    def name(self, index: int) -> str:
        """The row of image `index`."""
        return f"cifar100 image {index}"


def open_source(request: SourceRequest) -> ImageData:
    """CIFAR-100 as ImageData: 50,000 training images (the holdout is cut from them), 10,000 test.

    Raises DataError if the files are missing or not the published ones.
    """
    # For its error, before 150 MB are read for a model with other channels.
    mode_for(request.view.channels)
    root = Path(request.place).expanduser()
    # torchvision expects the parent of the unpacked folder, which users may name.
    root = root.parent if root.name == FOLDER else root
    names, test = _read(root, request, train=False)
    # An evaluation does not need the training images, which take 150 MB of memory.
    train = _read(root, request, train=True)[1] if request.options.train else None
    return assemble(request, Tables(classes=names, test=test, train=train))


def _read(root: Path, request: SourceRequest, *, train: bool) -> tuple[tuple[str, ...], ArrayTable]:
    try:
        data = CIFAR100(root, train=train, download=False)
    # torchvision raises the same error for files that are absent and for wrong checksums.
    except RuntimeError as error:
        raise _absent(root) from error
    return tuple(data.classes), ArrayTable(data.data, data.targets, request.view.channels)


def _absent(root: Path) -> DataError:
    folder, archive = root / FOLDER, root / ARCHIVE
    if folder.is_dir():
        cause = "CIFAR-100 is incomplete or its MD5 sums are not the published ones"
        hint = f"delete {folder} and unpack {ARCHIVE} anew"
    elif archive.is_file():
        cause = "CIFAR-100 is not unpacked"
        hint = f"tar -xzf {archive} -C {root}"
    else:
        cause = "CIFAR-100 is not there"
        hint = (
            f"get {ARCHIVE} (the python version, from the data set's home page), put it in {root} "
            f"and unpack it there, so that {folder / 'train'} exists"
        )
    return DataError(cause, place=folder, hint=hint)
