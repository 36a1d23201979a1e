"""The command line: a skin. One file per command; each parses, builds settings, calls one function.

Exit codes: 0 done, 1 failure, 2 wrong usage, 143 stopped by a signal with a checkpoint saved, 141
nobody reads the output any more.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module

from layershuffle._version import __version__
from layershuffle.errors import LayerShuffleError, UsageError

COMMANDS = {
    "fit": "refine a model so that its blocks run in any order",
    "eval": "score a model under many execution orders",
    "cache": "copy images at the size that training needs, to read them faster",
    "analyze": "ask what the blocks of a model learnt",
    "merge": "make models of the blocks of several models, and score them",
    "ensemble": "score the mean of several models' answers",
    "reproduce": "run a study of the paper and write its report",
    "report": "write the report of a study again, finished or not",
    "pretrain": "train a base model from a recipe",
    "bench": "measure how fast this machine trains and evaluates",
    "swarm": "serve a model from hosts that may die",
    "classify": "ask a running swarm",
    "doctor": "say what this machine has and what to type next",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    try:
        with _warnings_shown():
            code = _dispatch(arguments)
        print(end="", flush=True)
        return code
    except LayerShuffleError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    # The last line of defence: users get one paragraph, developers get --debug.
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            if arguments and not {"-h", "--help"} & set(arguments):
                print("stopped: nobody reads the output any more", file=sys.stderr)
            return 141
        if debug:
            raise
        print(
            f"error: {type(error).__name__}: {' '.join(str(error).split())} This is a fault of "
            "layershuffle or of a library under it. Next: the same command with --debug shows it.",
            file=sys.stderr,
        )
        return 1


def _nobody_reads() -> bool:
    """Whether who read our output has gone, as `head` does; nothing more is written then."""
    try:
        output, poll = sys.stdout.fileno(), select.poll()
    except OSError:  # not a file, as in a notebook
        return False
    poll.register(output, 0)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # for what Python still holds
    return gone


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Our own warnings on standard error; other libraries show theirs themselves."""
    log, handler = logging.getLogger("layershuffle"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        raise UsageError(
            f"There is no command {name!r}",
            hint=f"did you mean {near[0]!r}? layershuffle --help lists all"
            if near
            else "layershuffle --help lists all",
        )
    code: int = import_module(f"layershuffle.cli.{name}_command").run(rest)
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: layershuffle COMMAND [options] [--debug]",
            "",
            "Vision transformers whose blocks run in any order (arXiv 2407.04513).",
            "",
            *lines,
            "",
            "layershuffle COMMAND --help shows the options of a command.",
            "Start here: layershuffle reproduce recipes/digits-quick.yaml --out runs/quick",
        ]
    )
