"""Claim: the precision that `auto` chooses on a CPU is not slower than the other one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from _harness import Bound, Claim, ClaimRow, compare, run_claim

from layershuffle.bench.timing import SMOKE, Effort, cpu_timed
from layershuffle.bench.workloads import PICO, VIT_B, WIDTH_64, WIDTH_192, make_workload
from layershuffle.precision import GAIN, choose_precision, scoring_steps, training_steps

CASES = {
    "width 64, batch 64": (WIDTH_64, 64),
    "width 192, batch 8": (WIDTH_192, 8),
    "ViT-B/16, batch 4": (VIT_B, 4),
}
SMOKES = {"smoke": (PICO, 2)}


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Steps of training and forwards, in bf16 against fp32; and what `auto` makes of it."""
    for name, (spec, batch) in (SMOKES if effort is SMOKE else CASES).items():
        workload = make_workload(spec, batch=batch)
        model, images = workload.model.eval(), workload.images
        for kind, make in (("training step", training_steps), ("forward", scoring_steps)):
            training = make is training_steps
            chosen = choose_precision(model, device="cpu", training=training, images=batch)
            fp32, bf16 = map(cpu_timed, make(model, images))
            took_bf16 = chosen.precision == "bf16"
            yield compare(
                f"{kind}, {name}: auto is {chosen.precision}",
                "bf16 / fp32",
                a=bf16,
                b=fp32,
                effort=effort,
                # What is not chosen may be faster by less than the gain that is asked for.
                bound=Bound("at_most", 1.0) if took_bf16 else Bound("at_least", 1 / GAIN),
                settings=workload.settings,
                facts={"probe": chosen.why or "not tried"},
            )


CLAIM = Claim(theme="precision", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
