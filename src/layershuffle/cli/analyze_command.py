"""`layershuffle analyze NAME MODEL --data SPEC --out DIR`: ask one question about a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from layershuffle.analysis import ANALYSES, AnalysisSettings, read_analysis, run_analysis
from layershuffle.cli.parsing import settings_from, take_option
from layershuffle.errors import UsageError

_ABOUT = (
    "Ask one question about a model, or with NAME all every one that applies. MODEL is the "
    "directory of a fit or any model spec. Also takes --data SPEC, --out DIR (where tables, "
    "figures and the summary go; with all, a directory in it per question) and --list."
)


def run(argv: Sequence[str]) -> int:
    """Run the analyses; print what they say and where their files are."""
    if "--list" in argv:
        print(_listing())
        return 0
    data, words = take_option(argv, "--data")
    out, words = take_option(words, "--out")
    names = [word for word in words[:2] if not word.startswith("-")]
    settings = settings_from(
        AnalysisSettings,
        words[len(names) :],
        recipe=None,
        command="analyze NAME MODEL",
        about=_ABOUT,
    )
    if len(names) < 2 or data is None or out is None:
        raise UsageError(
            "analyze needs the name of an analysis, a model, --data SPEC and --out DIR",
            hint="layershuffle analyze --list shows the names",
        )
    name, model = names
    if name != "all":
        _show(name, model, data=data, settings=settings, out=Path(out))
        return 0
    return _run_all(model, data=data, settings=settings, out=Path(out))


def _run_all(model: str, *, data: str, settings: AnalysisSettings, out: Path) -> int:
    from layershuffle.analysis.subject import DoesNotApply

    refused = []
    for name in ANALYSES:
        try:
            _show(name, model, data=data, settings=settings, out=out / name)
        except DoesNotApply as reason:
            refused.append(f"{name} does not apply: {reason}")
    print("\n".join(refused) or "All analyses apply to this model.")
    return 0


def _show(name: str, model: str, *, data: str, settings: AnalysisSettings, out: Path) -> None:
    from rich.console import Console

    with Console(stderr=True).status(name) as status:
        run_analysis(
            name,
            model,
            data_spec=data,
            settings=settings,
            out=out,
            progress=lambda text: status.update(f"{name}: {text}"),
        )
    result = read_analysis(out)
    print(f"{result.title}\n{result.paragraph}")
    print(f"In {out}: {', '.join(result.files)}\n")


def _listing() -> str:
    width = max(map(len, ANALYSES))
    return "\n".join(f"{name:<{width}}  {one.question}" for name, one in ANALYSES.items())
