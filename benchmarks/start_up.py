"""Claim: the command line answers --help within half a second of processor time."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence

from _clocks import SMOKE, Effort, Side
from _harness import Bound, Claim, ClaimRow, compare, run_claim

COMMANDS = ("", "fit", "eval", "reproduce")
MOST_SECONDS = 0.5


def process(words: Sequence[str]) -> Side:
    """Processor time of a Python process from start to end."""

    def side() -> float:
        before = seconds_of_children()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        return seconds_of_children() - before

    return side


def seconds_of_children() -> float:
    """Of those that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Per command: seconds, and how many times those of a Python that does nothing."""
    nothing = process(["-c", "pass"])
    for command in COMMANDS[:1] if effort is SMOKE else COMMANDS:
        name = f"layershuffle {command} --help".replace("  ", " ")
        help_text = process(["-m", "layershuffle", *command.split(), "--help"])
        against = compare(name, "help / empty Python", a=help_text, b=nothing, effort=effort)
        yield ClaimRow(
            name=name,
            what="processor time",
            values=tuple(a for a, _ in against.pairs),
            unit="s",
            bound=Bound("at_most", MOST_SECONDS),
            facts={"an empty Python, s": [b for _, b in against.pairs]},
        )


CLAIM = Claim(theme="start-up", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
