"""What `pip install 'layershuffle[NAME]'` brings beside the core, and the error without it.

The core has what `fit`, `eval`, `merge` and `predict` need. Here stand the names by which packages
are imported; pyproject.toml has those by which they are installed (a test compares the two).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

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
            hint=f"pip install 'layershuffle[{extra}]'",
        )
