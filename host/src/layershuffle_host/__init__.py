"""A host of a LayerShuffle swarm: serves transformer blocks with ONNX Runtime, without torch.

The command is `layershuffle-host`; in a process, `layershuffle_host.host.Host`.
"""

import os

# Unless this is set before it is imported, ONNX Runtime tells Microsoft of every model that it
# runs, and takes 2 MB for that.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.2.0"
