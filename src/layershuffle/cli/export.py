"""`layershuffle export MODEL --out DIR`: ONNX files of a model, for hosts and other programs."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from layershuffle.cli.command import Command
from layershuffle.cli.words import MODEL
from layershuffle.ground.errors import UsageError
from layershuffle.ground.text import counted


@dataclass(frozen=True)
class ExportCommand(Command):
    """Write a model as ONNX files: its stem, one graph for its blocks, the weights of each block,
    its head, and a manifest.

    Every file is compared with torch. layershuffle eval and predict take the directory as a model.
    """

    model: Annotated[str, MODEL]
    """Directory of a fit, or any model spec: bundled:digits-swarm, timm:NAME, dir:PATH and
    others."""
    _: KW_ONLY
    out: Path
    """Directory of the files; an earlier export there is replaced."""
    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    """How the blocks' weights are stored. fp16 halves the files and computes in fp32; int8
    computes in int8, and is refused if it costs more than a point on --data."""
    data: str | None = None
    """Score the files beside the model on the test split of these images, as layershuffle eval
    takes them."""
    whole: bool = False
    """Write one file, model.onnx, of the whole model in one order, instead of its parts."""
    order: str | None = None
    """The order of --whole, such as "0,3,2,11" (default: the order of the model)."""

    def run(self) -> int:
        """Export, compare and print what was written."""
        if self.whole and (self.precision != "fp32" or self.data is not None):
            raise UsageError(
                "--whole excludes --precision and --data", hint="leave them out, or leave out it"
            )
        if self.order is not None and not self.whole:
            raise UsageError(
                "--order belongs to --whole: the other files run in any order", hint="add --whole"
            )

        from layershuffle.cli.progress import shown_progress
        from layershuffle.export import export_model, export_whole

        with shown_progress("export") as progress:
            if self.whole:
                manifest = export_whole(self.model, self.out, order=self.order)
            else:
                manifest = export_model(
                    self.model,
                    self.out,
                    precision=self.precision,
                    data=self.data,
                    progress=progress,
                )
        print("\n".join(_lines(manifest, self.out)))
        return 0


def _lines(manifest: dict[str, Any], out: Path) -> list[str]:
    size = sum(file["bytes"] for file in manifest["files"].values())
    files = f"{counted(len(manifest['files']), 'file')}, {size / 1e6:.1f} MB, in {out}"
    if "order" in manifest:
        error = manifest["parity"]["logits"]
        return [
            f"{manifest['model']} in the order {manifest['order']}: {files}",
            f"largest error of the logits against torch: {error:.1e} of the largest logit",
        ]
    speed = manifest["speed"]
    worst = max(block["parity"] for block in manifest["blocks"])
    graphs = len({block["graph"] for block in manifest["blocks"]})
    in_ends = sum(manifest.get("fixed", (0, 0)))
    ends = f" (and {in_ends} in the graphs of stem and head)" if in_ends else ""
    lines = [
        f"{manifest['model']}, {manifest['precision']}: {files}",
        f"{counted(len(manifest['blocks']), 'block')}{ends}, {counted(graphs, 'graph')}; largest "
        "error of a "
        f"block against torch: {worst:.1e} of its largest number",
        f"a block takes {speed['block_ms']:.3f} ms for one image on one thread here"
        + ("" if manifest["precision"] == "fp32" else f" (fp32: {speed['fp32_block_ms']:.3f} ms)"),
    ]
    if (scores := manifest.get("accuracy")) is not None:
        for key, name in (("in_order", "in order"), ("any_order", "in any order")):
            files_top1 = f"{scores['files'][key]:.2f} % through the files"
            torch_top1 = f"{scores['torch'][key]:.2f} % in torch"
            lines.append(f"top-1 {name}: {files_top1}, {torch_top1}")
        lines.append(f"on {counted(scores['images'], 'image')} of {scores['data']}")
    return lines
