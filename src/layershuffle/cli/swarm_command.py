"""`layershuffle swarm WORD`: serve a model from hosts that may die. One file per word."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from layershuffle.errors import UsageError

WORDS = {
    "up": "start a whole swarm on this machine: hosts, router, gateway",
    "demo": "show it: classify, kill a third of the hosts, classify on",
    "head": "start the head of a swarm of several machines",
    "host": "let this machine hold blocks for a head",
    "deploy": "serve a plan from the machines of a head",
    "status": "hosts, blocks, waiting work, latency and health of a running swarm",
    "drain": "let a host finish what it has and take no more",
    "readmit": "start a shut-out, drained or dead host anew",
    "swap": "let a block of a host come from a sibling model",
    "drill": "rehearse failures on a running swarm and judge its answers",
    "plan": "find which host is to hold which blocks",
    "simulate": "play a plan with thousands of hosts in virtual time",
    "calibrate": "measure the accuracy to expect with any number of blocks",
}


def run(argv: Sequence[str]) -> int:
    """Hand over to the word's own file."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    word, *rest = argv
    if word not in WORDS:
        near = get_close_matches(word, WORDS, n=1)
        listing = "layershuffle swarm --help lists all"
        raise UsageError(
            f"There is no command 'swarm {word}'",
            hint=f"did you mean 'swarm {near[0]}'? {listing}" if near else listing,
        )
    code: int = import_module(f"layershuffle.cli.swarm.{word}").run(rest)
    return code


def _help() -> str:
    width = max(map(len, WORDS))
    lines = [f"  {word:<{width}}  {about}" for word, about in WORDS.items()]
    return "\n".join(
        [
            "usage: layershuffle swarm COMMAND [options]",
            "",
            "Inference that answers while its hosts die. Needs pip install 'layershuffle[swarm]'.",
            "",
            *lines,
            "",
            "layershuffle swarm COMMAND --help shows the options of a command.",
            "Start here: layershuffle swarm demo",
        ]
    )
