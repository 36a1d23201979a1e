"""Groups of compatible donors, and merges of them as views.

A merge shares its donors' tensors: the blocks are the donors' modules, and only the few modules
that contain the block stack are new. In-place changes of a merge therefore change its donors;
`layershuffle.save` and `load` make an independent model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from layershuffle.core.position import (
    PositionedModel,
    PositionEncoding,
    PositionPrediction,
    backbone_of,
)
from layershuffle.core.stack import BlockStack, blocks_of, depth_of, stack_of
from layershuffle.errors import UsageError
from layershuffle.merging.compatibility import check_compatible, shared_record
from layershuffle.merging.plans import MergePlan, Source
from layershuffle.models.origin import origin_of, remember

AnyModule = TypeVar("AnyModule", bound=nn.Module)


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
        self._hosts = tuple(backbone_of(donor) for donor in self.donors)
        self._base = base
        self._shared = shared_record(self.donors)
        self._frames: dict[tuple[Source, Source], nn.Module] = {}
        self._tables: dict[Source, nn.Parameter] = {}

    def to(self, device: str | torch.device) -> None:
        """Move donors and base to a device, before merges are made."""
        for model in (*self.donors, *([] if self._base is None else [self._base])):
            model.to(device)

    def merge(self, plan: MergePlan) -> nn.Module:
        """The merge of this plan, in eval mode. Raises `UsageError` if the plan does not fit."""
        plan.check(len(self.donors), self.depth)
        frame = self._frame(plan.stem, plan.head)
        places = zip(plan.donors, plan.blocks, strict=True)
        blocks = [blocks_of(self._hosts[donor])[block] for donor, block in places]
        host = _with_blocks(frame, stack_of(frame), blocks)
        # The record is attached to the host, from which `save` takes it.
        remember(host, replace(origin_of(host), record=self.record(plan)))
        first = self.donors[0]
        return self._positioned(host, first, plan) if isinstance(first, PositionedModel) else host

    def record(self, plan: MergePlan) -> dict[str, Any]:
        """The metadata of the merge: entries that the donors share, and the donor of each part."""
        merge = {
            "blocks": list(plan.donors),  # the number of each block's donor
            **({} if plan.slots is None else {"slots": list(plan.slots)}),
            "stem": self._named(plan.stem),
            "head": self._named(plan.head),
            "donors": [{"model": name} for name in self.names],
        }
        return {**self._shared, "provenance": {**self._shared["provenance"], "merge": merge}}

    def _named(self, source: Source) -> str:
        return source if isinstance(source, str) else self.names[source]

    def _frame(self, stem: Source, head: Source) -> nn.Module:
        """A host with this stem and head, whose blocks do not matter; cached."""
        # The ends of one donor need no copy, because `_with_blocks` does not change the donor.
        if stem == head and isinstance(stem, int):
            return self._hosts[stem]
        if (stem, head) not in self._frames:
            self._frames[stem, head] = self._new_frame(stem, head)
        return self._frames[stem, head]

    def _new_frame(self, stem: Source, head: Source) -> nn.Module:
        first = self._hosts[0]
        # deepcopy uses the entries of its memo as copies, so the blocks stay the donors' modules,
        # and every tensor of the ends becomes the chosen one.
        memo: dict[int, Any] = {id(block): block for block in blocks_of(first)}
        for number, (place, source) in enumerate((("stem", stem), ("head", head))):
            chosen = self._ends(source, number, place)
            for name, tensor in ends_of(first)[number].items():
                memo[id(tensor)] = chosen[name]
        return copy.deepcopy(first, memo)

    def _ends(self, source: Source, number: int, place: str) -> dict[str, Tensor]:
        if isinstance(source, int):
            return ends_of(self._hosts[source])[number]
        if source == "base":
            return self._base_ends(number, place)
        all_ends = [ends_of(host)[number] for host in self._hosts]
        return {name: averaged([ends[name] for ends in all_ends]) for name in all_ends[0]}

    def _base_ends(self, number: int, place: str) -> dict[str, Tensor]:
        if self._base is None:
            raise UsageError(
                f"The {place} is to come from the base checkpoint, but none was given",
                hint="name the base, or choose other ends",
            )
        of_donor = ends_of(self._hosts[0])[number]
        of_base = ends_of(backbone_of(self._base))[number]
        for name, tensor in of_donor.items():
            shape = tuple(of_base[name].shape) if name in of_base else None
            if shape != tuple(tensor.shape):
                raise UsageError(
                    f"The {place} cannot come from the base checkpoint: its {name} has the shape "
                    f"{shape or '(not there)'}, the donors' {tuple(tensor.shape)}",
                    hint="choose other ends (the base was made for other classes or images)",
                )
        return {name: of_base[name] for name in of_donor}

    def _positioned(self, host: nn.Module, first: PositionedModel, plan: MergePlan) -> nn.Module:
        donors = [cast(PositionedModel, donor) for donor in self.donors]
        model = twin_of(first)
        model.backbone = host
        if first.encoding is not None:
            encodings = [cast(PositionEncoding, donor.encoding) for donor in donors]
            model.encoding = _spliced(first.encoding, encodings, plan)
            model.encoding.table = self._table(encodings, plan)
        if first.prediction is not None:
            predictions = [cast(PositionPrediction, donor.prediction) for donor in donors]
            model.prediction = _spliced(first.prediction, predictions, plan)
        return model

    def _table(self, encodings: Sequence[PositionEncoding], plan: MergePlan) -> nn.Parameter:
        """The position table: rows per block come from the donors, a shared one from the stem."""
        tables = [encoding.table for encoding in encodings]
        if tables[0].dim() == 3:
            # The only copied tensor, because it cannot be a view of several tables.
            rows = [tables[d][b] for d, b in zip(plan.donors, plan.blocks, strict=True)]
            return nn.Parameter(torch.stack(rows).detach(), tables[0].requires_grad)
        if isinstance(plan.stem, int):
            return tables[plan.stem]
        if plan.stem == "base":
            return self._base_table(tables[0])
        if plan.stem not in self._tables:
            self._tables[plan.stem] = cast(nn.Parameter, averaged(tables))
        return self._tables[plan.stem]

    def _base_table(self, like: Tensor) -> nn.Parameter:
        encoding = getattr(self._base, "encoding", None)
        if not isinstance(encoding, PositionEncoding) or encoding.table.shape != like.shape:
            raise UsageError(
                "The stem cannot come from the base checkpoint: it has no such table of positions",
                hint="choose other ends",
            )
        return encoding.table


def merge(donors: Sequence[nn.Module], plan: MergePlan) -> nn.Module:
    """A merge of `donors`, as a view of them in eval mode.

    For many merges use one `MergeGroup`, which computes average stems and heads once.
    Raises `UsageError` if the donors do not fit together or the plan does not fit them.
    """
    return MergeGroup(donors).merge(plan)


def ends_of(host: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of stem and head by name, which are registered before and after the blocks."""
    stack = stack_of(host)
    inside = set(stack.modules())
    stem: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    # In all supported hosts, modules registered before the blocks are called before them.
    place = stem
    for path, module in host.named_modules():
        if module is stack:
            place = head
        if module not in inside:
            own = {**module._parameters, **module._buffers}
            place.update({f"{path}.{name}": t for name, t in own.items() if t is not None})
    return stem, head


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


def twin_of(module: AnyModule) -> AnyModule:
    """A new module of the same class with the same children, tensors and settings."""
    twin = module.__new__(type(module))
    # Copies of the registries, so changes of the twin do not affect the original.
    twin.__dict__.update(
        {k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
    )
    return twin


def _with_blocks(module: nn.Module, stack: BlockStack, blocks: Sequence[nn.Module]) -> nn.Module:
    """`module` with `blocks` in its stack; only the modules that contain the stack are new."""
    # New modules down to the stack, because blocks replaced in place would change the donor.
    twin = twin_of(module)
    if module is stack:
        twin._modules.update(zip(list(module._modules), blocks, strict=True))
        return twin
    for name, child in module._modules.items():
        if child is not None and stack in child.modules():
            twin._modules[name] = _with_blocks(child, stack, blocks)
    return twin


def _spliced(first: AnyModule, parts: Sequence[nn.Module], plan: MergePlan) -> AnyModule:
    """A position part whose lists (an entry per block) have the entry of each block's donor."""
    twin = twin_of(first)
    for name, child in first._modules.items():
        if isinstance(child, nn.ModuleList):
            lists = [cast(nn.ModuleList, part._modules[name]) for part in parts]
            places = zip(plan.donors, plan.blocks, strict=True)
            twin._modules[name] = nn.ModuleList(lists[donor][block] for donor, block in places)
    return twin
