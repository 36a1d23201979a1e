"""A pico model and noise images as the subject of an analysis, without a file."""

import torch
from torch.utils.data import TensorDataset

from common import CLASSES, images
from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.analysis.subject import Subject
from layershuffle.data import ImageData, Split
from layershuffle.ground.text import unheard


def subject_of(model, *, count=8, classes=CLASSES, **settings):
    """`model` with `count` noise images labelled 0, 1, ... in turn."""
    labels = torch.arange(count) % CLASSES
    data = ImageData(
        spec="digit-pairs",
        classes=tuple(map(str, range(classes))),
        splits={"test": Split(dataset=TensorDataset(images(count), labels))},
        finish=torch.nn.Identity(),  # the noise is what the model takes
    )
    return Subject(
        model=model,
        spec="pico",
        data=data,
        settings=AnalysisSettings(**{"max_images": count, "batch_size": 4, **settings}),
        progress=unheard,
    )
