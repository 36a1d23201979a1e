"""`layershuffle classify IMAGE...` and `swarm status` ask a running swarm; `swarm drain` and
`readmit` change it."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from layershuffle.cli.command import Command, ImageFiles, Reporting
from layershuffle.core.orders import ExecutionOrder
from layershuffle.ground.bundled import packaged_file
from layershuffle.ground.errors import UsageError
from layershuffle.ground.extras import require
from layershuffle.ground.text import counted, ranked, table

if TYPE_CHECKING:
    from layershuffle.gateway.calibration.calibration import Expected
    from layershuffle.gateway.http.answers import Classification, SwarmAnswer
    from layershuffle.gateway.http.operator import CommandName


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
            from layershuffle.gateway.http.secrets import read_keys

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

        from layershuffle.gateway.client.client import SwarmClient, SwarmError

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
                text = json.dumps({"image": str(image), **answer.model_dump()})
                print(text if self.json else describe_answer(answer, image), flush=True)
        return code


def describe_answer(answer: Classification, image: Path | str) -> str:
    """The classes, the route, the skipped blocks, and the accuracy to expect."""
    lines = [f"{image}: {ranked((guess.label, guess.probability) for guess in answer.top)}"]
    visits: list[str] = []
    for hop in answer.route:
        outcome = f"{hop.ms:.0f} ms" if hop.outcome == "answered" else hop.outcome
        visits.append(f"{hop.host} ({hop.block}: {outcome})")
    hops = " -> ".join(visits)
    order = ExecutionOrder(tuple(answer.blocks), answer.depth, tuple(answer.versions))
    # Hops alone do not show which blocks ran side by side or again.
    plain = order.versions is None and not order.has_repeats
    steps = "" if plain else f", as {order}"
    if "@" in steps:
        steps += " (block@number of the steps whose state it read)"
    hosted = answer.depth - sum(answer.fixed)
    lines.append(f"{len(set(order))} of {hosted} blocks in {answer.ms.total:.0f} ms{steps}: {hops}")
    if answer.ending == "sure":
        lines.append("it ended there, because the answer was as sure as asked for")
    else:
        for skipped in answer.skipped:
            lines.append(f"block {skipped.block} skipped: {skipped.why}")
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
    kind = f"with {ran}"
    if expected.confidence is not None:
        chance = f"a chance of {100 * expected.confidence:g} %"
        kind = f"that ended at {chance}" if expected.sure else f"{kind} that never reached {chance}"
    return (
        f"On images like {expected.data}, {expected.top1:.1f} % of answers {kind} "
        f"are correct ({expected.low:.1f} to {expected.high:.1f} over "
        f"{expected.images:,} images); nine of ten orders lie between "
        f"{expected.orders_low:.1f} and {expected.orders_high:.1f} %. Of other images "
        "nothing is known."
    )


@dataclass(frozen=True, kw_only=True)
class StatusCommand(ServerOptions):
    """Show the hosts of a running swarm: blocks, waiting work, latency and health."""

    def run(self) -> int:
        """Print a row per host; times are milliseconds."""
        require("swarm")

        from layershuffle.gateway.client.client import SwarmClient

        with SwarmClient(*self.address, **self.client_options()) as client:
            swarm = client.swarm()
        self.show(swarm.model_dump(), status_table(swarm))
        return 0


def status_table(swarm: SwarmAnswer) -> str:
    """One line per host."""
    rows = []
    for host in swarm.hosts:
        # A host without an answer has no times yet, and 0 would look fast.
        compute = "-" if host.compute_ms is None else f"{host.compute_ms:.1f}"
        link = "-" if host.link_ms is None else f"{host.link_ms:.1f}"
        blocks = ", ".join(map(str, host.blocks)) + (f" ({host.why})" if host.why else "")
        rows.append((host.name, host.condition, str(host.waiting), compute, link, blocks))
    columns = ("host", "condition", "waiting", "block ms", "link ms", "blocks")
    return f"{table(columns, rows)}\n\n{_describe_expected(swarm.expected, swarm.expected_why)}"


@dataclass(frozen=True, kw_only=True)
class OperatorCommand(Command):
    """A change to a running swarm, by the operator's key."""

    address: str | None = None
    """Address of the gateway (default: the one of --state, on this machine)."""
    operator_key_file: Path | None = None
    """File with the operator's key, for an --address elsewhere; only its owner may read it (mode
    0600). Default: the key in --state."""
    authority: Path | None = None
    """For https: file of the certificate to trust (default: that of the gateway of --state, or the
    well-known authorities)."""
    state: str | None = None
    """Directory of the gateway on this machine (default: ~/.local/state/layershuffle/swarm)."""

    def command(self, name: CommandName, *, host: str) -> dict[str, Any]:
        """The gateway's answer to a command.

        Raises `UsageError` without an address if no swarm runs on this machine.
        """
        require("swarm")

        from layershuffle.gateway.http.operator import find_operator

        operator = find_operator(
            self.state,
            address=self.address,
            key_file=self.operator_key_file,
            authority=self.authority,
        )
        with closing(operator):
            return operator.command(name, host=host)

    def flags(self) -> str:
        """The flags of this gateway for the next command, with a leading space."""
        flags = ""
        if self.address is not None:
            flags += f" --address {quote(self.address)}"
        if self.operator_key_file is not None:
            flags += f" --operator-key-file {quote(str(self.operator_key_file))}"
        if self.authority is not None:
            flags += f" --authority {quote(str(self.authority))}"
        if self.state is not None:
            flags += f" --state {quote(self.state)}"
        return flags


@dataclass(frozen=True)
class DrainCommand(OperatorCommand):
    """Let a host finish its work and take no more.

    It is in service again after `swarm readmit`, and when the gateway starts again.
    """

    host: str
    """Name of the host."""

    def run(self) -> int:
        """Wait until the host has nothing left to do."""
        empty = self.command("drain", host=self.host)["empty"]
        # A drain waits for a while; open visits end at their own deadlines in any case.
        end = "is empty" if empty else "still has work, which will end at its deadlines"
        print(
            f"Host {self.host} takes no new visits and {end}. "
            f"Next: layershuffle swarm readmit {quote(self.host)}{self.flags()}, or take "
            "its machine away"
        )
        return 0


@dataclass(frozen=True)
class ReadmitCommand(OperatorCommand):
    """Start an excluded, drained or dead host again."""

    host: str
    """Name of the host."""

    def run(self) -> int:
        """Readmit the host; it serves again once its answers were found correct."""
        self.command("readmit", host=self.host)
        print(f"Host {self.host} is starting. Next: layershuffle swarm status --address URL")
        return 0
