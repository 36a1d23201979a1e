"""Model soups: averages of all weights of several models (arXiv 2203.05482)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from layershuffle.core.position import backbone_of
from layershuffle.merging.compatibility import check_compatible, shared_record
from layershuffle.merging.group import averaged
from layershuffle.models.origin import origin_of, remember


def uniform_soup(donors: Sequence[nn.Module]) -> nn.Module:
    """The average of all donors, including position parts, as an independent model.

    Sums are taken in float64 in the order of the donors; integer tensors are the first donor's.
    Raises `UsageError` if the donors do not fit together: other shapes, settings or activations.
    """
    # The source averages models with different settings, so methods and data may differ.
    check_compatible(donors, names=tuple(map(str, range(len(donors)))), mixed=True)
    return _average(donors)


def greedy_soup(
    donors: Sequence[nn.Module], score: Callable[[nn.Module], float]
) -> tuple[nn.Module, tuple[int, ...]]:
    """The soup of the donors that do not lower its score, and their indices as they were added.

    Donors are tried from the best to the worst (equal ones in the given order). `score` (higher is
    better) must use held-out images, never those on which the soup is reported. Raises as
    `uniform_soup`.
    """
    check_compatible(donors, names=tuple(map(str, range(len(donors)))), mixed=True)
    alone = list(map(score, donors))
    first, *others = sorted(range(len(donors)), key=lambda index: -alone[index])
    chosen = [first]
    best = alone[first]
    members = [donors[first]]
    for index in others:
        reached = score(_average([*members, donors[index]]))
        # "At least as good", as in the algorithm of the source.
        if reached >= best:
            chosen.append(index)
            members.append(donors[index])
            best = reached
    return _average(members), tuple(chosen)


def _average(donors: Sequence[nn.Module]) -> nn.Module:
    # `check_compatible` has ensured that all donors have the same keys.
    soup = copy.deepcopy(donors[0])
    states = [donor.state_dict() for donor in donors]
    means: dict[str, Tensor] = {}
    for name in states[0]:
        means[name] = averaged([state[name] for state in states])
    soup.load_state_dict(means)
    backbone = backbone_of(soup)
    record = shared_record(donors)
    record["provenance"]["soup"] = f"average of {len(donors)} models"
    remember(backbone, replace(origin_of(backbone), record=record))
    return soup
