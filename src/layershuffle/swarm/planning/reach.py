"""How many blocks can be reached when hosts fail independently of each other."""

from __future__ import annotations

import numpy as np

from layershuffle.swarm.planning.problem import Numbers, Placement

_EXACT_DEPTH = 14
_DRAWS = 20_000


def reachable(placement: Placement, availability: Numbers, *, seed: int = 0) -> Numbers:
    """Probability that exactly k blocks have a reachable holder, `[blocks + 1]`.

    Exact for up to 14 blocks (over the sets of blocks), else from 20,000 seeded draws.
    """
    groups, chances = _groups(placement, availability)
    depth = placement.shape[1]
    if depth > _EXACT_DEPTH:
        return _drawn(groups, chances, seed=seed)
    sets = np.arange(1 << depth)
    masks = groups @ (1 << np.arange(depth))
    likely = np.zeros(1 << depth)
    likely[0] = 1
    for mask, chance in zip(masks, chances, strict=True):
        joined = np.bincount(sets | mask, likely, minlength=1 << depth)
        likely = (1 - chance) * likely + chance * joined
    sizes = np.array([int(one).bit_count() for one in sets])
    return np.bincount(sizes, likely, minlength=depth + 1).astype(np.float64)


def _groups(placement: Placement, availability: Numbers) -> tuple[Placement, Numbers]:
    """Distinct holdings, and the probability that a host with them can be reached."""
    groups, which = np.unique(placement, axis=0, return_inverse=True)
    away = np.ones(len(groups))
    np.multiply.at(away, which.ravel(), 1 - availability)
    return groups, 1 - away


def _drawn(groups: Placement, chances: Numbers, *, seed: int) -> Numbers:
    generator = np.random.default_rng(seed)
    up = generator.random((_DRAWS, len(groups))) < chances
    counts = (up.astype(np.float32) @ groups.astype(np.float32) > 0).sum(axis=1)
    return np.bincount(counts, minlength=groups.shape[1] + 1).astype(np.float64) / _DRAWS
