"""Load and save models by spec string, and ask them for their classes and their view of images.

`store` loads and saves; `libraries` asks the adapter of a model's library (`timm_models`,
`hf_models`); `files` and `metadata` check everything that is read; `manifest` describes an export.
Names of `__init__.pyi` are loaded when they are first used: a gateway reads manifests, and never
imports torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
