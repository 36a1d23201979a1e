"""The command line: it parses arguments, calls one function of the library and prints the outcome.

Exit codes: 0 done, 1 failure, 2 wrong usage, 130 interrupted, 141 broken pipe (the reader of the
output has gone), 143 stopped by a signal after a checkpoint was saved.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from layershuffle._version import __version__
from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.text import did_you_mean, listing, one_line


@dataclass(frozen=True, kw_only=True)
class CommandGroup:
    """A group of commands, each with a line of description.

    A command is named as "module:class" and imported only when it is chosen, so that `--help` stays
    under half a second.
    """

    about: str
    first_step: str
    commands: dict[str, tuple[str, str | CommandGroup]]


SWARM = CommandGroup(
    about="Inference that goes on while hosts fail. Needs pip install 'layershuffle[swarm]'.",
    first_step="layershuffle swarm demo",
    commands={
        "up": ("start a whole swarm on this machine", "swarm.serving:UpCommand"),
        "demo": ("classify, kill a third of the hosts, classify again", "swarm.demo:DemoCommand"),
        "head": ("start the head of a swarm of several machines", "swarm.machines:HeadCommand"),
        "host": ("serve blocks on this machine for a head", "swarm.machines:HostCommand"),
        "deploy": ("serve a plan from the machines of a head", "swarm.serving:DeployCommand"),
        "status": ("show the hosts of a running swarm", "swarm.asking:StatusCommand"),
        "drain": ("let a host finish its work and take no more", "swarm.admin:DrainCommand"),
        "readmit": ("start an excluded, drained or dead host", "swarm.admin:ReadmitCommand"),
        "swap": ("take a block of a host from a sibling model", "swarm.admin:SwapCommand"),
        "drill": ("rehearse failures on a running swarm", "swarm.drill:DrillCommand"),
        "plan": ("find which host should hold which blocks", "swarm.planning:PlanCommand"),
        "simulate": ("run a plan in virtual time", "swarm.planning:SimulateCommand"),
        "calibrate": (
            "measure the accuracy to expect with any number of blocks",
            "swarm.planning:CalibrateCommand",
        ),
    },
)
ROOT = CommandGroup(
    about="Vision transformers whose blocks run in any order (arXiv 2407.04513).",
    first_step="layershuffle predict bundled:digits-swarm bundled:digit-pair.png",
    commands={
        "demo": ("rearrange a model's blocks on a page and watch it answer", "demo:PageCommand"),
        "fit": ("refine a model so that its blocks run in any order", "fit:FitCommand"),
        "predict": ("name the classes of images", "predict:PredictCommand"),
        "eval": ("score a model under many execution orders", "eval:EvalCommand"),
        "export": ("write a model as ONNX files", "export:ExportCommand"),
        "cache": ("copy images at the size that training needs", "cache:CacheCommand"),
        "analyze": ("analyse what the blocks of a model learnt", "analyze:AnalyzeCommand"),
        "merge": ("build models from the blocks of several models", "merge:MergeCommand"),
        "ensemble": ("score the mean of several models' answers", "merge:EnsembleCommand"),
        "reproduce": ("run a study of the paper and write its report", "study:ReproduceCommand"),
        "report": ("write the report of a study again", "study:ReportCommand"),
        "pretrain": ("train a base model from a recipe", "fit:PretrainCommand"),
        "bench": ("measure how fast this machine trains and evaluates", "bench:BenchCommand"),
        "swarm": ("serve a model from hosts that may fail", SWARM),
        "classify": ("classify images on a running swarm", "swarm.asking:ClassifyCommand"),
        "completion": ("complete commands and flags in a shell", "completion:CompletionCommand"),
        "doctor": ("check this machine and say what to type next", "doctor:DoctorCommand"),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Removed by hand, because parsing itself may fail, and groups have no parser.
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    try:
        with _log_to_stderr():
            code = _dispatch(arguments)
        # A closed pipe must fail here, inside the `try`, and not when Python exits.
        print(end="", flush=True)
        return code
    except LayerShuffleError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # 130 is 128 and the number of SIGINT, as shells report it.
        print("stopped", file=sys.stderr)
        return 130
    # The last line of defence: users get one paragraph, developers get --debug.
    except Exception as error:
        # A lost connection raises the same error, but is an ordinary failure.
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            # A user who pipes help into `head` expects the pipe to break.
            if arguments and not {"-h", "--help"} & set(arguments):
                print("stopped: broken pipe, the reader of the output has gone", file=sys.stderr)
            return 141
        if debug:
            raise
        print(
            f"error: {type(error).__name__}: {one_line(error)} This is a fault of layershuffle or "
            "of a library that it uses. Next: run the same command with --debug to see where.",
            file=sys.stderr,
        )
        return 1


def _dispatch(arguments: Sequence[str]) -> int:
    """Find the command that the first words name, parse the rest of the words and run it."""
    group, path, words = ROOT, ["layershuffle"], list(arguments)
    if words == ["--version"]:
        print(__version__)
        return 0
    while words and words[0] not in ("-h", "--help"):
        name = words.pop(0)
        if name == "help":  # `help fit` says what `fit --help` does
            words.append("--help")
            continue
        if name not in group.commands:
            unknown = " ".join([*path[1:], name])
            listed = f"{' '.join(path)} --help lists all commands"
            hint = did_you_mean(name, group.commands, otherwise=listed)
            raise UsageError(f"There is no command {unknown!r}", hint=hint)
        path.append(name)
        _, target = group.commands[name]
        if isinstance(target, CommandGroup):
            group = target
            continue
        module, _, kind = target.partition(":")
        # Only the chosen one: importing all costs --help 0.6 to 0.8 s (decision 018).
        command = getattr(import_module(f"layershuffle.cli.{module}"), kind)
        code: int = command.parse(words, prog=" ".join(path)).run()
        return code
    print(_group_help(group, " ".join(path)))
    return 0


def _group_help(group: CommandGroup, path: str) -> str:
    summaries = [(name, summary) for name, (summary, _) in group.commands.items()]
    return (
        f"usage: {path} COMMAND [options]\n\n{group.about}\n\n{listing(summaries)}\n\n"
        f"{path} COMMAND --help shows the options of a command; --debug shows the traceback of a "
        f"failure.\nStart here: {group.first_step}"
    )


def _output_is_closed() -> bool:
    """Whether the reader of the output has closed the pipe, as `head` does; if so, stop writing."""
    try:
        output, poll = sys.stdout.fileno(), select.poll()
    except OSError:  # not a file, as in a notebook
        return False
    poll.register(output, 0)
    # On the writing end of a pipe, POLLERR means that the reader has closed its end.
    closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if closed:
        # Python flushes its buffers when it exits, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return closed


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Show the warnings of this package on standard error; other libraries show their own."""
    log, handler = logging.getLogger("layershuffle"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    # Removed below, because tests and notebooks call `main` many times in one process.
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
