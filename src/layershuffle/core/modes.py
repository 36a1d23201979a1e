"""Evaluation modes: the set of orders that a score is about. Plain data, no torch.

Written `sequential`, `arbitrary`, `kept:9` (9 blocks, ascending), `kept:9:arbitrary`,
`kept:9:sequential:spaced` (choices: random, spaced, first, last). A range of block counts stands
for each of them: `kept:1-11:arbitrary`. Behind any of them `:parallel=3` runs three blocks side by
side, and behind kept `:passes=2` runs the blocks again: `kept:6:arbitrary:passes=2:parallel=3`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import comb
from typing import cast

from layershuffle.core.policies import Choice, Kept, OrderMode, OrderPolicy, Sequential, Shuffled
from layershuffle.errors import UsageError
from layershuffle.text import did_you_mean

_FORMS = (
    "sequential, arbitrary, kept:9, kept:9:arbitrary, kept:9:sequential:spaced, "
    "kept:1-11:arbitrary, arbitrary:parallel=3, kept:6:arbitrary:passes=2"
)
_OPTION = re.compile(r"(parallel|passes)=([1-9][0-9]{0,5})")
_RANGE = re.compile(r"kept:(\d+)-(\d+)((?::.*)?)")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """`order` as in the paper's tables; `kept=None` runs all blocks.

    The blocks run in rounds of `parallel` side by side, and `passes` times over.
    """

    order: OrderMode
    kept: int | None = None
    choose: Choice = "random"
    parallel: int = 1
    passes: int = 1

    def policy(self) -> OrderPolicy:
        """What draws this mode's orders."""
        rounds = None if self.parallel == 1 else (self.parallel, self.parallel)
        if self.kept is not None:
            return Kept(
                self.kept,
                order=self.order,
                choose=self.choose,
                passes=self.passes,
                parallel=rounds,
            )
        if self.order == "sequential":
            return Sequential(parallel=rounds)
        return Shuffled(parallel=rounds)

    def is_drawn(self, depth: int) -> bool:
        """Whether more than one order of a model with `depth` blocks belongs to the mode."""
        kept = depth if self.kept is None else self.kept
        # "spaced", "first" and "last" name their blocks, and all blocks can be kept in one way.
        subsets = comb(depth, kept) if self.choose == "random" else 1
        return subsets > 1 or (self.order == "arbitrary" and kept > 1)

    def draws(self, num_orders: int, *, depth: int) -> int:
        """How many scores the mode gets: `num_orders`, or one if it has a single order."""
        return num_orders if self.is_drawn(depth) else 1

    def __str__(self) -> str:
        # What `parse_modes` assumes is left out, so that equal modes have equal texts.
        words: list[str] = [] if self.kept is None else ["kept", str(self.kept)]
        words.append(self.order)
        if self.choose != "random":
            words.append(self.choose)
        if self.passes > 1:
            words.append(f"passes={self.passes}")
        if self.parallel > 1:
            words.append(f"parallel={self.parallel}")
        return ":".join(words)


def parse_modes(text: str) -> tuple[Mode, ...]:
    """The modes of a comma-separated list. Raises `UsageError` naming the word that is wrong."""
    words: list[str] = []
    for word in map(str.strip, text.split(",")):
        counts = _RANGE.fullmatch(word)
        if counts is None:
            words.append(word)
            continue
        # The order of the modes is that of the rows in results.csv: most blocks first.
        first, last = sorted((int(counts[1]), int(counts[2])), reverse=True)
        words += [f"kept:{kept}{counts[3]}" for kept in range(first, last - 1, -1)]
    modes = tuple(map(_parse_mode, words))
    # Equal modes draw equal orders: their scores would count twice in every mean.
    if len(set(modes)) < len(modes):
        twice = next(mode for mode in modes if modes.count(mode) > 1)
        raise UsageError(f"The mode {twice} is named twice in {text!r}")
    return modes


def _parse_mode(text: str) -> Mode:
    words, counts = text.split(":"), {"parallel": 1, "passes": 1}
    named: list[str] = []
    # The options stand last, in any order, each once.
    while words and (option := _OPTION.fullmatch(words[-1])) and option[1] not in named:
        named.append(option[1])
        counts[option[1]] = int(option[2])
        words.pop()
    parallel, passes = counts["parallel"], counts["passes"]
    if words in (["sequential"], ["arbitrary"]):
        if passes > 1:
            raise UsageError(
                f"{text!r} does not say how many blocks run again",
                hint="kept:K:ORDER:passes=2, where K may be the number of all blocks",
            )
        return Mode(order=cast(OrderMode, words[0]), parallel=parallel)
    name, *options = words or [""]
    if name != "kept" or not 1 <= len(options) <= 3 or not options[0].isdecimal():
        choices = ("sequential", "arbitrary", ":".join(["kept", *(options or ["9"])]))
        hint = did_you_mean(":".join(words), choices, otherwise=f"modes are {_FORMS}")
        raise UsageError(f"{text!r} is not an evaluation mode", hint=hint)
    order, choose = [*options[1:], *("sequential", "random")[len(options) - 1 :]]
    # Kept itself checks the words, so that there is one list of them.
    policy = Kept(int(options[0]), order=cast(OrderMode, order), choose=cast(Choice, choose))
    return Mode(
        order=policy.order, kept=policy.k, choose=policy.choose, parallel=parallel, passes=passes
    )
