"""Load and save models by spec string, and common functions on them.

`store` loads and saves; each library has its adapter (`timm_models`, `hf_models`); `files` and
`metadata` check everything that is read.
"""

from layershuffle.models.metadata import read_record
from layershuffle.models.store import (
    class_names_of,
    file_view,
    image_view,
    load,
    name_classes,
    num_classes_of,
    push_to_hub,
    replace_head,
    save,
    set_class_names,
    set_image_view,
    truncate,
)

__all__ = [
    "class_names_of",
    "file_view",
    "image_view",
    "load",
    "name_classes",
    "num_classes_of",
    "push_to_hub",
    "read_record",
    "replace_head",
    "save",
    "set_class_names",
    "set_image_view",
    "truncate",
]
