"""LayerShuffle: vision transformers whose blocks run in any order, on whatever subset is there.

`import layershuffle as ls` is cheap: every name of `__init__.pyi` is loaded when it is first used,
and torch only with the names that need it. What is not listed there may change without notice.
"""

import os

import lazy_loader

# Unless this is set before it is imported, ONNX Runtime tells Microsoft of every model it runs.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
