"""Backbones as users write them, with work between, around and instead of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from common import CLASSES, DEPTH, PATCH, SIZE, WIDTH, Family


class Part(nn.Module):
    """Mixes tokens or channels; the residual sum is the caller's."""

    def __init__(self, *, over_tokens: bool) -> None:
        super().__init__()
        size = (SIZE // PATCH) ** 2 if over_tokens else WIDTH
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(size, size)
        self.over_tokens = over_tokens

    def forward(self, x: Tensor) -> Tensor:
        """A change of the state."""
        x = self.norm(x)
        return self.mix(x.mT).mT.tanh() if self.over_tokens else self.mix(x).tanh()


class Block(nn.Module):
    """Two parts with their residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = Part(over_tokens=True), Part(over_tokens=False)

    def forward(self, x: Tensor) -> Tensor:
        """The next state."""
        x = x + self.tokens(x)
        return x + self.channels(x)


class WritingBlock(Block):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        """The next state, written over the last one."""
        x += self.tokens(x)
        x += self.channels(x)
        return x


class TupleBlock(Block):
    """Returns the state in a tuple, as transformers' layers do."""

    def forward(self, x: Tensor) -> Any:
        """A tuple with the next state."""
        return (super().forward(x),)


class Own(nn.Module):
    """Patches, blocks, the mean of the tokens, and a linear head."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.depth = WIDTH, DEPTH
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.blocks = nn.ModuleList(self.block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.norm(self.run(self.patches(images).flatten(2).mT)).mean(1))

    def run(self, x: Tensor) -> Tensor:
        """Run the blocks, with the work of this backbone around them."""
        for block in self.blocks:
            x = block(x)
        return x


class Readout(Own):
    """The mean of all states."""

    def run(self, x: Tensor) -> Tensor:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return torch.stack(states).mean(0)


class Injection(Own):
    """Every block reads the patches again, weighted by `inject`."""

    def __init__(self) -> None:
        super().__init__()
        self.inject = nn.Parameter(torch.zeros(1))

    def run(self, x: Tensor) -> Tensor:
        patches = x
        for block in self.blocks:
            x = block(x) + self.inject * patches
        return x


class InjectionInPlace(Injection):
    """The same, written into the state."""

    def run(self, x: Tensor) -> Tensor:
        patches = x
        for block in self.blocks:
            x = block(x)
            x += self.inject * patches
        return x


class Gates(Own):
    """A gate per position on the change of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.ones(2 * DEPTH))

    def run(self, x: Tensor) -> Tensor:
        for position, block in enumerate(self.blocks):
            x = x + self.gates[position] * (block(x) - x)
        return x


class Bounding(Own):
    """Scales a state down if it exceeds a bound."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            largest = x.abs().amax((1, 2), keepdim=True)
            if largest.max() > 1:
                x = x / largest.clamp(min=1)
        return x


class TrainedWithPatches(Own):
    """Adds the patches after every block, only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_of_patches = nn.BatchNorm1d(WIDTH)

    def run(self, x: Tensor) -> Tensor:
        patches = self.norm_of_patches(x.mT).mT if self.training else x
        x = patches
        for block in self.blocks:
            x = block(x)
            if self.training:
                x = x + patches
        return x


class Asked(Own):
    """Has an option for the mean of all states."""

    def forward(self, images: Tensor, *, every: bool = False) -> Tensor:
        """Logits."""
        states = [self.patches(images).flatten(2).mT]
        for block in self.blocks:
            states.append(block(states[-1]))
        state = torch.stack(states).mean(0) if every else states[-1]
        return self.head(self.norm(state).mean(1))


class TwoEnds(Own):
    """Does a step before the last block, which it indexes by -1."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return self.blocks[-1](x.clone())


class InPlace(Own):
    """Blocks that write into their input."""

    block = WritingBlock


class Tuples(Own):
    """Blocks that return tuples."""

    block = TupleBlock

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[0]
        return x


class InPlaceWithPatches(InPlace):
    """Reads its patches again at the end, after the blocks have overwritten them."""

    def run(self, x: Tensor) -> Tensor:
        patches = x
        return super().run(x) + patches


class TupleState(Own):
    """A state of two tensors in a tuple."""

    class Both(Block):
        """A block that passes a second tensor on."""

        def forward(self, state: Any) -> Any:
            """The next state."""
            return super().forward(state[0] + state[1]), state[1] / 2

    block = Both

    def run(self, x: Tensor) -> Tensor:
        state = (x, x.mean(1, keepdim=True))
        for block in self.blocks:
            state = block(state)
        return state[0]


class ByForward(Own):
    """Calls the forward of its blocks."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class OfItsClass(Own):
    """Builds a container of its blocks by their class."""

    def run(self, x: Tensor) -> Tensor:
        return nn.Sequential(*(block for block in self.blocks if isinstance(block, Block)))(x)


class Backwards(Own):
    """Runs its blocks in reverse."""

    def run(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Named(Own):
    """Passes the state to the blocks by keyword."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return x


class Pairs(Own):
    """Blocks are lists of two parts; the residual sums are in the backbone's loop."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [[Part(over_tokens=True), Part(over_tokens=False)] for _ in range(DEPTH)]
        self.blocks = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)

    def run(self, x: Tensor) -> Tensor:
        for tokens, channels in self.blocks:
            x = x + tokens(x)
            x = x + channels(x)
        return x


class ByParts(Own):
    """Runs the parts of its blocks by name; the residual sums are in its loop."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.tokens(x)
            x = x + block.channels(x)
        return x


class ByMethod(Own):
    """Runs a method of its blocks other than forward."""

    class Stepping(Block):
        """Has its forward under another name too."""

        def step(self, x: Tensor) -> Tensor:
            """The next state."""
            return self.forward(x)

    block = Stepping

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.step(x)
        return x


class ScaledByBlocks(Own):
    """Multiplies with a weight of the block in its loop."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * block.tokens.norm.weight
        return x


# --- backbones that ignore orders, or only follow orders up to their depth ------------------------


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
    """Leaves its loop after the last block of the backbone."""

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


# --- arguments beside the state -------------------------------------------------------------------


class Masked(nn.Module):
    """Passes `mask` to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """States."""
        for block in self.blocks:
            x = block(x, mask)
        return x


class MaskedBlock(nn.Module):
    """Multiplies with its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """States."""
        return self.inner(x) * mask


class MaybeMasked(Masked):
    """Has its mask as an option."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """States."""
        for block in self.blocks:
            x = block(x, 1 if mask is None else mask)
        return x


# --- blocks that share something beside the state, or return more ---------------------------------


class Values(Own):
    """The values of the first block that runs go to all later ones (arXiv 2410.17897)."""

    class Valued(Block):
        """Adds the first values of this forward."""

        box: dict[str, Tensor]

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return super().forward(x) + self.box.setdefault("values", self.channels(x))

    block = Valued

    def run(self, x: Tensor) -> Tensor:
        box: dict[str, Tensor] = {}
        for block in self.blocks:
            block.box = box  # type: ignore[assignment]
            x = block(x)
        return x


class Merging(Own):
    """Blocks note in a list how many tokens they left, and the head weighs by its length."""

    class Noting(Block):
        """Notes its run."""

        notes: list[int]

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            self.notes.append(x.shape[1])
            return super().forward(x) / len(self.notes)

    block = Noting

    def run(self, x: Tensor) -> Tensor:
        notes: list[int] = []
        for block in self.blocks:
            block.notes = notes  # type: ignore[assignment]
            x = block(x)
        return x


class BatchMixing(Own):
    """Blocks subtract the mean over the samples of the batch."""

    class Mixing(Block):
        """Mixes samples."""

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return super().forward(x) - x.mean(0, keepdim=True) / 2

    block = Mixing


CONDITION: ContextVar[float] = ContextVar("condition", default=0.0)


class Conditioned(Own):
    """The backbone sets a condition for its blocks in a context variable."""

    class Reading(Block):
        """Adds the condition."""

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return super().forward(x) + CONDITION.get()

    block = Reading

    def run(self, x: Tensor) -> Tensor:
        before = CONDITION.set(0.25)
        try:
            return super().run(x)
        finally:
            CONDITION.reset(before)


class Casting(Own):
    """The backbone runs its blocks under autocast."""

    def run(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().run(x)


class Losing(Own):
    """The blocks return a loss beside the state, and the backbone sums them up."""

    class Routed(Block):
        """Returns the state and how large it is."""

        def forward(self, x: Tensor) -> Any:
            """The next state, and a scalar."""
            return super().forward(x), x.square().mean()

    block = Routed

    def run(self, x: Tensor) -> Tensor:
        total: Any = 0.0
        for block in self.blocks:
            x, loss = block(x)
            total = total + loss
        return x + total * torch.linspace(0, 1, WIDTH)


class TokensFirst(Own):
    """The state has its samples on the second axis."""

    class Turned(Block):
        """Takes and returns tokens first."""

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    block = Turned

    def run(self, x: Tensor) -> Tensor:
        return super().run(x.transpose(0, 1)).transpose(0, 1)


class Scaled(Own):
    """The blocks take a scale of every sample by keyword, and return a number of every sample."""

    class Scaling(Block):
        """Scales what it adds."""

        def forward(self, x: Tensor, *, scale: Tensor) -> Any:
            """The next state, and its size."""
            out = x + scale * (super().forward(x) - x)
            return out, out.abs().mean((1, 2))

    block = Scaling

    def run(self, x: Tensor) -> Tensor:
        scale, sizes = x.abs().amax((1, 2), keepdim=True), 0.0
        for block in self.blocks:
            x, size = block(x, scale=scale)
            sizes = sizes + size
        return x + sizes[:, None, None] * torch.linspace(0, 1, WIDTH)


# --- blocks that do not add to the state ----------------------------------------------------------


class PostNorm(Block):
    """Normalises the sum, so the block does not add to its state."""

    def forward(self, x: Tensor) -> Tensor:
        """The next state."""
        return nn.functional.layer_norm(super().forward(x), (WIDTH,))


class PostNormed(Own):
    """Blocks that do not add to their state."""

    block = PostNorm


class Shortening(Own):
    """Blocks that return fewer tokens than they get."""

    class Shorter(Block):
        """Leaves the last token out."""

        def forward(self, x: Tensor) -> Tensor:
            """The next state."""
            return x[:, :-1] + self.channels(x[:, :-1])

    block = Shorter


def families(*backbones: Callable[[], nn.Module]) -> dict[str, Family]:
    """Families of backbones, by name."""
    return {
        f"own-{backbone.__name__.lower()}": Family(
            f"own-{backbone.__name__.lower()}", "own", "blocks", backbone
        )
        for backbone in backbones
    }


# Backbones that follow an order. The first only pass the state from block to block.
CHAINS = families(Own, Tuples, Named, ByForward, OfItsClass)
LOOPS = families(
    *(Readout, Injection, InjectionInPlace, Gates, Bounding, Backwards, TwoEnds),
    *(InPlace, InPlaceWithPatches, TupleState, TokensFirst, Scaled, PostNormed, Shortening),
    *(Pairs, ByParts, ByMethod, ScaledByBlocks),
)
# The blocks share something, or get something, beside the state.
SHARED = families(Values, Merging, BatchMixing, Conditioned, Casting, Losing)
# Those whose blocks run in parts, so nothing can be put around a block.
IN_PARTS = ("own-pairs", "own-byparts", "own-bymethod")
# Backbones that follow orders up to their depth.
CUTTING = families(Counting, Zipped, ZippedAfter, Leaving)
# Backbones that no order reaches.
DEAF = families(Children, Modules, Cached, ChildrenByForward)
