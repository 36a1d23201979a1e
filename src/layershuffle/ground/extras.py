"""What an extra brings beside the core, how it is installed, and the error without it.

The core has what `fit`, `eval`, `merge` and `predict` need. Here stand the names by which packages
are imported; pyproject.toml has those by which they are installed (a test compares the two).
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

from layershuffle.ground.errors import UsageError


@dataclass(frozen=True)
class Extra:
    """What an extra is good for, and what is imported of it."""

    brings: str
    modules: tuple[str, ...]


EXTRAS = {
    "study": Extra(
        "digit pairs, reproduce, report, analyze",
        ("sklearn", "pandas", "matplotlib", "umap"),
    ),
    "datasets": Extra("data of the Hugging Face hub, parquet files and tars: hf:", ("datasets",)),
    "ray": Extra("reproduce --ray, swarm up --ray: work for a cluster", ("ray",)),
    "export": Extra(
        "export, eval and predict of exported files", ("onnx", "onnxscript", "onnxruntime")
    ),
    "swarm": Extra(
        "swarm, classify, demo",
        (
            "fastapi",
            "uvicorn",
            "starlette",
            "websockets",
            "prometheus_client",
            "httpx",
            "sklearn",
            "onnxruntime",
            "layershuffle_host",
            "segno",
        ),
    ),
    "browser": Extra("browser tabs as hosts of a swarm: /join", ("layershuffle_browser",)),
}
# The folders of a clone that are packages of their own, by the module that each of them has.
_PARTS = {"host": "layershuffle_host", "browser": "layershuffle_browser"}


def installed(module: str) -> bool:
    """Whether a package is there under this name; it is not imported, which may take seconds.

    A folder of that name in the working directory, such as wandb/ with logs, is no package.
    """
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def missing(extra: str, *modules: str) -> list[str]:
    """Those of `modules` (default: all of the extra) that are not installed."""
    return [name for name in modules or EXTRAS[extra].modules if not installed(name)]


def require(extra: str, *modules: str) -> None:
    """Raise `UsageError` naming the extra if `modules` (default: all of it) are not installed."""
    lacking = missing(extra, *modules)
    if lacking:
        raise UsageError(
            f"This needs packages that are not installed: {', '.join(lacking)} "
            f"(the extra {extra!r}: {EXTRAS[extra].brings})",
            hint=install_line(extra),
        )


def install_line(extra: str) -> str:
    """The command that adds `extra` to this installation of the package.

    A release comes from a package index, and so do its extras. What was installed from a clone is
    installed from that clone again, with the parts of it that the extra needs.

        install_line("study")  # pip install '/home/me/layershuffle[study]'
    """
    pip = shutil.which("pip")
    words = ["pip", "install"]
    if pip is None or Path(pip).parent != Path(sys.executable).parent:  # that of another Python
        words = [sys.executable, "-m", "pip", "install"]
    clone, editable = _clone()
    if clone is None:
        return " ".join([*map(quote, words), f"'layershuffle[{extra}]'"])
    parts = [f"{clone}[{extra}]"]
    for folder, module in _PARTS.items():
        if module in EXTRAS[extra].modules:
            parts.append(f"{clone / folder}")
    for part in parts:
        words += ["--editable", part] if editable else [part]
    return " ".join(map(quote, words))


def _clone() -> tuple[Path | None, bool]:
    """The clone that this package was installed from, and whether edits there take effect.

    There is none for a release, and for a clone that has gone.
    """
    try:
        # pip writes this file for all that does not come from an index (PEP 610).
        text = distribution("layershuffle").read_text("direct_url.json")
    except PackageNotFoundError:  # the sources of a clone, without an installation
        text = None
    if text is None:
        return None, False
    source = json.loads(text)
    clone = Path(unquote(urlsplit(source["url"]).path))
    if "dir_info" not in source or not (clone / "pyproject.toml").exists():
        return None, False
    return clone, source["dir_info"].get("editable", False)
