"""`layershuffle classify IMAGE...`: ask a running swarm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.status import Gateway, client_options

if TYPE_CHECKING:
    from layershuffle.swarm.server.schemas import Classification


@dataclass(kw_only=True)
class Options(Gateway):
    """Flags of `classify`."""

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Image files."""
    deadline_ms: float | None = None
    """Answer within this many milliseconds, with the blocks that can be run until then."""
    min_blocks: int | None = None
    """Fewest blocks that are worth an answer."""
    order: str | None = None
    """Run exactly these blocks in this order ("3,0,2"); blocks that no host holds are left out."""
    top_k: int = 5
    """Classes to show."""
    json: bool = False
    """Print the whole answer as JSON."""


def run(argv: Sequence[str]) -> int:
    """Ask, and print the classes and the way that the answer took."""
    about = "Classify images by a running swarm; says which blocks were used and what to expect."
    options = parse(Options, argv, command="classify", about=about)

    from layershuffle.cli.swarm.serving import require_extra

    require_extra()

    from layershuffle.swarm.client import SwarmClient

    with SwarmClient(options.address, **client_options(options)) as client:
        answer = client.classify(
            options.images,
            deadline_ms=options.deadline_ms,
            min_blocks=options.min_blocks,
            order=options.order,
            top_k=options.top_k,
        )
    print(json.dumps(answer.model_dump(), indent=2) if options.json else text(answer, options))
    return 0


def text(answer: Classification, options: Options) -> str:
    """Classes per image, then the route, what was skipped, and the accuracy to expect."""
    lines = []
    for path, image in zip(options.images, answer.images, strict=True):
        guesses = ", ".join(f"{one.label} {100 * one.probability:.1f} %" for one in image.top)
        lines.append(f"{path}: {guesses}")
    hops = " -> ".join(
        f"{hop.host} ({', '.join(map(str, hop.blocks))}: "
        f"{f'{hop.ms:.0f} ms' if hop.outcome == 'answered' else hop.outcome})"
        for hop in answer.route
    )
    lines.append(
        f"{len(answer.blocks)} of {answer.depth} blocks in {answer.ms.total:.0f} ms: {hops}"
    )
    lines += [f"block {one.block} skipped: {one.why}" for one in answer.skipped]
    lines.append(_expectation(answer))
    return "\n".join(lines)


def _expectation(answer: Classification) -> str:
    if answer.expected is None:
        return f"Accuracy to expect is not known: {answer.expected_why}"
    one = answer.expected
    return (
        f"With {one.kept} blocks in any order {one.top1:.1f} % of answers are right "
        f"({one.low:.1f} to {one.high:.1f}; {one.data}, {one.images} images)."
    )
