"""Labelled images for any model: one spec string in, named splits out.

`open_data("digit-pairs", view)` is the entry point; `loading.SOURCES` lists the kinds of specs.
"""

from layershuffle.data.class_names import match_classes
from layershuffle.data.loading import open_data
from layershuffle.data.splits import DataOptions, ImageData, Split
from layershuffle.images.view import ImageView

__all__ = [
    "DataOptions",
    "ImageData",
    "ImageView",
    "Split",
    "match_classes",
    "open_data",
]
