"""The command line: it parses arguments, calls one function of the library and prints the outcome.

Exit codes: 0 done, 1 failure, 2 wrong usage, 130 interrupted, 141 broken pipe (the reader of the
output has gone), 143 stopped by a signal after a checkpoint was saved.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, Token, UnknownOptionError

from layershuffle._version import __version__
from layershuffle.ground.errors import (
    Interrupted,
    LayerShuffleError,
    SettingsError,
    UsageError,
    of_the_machine,
)
from layershuffle.ground.files import user_path
from layershuffle.ground.text import one_line

if TYPE_CHECKING:
    from layershuffle.cli.command import Command

HELP_FLAGS = ("--help", "-h")
# A command is imported once it is chosen: that keeps `--help` under half a second.
COMMANDS = {
    "demo": ("Rearrange a model's blocks on a page and watch it answer.", "demo:PageCommand"),
    "fit": ("Fine-tune a model so that its blocks run in any order.", "fit:FIT"),
    "predict": ("Name the classes of images.", "eval:PredictCommand"),
    "eval": ("Score a model under many execution orders.", "eval:EvalCommand"),
    "compare": ("Compare two runs: settings, and scores in pairs.", "compare:CompareCommand"),
    "export": ("Write a model as ONNX files for other programs.", "export:ExportCommand"),
    "analyze": ("Analyse what the blocks of a model learnt.", "analyze:AnalyzeCommand"),
    "merge": ("Build models from the blocks of several models.", "merge:MergeCommand"),
    "ensemble": ("Score the mean of several models' answers.", "merge:EnsembleCommand"),
    "reproduce": ("Run a study of the paper and write its report.", "study:ReproduceCommand"),
    "report": ("Write the report of a study again.", "study:ReportCommand"),
    "classify": ("Classify images on a running swarm.", "asking:ClassifyCommand"),
    "completion": ("Complete commands and flags in a shell.", "machine:CompletionCommand"),
    "doctor": ("Check this machine and say what to type next.", "machine:DoctorCommand"),
}
SWARM_COMMANDS = {
    "up": ("Serve a model from hosts that dial in.", "serving:UpCommand"),
    "demo": ("Classify, kill a third of the hosts, classify again.", "swarm_demo:DemoCommand"),
    "status": ("Show the hosts of a running swarm.", "asking:StatusCommand"),
    "drain": ("Let a host finish its work and take no more.", "asking:DrainCommand"),
    "readmit": ("Start an excluded, drained or dead host.", "asking:ReadmitCommand"),
    "calibrate": ("Measure what to expect of fewer blocks.", "calibrate:CalibrateCommand"),
}
# What other programs call an option, and what it is here: nobody misspells them.
MEANINGS = {
    "--learning-rate": "--lr",
    "--bs": "--batch-size",
    "--num-epochs": "--epochs",
    "--max-steps": "--steps",
    "--num-workers": "--workers",
    "--gradient-accumulation-steps": "--accumulate",
    "--grad-accum-steps": "--accumulate",
    "--grad-checkpointing": "--activation-checkpointing",
    "--clip-grad": "--clip",
    "--max-grad-norm": "--clip",
    "--wd": "--weight-decay",
    "--optimizer": "--opt",
    "--optim": "--opt",
    "--label-smoothing": "--smoothing",
    "--mixup-alpha": "--mixup",
    "--cutmix-alpha": "--cutmix",
    "--llrd": "--layer-decay",
    "--layer-lr-decay": "--layer-decay",
    "--freeze-layers": "--freeze",
    "--stochastic-depth": "--drop-path",
    "--drop": "--block-drop, which leaves blocks out, or --drop-path of timm's models",
    "--sched": "--schedule",
    "--lr-scheduler": "--schedule",
    "--warmup-steps": "--warmup",
    "--data-dir": "--data",
    "--dataset": "--data",
    "--train-dir": "--data",
    "--output": "--out",
    "--output-dir": "--out",
    "--model-name": "--model",
    "--amp": "--precision bf16",
    "--bf16": "--precision bf16",
    "--fp16": "--precision bf16",
    "--torchcompile": "--compile",
    "--gpu": "--device cuda",
    "--cuda": "--device cuda",
    "--val-split": "--holdout",
    "--label-map": "--classes",
    "--report-to": "--log-with",
    "--config": "--recipe",
    "--layerdrop": "--method layerdrop",
    "--shuffle": "--method layershuffle",
    "--img-size": "--model 'timm:NAME?img_size=96'",
    "--num-classes": "--data, whose classes the model gets",
    "--seeds": "a line seeds: [0, 1, 2] in the recipe",
    "--resume": "the same command again, which continues a run",
}


def _shown(default: Any) -> str | None:
    """A default in `--help`; "off" needs no words."""
    if isinstance(default, tuple):
        return " ".join(default) or None
    return None if default is None or default is False else str(default)


def _group(about: str, commands: dict[str, tuple[str, str]], **options: Any) -> App:
    group = App(help=about, help_flags=HELP_FLAGS, **options)
    for place, (name, (summary, target)) in enumerate(commands.items()):
        group.command(f"layershuffle.cli.{target}", name=name, help=summary, sort_key=place)
    return group


APP = _group(
    "Fine-tune vision transformers so that their blocks (layers) run in any order, and answer "
    "while some of them are missing (arXiv 2407.04513).\n\n"
    "Start here: layershuffle predict bundled:digits-swarm bundled:digit-pair.png\n\n"
    "COMMAND --help shows the options of a command; --debug shows the traceback of a failure.",
    COMMANDS,
    name="layershuffle",
    version=__version__,
    version_flags="--version",
    help_format="markdown",
    default_parameter=Parameter(consume_multiple=1, negative_iterable=(), show_default=_shown),
    # `main` prints errors and decides on the exit code.
    print_error=False,
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)
APP.command(
    _group(
        "Serve a model from hosts that may fail.\n\n"
        "Needs the extra swarm, which layershuffle doctor says how to install. Start here: "
        "layershuffle swarm demo",
        SWARM_COMMANDS,
        name="swarm",
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Removed by hand, because parsing itself may fail.
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    # Commands draw into files, and that of a notebook, which its shells inherit, may not be there.
    os.environ["MPLBACKEND"] = "agg"
    # A service may have closed them, and libraries write to them all the same.
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        # A character that a shell cannot show must not lose the result of an hour.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with _log_to_stderr():
            command = parse(arguments)
            code = 0 if command is None else command.run()
        # A closed pipe must fail here, inside the `try`, and not when Python exits.
        print(end="", flush=True)
        return code
    except LayerShuffleError as error:
        if debug:
            raise
        word = "stopped" if isinstance(error, Interrupted) else "error"
        print(f"{word}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # 130 is 128 and the number of SIGINT, as shells report it.
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes its buffers when it exits, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A user who pipes help into `head` expects the pipe to break.
        if arguments and not set(HELP_FLAGS) & set(arguments):
            print("stopped: broken pipe, the reader of the output has gone", file=sys.stderr)
        return 141
    # The last line of defence: users get one paragraph, developers get --debug.
    except Exception as error:
        if debug:
            raise
        text = (
            f"{type(error).__name__}: {one_line(error)} This is a fault of layershuffle or of a "
            "library that it uses. Next: run the same command with --debug to see where."
        )
        print(f"error: {of_the_machine(error) or text}", file=sys.stderr)
        return 1


def parse(words: Sequence[str]) -> Command | None:
    """The command that `words` name, with its arguments; `None` where help or the version was
    printed. Raises `UsageError` or `SettingsError` for what cannot be understood."""
    if words[:1] == ["__complete"]:  # the script of a shell asks what may stand at the cursor
        APP(words)
        return None
    words = [_with_home(word) for word in words]
    if words[:1] == ["help"]:  # `help fit` says what `fit --help` does
        words = [*words[1:], "--help"]
    path, apps, _ = APP.parse_commands([word for word in words if word not in HELP_FLAGS])
    # Without docstrings (python -OO) the line stays, as a dataclass then has its signature there.
    if (kind := apps[-1].default_command) is not None and sys.flags.optimize < 2:
        apps[-1].help = kind.__doc__  # in place of its line in the list of commands
    next_command = " ".join(["layershuffle", *path, "--help"])
    try:
        command: Command | None = APP(words)
        return command
    except SystemExit:  # of rich, where the reader of the help has gone
        raise BrokenPipeError from None
    except SettingsError as error:
        cause = error.cause
        hint = error.hint or next_command
        for name in re.findall(r"'(\w+)' is not a setting", cause):
            meant = _meaning(f"--{name.replace('_', '-')}", apps[-1])
            if meant is not None:
                cause = cause.partition(", did you mean")[0]
                hint = f"here it is {meant} ({next_command})"
        # Not chained: the first error has the same text without the next command.
        raise SettingsError(cause, place=error.place, hint=hint) from None
    except CycloptsError as error:
        # Without all commands, which `next_command` lists with what they do.
        cause, _, _ = _cause(error).partition(" Available commands: ")
        meanings = [_meaning(word, apps[-1]) for word in re.findall(r"--[a-z0-9-]+", cause)]
        meant = next(filter(None, meanings), None)
        if "Unknown option" in cause and meant is not None:
            cause = cause.partition(" Did you mean ")[0]
            raise UsageError(cause, hint=f"here it is {meant} ({next_command})") from None
        if cause.startswith("Unused Tokens"):
            # cyclopts shows them as a list of Python.
            unused = " ".join(re.findall(r"'([^']*)'", cause))
            cause = f"The command takes no further word, and got: {unused}"
            next_command = f"flags such as --augment need no word, others one each; {next_command}"
        elif "requires an argument" in cause and (value := _hyphenated(words, cause)):
            cause = f"{cause.rstrip('.')}, and {value} is read as one more option"
        raise UsageError(cause, hint=next_command) from None


def _meaning(word: str, app: App) -> str | None:
    """What an option of other programs is in the command `app`; `None` if it has none like it."""
    meant = MEANINGS.get(word)
    option, _, value = (meant or "").partition(" ")
    if not option.startswith("--"):
        return meant
    for argument in app.assemble_argument_collection():
        if option.rstrip(",") in argument.names:
            choices = argument.get_choices() or ()
            return None if choices and value and value not in choices else meant
    return None


def _hyphenated(words: Sequence[str], cause: str) -> str | None:
    """The word behind an option without a value, where a hyphen and a digit begin it."""
    for word, following in itertools.pairwise(words):
        if word.startswith("--") and f" {word} " in cause and re.match(r"-\d", following):
            return following
    return None


def _with_home(word: str) -> str:
    """`word` with its tilde, or that behind the = of a flag, as the home directory.

    The others, as of folder:~/data, are read where the place is.
    """
    flag, equals, value = word.partition("=")
    if not flag.startswith("--"):
        flag, equals, value = "", "", word
    if value == "~" or value.startswith("~/"):
        value = str(user_path(value))
    return flag + equals + value


def _cause(error: CycloptsError) -> str:
    """What is wrong; a misspelt flag is the cause of the argument that is then missing."""
    if not isinstance(error, MissingArgumentError) or error.app is None or error.argument is None:
        return str(error)
    arguments = error.app.assemble_argument_collection()
    for word in error.unused_tokens or ():
        flag = word.partition("=")[0]
        if flag.startswith("--") and arguments.get(flag, None) is None:
            token = Token(keyword=flag, source="cli")
            return str(
                UnknownOptionError(verbose=False, token=token, argument_collection=arguments)
            )
    if error.keyword is not None or error.argument.tokens:
        return str(error)  # the flag is there, and has no value
    name, is_word = error.argument.name, error.argument.index is not None
    return f"{name.removeprefix('--').upper() if is_word else name} is missing"


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
