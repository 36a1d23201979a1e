"""A large recipe runs end to end on tiny models and generated images.

Tasks run in this process, because new processes would import torch for a minute in all.
"""

from __future__ import annotations

import csv
import json

import pytest
import torch
from fixture import done_here
from transformers import ViTConfig, ViTForImageClassification

from layershuffle.bundled import asset
from layershuffle.settings import read_recipe
from layershuffle.study.paper.report import write_report
from layershuffle.study.plan import plan_of
from layershuffle.study.settings import StudySettings
from layershuffle.study.store import read_facts

CLASSES = ("ape", "bee", "cat")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of generated images: train/ and val/, a directory per class."""
    from PIL import Image

    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 6), ("val", 4)):
        for name in CLASSES:
            directory = root / split / name
            directory.mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(256, (20, 20, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(directory / f"{index}.png")
    return root


@pytest.fixture
def model(tmp_path_factory):
    """A ViT of transformers, as in the recipe, of 12 blocks with random weights."""
    directory = tmp_path_factory.mktemp("model")
    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=12,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        num_labels=len(CLASSES),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ViTForImageClassification(config).save_pretrained(directory)
    return f"hf:{directory}"


def shrunk(recipe, *, model, data, seeds):
    """The recipe with another model, data and budget; arms, modes and tables stay."""
    arms = [
        {
            **arm,
            "seeds": seeds if "seeds" in arm else seeds[:1],
            "fit": {
                **{k: v for k, v in arm.get("fit", {}).items() if k not in ("epochs", "model")},
                **({"model": model} if "model" in arm.get("fit", {}) else {}),
            },
        }
        for arm in recipe["arms"]
    ]
    fit = {k: v for k, v in recipe["fit"].items() if k != "epochs"}
    fit |= {"steps": 1, "batch_size": 4, "eval_batch_size": 4, "workers": 0, "eval_orders": 1}
    # Compilation, meant for GPUs, would take minutes.
    evaluate = {**recipe["evaluate"], "num_orders": 2, "batch_size": 6, "compile": False}
    shrunk = {**recipe, "model": model, "data": data, "seeds": seeds[:1], "arms": arms}
    if "merging" in recipe:
        # Two donors are too few for a block each.
        options = {
            "merges": 3,
            "batch_size": 6,
            "num_orders": 1,
            "replacement": True,
            "compile": False,
        }
        options = {**recipe["merging"][0]["options"], **options}
        shrunk["merging"] = [{**recipe["merging"][0], "options": options}]
    small = {"max_images": 12, "neighbours": 3, "batch_size": 6}
    shrunk["analyses"] = [
        {**analysis, "seeds": seeds[:1], "options": small} for analysis in recipe["analyses"]
    ]
    return StudySettings(**{**shrunk, "fit": fit, "evaluate": evaluate})


def test_the_imagenet_recipe_end_to_end(images, model, tmp_path):
    recipe = read_recipe(asset("recipes", "imagenet-paper.yaml"))
    # The twelve seeds of two arms are there to be merged; two of them go through the same code.
    study = shrunk(recipe, model=model, data=f"folder:{images}", seeds=(0, 1))
    plan = plan_of(study)
    assert (len(plan.runs), len(plan.tasks)) == (7 + 2 * 2, 15)
    done_here(study, tmp_path)
    facts = read_facts(tmp_path)
    assert all(task.is_done(facts) for task in plan.tasks)
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    for arm in recipe["arms"]:
        if arm["method"] != "truncated":
            assert _rows(tmp_path, arm.get("name", arm["method"])), arm
    assert "Figure 4" in text
    run = facts["baseline-seed0"]
    assert (run["eval_precision"], run["eval_blocks"]["mode"]) == ("bf16", "eager")
    for arm in recipe["merging"][0]["arms"]:
        assert facts[f"merging-{arm}"]["hardware"]["precision"] == "bf16"
    assert "Table 2 and Figure 5" in text
    assert "Paper protocol: the checkpoint was picked on the same images" in text
    record = tmp_path / "runs/truncated-3-seed0/fit/model/layershuffle.json"
    short = json.loads(record.read_text())
    assert (short["depth"], short["provenance"]["blocks_of_base"]) == (3, "0,6,11")


def _rows(out, arm):
    with (out / "results.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["method"] == arm]
