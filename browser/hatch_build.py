"""Brings the files of onnxruntime-web that a tab needs from npm into this distribution.

Run as a script, it brings them for an editable installation.
"""

import gzip
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__version__ = "1.30.0"
PACKAGE = f"onnxruntime-web@{__version__}"
SHA256 = "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71"
# WebAssembly on the processor; npm's package has 130 MB of other builds.
FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
ORT = Path(__file__).parent / "src" / "layershuffle_browser" / "ort"


def bring() -> None:
    """Make `ORT`, unless it is there. Raises `RuntimeError` if npm does not give the package."""
    if ORT.exists():
        if f" v{__version__}\n" in (ORT / FILES[0]).read_text(encoding="utf-8")[:100]:
            return
        shutil.rmtree(ORT)
    with tempfile.TemporaryDirectory(dir=ORT.parent) as name:
        place = Path(name)
        words = ["npm", "pack", PACKAGE, "--silent", "--fetch-retries=1"]
        words += ["--pack-destination", name]
        if shutil.which("npm") is None or subprocess.run(words, check=False).returncode:
            raise RuntimeError(f"npm does not give {PACKAGE}, which this build needs")
        (packed,) = place.glob("*.tgz")
        if hashlib.sha256(packed.read_bytes()).hexdigest() != SHA256:
            raise RuntimeError(f"npm gives another {PACKAGE} than the one that was tested")
        (place / "ort").mkdir()
        with tarfile.open(packed) as archive:
            for file in FILES:
                member = archive.extractfile(f"package/dist/{file}")
                assert member is not None
                content, out = member.read(), place / "ort" / file
                if out.suffix == ".wasm":
                    content, out = gzip.compress(content, mtime=0), out.with_suffix(".wasm.gz")
                out.write_bytes(content)
        (place / "ort").rename(ORT)


class Runtime(BuildHookInterface[Any]):
    """Hatchling calls it before it packs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See the module."""
        del build_data
        if version != "editable":
            bring()


if __name__ == "__main__":
    bring()
