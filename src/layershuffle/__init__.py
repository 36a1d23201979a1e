"""LayerShuffle: vision transformers whose blocks run in any order, on whatever subset is there.

`import layershuffle as ls` is cheap: every name of `__init__.pyi` is loaded when it is first used,
and torch only with the names that need it. What is not listed there may change without notice.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
