"""Claim: drawing the images of `formula` takes a small part of the training step that uses them.

The models are those of the recipes `formula-gpu` (with a GPU: ViT-S/16 at 224 pixels, bf16 by
autocast) and `formula-cpu` (without one: width 128 at 64 pixels).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from _clocks import PICO, SMOKE, Effort, timed_on
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from _workload import Workload, make_workload

from layershuffle.core.policies import Shuffled
from layershuffle.core.stack import depth_of, running
from layershuffle.data.formula import FormulaFinish

WIDTH_128 = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=300&img_size=64&patch_size=16"
    "&embed_dim=128&depth=12&num_heads=4&mlp_ratio=2"
)
VIT_S = "timm:vit_small_patch16_224?pretrained=false&num_classes=300"


@dataclass(frozen=True, kw_only=True)
class FormulaCase:
    """A model, its batch, and how many times as long as the drawing its step has to take."""

    name: str
    spec: str
    batch: int
    device: str
    least: float


ON_CPU = FormulaCase(
    name="width 128 at 64 pixels", spec=WIDTH_128, batch=64, device="cpu", least=10
)
ON_GPU = FormulaCase(name="ViT-S/16 at 224 pixels", spec=VIT_S, batch=512, device="cuda", least=3)
SMOKES = FormulaCase(name="smoke", spec=PICO, batch=4, device="cpu", least=0)


def step_of(workload: Workload, case: FormulaCase) -> Callable[[], None]:
    """A whole step: forward in a drawn order, backward, optimiser; images are there already."""
    model = workload.model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    labels = workload.labels.to(case.device)

    def step() -> None:
        on_gpu = case.device == "cuda"
        with (
            torch.autocast(case.device, torch.bfloat16, enabled=on_gpu),
            running(model, Shuffled().draw(depth_of(model), seed=0, step=0)),
        ):
            loss = F.cross_entropy(model(workload.images), labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Seconds of the step over seconds of drawing its images."""
    case = ON_GPU if torch.cuda.is_available() else ON_CPU
    case = SMOKES if effort is SMOKE else case
    workload = make_workload(case.spec, batch_size=case.batch, device=case.device)
    step, view = step_of(workload, case), workload.finish.view
    classes = torch.arange(case.batch) % 10
    keys = torch.stack([classes, torch.arange(case.batch)], dim=1).to(case.device)
    finish = FormulaFinish(view=view, classes=10, size=view.height)
    row = compare(
        f"orbits, {case.name}",
        "training step / drawing its images",
        a=timed_on(case.device, step),
        b=timed_on(case.device, lambda: finish(keys)),
        effort=effort,
        bound=Bound("at_least", case.least),
        settings={**workload.settings, "size": view.height},
    )
    drawn = statistics.median(seconds for _, seconds in row.pairs)
    yield replace(row, facts={"images drawn per second": round(case.batch / drawn)})


CLAIM = Claim(theme="formula", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
