"""Load and save models by spec string.

    bundled:digits                                  the base checkpoint in this package
    timm:NAME[?pretrained=false&img_size=12,20&...] timm, keywords of timm.create_model
    timm:NAME?checkpoint=FILE[&num_classes=10&...]  a checkpoint of timm's training script
    hf:NAME_OR_DIR[?pretrained=false&revision=...]  the hub or a directory: what `push_to_hub`,
                                                    transformers or timm wrote
    dir:PATH                                        what `save`, `layershuffle fit`, timm or
                                                    transformers wrote

A saved directory has the layout of the model's library, with safetensors only. Data that do not fit
into it are in other files (layershuffle.json, layershuffle.safetensors, README.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi
from torch import nn

from layershuffle.core.checks.blocks_alike import ISOTROPIC
from layershuffle.core.discovery import find_blocks
from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.core.position import backbone_of
from layershuffle.core.stack import BlockStack, depth_of, stack_of, wrap
from layershuffle.core.torch_private import parts_by_name, uncompiled
from layershuffle.core.tying import places_tied, tie
from layershuffle.ground.bundled import asset, recipe_of_model
from layershuffle.ground.errors import ModelFileError, StackError, UsageError
from layershuffle.ground.files import refuse_others, staged_directory, user_path
from layershuffle.models.card import render
from layershuffle.models.files import (
    CONFIG,
    LOG,
    PICKLE_SUFFIXES,
    PROCESSORS,
    WEIGHTS,
    WEIGHTS_INDEX,
    check_finite,
    fetched,
    hub_errors,
    library_errors,
    read_json,
    refused_pickle,
    weights_digest,
)
from layershuffle.models.libraries import (
    adapter,
    class_names_of,
    image_view,
    library_of,
    num_classes_of,
)
from layershuffle.models.manifest import MANIFEST
from layershuffle.models.metadata import (
    METADATA_FILE,
    ModelMetadata,
    ModelRecord,
    checked_record,
    read_metadata,
)
from layershuffle.models.origin import origin_of, remember, unknown_name
from layershuffle.models.output import CARD, FILES_OF_A_MODEL
from layershuffle.models.position_files import (
    PARTS,
    forms_of,
    with_stored_parts,
    write_parts,
)
from layershuffle.models.spec import ModelSpec, model_directory, parse_spec

_SAVE_AGAIN = "the files come from different models, or were changed: save the model again"


def load(spec: str | Path, *, num_classes: int | None = None, seed: int = 0) -> nn.Module:
    """The wrapped model of `spec`, in float32 and eval mode, with its position parts if it has any.

    A path that exists may stand for dir:PATH. With `num_classes` other than the model's, the head
    is replaced by a fresh one, which is logged as a warning. New weights are a function of `seed`
    alone, and torch's global generator stays as it is. Weights in another dtype than float32 are
    converted, which is logged as well. Raises `UsageError` for a bad spec, `ModelFileError` for
    missing, damaged or refused files and for weights that are not finite, `StackError` for models
    whose blocks are not interchangeable.
    """
    if num_classes is not None and num_classes < 1:
        raise UsageError(f"num_classes must be at least 1, got {num_classes}")
    try:
        model = _opened(parse_spec(str(spec)), seed)
    except StackError as error:
        # Without what `wrap` could be given: whoever names a model by a spec does not call it.
        raise StackError(error.cause, place=spec, hint=ISOTROPIC) from error
    check_finite(model, str(spec))
    if num_classes is not None and num_classes != num_classes_of(model):
        replace_head(model, num_classes, seed=seed)
    return model.eval()


def replace_head(model: nn.Module, classes: int, *, seed: int) -> None:
    """Give `model` a fresh head, a function of `seed`, for `classes` classes without names.

    A warning says so.
    """
    backbone = backbone_of(model)
    library_of(backbone).resize_head(backbone, classes, seed=seed)
    # Neither names nor method and scores apply to the new head.
    remember(backbone, replace(origin_of(backbone), class_names=None, record={}))
    model.eval()  # the libraries make new layers in training mode


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    record: Mapping[str, Any] | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` to `directory` atomically, in the dtype that it has.

    A model that was saved there before is replaced once the new one is whole on disk.

    `record`: JSON-able metadata (method, policy, selected, settings, scores, provenance) kept in
    layershuffle.json; `scores` by order mode, e.g. {"arbitrary": {"top1": 74.5}}. Without a record
    that of the loaded model is kept, its scores excepted: the weights may have changed.
    `model_args`: what a timm model was built with, where timm does not know it. Raises `UsageError`
    if the library would rebuild another model, or if `directory` holds other files;
    `ModelFileError` for weights that are not finite; `LayerShuffleError` for a full disk and the
    like.
    """
    final = user_path(directory)
    refuse_others(final, ours=FILES_OF_A_MODEL, kind="saved model")
    with staged_directory(final) as stage:
        _write(model, stage, record, model_args, title=final.absolute().name)


def push_to_hub(
    model: nn.Module,
    repo: str,
    *,
    private: bool | None = None,
    record: Mapping[str, Any] | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> str:
    """Write `model` to the repository `repo` ("user/name") of the hub; returns its address.

        ls.push_to_hub(model, "user/vit-any-order")
        model = ls.load("hf:user/vit-any-order")

    The repository is made if it is not there (`private`: by the settings of the user), and its
    files are those of `save`: an ordinary model of timm or transformers for others. The rest as in
    `save`. Needs `hf auth login`, or HF_TOKEN. Raises `ModelFileError` if the hub refuses it.
    """
    with TemporaryDirectory() as place, hub_errors(repo):
        _write(model, Path(place), record, model_args, title=repo.rpartition("/")[2], repo=repo)
        api = HfApi()
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=place,
            commit_message="Model saved by layershuffle",
            # Files of an earlier model would be taken for parts of this one.
            delete_patterns=list(FILES_OF_A_MODEL),
        )
    return str(url)


def _write(
    model: nn.Module,
    stage: Path,
    record: Mapping[str, Any] | None,
    model_args: Mapping[str, Any] | None,
    *,
    title: str,
    repo: str | None = None,
) -> None:
    check_finite(model)
    model = uncompiled(model)
    backbone = backbone_of(model)
    names = class_names_of(model)
    origin = origin_of(backbone)
    library = library_of(backbone)
    view = image_view(backbone)
    earlier = {key: value for key, value in origin.record.items() if key != "scores"}
    plain = checked_record(earlier if record is None else record)
    path, container = next(
        # A model that is not wrapped is searched, and not changed.
        (item for item in backbone.named_modules() if isinstance(item[1], BlockStack)),
        None,
    ) or find_blocks(backbone)
    tied = places_tied(container.children())
    metadata = ModelMetadata(
        schema=1,
        library=library.NAME,
        name=library.write(backbone, stage, view=view, names=names, model_args=model_args or {}),
        num_classes=library.num_classes(backbone),
        depth=len(parts_by_name(container)),
        blocks=path,
        tied=None if tied is None else list(tied),
        fixed=container.fixed if isinstance(container, BlockStack) else (0, 0),
        shuffled=isinstance(container, BlockStack) and container.shuffled,
        position=forms_of(model),
        image_view=view,
        base_model=origin.base_model,
        **plain,
    )
    write_parts(model, stage)
    facts = metadata.model_dump_json(indent=2, by_alias=True, exclude_unset=True)
    (stage / METADATA_FILE).write_text(facts + "\n", encoding="utf-8")
    card = render(metadata, place=title, classes=names, repo=repo)
    (stage / CARD).write_text(card, encoding="utf-8")


def truncate(model: nn.Module, blocks: ExecutionOrder | str | Sequence[int]) -> nn.Module:
    """`model` itself, shortened to `blocks` (ids, each once), which it now runs in that order.

    Stem and head stay, and ends that keep their place do if the blocks have them there and two
    others; otherwise all are drawn. It can be saved and loaded as an ordinary model of its library.
    Raises `UsageError` for repeats, for models with position parts (their tables belong to another
    depth), and where the library cannot describe the shorter model; the model is then as before.
    """
    stack = stack_of(wrap(model))
    order = order_of(blocks, stack.depth)
    if backbone_of(model) is not model:
        raise UsageError(
            "A model with position parts cannot be shortened", hint="shorten it before adding them"
        )
    if len(set(order)) < len(order):
        raise UsageError(f"The blocks {order} hold a block twice", hint="name each block once")
    before = dict(parts_by_name(stack))
    # The names count from 0 again, as the library names the blocks of a shorter model.
    names = list(before)[: len(order)]
    kept = [stack.blocks[block] for block in order]
    _replace_parts(stack, dict(zip(names, kept, strict=True)))
    try:
        library_of(model).set_depth(model, len(order))
    except UsageError:
        _replace_parts(stack, before)
        raise
    ends = stack.fixed
    if any(ends) and (not order.keeps_ends(ends) or sum(ends) + 2 > len(order)):
        stack.fixed = (0, 0)
        LOG.warning(
            "The blocks %s do not keep the ends %d,%d of the model and two others between them, so "
            "all of them are drawn from now on",
            order,
            *ends,
        )
    # Method and scores do not apply to the shorter model.
    return remember(model, replace(origin_of(model), record={}))


def _replace_parts(container: nn.Module, parts: Mapping[str, nn.Module | None]) -> None:
    """Let `container` hold `parts` under their names, in this order, and nothing else."""
    for name in list(parts_by_name(container)):
        delattr(container, name)
    for name, part in parts.items():
        container.add_module(name, part)


def _opened(spec: ModelSpec, seed: int) -> nn.Module:
    if spec.scheme == "timm":
        return wrap(adapter("timm").build(spec.place, spec.settings, seed=seed))
    place = user_path(spec.place)
    random = spec.settings.get("pretrained") is False
    base = None
    if spec.scheme == "bundled":
        marks = (METADATA_FILE, MANIFEST)
        place = asset(spec.place)
        names = []
        for mark in marks:
            for path in asset().glob(f"*/{mark}"):
                names.append(path.parent.name)
        if spec.place not in names:
            listing = f"this installation has {', '.join(names) or 'none'}"
            raise unknown_name("bundled model", spec.place, names=names, listing=listing)
    elif unknown := sorted(spec.settings.keys() - {"pretrained", "revision"}):
        hint = "pretrained=true|false and revision=NAME"
        raise UsageError(f"hf: has no setting {unknown[0]!r}", hint=hint)
    elif not isinstance(spec.settings.get("pretrained", True), bool):
        raise UsageError("pretrained is true or false", place=spec.place)
    elif spec.scheme == "hf" and "revision" in spec.settings and place.is_dir():
        raise UsageError("A directory has no revisions", place=place, hint="leave revision= out")
    elif spec.scheme == "hf" and not place.is_dir():
        base = spec.place
        files = [CONFIG, *PROCESSORS]
        if not random:
            # Without pickles and code, which would be refused after the download.
            files += [METADATA_FILE, PARTS, WEIGHTS, WEIGHTS_INDEX, "model-*-of-*.safetensors"]
        place = fetched(base, files, revision=spec.settings.get("revision"))
    if random:
        from layershuffle.models import hf_models

        return wrap(hf_models.random(place, seed=seed))
    return _load_directory(place, seed, base)


def _load_directory(place: Path, seed: int, base: str | None) -> nn.Module:
    """The model in a directory; `base`: the name of one that somebody else put on the hub."""
    directory = _loadable_directory(place)
    if (directory / MANIFEST).is_file():
        return adapter("onnxruntime").read(directory, seed=seed)
    if not (directory / METADATA_FILE).is_file():
        return _built_by_its_library(directory, seed, base)
    metadata = read_metadata(directory)
    path = directory / METADATA_FILE
    library = adapter(metadata.library)
    backbone = library.read(directory, seed=seed)
    try:
        wrap(backbone, metadata.blocks)
    except StackError as error:
        raise ModelFileError(error.cause, place=path, hint=_SAVE_AGAIN) from error
    # The file of another model would bring its view of images, and be right about nothing else.
    says = metadata.num_classes, metadata.depth
    has = library.num_classes(backbone), depth_of(backbone)
    if says != has:
        raise ModelFileError(
            f"It is of {says[0]} classes and {says[1]} blocks, and the model beside it has "
            f"{has[0]} and {has[1]}",
            place=path,
            hint=_SAVE_AGAIN,
        )
    record = metadata.model_dump(include=set(ModelRecord.model_fields), exclude_none=True)
    origin = origin_of(backbone)
    base = metadata.base_model
    remember(backbone, replace(origin, view=metadata.image_view, base_model=base, record=record))
    _tie_again(backbone, metadata, path)
    stack = stack_of(backbone)
    stack.fixed = metadata.fixed
    stack.shuffled = metadata.shuffled
    return with_stored_parts(backbone, metadata.position, directory=directory)


def _tie_again(backbone: nn.Module, metadata: ModelMetadata, path: Path) -> None:
    """Tie a model as it was saved. Raises `ModelFileError` if that would change weights."""
    if metadata.tied is None:
        return
    before = weights_digest(backbone)
    hint = "delete the key 'tied' to load the blocks as they are"
    with library_errors("layershuffle", path, hint=hint):
        tie(backbone, metadata.tied)
        if weights_digest(backbone) != before:
            raise ValueError(f"the places {metadata.tied} are tied, and their weights differ")


def _built_by_its_library(directory: Path, seed: int, base: str | None) -> nn.Module:
    """The model in a directory that timm or transformers saved."""
    from layershuffle.models import hf_models

    # Without the file that describes them, the parts would be silently ignored.
    if (directory / PARTS).exists():
        raise ModelFileError(
            f"{PARTS} is present without {METADATA_FILE}", place=directory, hint=_SAVE_AGAIN
        )
    config = read_json(directory / CONFIG)
    # transformers' wrapper around timm also has an architecture.
    if "architecture" not in config or "model_type" in config:
        return wrap(hf_models.foreign(directory, seed=seed, base=base))
    backbone = adapter("timm").read(directory, seed=seed)
    origin = replace(origin_of(backbone), base_model=base, natural_classes=True)
    return wrap(remember(backbone, origin))


def _loadable_directory(place: Path) -> Path:
    """The directory with the model of `place`. Raises `ModelFileError` if there is none."""
    directory = model_directory(place)
    if any((directory / mark).is_file() for mark in (MANIFEST, METADATA_FILE, CONFIG)):
        return directory
    if place.suffix.lower() in PICKLE_SUFFIXES:
        raise refused_pickle(place)
    cause = f"There is no {METADATA_FILE} and no {CONFIG} here"
    hint = (
        "name a directory that layershuffle fit, layershuffle.save, timm or transformers wrote; a "
        "checkpoint of timm's train.py is named by timm:ARCHITECTURE?checkpoint=FILE"
    )
    if place.is_file():
        cause = "A model is a directory, and this is a file"
        hint = "name its directory; images come after the model: layershuffle predict MODEL IMAGE"
    if not place.exists():
        cause = "There is no such directory"
        hint = "check the path"
        if recipe_of_model(place) is not None:
            hint = f"layershuffle fit --recipe {place.name} --out {place}"
    raise ModelFileError(cause, place=place, hint=hint)
