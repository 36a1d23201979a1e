"""ONNX Runtime for browsers: the files in `RUNTIME`, of npm's onnxruntime-web `__version__`.

The large one is packed by gzip, as it is sent. The directory is made by the build.
"""

from pathlib import Path

__version__ = "1.30.0"
RUNTIME = Path(__file__).with_name("ort")
