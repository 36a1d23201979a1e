"""ONNX Runtime for browsers: in `RUNTIME`, made by the build, the files of npm's onnxruntime-web.

The large one is packed by gzip, as it is sent.
"""

from pathlib import Path

RUNTIME = Path(__file__).with_name("ort")
