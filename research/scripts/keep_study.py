# Ran at commit 8550626.
"""Copy the results, report and figures of a study for the documentation, without weights and logs.

    python scripts/keep_study.py runs/digits-paper docs/results/digits-paper

Tasks that the directory lacks and the recipe still plans are taken from the existing copy, so a
study that has grown may be run without its finished tasks. With the copy as both arguments, it is
written again as this version does. `layershuffle report` reads the copy and makes its report.html
(`layershuffle.study.store`).
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

from PIL import Image

from layershuffle.analysis import find_analysis, read_analysis
from layershuffle.plotting import figure_bytes
from layershuffle.study.claims import judge
from layershuffle.study.plan import KEPT_FILE
from layershuffle.study.report import KEPT_DPI, write_report
from layershuffle.study.store import completed, read_study, write_kept

COLOURS = 24
"""This many make a figure a quarter as large and still preserve the colours of its lines."""
FIELDS = ("schema", "code_version", "recipe")


def small(figure: bytes) -> bytes:
    """`figure` (a PNG) with a palette of `COLOURS` colours."""
    picture = Image.open(io.BytesIO(figure)).convert("RGB")
    # The median cut, Pillow's default, merges rare colours, such as those of thin lines.
    with_palette = picture.quantize(
        COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE
    )
    content = io.BytesIO()
    with_palette.save(content, "PNG", optimize=True)
    return content.getvalue()


def keep(directory: Path, out: Path) -> int:
    """Copy the study to `out`, with the tasks that only `out` has. Returns the number of files."""
    fresh = study = read_study(directory)
    pictures: dict[str, bytes] = {}
    if (out / KEPT_FILE).exists():
        study = completed(fresh, by=read_study(out))
        pictures = {path.name: path.read_bytes() for path in (out / "figures").glob("*.png")}
    plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    figures: dict[str, bytes] = {}
    shown = set[tuple[str, str]]()
    # A kept study has the figures of its analyses without their tables.
    analyses = () if fresh.kept else fresh.analyses
    computed = {outcome.task.name for outcome in analyses if outcome.result is not None}
    for outcome in study.main_analyses:
        task, question = outcome.task, (outcome.task.options.name, outcome.task.arm)
        if outcome.result is not None and task.name not in computed:
            names = (name for name in pictures if name.startswith(f"{task.name}-"))
            figures.update({name: pictures[name] for name in names})
        elif outcome.result is not None and question not in shown:  # by another model of the arm
            shown.add(question)
            tables = read_analysis(task.directory(directory) / "files").tables
            drawn = find_analysis(task.options.name).load().figures(tables)
            for name, figure in drawn.items():
                if "-blocks" not in name:  # except figures with a page per block
                    content = small(figure_bytes(figure, "png", dpi=KEPT_DPI))
                    figures[f"{task.name}-{name}.png"] = content
    if out.exists():
        shutil.rmtree(out)
    text = json.dumps({field: plan[field] for field in FIELDS}, indent=1)
    write_kept(study, out, plan=f"{text}\n")
    for name, content in figures.items():
        (out / "figures").mkdir(exist_ok=True)
        (out / "figures" / name).write_bytes(content)
    report = write_report(out)
    report.html.unlink()
    (out / "table.md").unlink()  # the first table of report.md
    if all(judged == "not measured" for _, judged, _ in judge(report.summary)):
        (out / "claims.md").unlink()
    for path in out.glob("*.png"):
        path.write_bytes(small(path.read_bytes()))
    return sum(path.is_file() for path in out.rglob("*"))


if __name__ == "__main__":
    print(f"{keep(Path(sys.argv[1]), Path(sys.argv[2]))} files")
