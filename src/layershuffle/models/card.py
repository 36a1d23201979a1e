"""The README.md of a saved model: YAML front matter for the hub, and how to load it.

It says what is known and leaves out the rest: no licence is invented, and scores appear only where
the record has them, sequential and arbitrary orders apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

_STOCK = {
    "timm": 'import timm\nmodel = timm.create_model("local-dir:{place}", pretrained=True)',
    "transformers": "from transformers import AutoModelForImageClassification as Auto\n"
    'model = Auto.from_pretrained("{place}")',
    "torchvision": "import json, torchvision, safetensors.torch\n"
    'model = torchvision.models.VisionTransformer(**json.load(open("{place}/config.json"))'
    '["kwargs"])\n'
    'model.load_state_dict(safetensors.torch.load_file("{place}/model.safetensors"))',
}
_NUMBERS = (("top1", "top-1 in percent"), ("top5", "top-5 in percent"), ("cross_entropy", "nats"))


def render(facts: Mapping[str, Any], *, place: str) -> str:
    """The card of a model with these facts (layershuffle.json), kept in the directory `place`."""
    front = yaml.safe_dump(_front_matter(facts, place), sort_keys=False).strip()
    sections = [f"---\n{front}\n---", f"# {place}", _summary(facts)]
    table = _score_table(_scores(facts))
    if table:
        sections.append(f"## Scores\n\n{table}")
    merge = _merge_table(facts)
    if merge:
        sections.append(f"## Merge\n\n{merge}")
    sections.append(_loading(facts, place))
    return "\n\n".join(sections) + "\n"


def _front_matter(facts: Mapping[str, Any], place: str) -> dict[str, Any]:
    front: dict[str, Any] = {
        "library_name": facts["library"],
        "tags": ["layershuffle"],
        "pipeline_tag": "image-classification",
    }
    if facts.get("base_model"):
        front["base_model"] = facts["base_model"]
    results = _results(facts)
    if results:
        front["model-index"] = [{"name": place, "results": results}]
    return front


def _results(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry per order mode with a top-1 score, where the data they were taken on is known."""
    data = (facts.get("provenance") or {}).get("data")
    if not isinstance(data, str):
        return []
    return [
        {
            "task": {"type": "image-classification", "name": f"{mode} order"},
            "dataset": {"type": data, "name": data},
            "metrics": [{"type": "accuracy", "name": f"top-1, {mode}", "value": score["top1"]}],
        }
        for mode, score in _scores(facts).items()
        if "top1" in score
    ]


def _scores(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Scores by order mode; what is not a mapping of numbers has no place in a table."""
    scores = facts.get("scores")
    if not isinstance(scores, Mapping):
        return {}
    return {str(mode): dict(one) for mode, one in scores.items() if isinstance(one, Mapping)}


def _score_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    columns = [
        (key, title) for key, title in _NUMBERS if any(key in one for one in scores.values())
    ]
    if not columns:
        return ""
    head = "| order | " + " | ".join(title for _, title in columns) + " |"
    rows = [
        f"| {mode} | " + " | ".join(str(one.get(key, "")) for key, _ in columns) + " |"
        for mode, one in scores.items()
    ]
    return "\n".join([head, "|---" * (len(columns) + 1) + "|", *rows])


def _summary(facts: Mapping[str, Any]) -> str:
    lines = [
        f"An image classifier ({facts['library']} {facts['name']}, {facts['depth']} blocks, "
        f"{facts['num_classes']} classes), saved by layershuffle (https://arxiv.org/abs/2407.04513)."
    ]
    if facts.get("method"):
        lines.append(f"Training method: {facts['method']}.")
    provenance = facts.get("provenance") or {}
    told = [f"- {key}: {value}" for key, value in provenance.items() if isinstance(value, str)]
    lines += ["", *told, ""] if told else []
    parts = [name for name, form in facts["position"].items() if form]
    if parts:
        lines.append(
            f"It has a position {' and a position '.join(parts)}, in layershuffle.safetensors: "
            "without layershuffle the backbone loads alone."
        )
    return "\n".join(lines)


def _merge_table(facts: Mapping[str, Any]) -> str:
    """Who gave what, where the provenance says that the model is a merge."""
    merge = (facts.get("provenance") or {}).get("merge")
    if not isinstance(merge, Mapping):
        return ""
    donors, blocks = merge.get("donors"), merge.get("blocks")
    if not isinstance(donors, list) or not isinstance(blocks, list):
        return ""
    rows = [
        f"| {one.get('model')} | {', '.join(str(i) for i, d in enumerate(blocks) if d == number)} "
        f"| {_listed(one.get('sha256'))} |"
        for number, one in enumerate(donors)
        if isinstance(one, Mapping)
    ]
    ends = f"Stem: {merge.get('stem')}. Head: {merge.get('head')}."
    head = "| donor | blocks | SHA-256 of its weights |"
    return "\n".join([ends, "", head, "|---" * 3 + "|", *rows])


def _listed(digests: object) -> str:
    if not isinstance(digests, Mapping):
        return ""
    return ", ".join(f"{name} `{digest}`" for name, digest in digests.items())


def _loading(facts: Mapping[str, Any], place: str) -> str:
    stock = _STOCK[facts["library"]].format(place=place)
    ours = f'import layershuffle as ls\nmodel = ls.load("dir:{place}")'
    return (
        f"## Loading\n\n```python\n{ours}\n```\n\nWithout layershuffle:\n\n```python\n{stock}\n```"
    )
