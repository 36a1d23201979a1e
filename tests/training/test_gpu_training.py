"""On a GPU: no step waits for it, nothing is recompiled, and missing memory is reported."""

import pytest
import torch
from runs import assert_same_weights, losses, settings, weights

from layershuffle.ground.errors import TrainingError
from layershuffle.training import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # torch's own, while it compiles
]
# Of the plain run nothing needs a kernel that inductor does not have: drop-path, too.
ARMS = {
    "plain": {},
    "position": {"method": "layershuffle-position"},
    "groups": {
        "method": "layershuffle-predict",
        "prediction": {"loss": "mean"},
        "orders_per_batch": 4,
        "accumulate": 2,
    },
    "recomputed": {"activation_checkpointing": True, "method": "layershuffle", "min_kept": 3},
}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ARMS)
def test_no_step_waits_and_none_compiles_again(tmp_path, name, precision):
    """From reading its batch to its end: copies, forward, backward, clipping, optimiser."""

    def strict_in_steps(phase, step):
        # Constants are sent, and Adam's moments made, in the first step. After a step logs, scores
        # and checkpoints are read.
        strict = phase != "report" and step > 0
        torch.cuda.set_sync_debug_mode("error" if strict else "default")

    run = settings(device="cuda", precision=precision, log_every=100, **ARMS[name])
    try:
        result = fit(run, tmp_path, on_phase=strict_in_steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.compile["mode"] == "compiled", result.compile["reason"]
    assert result.compile["recompiles"] == 0


def test_compiled_is_eager_to_rounding(tmp_path):
    losses_of = {}
    for compiled in (True, False):
        events = []
        out = tmp_path / str(compiled)
        model = settings().model.replace("proj_drop_rate=0.1", "proj_drop_rate=0")
        run = settings(device="cuda", precision="fp32", compile=compiled, model=model)
        fit(run, out, on_event=events.append)
        losses_of[compiled] = losses(events)
    assert losses_of[True] == pytest.approx(losses_of[False], rel=1e-3)
    assert_same_weights(weights(tmp_path / "True"), weights(tmp_path / "False"), tolerance=1e-2)


def test_a_batch_that_does_not_fit(tmp_path):
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        big = (
            "timm:vit_base_patch16_224?pretrained=false&in_chans=1&img_size=96,160&num_classes=100"
        )
        with pytest.raises(TrainingError, match="--accumulate 2"):
            fit(settings(device="cuda", model=big, batch_size=2048, compile=False), tmp_path)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
