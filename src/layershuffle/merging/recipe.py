"""Recipes of merges: a YAML file names the donor of each block, and `merge_recipe` saves the merge.

    slices:
      - model: runs/a          # what layershuffle fit or save wrote, or any model spec
        blocks: [0, 2]         # block i of the merge is block i of this model
      - model: runs/b
        blocks: [1, 3]
    stem: average              # or base, or one of the models above
    head: runs/a
    base: bundled:digits       # for base ends; by default the base that the donors name

The form is similar to mergekit's `slices`, without layer ranges, because a block keeps its id.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.ground.files import refuse_others
from layershuffle.ground.settings import BlockId, Settings, read_recipe
from layershuffle.ground.text import did_you_mean, shortened
from layershuffle.merging.plans import MergePlan, Source
from layershuffle.merging.scoring import load_group
from layershuffle.models import save
from layershuffle.models.output import FILES_OF_A_MODEL, check_output
from layershuffle.models.spec import own_directory


class Slice(Settings):
    """The blocks of one donor."""

    model: str
    """Directory of a fit or of a saved model, or any model spec."""
    blocks: Annotated[tuple[BlockId, ...], Field(min_length=1)]
    """Ids of its blocks that the merge takes."""


class MergeRecipe(Settings):
    """The donors of the blocks, and the sources of stem and head."""

    slices: Annotated[tuple[Slice, ...], Field(min_length=2)]
    """The donors."""
    stem: str = "average"
    """average, base, or one of the models."""
    head: str = "average"
    """average, base, or one of the models."""
    base: str | None = None
    """The base checkpoint (default: the one that the donors name)."""

    @model_validator(mode="after")
    def _check(self) -> MergeRecipe:
        words = ["average", "base", *self.models]
        for word in (self.stem, self.head):
            if word not in words:
                raise ValueError(
                    f"stem and head come from average, base or one of the models, not from "
                    f"{word!r}; {did_you_mean(word, words)}".rstrip("; ")
                )
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The donors, in the order of the file."""
        return tuple(part.model for part in self.slices)

    def plan(self, depth: int) -> MergePlan:
        """The plan for models of `depth` blocks. Raises `UsageError` unless it names each once."""
        blocks: list[int] = []
        donors: dict[int, int] = {}
        for donor, part in enumerate(self.slices):
            for block in part.blocks:
                blocks.append(block)
                donors[block] = donor
        if sorted(blocks) != list(range(depth)):
            raise UsageError(
                f"The slices give the blocks {shortened(map(str, sorted(blocks)), limit=20)}, "
                f"which do not make a model of {depth} blocks",
                hint=f"name each of 0..{depth - 1} once",
            )
        in_order = tuple(donors[block] for block in range(depth))
        return MergePlan(in_order, self._source(self.stem), self._source(self.head))

    def _source(self, word: str) -> Source:
        if word == "average":
            return "average"
        return "base" if word == "base" else self.models.index(word)


def read_merge_recipe(path: Path) -> MergeRecipe:
    """The recipe in a YAML file. Raises `SettingsError` or `UsageError` for an invalid file."""
    fields = read_recipe(path)
    try:
        return MergeRecipe(**fields)
    except SettingsError as error:
        form = "slices: [{model: DIR, blocks: [0, 2]}, {model: DIR, blocks: [1, 3]}]"
        raise SettingsError(error.cause, place=path, hint=f"the form is {form}") from None


def merge_recipe(recipe: MergeRecipe, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the merge of `recipe` to the directory `out`, and return its record.

    layershuffle.json and the card contain the SHA-256 of the donors' weight files. Raises
    `UsageError` for donors that do not fit, and if `out` holds a donor, or any file without
    `overwrite`; `ModelFileError` for files that cannot be read.
    """
    # Before the donors are loaded, because large models take minutes.
    reads = list(recipe.models)
    if recipe.base:
        reads.append(recipe.base)
    check_output(out, reads=reads, overwrite=overwrite)
    refuse_others(out, ours=FILES_OF_A_MODEL, kind="saved model")
    needs_base = "base" in (recipe.stem, recipe.head)
    group = load_group(recipe.models, base=recipe.base, needs_base=needs_base)
    # The plan needs the depth of the donors, which the recipe does not state.
    plan = recipe.plan(group.depth)
    record = group.record(plan)
    for donor in record["provenance"]["merge"]["donors"]:
        # Directories may be renamed or trained again; the digests identify the merged weights.
        place = own_directory(donor["model"])
        digests: dict[str, str] = {}
        if place is not None:
            for path in sorted(place.glob("*.safetensors")):
                with path.open("rb") as file:
                    digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        donor["sha256"] = digests
    save(group.merge(plan), out, record=record)
    return record
