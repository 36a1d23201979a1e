"""Which member of a swarm holds which blocks: a pure function of who is there.

Petals' rule, made whole: whoever has room takes what the fewest others hold. What a member has
stays where it is, so few files move when members come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

COPIES = 2
"""Members that hold a block, so that the death of one is felt by nobody."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A member: bytes of weights that it takes, its relative speed, digests of the files that it
    has on disk, the blocks that it is to hold now, and those of them that it has loaded."""

    name: str
    memory: int
    speed: float = 1.0
    on_disk: frozenset[str] = frozenset()
    blocks: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class BlockFile:
    """The weights of a block. Places that share their weights have the same digest."""

    digest: str
    size: int


Assignment = Mapping[str, frozenset[int]]


def assign(
    devices: Iterable[Holder], blocks: Sequence[BlockFile], *, first: int = 0, copies: int = COPIES
) -> Assignment:
    """The blocks of every device, by its name; `first` is the id of the first of `blocks`.

    Each block has `copies` holders where memory allows, fast devices hold more than slow ones, and
    none has less than its share of them while it has room. One with more gives up what enough
    others have loaded. A block without a holder takes the place of one with several. Equal devices
    and blocks give an equal answer.

        assign([Holder("pi", memory=10)], [BlockFile("a", 4), BlockFile("b", 4)])
    """
    table = _Table(
        {d.name: d for d in sorted(devices, key=lambda d: d.name)},
        blocks,
        first=first,
        copies=copies,
    )
    for wanted in range(1, copies + 1):
        # All blocks get their first holder before any gets its second.
        for file in table.rarest_first():
            while len(table.holders[file]) < wanted:
                taker = table.taker(file)
                if taker is not None:
                    table.hold(taker, file)
                elif wanted > 1 or not table.make_room(file):
                    break
    for name in table.devices:
        table.fill(name)
        table.trim(name, copies=copies)
    return {name: table.blocks_of(name) for name in table.devices}


class _Table:
    """Who holds which file, while it is decided."""

    def __init__(
        self,
        devices: Mapping[str, Holder],
        blocks: Sequence[BlockFile],
        *,
        first: int,
        copies: int,
    ) -> None:
        self.devices = devices
        self.size = {file.digest: file.size for file in blocks}
        self.places: dict[str, list[int]] = {}
        for place, file in enumerate(blocks, start=first):
            self.places.setdefault(file.digest, []).append(place)
        self.holders: dict[str, list[str]] = {digest: [] for digest in self.places}
        self.files: dict[str, list[str]] = {name: [] for name in devices}
        self.room = {name: device.memory for name, device in devices.items()}
        # What each would hold if all worked by their speed, rounded up, so that all have work; as
        # fractions, because equal devices would hold one more where their floats add up to less.
        speeds = {name: Fraction(device.speed) for name, device in devices.items()}
        work = Fraction(copies * len(self.places)) / (sum(speeds.values()) or 1)
        self.share = {name: ceil(work * speed) for name, speed in speeds.items()}
        for name, device in devices.items():
            for digest in self.places:
                # A device may come back with less memory.
                has = any(place in device.blocks for place in self.places[digest])
                if has and self.fits(name, digest):
                    self.hold(name, digest)

    def fits(self, name: str, digest: str) -> bool:
        return digest not in self.files[name] and self.size[digest] <= self.room[name]

    def hold(self, name: str, digest: str) -> None:
        self.files[name].append(digest)
        self.holders[digest].append(name)
        self.room[name] -= self.size[digest]

    def release(self, name: str, digest: str) -> None:
        self.files[name].remove(digest)
        self.holders[digest].remove(name)
        self.room[name] += self.size[digest]

    def rarest_first(self) -> list[str]:
        """All files, those with the fewest holders first, and of these the ones on a disk."""
        on_disk = {digest for device in self.devices.values() for digest in device.on_disk}
        return sorted(self.places, key=lambda d: (len(self.holders[d]), d not in on_disk))

    def taker(self, digest: str) -> str | None:
        """Who takes another file: one that has it on disk, else the one with the least to do."""

        def cost(name: str) -> tuple[bool, float, str]:
            device, number = self.devices[name], len(self.files[name])
            near = digest in device.on_disk and number < self.share[name]
            return not near, (number + 1) / max(device.speed, 1e-9), name

        fitting = (name for name in self.devices if self.fits(name, digest))
        return min(fitting, key=cost, default=None)

    def make_room(self, digest: str) -> bool:
        """Replace a file that others hold as well by this one, which nobody holds."""
        swaps = [
            (-len(self.holders[other]), name, other)
            for name in self.devices
            for other in self.files[name]
            if len(self.holders[other]) > 1
            and self.room[name] + self.size[other] >= self.size[digest]
        ]
        if not swaps:
            return False
        _, name, other = min(swaps)
        self.release(name, other)
        self.hold(name, digest)
        return True

    def fill(self, name: str) -> None:
        """Give a device what the fewest hold, until it has its share: a new one has nothing yet."""
        on_disk = self.devices[name].on_disk
        while len(self.files[name]) < self.share[name]:
            fitting = [digest for digest in self.places if self.fits(name, digest)]
            if not fitting:
                return
            self.hold(name, min(fitting, key=lambda d: (len(self.holders[d]), d not in on_disk)))

    def trim(self, name: str, *, copies: int) -> None:
        """Take from a device what is beyond its share, if enough others have loaded it."""
        for digest in sorted(self.files[name], key=lambda d: (-len(self.holders[d]), d)):
            if len(self.files[name]) <= self.share[name] + 1:
                return
            place = self.places[digest][0]
            others = (self.devices[other] for other in self.holders[digest] if other != name)
            if sum(place in other.ready for other in others) >= copies:
                self.release(name, digest)

    def blocks_of(self, name: str) -> frozenset[int]:
        return frozenset(place for digest in self.files[name] for place in self.places[digest])
