"""`layershuffle classify IMAGE...` and `swarm status` ask a running swarm; `swarm drain`, `readmit`
and `roll` change it, from its own machine."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from layershuffle.bundled import packaged_file
from layershuffle.cli.command import Command, ImageFiles, Reporting
from layershuffle.cli.serving import state_flag
from layershuffle.core.orders import ExecutionOrder
from layershuffle.errors import UsageError
from layershuffle.extras import require
from layershuffle.text import counted, counted_as, ranked, table

if TYPE_CHECKING:
    from layershuffle.swarm.calibration import Expected
    from layershuffle.swarm.server.operating import CommandName
    from layershuffle.swarm.server.schemas import Classification, SwarmAnswer


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Reporting):
    """Flags about the server that receives the requests."""

    address: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Address of the server, http:// or https://; where one does not answer, the next is asked."""
    api_key_file: Path | None = None
    """File with the API key, if the server requires one; only its owner may read it (mode 0600)."""
    authority: Path | None = None
    """For https: file of the certificate to trust (default: the well-known authorities)."""

    def client_options(self) -> dict[str, Any]:
        """The keyword arguments of a client for these flags.

        Raises `UsageError` for a key file that others may read or that does not hold just one key.
        """
        key = None
        if self.api_key_file is not None:
            from layershuffle.swarm.server.doors import read_keys

            keys = read_keys(self.api_key_file)
            # The file of a server may hold many keys; we do not guess which of them is meant.
            if len(keys) != 1:
                cause = f"The file holds {len(keys)} keys"
                raise UsageError(cause, place=self.api_key_file, hint="keep one")
            key = keys[0]
        return {"api_key": key, "authority": self.authority}


@dataclass(frozen=True)
class ClassifyCommand(ServerOptions):
    """Classify images by a running swarm, one after the other.

    Prints for each the most probable classes, the hosts and blocks that were used, and the accuracy
    to expect; or an error, and goes on with the next image. JSON is a line per image.
    """

    images: ImageFiles
    """Image files; bundled:digit-pair.png is one of this package."""
    _: KW_ONLY
    deadline_ms: float | None = None
    """Answer within this many milliseconds, with the blocks that can be run until then."""
    min_blocks: int | None = None
    """Fewest blocks of an answer; with fewer the request fails."""
    confidence: str | None = None
    """End with fewer blocks once the chance of being right is this (0.95); off runs all of them.
    Default: what lost at most 0.3 points of top-1 when it was measured."""
    top: int = 5
    """Classes to show per image."""

    def run(self) -> int:
        """Ask, and print the classes and how the answers were computed."""
        require("swarm")

        from layershuffle.swarm.client import SwarmClient, SwarmError

        code = 0
        with SwarmClient(*self.address, **self.client_options()) as client:
            for image in self.images:
                try:
                    answer = client.classify(
                        packaged_file(image),
                        deadline_ms=self.deadline_ms,
                        min_blocks=self.min_blocks,
                        confidence=self.confidence,
                        top=self.top,
                    )
                except (SwarmError, UsageError) as error:
                    # Without a gateway or its key no image can be classified.
                    if isinstance(error, SwarmError) and error.status in (None, 401):
                        raise
                    code = max(code, error.exit_code)
                    print(f"error: {image} was not classified: {error}", file=sys.stderr)
                    if self.json:  # so that there is a line per image
                        refusal = {"cause": error.cause, "hint": error.hint}
                        print(json.dumps({"image": str(image), "error": refusal}), flush=True)
                    continue
                text = json.dumps(answer.model_dump())
                print(text if self.json else describe_answer(answer, image), flush=True)
        return code


def describe_answer(answer: Classification, image: Path | str) -> str:
    """The classes, the route, the skipped blocks, and the accuracy to expect."""
    lines = [f"{image}: {ranked((guess.label, guess.probability) for guess in answer.top)}"]
    hops = " -> ".join(
        f"{hop.host} ({hop.block}: "
        f"{f'{hop.ms:.0f} ms' if hop.outcome == 'answered' else hop.outcome})"
        for hop in answer.route
    )
    order = ExecutionOrder(tuple(answer.blocks), answer.depth, tuple(answer.versions))
    # Hops alone do not show which blocks ran side by side or again.
    plain = order.versions is None and not order.has_repeats
    steps = "" if plain else f", as {order}"
    if "@" in steps:
        steps += " (block@number of the steps whose state it read)"
    lines.append(
        f"{len(set(order))} of {answer.depth} blocks in {answer.ms.total:.0f} ms{steps}: {hops}"
    )
    if answer.ending == "sure":
        lines.append("it ended there, because the answer was as sure as asked for")
    else:
        lines += [f"block {skipped.block} skipped: {skipped.why}" for skipped in answer.skipped]
    if answer.chance is not None:
        lines.append(f"This answer is right with a chance of {100 * answer.chance:.1f} %")
    lines.append(_describe_expected(answer.expected, answer.expected_why))
    return "\n".join(lines)


def _describe_expected(expected: Expected | None, why: str) -> str:
    """The expected accuracy of answers with this number of blocks: the mean, and single orders.

    It was measured on certain images and does not hold for other kinds of images.
    """
    if expected is None:
        # Printed explicitly, because without a number users would think the answer certain.
        return f"The accuracy to expect is unknown: {why}"
    ran = f"{counted(expected.kept, 'block')} in any order"
    if expected.parallel > 1:
        ran += f", up to {expected.parallel} side by side"
    if expected.passes > 1:
        ran += f", {expected.passes} times over"
    return (
        f"On images like {expected.data}, {expected.top1:.1f} % of answers with {ran} "
        f"are correct ({expected.low:.1f} to {expected.high:.1f} over "
        f"{expected.images:,} images, {counted_as([expected.effective])}); nine of ten orders lie "
        f"between {expected.orders_low:.1f} and {expected.orders_high:.1f} %. Of other images "
        "nothing is known."
    )


@dataclass(frozen=True, kw_only=True)
class StatusCommand(ServerOptions):
    """Show the hosts of a running swarm: blocks, waiting work, latency and health."""

    def run(self) -> int:
        """Print a row per host; times are milliseconds."""
        require("swarm")

        from layershuffle.swarm.client import SwarmClient

        with SwarmClient(*self.address, **self.client_options()) as client:
            swarm = client.swarm()
        self.show(swarm.model_dump(), status_table(swarm))
        return 0


def status_table(swarm: SwarmAnswer) -> str:
    """One line per host."""
    rows = []
    for host in swarm.hosts:
        # A host without an answer has no times yet, and 0 would look fast.
        times = ["-" if ms is None else f"{ms:.1f}" for ms in (host.compute_ms, host.link_ms)]
        blocks = ", ".join(map(str, host.blocks)) + (f" ({host.why})" if host.why else "")
        rows.append((host.name, host.condition, str(host.waiting), *times, blocks))
    columns = ("host", "condition", "waiting", "block ms", "link ms", "blocks")
    return f"{table(columns, rows)}\n\n{_describe_expected(swarm.expected, swarm.expected_why)}"


@dataclass(frozen=True, kw_only=True)
class OperatorCommand(Command):
    """A change to the running swarm, by the operator's key."""

    state: str | None = None
    """Directory of the operator's key (default: ~/.local/state/layershuffle/swarm)."""

    def command(self, name: CommandName, **fields: str) -> dict[str, Any]:
        """The swarm's answer to a command. Raises `UsageError` if none runs on this machine."""
        require("swarm")

        from layershuffle.swarm.server.operating import Operator

        with closing(Operator(self.state)) as operator:
            return operator.command(name, **fields)


@dataclass(frozen=True)
class DrainCommand(OperatorCommand):
    """Let a host finish its work and take no more; run this on the machine of the server."""

    host: str
    """Name of the host."""

    def run(self) -> int:
        """Wait until the host has nothing left to do."""
        empty = self.command("drain", host=self.host)["empty"]
        # A drain waits for a while; visits under way end at their own deadlines in any case.
        end = "is empty" if empty else "still has work, which will end at its deadlines"
        print(
            f"Host {self.host} takes no new visits and {end}. "
            f"Next: layershuffle swarm readmit {quote(self.host)}{state_flag(self.state)}, or take "
            "its machine away"
        )
        return 0


@dataclass(frozen=True)
class ReadmitCommand(OperatorCommand):
    """Start an excluded, drained or dead host again; run this on the machine of the server."""

    host: str
    """Name of the host."""

    def run(self) -> int:
        """Readmit the host; it serves again once its answers were found correct."""
        self.command("readmit", host=self.host)
        print(f"Host {self.host} is starting. Next: layershuffle swarm status --address URL")
        return 0


@dataclass(frozen=True)
class RollCommand(OperatorCommand):
    """Serve another export of the model, without a failed request; run this on its machine."""

    directory: Path
    """Directory of `layershuffle export`, of the same form as the model that is served."""

    def run(self) -> int:
        """Wait until hosts have loaded it beside the other, and it has taken over."""
        before = self.command("roll", model=str(self.directory.absolute()))["before"]
        back = f"layershuffle swarm roll {quote(before)}{state_flag(self.state)}"
        print(f"{self.directory} is served. To take it back: {back}")
        return 0
