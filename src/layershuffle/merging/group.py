"""Groups of compatible donors, and merges of them as views.

A merge shares its donors' tensors: the blocks are the donors' modules, and only what is around them
is new. In-place changes of a merge therefore change its donors; `layershuffle.save` and `load` make
an independent model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.position import PositionedModel, backbone_of
from layershuffle.core.stack import blocks_of, depth_of, fixed_of, stack_of
from layershuffle.ground.errors import UsageError
from layershuffle.merging.compatibility import check_compatible, shared_record
from layershuffle.merging.plans import MergePlan, Source
from layershuffle.models.origin import origin_of, remember
from layershuffle.models.position_files import parts_of

_TABLE = "encoding.table"  # of positions; with a row per block it belongs to no end


class MergeGroup:
    """Models whose blocks can be combined. Average stems and heads are computed once.

    `names`: the donors' names in messages and records (default: their numbers). `base`: the model
    of "base" ends. `mixed` allows several methods and data. Raises `UsageError` with the reason if
    the donors cannot be merged (`layershuffle.merging.compatibility`).
    """

    def __init__(
        self,
        donors: Sequence[nn.Module],
        *,
        names: Sequence[str] | None = None,
        base: nn.Module | None = None,
        mixed: bool = False,
    ) -> None:
        self.donors = tuple(donors)
        self.names = tuple(names) if names is not None else tuple(map(str, range(len(donors))))
        check_compatible(self.donors, names=self.names, mixed=mixed)
        self.depth = depth_of(self.donors[0])
        self.fixed = fixed_of(self.donors[0])
        self._base = base
        self._shared = shared_record(self.donors)
        self._averages: dict[str, Tensor] = {}

    def to(self, device: str | torch.device) -> None:
        """Move donors and base to a device, before merges are made."""
        for donor in self.donors:
            donor.to(device)
        if self._base is not None:
            self._base.to(device)

    def merge(self, plan: MergePlan) -> nn.Module:
        """The merge of this plan, in eval mode. Raises `UsageError` if the plan does not fit."""
        plan.check(len(self.donors), self.depth, fixed=self.fixed)
        first = self.donors[0]
        # deepcopy takes the entries of its memo as copies: so the parts of every place become the
        # chosen donor's modules, and the tensors around them the chosen tensors.
        memo: dict[int, Any] = {}
        for place, (donor, block) in enumerate(zip(plan.donors, plan.blocks, strict=True)):
            chosen = _parts_of_block(self.donors[donor], block)
            memo |= zip(map(id, _parts_of_block(first, place)), chosen, strict=True)
        for end, source in zip(end_tensors(first), (plan.stem, plan.head), strict=True):
            for name, tensor in end.items():
                if name == _TABLE and tensor.dim() == 3:
                    memo[id(tensor)] = self._rows(plan)
                else:
                    memo[id(tensor)] = self._end(name, tensor, source)
        model = copy.deepcopy(first, memo)
        # The record is attached to the backbone, from which `save` takes it.
        backbone = backbone_of(model)
        remember(backbone, replace(origin_of(backbone), record=self.record(plan)))
        return model

    def record(self, plan: MergePlan) -> dict[str, Any]:
        """The metadata of the merge: entries that the donors share, and the donor of each part."""
        merge: dict[str, Any] = {"blocks": list(plan.donors)}  # the number of each block's donor
        if plan.slots is not None:
            merge["slots"] = list(plan.slots)
        merge["stem"] = plan.stem if isinstance(plan.stem, str) else self.names[plan.stem]
        merge["head"] = plan.head if isinstance(plan.head, str) else self.names[plan.head]
        merge["donors"] = [{"model": name} for name in self.names]
        return {**self._shared, "provenance": {**self._shared["provenance"], "merge": merge}}

    def _end(self, name: str, like: Tensor, source: Source) -> Tensor:
        """The tensor `name` of stem or head from its source."""
        if isinstance(source, int):
            return _stem_and_head(self.donors[source])[name]
        if source == "average":
            if name not in self._averages:
                tensors = [_stem_and_head(donor)[name] for donor in self.donors]
                self._averages[name] = averaged(tensors)
            return self._averages[name]
        if self._base is None:
            raise UsageError(
                "Stem or head is to come from the base checkpoint, which neither donors nor caller "
                "name",
                hint="name it (--base SPEC, base: SPEC in a recipe), or choose other ends",
            )
        tensor = _stem_and_head(self._base).get(name)
        if tensor is None or tensor.shape != like.shape:
            raise UsageError(
                f"Stem or head cannot come from the base checkpoint: its {name} is not one of "
                f"{tuple(like.shape)} numbers, as that of the donors",
                hint="choose other ends (the base was made for other classes or images)",
            )
        return tensor

    def _rows(self, plan: MergePlan) -> nn.Parameter:
        """The table of positions with a row for each block, taken from the donor of the block.

        It is the only tensor that is copied, because no tensor can be a view of several tables.
        """
        tables = [_stem_and_head(donor)[_TABLE] for donor in self.donors]
        rows: list[Tensor] = []
        for donor, block in zip(plan.donors, plan.blocks, strict=True):
            rows.append(tables[donor][block])
        return nn.Parameter(torch.stack(rows).detach(), tables[0].requires_grad)


def merge(donors: Sequence[nn.Module], plan: MergePlan) -> nn.Module:
    """A merge of `donors`, as a view of them in eval mode.

    For many merges use one `MergeGroup`, which computes average stems and heads once.
    Raises `UsageError` if the donors do not fit together or the plan does not fit them.
    """
    return MergeGroup(donors).merge(plan)


def _parts_of_block(model: nn.Module, block: int) -> list[nn.Module]:
    """The block, and its entry in every list of the position parts (norms, projections, ...)."""
    parts = [blocks_of(model)[block]]
    if isinstance(model, PositionedModel):
        for part in parts_of(model).modules():
            if isinstance(part, nn.ModuleList):
                parts.append(part[block])
    return parts


def end_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of stem and head by name, which are registered before and after the blocks.

    A table of positions belongs to the stem.
    """
    backbone = backbone_of(model)
    stack = stack_of(model)
    inside = set(stack.modules())
    stem: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    # In all supported backbones, modules registered before the blocks are called before them.
    end = stem
    for path, module in backbone.named_modules():
        if module is stack:
            end = head
        if module in inside:
            continue
        # With those that come a second time, as of an embedding that is tied to a head.
        own = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in own:
            end[f"{path}.{name}"] = tensor
    if isinstance(model, PositionedModel) and model.encoding is not None:
        stem[_TABLE] = model.encoding.table
    return stem, head


def _stem_and_head(model: nn.Module) -> dict[str, Tensor]:
    stem, head = end_tensors(model)
    return stem | head


def averaged(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of tensors of equal shape and dtype; of integer tensors (indices) the first."""
    first = tensors[0]
    if not first.is_floating_point():
        return first
    # In float64 and in the given order, so the bits are the same on every machine.
    total = torch.zeros_like(first, dtype=torch.float64)
    for tensor in tensors:
        total += tensor.detach()
    mean = (total / len(tensors)).to(first.dtype)
    return nn.Parameter(mean, first.requires_grad) if isinstance(first, nn.Parameter) else mean
