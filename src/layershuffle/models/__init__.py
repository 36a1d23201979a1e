"""Host models by one spec string, and what the rest of the package asks of them.

`store` loads and saves; each host library has its adapter (`timm_host`, `hf_host`,
`torchvision_host`); `files` and `metadata` check everything that is read.
"""

from layershuffle.models.metadata import read_record
from layershuffle.models.store import (
    host_of,
    image_view,
    load,
    logits_of,
    num_classes_of,
    save,
    truncate,
)

__all__ = [
    "host_of",
    "image_view",
    "load",
    "logits_of",
    "num_classes_of",
    "read_record",
    "save",
    "truncate",
]
