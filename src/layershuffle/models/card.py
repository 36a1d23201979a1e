"""The README.md of a saved model: front matter for the hub, and instructions to load the model.

Only what is recorded is written: no licence is invented, and scores stand in the card only where
the record has them, sequential and arbitrary orders apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml
from huggingface_hub import EvalResult, ModelCardData

from layershuffle.ground.text import shortened
from layershuffle.models.metadata import ModelMetadata

# How the libraries load a directory, "." for themselves and "local-dir:." for timm.
_STOCK = {
    "timm": 'import timm\nmodel = timm.create_model("local-dir:.", pretrained=True)',
    "transformers": 'from transformers import {name}\nmodel = {name}.from_pretrained(".")',
}


def render(
    metadata: ModelMetadata, *, place: str, classes: Sequence[str] | None, repo: str | None
) -> str:
    """The card of a model with this metadata (layershuffle.json) in the directory named `place`.

    `classes`: the class names, if the model has any. `repo`: its name on the hub.
    """
    # The name of the directory is often just "model".
    title = f"{metadata.name}, {metadata.method}" if metadata.method else place
    task = "image-classification" if metadata.num_classes else "image-feature-extraction"
    front = ModelCardData(
        library_name=metadata.library,
        tags=["layershuffle"],
        pipeline_tag=task,
        base_model=metadata.base_model,
        model_name=title,
        eval_results=list(_results(metadata)) or None,
    )
    sections = [f"---\n{front.to_yaml()}\n---", f"# {title}", _summary(metadata)]
    if classes:
        listed = shortened(classes, limit=20)
        sections.append(f"## Classes\n\n{len(classes)}, in the order of the logits: {listed}.")
    record = metadata.model_dump(include={"selected", "provenance"}, exclude_none=True)
    if record:
        text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
        sections.append(
            "## Record\n\nPaths are those of the machine that made the model; `base_sha256` is the "
            f"digest of the blocks that it started from.\n\n```yaml\n{text}```"
        )
    stock = _STOCK[metadata.library].replace("{name}", metadata.name)
    ours = 'import layershuffle as ls\nmodel = ls.load("dir:.")'
    if repo:
        ours = ours.replace("dir:.", f"hf:{repo}")
        stock = stock.replace('"local-dir:."', f'"hf-hub:{repo}"').replace('"."', f'"{repo}"')
    sections.append(
        f"## Loading\n\nFiles are those in the directory of this card.\n\n```python\n{ours}\n"
        f"```\n\nWithout layershuffle:\n\n```python\n{stock}\n```"
    )
    return "\n\n".join(sections) + "\n"


def _results(metadata: ModelMetadata) -> Iterator[EvalResult]:
    """A top-1 score per order mode, if the data on which it was measured is recorded."""
    data = (metadata.provenance or {}).get("data")
    if not isinstance(data, str) or not isinstance(metadata.scores, dict):
        return
    for mode, score in metadata.scores.items():
        if isinstance(score, dict) and "top1" in score:
            # The hub groups results by data set, so the metric's name includes the mode.
            yield EvalResult(
                task_type="image-classification",
                dataset_type=data,
                dataset_name=data,
                metric_type="accuracy",
                metric_name=f"top-1, {mode} order",
                metric_value=score["top1"],
            )


def _summary(metadata: ModelMetadata) -> str:
    kind = "A vision transformer without a classifier"
    heads = ""
    if metadata.num_classes:
        kind = "An image classifier"
        heads = f", {metadata.num_classes} classes"
    blocks = f"{metadata.depth} blocks"
    if metadata.tied:
        blocks += (
            f", of which {len(set(metadata.tied))} are different (the others share their weights; "
            "loaded without layershuffle, all are blocks of their own)"
        )
    if any(metadata.fixed):
        named: list[str] = []
        for which, count in zip(("first", "last"), metadata.fixed, strict=True):
            if count:
                named.append(f"the {which}" if count == 1 else f"the {which} {count}")
        verb = "keeps its" if sum(metadata.fixed) == 1 else "keep their"
        blocks += f", of which {' and '.join(named)} {verb} place; the others run in any order"
    lines = [
        f"{kind} ({metadata.library} {metadata.name}, {blocks}{heads}), saved by layershuffle "
        "(https://arxiv.org/abs/2407.04513)."
    ]
    if metadata.method:
        lines.append(f"Training method: {metadata.method}.")
    parts = [name for name, form in metadata.position if form]
    if parts:
        lines.append(
            f"It has a position {' and a position '.join(parts)}, in layershuffle.safetensors: "
            "without layershuffle the backbone loads alone."
        )
    return "\n".join(lines)
