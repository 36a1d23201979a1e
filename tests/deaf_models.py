"""Host models that ignore orders, or only follow orders up to their depth."""

from __future__ import annotations

from torch import Tensor

from common import DEPTH
from own_models import Own, Pairs, families


class Counting(Own):
    """Blocks by number, up to the depth."""

    def run(self, x: Tensor) -> Tensor:
        for number in range(self.depth):
            x = self.blocks[number](x)
        return x


class Zipped(Own):
    """Blocks beside a list of as many scales, after or before it."""

    blocks_first = True

    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0 + number / 8 for number in range(DEPTH)]

    def run(self, x: Tensor) -> Tensor:
        pairs = zip(self.blocks, self.scales, strict=False)
        if not self.blocks_first:
            pairs = ((block, scale) for scale, block in zip(self.scales, self.blocks, strict=False))
        for block, scale in pairs:
            x = block(x) * scale
        return x


class ZippedAfter(Zipped):
    """The scales come first."""

    blocks_first = False


class Leaving(Own):
    """Leaves its loop after the last block of the host."""

    def run(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.depth - 1:
                break
        return x


class Children(Own):
    """Runs the children of its container."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks.children():
            x = block(x)
        return x


class NamedChildren(Own):
    """Runs the named children of its container."""

    def run(self, x: Tensor) -> Tensor:
        for _, block in self.blocks.named_children():
            x = block(x)
        return x


class Modules(Own):
    """Runs what torch keeps in its container."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks._modules.values():
            x = block(x)
        return x


class Cached(Own):
    """Runs a list made at its start."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = list(self.blocks)

    def run(self, x: Tensor) -> Tensor:
        for block in self.cached:
            x = block(x)
        return x


class PairsOfChildren(Pairs):
    """Pairs, and the container's children."""

    def run(self, x: Tensor) -> Tensor:
        for tokens, channels in self.blocks.children():
            x = x + tokens(x)
            x = x + channels(x)
        return x


class ChildrenByForward(Own):
    """Calls the forward of its container's children, so hooks do not see the runs."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks.children():
            x = block.forward(x)
        return x


class CachedLater(Own):
    """Runs a list made in its first forward."""

    def run(self, x: Tensor) -> Tensor:
        if "cached" not in vars(self):
            vars(self)["cached"] = list(self.blocks)
        for block in vars(self)["cached"]:
            x = block(x)
        return x


# Hosts that follow orders up to their depth.
CUTTING = families(Counting, Zipped, ZippedAfter, Leaving)
# Hosts that no order reaches.
DEAF = families(Children, NamedChildren, Modules, Cached, PairsOfChildren, ChildrenByForward)
