"""Training: `fit` refines a backbone with one of the methods and keeps its best state.

A run directory holds `settings.yaml`, `checkpoints/` (to resume after a kill), `model/` (the best
state so far, in its library's own layout) and `history.csv` (what was logged, by step). A finished
run adds `result.json` and `index.html`, which shows the curves.
"""

from layershuffle.training.distributed import is_first_process
from layershuffle.training.fit import FitResult, fit

__all__ = ["FitResult", "fit", "is_first_process"]
