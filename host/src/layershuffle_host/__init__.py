"""A host of a LayerShuffle swarm: serves transformer blocks with ONNX Runtime, without torch.

The command is `layershuffle-host`; in a process, `layershuffle_host.host.Host`.
"""

__version__ = "0.2.0"
