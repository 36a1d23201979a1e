"""Which host of a swarm holds which blocks: a pure function of who is there.

Petals' rule, made whole: whoever has room takes what the fewest others hold. What a host has
stays where it is, so few files move when hosts come and go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from operator import attrgetter

from layershuffle.gateway.brain.limits import Limits

COPIES = 2
"""Hosts that hold a block, so that the death of one is felt by nobody."""


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """What a host offers and holds: bytes of weights that it takes, its relative speed, digests of
    the files that it has on disk, the blocks that it is to hold now, and those of them that are
    loaded and tested.

    `failed`: blocks that it was given and has not loaded in time. A host with such blocks counts
    for what it has loaded and nothing else, whatever memory it claims.
    """

    name: str
    memory: int
    speed: float = 1.0
    on_disk: frozenset[str] = frozenset()
    blocks: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Loading:
    """How a host gets on: it has loaded nothing more `since` then, in seconds of any clock.

    `failed`: as in `HostCapacity`; `why`: the reason for the newest of them.
    """

    since: float
    failed: frozenset[int] = frozenset()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Stay:
    """How a host stays: it dialled in at `since`, in seconds of any clock, and `short` of its
    connections before this one ended soon, one after the other."""

    since: float
    short: int = 0


@dataclass(frozen=True, slots=True)
class BlockFile:
    """The weights of a block. Places that share their weights have the same digest."""

    digest: str
    size: int


Assignment = Mapping[str, frozenset[int]]


def assign(
    capacities: Iterable[HostCapacity],
    blocks: Sequence[BlockFile],
    *,
    first: int = 0,
    copies: int = COPIES,
) -> Assignment:
    """The blocks of every host, by its name; `first` is the id of the first of `blocks`.

    Each block is on `copies` hosts where memory allows, fast hosts hold more than slow ones, and
    none has less than its share of them while it has room. One with more gives up what enough
    others have loaded. A block that nobody holds takes the place of one with several. A host that
    could not load a block keeps what it has loaded, and tries one more, which others hold as well.
    Equal hosts and blocks give an equal answer.

        assign([HostCapacity("pi", memory=10)], [BlockFile("a", 4), BlockFile("b", 4)])
    """
    by_name: dict[str, HostCapacity] = {}
    for capacity in sorted(capacities, key=attrgetter("name")):
        by_name[capacity.name] = capacity
    table = _Table(by_name, blocks, first=first, copies=copies)
    for wanted in range(1, copies + 1):
        # All blocks get their first host before any gets its second.
        for file in table.rarest_first():
            while len(table.hosts[file]) < wanted:
                taker = table.taker(file)
                if taker is not None:
                    table.hold(taker, file)
                elif wanted > 1 or not table.make_room(file):
                    break
    for name in table.capacities:
        table.fill(name)
        table.trim(name, copies=copies)
    trials = table.trials()
    given: dict[str, frozenset[int]] = {}
    for name in table.capacities:
        given[name] = table.blocks_of(name) | trials.get(name, frozenset())
    return given


def overdue(loading: Loading, blocks: Iterable[BlockFile], *, now: float, limits: Limits) -> bool:
    """Whether a host that is to load `blocks` has loaded none of them for too long.

    It loads one after the other, so it has the time for the largest of them.
    """
    largest = 0
    for block in blocks:
        largest = max(largest, block.size)
    if not largest:
        return False
    seconds = limits.load_ms / 1000 + largest / limits.load_bytes_per_second
    return now - loading.since >= seconds


def settled(stay: Stay, *, now: float, limits: Limits) -> bool:
    """Whether a host has stayed for so long that its copies of blocks count.

    Two short connections are forgiven. From the third on it has to stay for a pause that doubles,
    like the one before a process of this machine is started again.
    """
    counted = stay.short - 2
    return counted < 1 or now - stay.since >= limits.restart_pause_ms(counted) / 1000


class _Table:
    """Who holds which file, while it is decided."""

    def __init__(
        self,
        capacities: Mapping[str, HostCapacity],
        blocks: Sequence[BlockFile],
        *,
        first: int,
        copies: int,
    ) -> None:
        self.capacities = capacities
        # By the digest of a file: its bytes, the blocks that it is, and the hosts that hold it.
        self.size: dict[str, int] = {}
        self.places: dict[str, list[int]] = {}
        self.hosts: dict[str, list[str]] = {}
        for place, file in enumerate(blocks, start=first):
            self.size[file.digest] = file.size
            self.places.setdefault(file.digest, []).append(place)
            self.hosts[file.digest] = []
        # By the name of a host: the files that it holds, its free bytes, and its share of files.
        self.files: dict[str, list[str]] = {}
        self.room: dict[str, int] = {}
        self.share: dict[str, int] = {}
        # What each would hold if all worked by their speed, rounded up, so that all have work; as
        # fractions, because equal hosts would hold one more where their floats add up to less.
        speeds: dict[str, Fraction] = {}
        for name, capacity in capacities.items():
            self.files[name] = []
            self.room[name] = capacity.memory
            speeds[name] = Fraction(0 if capacity.failed else capacity.speed)
        work = Fraction(copies * len(self.places)) / (sum(speeds.values()) or 1)
        for name, speed in speeds.items():
            self.share[name] = ceil(work * speed)
        for name, capacity in capacities.items():
            for digest in self.places:
                # Assigned counts as held until loading it has failed.
                counted = capacity.ready if capacity.failed else capacity.blocks
                has = not counted.isdisjoint(self.places[digest])
                # A host may come back with less memory.
                if has and self.fits(name, digest):
                    self.hold(name, digest)
            if capacity.failed:
                self.room[name] = 0

    def fits(self, name: str, digest: str) -> bool:
        return digest not in self.files[name] and self.size[digest] <= self.room[name]

    def hold(self, name: str, digest: str) -> None:
        self.files[name].append(digest)
        self.hosts[digest].append(name)
        self.room[name] -= self.size[digest]

    def release(self, name: str, digest: str) -> None:
        self.files[name].remove(digest)
        self.hosts[digest].remove(name)
        self.room[name] += self.size[digest]

    def rarest_first(self) -> list[str]:
        """All files, those that the fewest hosts hold first, and of these the ones on a disk."""
        on_disk: set[str] = set()
        for capacity in self.capacities.values():
            on_disk |= capacity.on_disk
        return sorted(self.places, key=lambda d: (len(self.hosts[d]), d not in on_disk))

    def taker(self, digest: str) -> str | None:
        """Who takes another file: one that has it on disk, else the one with the least to do."""

        def cost(name: str) -> tuple[bool, float, str]:
            capacity = self.capacities[name]
            number = len(self.files[name])
            near = digest in capacity.on_disk and number < self.share[name]
            return not near, (number + 1) / max(capacity.speed, 1e-9), name

        fitting = (name for name in self.capacities if self.fits(name, digest))
        return min(fitting, key=cost, default=None)

    def make_room(self, digest: str) -> bool:
        """Replace a file that others hold as well by this one, which nobody holds."""
        swaps = []
        for name, capacity in self.capacities.items():
            if capacity.failed:
                continue
            for other in self.files[name]:
                if self.room[name] + self.size[other] < self.size[digest]:
                    continue
                # What it has loaded stays until another has.
                needed = self.places[other][0] in capacity.ready
                if self.loaded_elsewhere(name, other) or (
                    not needed and len(self.hosts[other]) > 1
                ):
                    swaps.append((-len(self.hosts[other]), name, other))
        if not swaps:
            return False
        _, name, other = min(swaps)
        self.release(name, other)
        self.hold(name, digest)
        return True

    def fill(self, name: str) -> None:
        """Give a host what the fewest hold, until it has its share: a new one has nothing yet."""
        on_disk = self.capacities[name].on_disk
        while len(self.files[name]) < self.share[name]:
            fitting = [digest for digest in self.places if self.fits(name, digest)]
            if not fitting:
                return
            self.hold(name, min(fitting, key=lambda d: (len(self.hosts[d]), d not in on_disk)))

    def trim(self, name: str, *, copies: int) -> None:
        """Take from a host what is beyond its share, if enough others have loaded it."""
        if self.capacities[name].failed:
            return
        for digest in sorted(self.files[name], key=lambda d: (-len(self.hosts[d]), d)):
            if len(self.files[name]) <= self.share[name] + 1:
                return
            if self.loaded_elsewhere(name, digest) >= copies:
                self.release(name, digest)

    def loaded_elsewhere(self, name: str, digest: str) -> int:
        """The number of hosts other than this one that hold a file and have loaded it."""
        place = self.places[digest][0]
        loaded = 0
        for other in self.hosts[digest]:
            if other != name and place in self.capacities[other].ready:
                loaded += 1
        return loaded

    def trials(self) -> dict[str, frozenset[int]]:
        """The blocks of a file more for every host that could not load one, if one fits.

        It is one that the fewest hold or try; of these one that the host has not failed to load.
        """
        trials: dict[str, frozenset[int]] = {}
        tried = Counter[str]()
        for name, capacity in self.capacities.items():
            room = capacity.memory - sum(self.size[digest] for digest in self.files[name])
            best: tuple[int, bool, bool, str] | None = None
            for digest, places in self.places.items():
                if digest in self.files[name] or self.size[digest] > room or not capacity.failed:
                    continue
                offer = (
                    len(self.hosts[digest]) + tried[digest],
                    not capacity.failed.isdisjoint(places),
                    capacity.blocks.isdisjoint(places),
                    digest,
                )
                best = offer if best is None else min(best, offer)
            if best is not None:
                digest = best[-1]
                tried[digest] += 1
                trials[name] = frozenset(self.places[digest])
        return trials

    def blocks_of(self, name: str) -> frozenset[int]:
        blocks: set[int] = set()
        for digest in self.files[name]:
            blocks.update(self.places[digest])
        return frozenset(blocks)
