"""What one NVIDIA H200 is to reach; where none was at hand the page says "not measured yet"."""

from __future__ import annotations

from layershuffle.bench.pairs import Bound

GPU: dict[str, tuple[str, str, Bound | None]] = {
    # name: (what, unit, bound)
    "training": ("ViT-B/16 at 224, batch 640, bf16:", "images/s", Bound("at_least", 3500)),
    "training, MFU": ("of a matrix product measured in the run:", "%", None),
    "training, recompiles": ("after warm-up:", "graphs", Bound("equal", 0)),
    "training, syncs": ("the host waits for the GPU", "times a step", Bound("equal", 0)),
    "training, memory": ("at the highest:", "GB", Bound("at_most", 60)),
    "inference": ("ViT-B/16 at 224, batch 640, bf16:", "images/s", Bound("at_least", 12_500)),
    "inference, MFU": ("of a matrix product measured in the run:", "%", None),
    "training step, order": ("shuffled / fixed order", "", Bound("at_most", 1.01)),
    "training step, precision": ("bf16 autocast / bf16-pure", "", None),
    "training step, compiled": ("eager / compiled", "", None),
    "inference, compiled": ("eager / compiled", "", Bound("at_least", 1.12)),
    "training step, plain": ("plain Trainer, as the authors' / ours", "", Bound("at_least", 2.5)),
    "training, four orders per batch": ("in groups of 160:", "images/s", None),
    "reading": ("JPEG files of 500 x 375, all cores:", "images/s", Bound("at_least", 3500)),
    "leave-one-out and base": ("one by one / trie", "", Bound("at_least", 1.55)),
}
