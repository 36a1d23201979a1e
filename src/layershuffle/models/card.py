"""The README.md of a saved model: front matter for the hub, and instructions to load the model.

Only what is recorded is written: no licence is invented, and scores stand in the card only where
the record has them, sequential and arbitrary orders apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from layershuffle.text import markdown_table, shortened

# How the libraries load a directory, "." for themselves and "local-dir:." for timm.
_STOCK = {
    "timm": 'import timm\nmodel = timm.create_model("local-dir:.", pretrained=True)',
    "transformers": 'from transformers import {name}\nmodel = {name}.from_pretrained(".")',
    "torchvision": "import json, pathlib, torchvision, safetensors.torch\n"
    'config = json.loads(pathlib.Path("config.json").read_text())\n'
    'model = torchvision.models.VisionTransformer(**config["kwargs"])\n'
    'model.load_state_dict(safetensors.torch.load_file("model.safetensors"))',
}


def render(
    metadata: Mapping[str, Any],
    *,
    place: str,
    classes: Sequence[str] | None = None,
    repo: str | None = None,
) -> str:
    """The card of a model with this metadata (layershuffle.json) in the directory named `place`.

    `classes`: the class names, if the model has any. `repo`: its name on the hub.
    """
    scores, provenance = metadata.get("scores") or {}, metadata.get("provenance") or {}
    # The name of the directory is often just "model".
    title = f"{metadata['name']}, {metadata['method']}" if metadata.get("method") else place
    front = ModelCardData(
        library_name=metadata["library"],
        tags=["layershuffle"],
        pipeline_tag="image-classification"
        if metadata["num_classes"]
        else "image-feature-extraction",
        base_model=metadata.get("base_model"),
        model_name=title,
        eval_results=list(_results(scores, provenance.get("data"))) or None,
    )
    sections = [f"---\n{front.to_yaml()}\n---", f"# {title}", _summary(metadata, provenance)]
    if accuracy := _held_out(metadata.get("selected") or {}):
        sections.append(f"## Accuracy\n\n{accuracy}")
    if classes:
        listed = shortened(classes, limit=20)
        sections.append(f"## Classes\n\n{len(classes)}, in the order of the logits: {listed}.")
    if "merge" in provenance:
        sections.append(f"## Merge\n\n{_merge_table(provenance['merge'])}")
    stock = _STOCK[metadata["library"]].replace("{name}", metadata["name"])
    ours = 'import layershuffle as ls\nmodel = ls.load("dir:.")'
    if repo:
        ours = ours.replace("dir:.", f"hf:{repo}")
        stock = stock.replace('"local-dir:."', f'"hf-hub:{repo}"').replace('"."', f'"{repo}"')
    sections.append(
        f"## Loading\n\nFiles are those in the directory of this card.\n\n```python\n{ours}\n"
        f"```\n\nWithout layershuffle:\n\n```python\n{stock}\n```"
    )
    return "\n\n".join(sections) + "\n"


def _held_out(selected: Mapping[str, Any]) -> str:
    """A sentence with the top-1 on the images that picked the checkpoint, or ""."""
    if "top1" not in selected:
        return ""
    orders = (f"{percent:.1f} % in {mode} order" for mode, percent in selected["top1"].items())
    split = str(selected["metric"]).partition(" ")[0]
    return (
        f"Top-1 is {' and '.join(orders)}, on the {selected['images']:,} images ({split}) by which "
        "this checkpoint was picked."
    )


def _results(scores: Mapping[str, Mapping[str, Any]], data: object) -> Iterator[EvalResult]:
    """A top-1 score per order mode, if the data on which it was measured is recorded."""
    if not isinstance(data, str):
        return
    for mode, score in scores.items():
        if "top1" in score:
            # The hub groups results by data set, so the metric's name includes the mode.
            yield EvalResult(
                task_type="image-classification",
                dataset_type=data,
                dataset_name=data,
                metric_type="accuracy",
                metric_name=f"top-1, {mode} order",
                metric_value=score["top1"],
            )


def _summary(metadata: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    classes, tied = metadata["num_classes"], metadata["tied"]
    kind, heads = "A vision transformer without a classifier", ""
    if classes:
        kind, heads = "An image classifier", f", {classes} classes"
    blocks = f"{metadata['depth']} blocks"
    if tied:
        blocks += (
            f", of which {len(set(tied))} are different (the others share their weights; loaded "
            "without layershuffle, all are blocks of their own)"
        )
    lines = [
        f"{kind} ({metadata['library']} {metadata['name']}, {blocks}{heads}), saved by "
        "layershuffle (https://arxiv.org/abs/2407.04513)."
    ]
    if metadata.get("method"):
        lines.append(f"Training method: {metadata['method']}.")
    # Mappings, as a merge, have their own section or are only in layershuffle.json.
    facts = [f"- {key}: {value}" for key, value in provenance.items() if isinstance(value, str)]
    lines += ["", *facts, ""] if facts else []
    if "base_sha256" in provenance:
        lines.append(
            "Paths in `base` and `data` are those of the machine that trained the model; "
            "`base_sha256` is the digest of the blocks that it started from."
        )
    parts = [name for name, form in metadata["position"].items() if form]
    if parts:
        lines.append(
            f"It has a position {' and a position '.join(parts)}, in layershuffle.safetensors: "
            "without layershuffle the backbone loads alone."
        )
    return "\n".join(lines)


def _merge_table(merge: Mapping[str, Any]) -> str:
    """A table of the blocks of each donor."""
    rows = []
    for number, donor in enumerate(merge["donors"]):
        donated = [str(block) for block, giver in enumerate(merge["blocks"]) if giver == number]
        digests = [f"{name} `{digest}`" for name, digest in donor.get("sha256", {}).items()]
        rows.append([donor["model"], ", ".join(donated), ", ".join(digests)])
    ends = f"Stem: {merge['stem']}. Head: {merge['head']}."
    return f"{ends}\n\n{markdown_table(['donor', 'blocks', 'SHA-256 of its weights'], rows)}"
