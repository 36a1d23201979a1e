"""A swarm of a model with ends that keep their place: stem and head have them, hosts the others."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from dial_site import gateway, hosting
from torch import nn

import layershuffle as ls
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import fixed_of, stack_of
from layershuffle.data import DataOptions, open_data
from layershuffle.export import export_model, export_whole
from layershuffle.gateway.brain.policy import probabilities
from layershuffle.gateway.calibration.calibration import (
    CALIBRATION,
    write_calibration,
)
from layershuffle.gateway.client.calibrate import calibrate
from layershuffle.gateway.hosts.served_model import Classified, RemoteModel, ServedModel
from layershuffle.gateway.http.requests import classification
from layershuffle.ground.errors import UsageError
from layershuffle.models import image_view, truncate
from layershuffle.models.manifest import read_manifest
from layershuffle.page.workbench import Workbench
from refusals import refuses
from waiting import HANGS

FIXED, DEPTH, HOSTED = (1, 1), 6, (1, 2, 3, 4)
DATA = "digit-pairs?test=40"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six blocks whose first and last keep their place, with its calibration."""
    place = tmp_path_factory.mktemp("ends") / "model"
    model = truncate(ls.load("bundled:digits"), "0,2,4,7,9,11")
    stack_of(model).fixed = FIXED
    ls.save(model, place)
    write_calibration(calibrate(model, DATA, orders=2, images=20), place / CALIBRATION)
    return place


@pytest.fixture(scope="module")
def files(saved: Path) -> Path:
    """Its export."""
    out = saved.parent / "files"
    export_model(str(saved), out)
    return out


def pictures(model: nn.Module) -> torch.Tensor:
    data = open_data(DATA, image_view(model), options=DataOptions(train=False, max_test=4))
    items = [data.splits["test"].dataset[index][0] for index in range(4)]
    return data.finish(torch.stack(items))


def answers_of(model: nn.Module, order: ExecutionOrder | str, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), ls.running(model, order):
        answer: torch.Tensor = model(images)
    return answer


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error, as a part of the largest number."""
    return float((got - wanted).abs().max() / wanted.abs().max())


# --- the files ------------------------------------------------------------------------------------


def test_the_manifest_counts_hosted_blocks_by_their_ids_in_the_model(files: Path) -> None:
    manifest = read_manifest(files)
    assert (manifest.fixed, manifest.depth, tuple(manifest.hosted)) == (FIXED, DEPTH, HOSTED)
    assert [block.weights for block in manifest.blocks] == [
        f"block-{block:02d}.weights" for block in HOSTED
    ]
    assert {path.name for path in files.glob("block*")} == {
        "block.onnx", *(f"block-{block:02d}.weights" for block in HOSTED)
    }  # fmt: skip


def test_the_files_are_a_model_with_the_same_ends(saved: Path, files: Path) -> None:
    model, exported = ls.load(str(saved)), ls.load(str(files))
    assert fixed_of(exported) == FIXED
    images = pictures(model)
    for order in ("0,1,2,3,4,5", "0,4,2,1,3,5", "0,3,5", "0,2+3,1,1,5", "0,5"):
        assert (
            distance(answers_of(exported, order, images), answers_of(model, order, images)) < 1e-5
        )
    # Draws are those of the model, and no option takes the ends out of the graphs.
    batches = [(images, torch.arange(4))]
    modes = ["sequential", "arbitrary", "kept:3"]
    scores = [ls.evaluate(m, batches, modes=modes, num_orders=2) for m in (exported, model)]
    assert [s.order for s in scores[0]] == [s.order for s in scores[1]]
    for ours, theirs in zip(*scores, strict=True):
        assert ours.cross_entropy == pytest.approx(theirs.cross_entropy, rel=1e-4)
    for order in ("1,0,2,3,4,5", "0,1,2"):
        with refuses(UsageError), ls.running(exported, order, fixed=(0, 0)):
            exported(images)


def test_one_file_of_one_order_has_the_ends_in_their_place(saved: Path, tmp_path: Path) -> None:
    assert export_whole(str(saved), tmp_path / "one", order="0,3,2,5")["order"] == "0,3,2,5"
    with refuses(UsageError):
        export_whole(str(saved), tmp_path / "two", order="3,2,0,5")


# --- hosts ----------------------------------------------------------------------------------------


def test_answers_are_those_of_the_library_whatever_is_alive(
    saved: Path, files: Path, tmp_path: Path
) -> None:
    """Over real hosts, with random blocks alive; routes name blocks of the model."""
    model, draw = ls.load(str(saved)), random.Random(4)
    images = pictures(model)
    alive = [HOSTED, *(tuple(draw.sample(HOSTED, count)) for count in (1, 2, 2, 3, 3, 4))]

    async def go() -> list[Classified]:
        async with gateway(model=ServedModel(files), parallel=2) as site:
            remote = RemoteModel(site.model, site.router)
            async with hosting(site.url, cache=tmp_path):
                await site.until(lambda: min(site.copies()) == 1, seconds=HANGS)
                answers = []
                for number, blocks in enumerate(alive):
                    view = site.router.swarm["pi"]
                    site.router.put(view._replace(blocks=frozenset(blocks)))
                    image = images[number % 4][None].numpy()
                    deadline = site.router.clock() + HANGS
                    answers.append(await remote.classify(image, deadline=deadline))
                remote.close()
                return answers

    for number, (blocks, got) in enumerate(zip(alive, asyncio.run(go()), strict=True)):
        route = got.route
        assert (set(route.order), route.depth, route.fixed) == (set(blocks), DEPTH, FIXED)
        assert set(route.skipped) == set(HOSTED) - set(blocks)
        order = ExecutionOrder(route.order, DEPTH, route.versions).within_ends(FIXED)
        wanted = answers_of(model, order, images[number % 4][None])
        assert distance(torch.from_numpy(got.logits), wanted) < 1e-5
        answer: Any = classification(
            got, labels=[str(n) for n in range(100)], top=1, expected=(None, ""), total_ms=1.0
        )
        assert set(answer.blocks) == set(blocks)
        assert (answer.depth, answer.fixed) == (DEPTH, FIXED)
        assert answer.degraded == (len(blocks) < len(HOSTED))


def test_a_request_that_is_sure_has_passed_through_the_last_block(
    saved: Path, files: Path, tmp_path: Path
) -> None:
    model, served = ls.load(str(saved)), ServedModel(files)
    calibration = served.calibration
    assert calibration is not None
    assert [row.kept for row in calibration.queue] == [1, 2, 3, 4], "only these can be lost"
    assert len(calibration.temperatures) == len(HOSTED)
    image = pictures(model)[:1]

    async def go() -> Classified:
        async with gateway(model=served) as site:
            remote = RemoteModel(site.model, site.router, calibration=calibration)
            async with hosting(site.url, cache=tmp_path):
                await site.until(lambda: min(site.copies()) == 1, seconds=HANGS)
                deadline = site.router.clock() + HANGS
                got = await remote.classify(
                    image.numpy(), deadline=deadline, min_blocks=1, confidence=1e-9
                )
                remote.close()
                return got

    got = asyncio.run(go())
    assert (got.route.ending, len(got.route.order)) == ("sure", 1)
    wanted = answers_of(model, f"0,{got.route.order[0]},5", image)
    assert distance(torch.from_numpy(got.logits), wanted) < 1e-5
    assert got.temperature == calibration.temperatures[0]
    assert probabilities(got.logits, got.temperature).max() == pytest.approx(
        float((wanted.double() / got.temperature).softmax(-1).max()), rel=1e-4
    )


def test_a_calibration_of_the_files_is_that_of_the_model(saved: Path, files: Path) -> None:
    ours = calibrate(ls.load(str(files)), DATA, orders=2, images=20)
    theirs = calibrate(ls.load(str(saved)), DATA, orders=2, images=20)
    assert (ours.rows, ours.late, ours.weights) == (theirs.rows, theirs.late, theirs.weights)
    assert ours.temperatures == pytest.approx(theirs.temperatures, rel=1e-3)


# --- the page of the demo -------------------------------------------------------------------------


def test_the_page_draws_between_the_ends(saved: Path) -> None:
    plain = truncate(ls.load("bundled:digits"), "0,2,4,7,9,11")
    bench = Workbench({"ours": ls.load(str(saved)), "ordinary": plain}, names={})
    facts = bench.facts()
    assert (facts["depth"], facts["fixed"]) == (DEPTH, FIXED)
    assert str(bench.order("3,1+2")) == "0,3,1+2,5"
    score = bench.scores(bench.order("3,1,4"))
    images, classes = bench.pictures.images, bench.pictures.classes
    right = answers_of(ls.load(str(saved)), "0,3,1,4,5", images).argmax(-1) == classes
    assert score["right"]["ours"] == int(right.sum())
    for order in ("0,1,2", "1,5", "6"):
        with refuses(UsageError):
            bench.order(order)
    bench.pool.shutdown()
