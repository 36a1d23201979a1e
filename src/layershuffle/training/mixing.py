"""Smoothed labels, mixup and cutmix of a batch, by timm."""

from __future__ import annotations

import numpy as np
import torch
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor

from layershuffle.training.settings import FitSettings


def mixed(
    images: Tensor,
    labels: Tensor,
    *,
    settings: FitSettings,
    classes: int,
    step: int,
    micro_batch: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """The images `[n, channels, height, width]` and the labels of one forward, as they train.

    For runs with smoothing, mixup or cutmix: `images` may be changed in place, and the labels are
    probabilities in fp32 `[n, classes]`. What is drawn is a function of the seed, the step, the
    micro-batch and the process, so a resumed run draws the same.
    """
    smoothing = settings.smoothing
    targets = mixup_target(labels, classes, 1.0, smoothing)
    even = len(images) // 2 * 2  # timm mixes pairs, and the last forward of an epoch may be odd
    if even and (settings.mixup or settings.cutmix):
        mixup = Mixup(
            mixup_alpha=settings.mixup,
            cutmix_alpha=settings.cutmix,
            label_smoothing=smoothing,
            num_classes=classes,
        )
        # timm draws from numpy's global generator, which has its state back afterwards.
        before = np.random.get_state()
        np.random.seed([settings.seed, step, micro_batch, rank])
        try:
            images[:even], soft = mixup(images[:even], labels[:even])
        finally:
            np.random.set_state(before)
        targets = torch.cat((soft, targets[even:]))
    return images, targets
