"""`bench eval`: forwards, each batch in an order of its own."""

from __future__ import annotations

import torch

from layershuffle.bench.choices import Chosen, compiler_of, subject_of
from layershuffle.bench.machine import Memory, Syncs, flops_of, matmul_ceiling
from layershuffle.bench.marks import BlockMarks, Marks
from layershuffle.bench.measured import PHASED, WARM_UP, Measured, mode_of, report_of
from layershuffle.bench.report import Report
from layershuffle.bench.subjects import Subject, converted
from layershuffle.models import image_view, logits_of
from layershuffle.policies import Shuffled
from layershuffle.stack import depth_of, running, with_hooks


def bench_eval(chosen: Chosen) -> Report:
    """Inference of `chosen.model`, weights and states in `chosen.precision`."""
    on = subject_of(chosen)
    flops = flops_of(on.model, image_view(on.model)).forward
    ceiling = matmul_ceiling(chosen.device, chosen.precision)
    return report_of(
        "eval",
        chosen,
        measured=_measured(chosen, on),
        flops_per_image=flops,
        ceiling=ceiling,
        facts={"orders": "one per batch"},
    )


def _measured(chosen: Chosen, on: Subject) -> Measured:
    forwards = Forwards(chosen, on)
    compiler, syncs = forwards.compiler, Syncs()
    with torch.inference_mode(), compiler.limits():
        compiler.or_eager(lambda: forwards.run(WARM_UP))
        graphs, memory = compiler.graphs, Memory(chosen.device)
        forwards.marks = Marks(chosen.device)
        with syncs.counted(chosen.device):
            forwards.run(chosen.steps)
        peak = memory.peak()
        with with_hooks(on.model, BlockMarks(forwards.marks)):
            forwards.run(PHASED)
    forwards.marks.mark("data")
    found = forwards.marks.steps("data")
    return Measured(
        seconds=[sum(step.values()) for step in found[: chosen.steps]],
        phases=found[chosen.steps :],
        mode=mode_of(compiler, graphs_before=graphs),
        memory=(peak, memory.of),
        syncs=syncs.count,
    )


class Forwards:
    """Batches of bytes sent to the model, finished there and scored, with marks in between."""

    def __init__(self, chosen: Chosen, on: Subject) -> None:
        self.on, self.marks = converted(on, chosen.precision), Marks(chosen.device)
        self.compiler = compiler_of(chosen)
        self.compiler.add(on.model)
        self._step, self._depth = 0, depth_of(on.model)

    def run(self, steps: int) -> None:
        """So many batches, each in a new order."""
        for _ in range(steps):
            self._step += 1
            self.marks.mark("data")
            pixels = self.on.pixels.to(self.on.images.device, non_blocking=True)
            images = self.on.finish(pixels).to(self.on.images.dtype)
            self.marks.mark("stem")
            with running(self.on.model, Shuffled().draw(self._depth, seed=0, step=self._step)):
                logits_of(self.on.model(images))
