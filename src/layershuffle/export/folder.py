"""A directory of ONNX files of a model: stem, blocks, head, and a manifest that says what they are.

Everything is compared with torch before the directory takes its name. `models.onnx_models` reads
it; a swarm serves it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.orders import ExecutionOrder, check_ends, order_of
from layershuffle.core.policies import drawn_blocks
from layershuffle.core.position import PositionedModel, backbone_of
from layershuffle.core.stack import blocks_of, depth_of, fixed_of, running
from layershuffle.core.tensors import logits_of, map_tensors, tensors_of
from layershuffle.export.graphs import (
    OPSET,
    BlockForm,
    BlockPrecision,
    ModelPart,
    block_alone,
    form_of,
    graph_of,
)
from layershuffle.ground.errors import ModelFileError, StackError, UsageError
from layershuffle.ground.extras import require
from layershuffle.ground.files import (
    listed_files,
    refuse_others,
    staged_directory,
    write_bytes,
    write_text,
)
from layershuffle.ground.machine import collector_paused, processor, versions
from layershuffle.ground.text import Progress, unheard
from layershuffle.models import class_names_of, image_view, load, num_classes_of
from layershuffle.models.files import weights_digest
from layershuffle.models.manifest import CALIBRATION, MANIFEST, MANIFEST_SCHEMA
from layershuffle.models.onnx_models import OnnxGraph
from layershuffle.models.origin import origin_of
from layershuffle.models.spec import own_directory
from layershuffle.models.stem_head import refuse_more_than_blocks, run_head, run_stem
from layershuffle.scoring.evaluate_spec import evaluate_spec
from layershuffle.scoring.settings import EvalSettings

PARITY = 1e-5
"""Largest error of a block in fp32, as a part of the largest number that it returns (or of 1)."""
_LOGITS_PARITY = 1e-3  # after all blocks, in which such errors add up
_MOST_LOST = 1.0  # points that int8 may cost
_ORDERS = 5
_SEED = 20407
_CHECKED = 3  # images
_TIMED_RUNS = 30
_SERVED = "serve a model whose position information enters before the blocks (ViT, DeiT, DINOv2)"


def export_model(
    spec: str,
    out: Path,
    *,
    precision: BlockPrecision = "fp32",
    data: str | None = None,
    progress: Progress = unheard,
) -> dict[str, Any]:
    """Write the model of `spec` to the directory `out` as ONNX files; returns the manifest.

    `precision` is that of the blocks' weights; stem and head are fp32. Blocks that keep their place
    (`BlockStack.fixed`) are in the graphs of stem and head. With `data` (as for
    `evaluate_spec`) the files are scored beside the model, in order and in drawn orders. Raises
    `StackError` for a model that cannot be cut into stem, blocks and head or that torch cannot
    export, `UsageError` for int8 without `data` or with more than a point lost,
    `LayerShuffleError` for a place that cannot be written.

        export_model("bundled:digits-swarm", Path("digits"))
    """
    model = _opened(spec, out, ours=[CALIBRATION])
    calibration = _calibration_of(model, spec, out)
    if precision == "int8" and data is None:
        raise UsageError(
            "int8 is only taken if it is measured: some models lose everything by it",
            hint="name images with labels: --data SPEC",
        )
    images = _noise(model)
    others = _constants(model, images)
    fixed = fixed_of(model)
    hosted = drawn_blocks(depth_of(model), fixed)
    blocks = [block_alone(block, others) for block in blocks_of(model)]
    with staged_directory(out) as stage, collector_paused():
        # Stem and head run the whole model beside its blocks, and the blocks that keep their place;
        # the graph loses what it does not need.
        def stem(batch: Tensor) -> Tensor:
            state, _ = run_stem(model, batch, forward=model)
            for block in blocks[: hosted.start]:
                state = block(state)
            return state

        def head(state: Tensor) -> Tensor:
            for block in blocks[hosted.stop :]:
                state = block(state)
            blank = state.new_zeros((state.shape[0], *images.shape[1:]))
            return run_head(model, blank, state=state, forward=lambda x: logits_of(model(x), model))

        with torch.no_grad():
            state = stem(images)
        _write_graph(stage / "stem.onnx", ModelPart(model, stem), images, ("images", "state"))
        _write_graph(stage / "head.onnx", ModelPart(model, head), state, ("state", "logits"))
        facts = {
            **_facts(model, spec, precision=precision),
            "state": {"shape": list(state.shape[1:]), "dtype": "float32"},
            **_write_blocks(
                stage,
                list(enumerate(blocks))[hosted.start : hosted.stop],
                state=state,
                precision=precision,
            ),
        }
        if any(fixed):
            facts["fixed"] = list(fixed)
        _write_manifest(stage, facts)
        facts["parity"] = {"logits": _compared(model, stage, images, precision=precision)}
        if calibration is not None:
            write_bytes(stage / CALIBRATION, calibration)
        if data is not None:
            facts["accuracy"] = _accuracy(
                spec, stage, data=data, precision=precision, progress=progress
            )
        return _write_manifest(stage, facts)


def export_whole(spec: str, out: Path, *, order: str | None = None) -> dict[str, Any]:
    """Write the model of `spec`, in one order, as the single file model.onnx, with a manifest.

    `order`: such as "3,0,2"; by default that of the model. Raises as `export_model`, and
    `UsageError` for an order in which the ends of the model do not keep their place.
    """
    model = _opened(spec, out)
    chosen = order_of(range(depth_of(model)) if order is None else order, depth_of(model))
    check_ends([chosen], fixed_of(model), hint="name the ends in their place, in --order")
    images = _noise(model)
    with staged_directory(out) as stage, torch.no_grad():

        def whole(batch: Tensor) -> Tensor:
            with running(model, chosen):
                return logits_of(model(batch), model)

        part = ModelPart(model, whole)
        content = _write_graph(stage / "model.onnx", part, images, ("images", "logits"))
        error = _error(OnnxGraph(content)(images), whole(images))
        _refuse_other_numbers("The model", error, most=_LOGITS_PARITY)
        facts = {**_facts(model, spec, precision="fp32"), "order": str(chosen)}
        return _write_manifest(stage, {**facts, "parity": {"logits": error}})


def _calibration_of(model: nn.Module, spec: str, out: Path) -> bytes | None:
    """The calibration for the export of `model`: that beside it, or else one that was measured on
    an export of these weights in `out`.

    Raises `UsageError` for one that was measured in `out` on other weights, which would be lost.
    """
    measured = _measured_in(out)
    if measured is not None and not _is_of(measured, weights_digest(model)):
        raise UsageError(
            "Writing here would delete a calibration of another model",
            place=out / CALIBRATION,
            hint="name another place, or delete it",
        )
    directory = own_directory(spec)
    if directory is not None and (directory / CALIBRATION).is_file():
        return (directory / CALIBRATION).read_bytes()
    return measured


def _measured_in(out: Path) -> bytes | None:
    """The calibration in `out`, unless an export copied it there, as its manifest says."""
    if not (out / CALIBRATION).is_file():
        return None
    content = (out / CALIBRATION).read_bytes()
    try:
        files = json.loads((out / MANIFEST).read_text(encoding="utf-8"))["files"]
        is_copy = files[CALIBRATION]["sha256"] == hashlib.sha256(content).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        is_copy = False
    return None if is_copy else content


def _is_of(calibration: bytes, weights: str) -> bool:
    """Whether it was measured on the weights of this digest."""
    try:
        return bool(json.loads(calibration)["weights"] == weights)
    except (ValueError, KeyError, TypeError):
        return False


def _opened(spec: str, out: Path, *, ours: Sequence[str] = ()) -> nn.Module:
    require("export")
    refuse_others(out, ours=[*ours, *listed_files(out / MANIFEST)], kind="exported model")
    model = load(spec)
    if isinstance(blocks_of(model)[0], OnnxGraph):
        raise UsageError(
            "This is an export already", place=spec, hint="export the model that its manifest names"
        )
    if isinstance(model, PositionedModel) and model.encoding is not None:
        raise UsageError(
            "The blocks of this model need a position encoding, which depends on the order",
            place=spec,
            hint="export a model without position encoding (methods layershuffle, "
            "layershuffle-predict, anyorder)",
        )
    return backbone_of(model)


def _write_graph(path: Path, part: ModelPart, example: Tensor, names: tuple[str, str]) -> bytes:
    content: bytes = graph_of(part, example, names=names).SerializeToString(deterministic=True)
    write_bytes(path, content)
    return content


def _noise(model: nn.Module) -> Tensor:
    """Images of about the mean and spread of normalised ones."""
    view = image_view(model)
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(_CHECKED, view.channels, view.height, view.width, generator=generator)


@torch.no_grad()
def _constants(model: nn.Module, images: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What all blocks get beside the state. Raises `StackError` if it depends on the images."""
    refuse_more_than_blocks(model, images, forward=lambda batch: logits_of(model(batch), model))
    state, others = run_stem(model, images, forward=model)
    if state.dim() != 3 or state.dtype != torch.float32:
        raise StackError(
            f"The state between the blocks is {state.dtype} {tuple(state.shape)}; files take "
            "float32 (images, tokens, width)",
            hint=_SERVED,
        )
    # Tables of positions are constants. Masks have a row for each image, or other numbers.
    _, again = run_stem(model, images[:2].flip(-1) * 0.5, forward=model)
    for value, other in zip(tensors_of(others), tensors_of(again), strict=True):
        if value.shape != other.shape or not torch.equal(value, other):
            raise StackError(
                "The blocks get more than the state, and it depends on the images", hint=_SERVED
            )
    args, kwargs = map_tensors(others, Tensor.clone)
    return args, kwargs


@torch.no_grad()
def _write_blocks(
    stage: Path,
    blocks: Sequence[tuple[int, ModelPart]],
    *,
    state: Tensor,
    precision: BlockPrecision,
) -> dict[str, Any]:
    """Write graphs and weights of `blocks`, pairs of the id in the model and the block, each
    compared with torch; returns their facts. `state` enters the first of them."""
    forms: list[BlockForm] = []
    graphs: dict[bytes, str] = {}
    facts: list[dict[str, Any]] = []
    speed: dict[str, Any] = {}
    for block, alone in blocks:
        module = alone.model
        wanted = alone(state)
        # A block that computes in another way than those before has a graph of its own.
        for form in forms:
            if not form.fits(module):
                continue
            files = form.files(module, "fp32")
            if (error := _block_error(files, state, wanted)) <= PARITY:
                break
        else:
            form = form_of(alone, state)
            files = form.files(module, "fp32")
            error = _block_error(files, state, wanted)
            _refuse_other_numbers(f"Block {block}", error, most=PARITY)
            forms.append(form)
        if not facts:
            speed["fp32_block_ms"] = _milliseconds(files, state)
        if precision != "fp32":
            files = form.files(module, precision)
            error = _block_error(files, state, wanted)
        if not facts:
            speed |= {"block_ms": _milliseconds(files, state), "processor": processor()}
        graph, weights = files
        if graph not in graphs:
            graphs[graph] = "block.onnx" if not graphs else f"block-{block:02d}.onnx"
            write_bytes(stage / graphs[graph], graph)
        name = f"block-{block:02d}.weights"
        write_bytes(stage / name, weights)
        facts.append({"graph": graphs[graph], "weights": name, "parity": error})
        state = wanted
    return {"blocks": facts, "speed": speed}


def _block_error(files: tuple[bytes, bytes], state: Tensor, wanted: Tensor) -> float:
    run = OnnxGraph(*files)
    # A batch of another size, too: the graph takes any.
    return max(_error(run(state), wanted), _error(run(state[:1]), wanted[:1]))


def _milliseconds(files: tuple[bytes, bytes], state: Tensor) -> float:
    """Milliseconds of a block for one image on one thread of this machine."""
    run = OnnxGraph(*files, threads=1)
    times = []
    for _ in range(_TIMED_RUNS):
        begin = time.perf_counter()
        run(state[:1])
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def _error(got: Tensor, wanted: Tensor) -> float:
    """The largest error, as a part of the largest number of `wanted` (of 1 at least)."""
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


def _refuse_other_numbers(what: str, error: float, *, most: float) -> None:
    # `not <=`, because an error may be NaN.
    if not error <= most:
        raise StackError(
            f"{what} gives other numbers as an ONNX file: the largest error is {error:.1e} of the "
            f"largest number, {most:.0e} is allowed",
            hint="layershuffle predict and eval run this model on this machine",
        )


@torch.no_grad()
def _compared(
    model: nn.Module, stage: Path, images: Tensor, *, precision: BlockPrecision
) -> dict[str, float]:
    """The error of the logits through the files, in order and in reverse between the ends."""
    exported = load(f"dir:{stage}")
    depth = depth_of(model)
    fixed = fixed_of(model)
    drawn = drawn_blocks(depth, fixed)
    errors = {}
    for name, blocks in (("in_order", tuple(drawn)), ("reversed", tuple(reversed(drawn)))):
        ran = ExecutionOrder(blocks, depth).within_ends(fixed)
        with running(model, ran), running(exported, ran):
            errors[name] = _error(exported(images), logits_of(model(images), model))
        if precision == "fp32":
            _refuse_other_numbers("The model", errors[name], most=_LOGITS_PARITY)
    return errors


def _accuracy(
    spec: str, stage: Path, *, data: str, precision: BlockPrecision, progress: Progress
) -> dict[str, Any]:
    """Top-1 in percent, of the model and of its files, in order and over drawn orders."""
    settings = EvalSettings(num_orders=_ORDERS)
    report: dict[str, Any] = {"data": data, "orders": _ORDERS, "seed": settings.seed}
    for name, subject in (("torch", spec), ("files", f"dir:{stage}")):
        scores = evaluate_spec(
            subject, data, settings=settings, device="cpu", progress=progress
        ).scores
        report["images"] = scores[0].images
        report[name] = {
            "in_order": scores[0].top1,
            "any_order": statistics.mean(score.top1 for score in scores[1:]),
        }
    for mode, top1 in report["torch"].items():
        lost = top1 - report["files"][mode]
        if precision == "int8" and lost > _MOST_LOST:
            raise UsageError(
                f"int8 costs {lost:.1f} points ({mode.replace('_', ' ')}, on {data}), and "
                f"{_MOST_LOST:g} is allowed",
                place=spec,
                hint="take --precision fp16 or fp32",
            )
    return report


def _facts(model: nn.Module, spec: str, *, precision: BlockPrecision) -> dict[str, Any]:
    """What the manifest says of the model itself."""
    record = origin_of(model).record
    settings = record.get("settings") or {}
    names = class_names_of(model)
    return {
        "schema": MANIFEST_SCHEMA,
        "model": spec,
        "precision": precision,
        "opset": OPSET,
        "depth": depth_of(model),
        "classes": num_classes_of(model),
        "class_names": None if names is None else list(names),
        "image_view": asdict(image_view(model)),
        "trained": {
            "method": record.get("method"),
            "data": settings.get("data"),
            "holdout": settings.get("holdout"),
            "paper_protocol": settings.get("paper_protocol", False),
        },
        "weights": weights_digest(model),
        "versions": {
            **versions(),
            "onnx": version("onnx"),
            "onnxruntime": version("onnxruntime"),
        },
    }


def _write_manifest(stage: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest with size and SHA-256 of every file beside it."""
    files = {}
    for path in sorted(stage.iterdir()):
        if path.name != MANIFEST:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            files[path.name] = {"sha256": digest, "bytes": len(content)}
    manifest = {**facts, "files": files}
    try:
        text = json.dumps(manifest, indent=2, allow_nan=False)
    except ValueError as error:
        raise ModelFileError("A number of the export is not finite", place=stage) from error
    write_text(stage / MANIFEST, text + "\n")
    return manifest
