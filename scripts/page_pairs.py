"""Write the test pairs of the page: a sheet of 100 digit pairs, ten in a row, and their classes.

python scripts/page_pairs.py
"""

import json
from pathlib import Path

from PIL import Image
from torch import Tensor

from layershuffle.data.digits import CANVAS, CLASSES, LEVELS, compose, draw_pairs

PAGE = Path(__file__).resolve().parent.parent / "src" / "layershuffle" / "assets" / "page"
ACROSS, PAIRS = 10, 100


def sheet() -> tuple[Tensor, list[str]]:
    """The first pairs of the test split as one picture, uint8 [120, 200], and their class names."""
    canvases, labels = compose(draw_pairs("test", PAIRS))
    # As in `labelled_images`, ink of 0 to 16 becomes grey of 0 to 255.
    grey = (canvases[:, 0].float() / LEVELS * 255).round().byte()
    rows = grey.view(-1, ACROSS, *CANVAS).transpose(1, 2)
    return rows.reshape(-1, ACROSS * CANVAS[1]), [CLASSES[label] for label in labels.tolist()]


def main() -> None:
    """Write the sheet and the class names."""
    pixels, names = sheet()
    Image.fromarray(pixels.numpy()).save(PAGE / "pairs.png", optimize=True)
    (PAGE / "pairs.json").write_text(json.dumps(names) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
