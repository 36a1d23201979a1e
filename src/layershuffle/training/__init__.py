"""Training: `fit` refines a backbone with one of the methods and keeps its best state.

A run directory holds `settings.yaml`, `checkpoints/` (to resume after a kill), `model/` (the best
state so far, in its library's own layout) and `history.csv` (what was logged, by step). A finished
run adds `result.json` and `index.html`, which shows the curves. The names of `__init__.pyi` are
loaded when they are first used: the settings of a training need no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
