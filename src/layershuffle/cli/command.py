"""What every command of the command line is: a frozen dataclass of its arguments, with `run`.

tyro makes the flags and the help text of the fields and their docstrings, so that `--help` shows
every argument with its type, its default and a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from layershuffle.errors import SettingsError, UsageError
from layershuffle.machine import Device, torch_threads
from layershuffle.text import Progress

AnySettings = TypeVar("AnySettings")
Inline = Annotated[AnySettings, tyro.conf.arg(name="")]
"""Settings whose fields are flags without a prefix: `--seed`, not `--settings.seed`."""


def required(when: str = "", *, metavar: str | None = None) -> Any:
    """Mark an argument as required in the help. tyro itself does not require it, because it has a
    default or is a tuple; `run` checks it. `when` names the case in which it is required."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"({f'required {when}'.strip()})")


TYRO_RULES = ConstructorRegistry()
"""Pass these to every `tyro.cli` that prints help: they say how arguments are shown."""
_asks_tyro = ContextVar("_asks_tyro", default=False)


# tyro 1.0.17 joins the lines of a docstring before it removes their indentation, and treats an
# indented line as a list item that must keep its line break. So the lines are joined here.
@TYRO_RULES.struct_rule
def _for_readers(info: StructTypeInfo) -> StructConstructorSpec | None:
    """What tyro's own rules make of a dataclass or of settings, with each text in one line. What
    is required comes first, and what the command shares with others last."""
    if _asks_tyro.get():
        return None
    token = _asks_tyro.set(True)
    try:
        spec = ConstructorRegistry.get_struct_spec(info)
    finally:
        _asks_tyro.reset(token)
    if not isinstance(spec, StructConstructorSpec):
        return None
    homes = [vars(kind).get("__annotations__", ()) for kind in info.type.__mro__]

    def place(field: StructFieldSpec) -> tuple[bool, int]:
        if tyro.conf.Positional in getattr(field.type, "__metadata__", ()):
            return False, -1  # words are told apart by their order alone
        missing = any(field.default is mark for mark in (tyro.MISSING, tyro.MISSING_NONPROP))
        home = next((n for n, names in enumerate(homes) if field.name in names), 0)
        return not missing and "(required" not in _hint(field), home

    return replace(spec, fields=tuple(map(_shown, sorted(spec.fields, key=place))))


@TYRO_RULES.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """An optional value is the plain one, or the word None: so the help says INT and not
    {None}|INT, and an error is that of the plain type."""
    kinds = [kind for kind in get_args(info.type) if kind is not type(None)]
    is_union = get_origin(info.type) in (Union, UnionType)
    if not is_union or len(kinds) != 1 or type(None) not in get_args(info.type):
        return None
    plain = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
    # tyro compares a fixed number of words before it asks what they mean.
    if not isinstance(plain, PrimitiveConstructorSpec) or plain.nargs not in (1, "*"):
        return None
    return replace(
        plain,
        instance_from_str=lambda words: (
            None if words == ["None"] else plain.instance_from_str(words)
        ),
        is_instance=lambda value: value is None or plain.is_instance(value),
        str_from_instance=lambda value: (
            ["None"] if value is None else plain.str_from_instance(value)
        ),
        choices=plain.choices and (*plain.choices, "None"),
    )


def _hint(field: StructFieldSpec) -> str:
    """What a field's own mark says behind its text (`required`), else nothing."""
    marks = getattr(field.type, "__metadata__", ())
    return next(filter(None, (getattr(m, "help_behavior_hint", None) for m in marks)), "")


def _shown(field: StructFieldSpec) -> StructFieldSpec:
    """The field with its text in one line, and no "(default: None)" behind it."""
    kind: Any = field.type
    text = _one_line(field.helptext)
    if field.default is None and not _hint(field):
        hint = tyro.conf.arg(
            # Most texts say what happens without the flag.
            help_behavior_hint=lambda _: "" if "default" in (text() or "").lower() else "(optional)"
        )
        kind = Annotated[kind, hint]
    return replace(field, helptext=text, type=kind)


def _one_line(text: str | Callable[[], str | None] | None) -> Callable[[], str | None]:
    """The text without line breaks, read only when it is shown, because reading takes time."""

    def joined() -> str | None:
        read = text() if callable(text) else text
        return None if read is None else " ".join(read.split())

    return joined


def asked(words: Sequence[str]) -> list[str]:
    """`words`, or only --help if they contain it: tyro omits flags that are given from its help."""
    return ["--help"] if {"-h", "--help"} & set(words) else list(words)


@dataclass(frozen=True, kw_only=True)
class Command:
    """The arguments of a command; its docstring is the description in `--help`."""

    # `main` acts on --debug before anything is parsed, because parsing may fail as well. The field
    # is here for the help text.
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show the whole Python traceback of a failure."""

    def run(self) -> int:
        """Run the command and print the outcome; returns the exit code."""
        raise NotImplementedError

    @classmethod
    def parse(cls, words: Sequence[str], *, prog: str) -> Self:
        """The command with its arguments from `words`.

        Raises `SettingsError` for a value that a setting cannot have. tyro itself reports unknown
        and missing arguments, and exits with 2.
        """
        try:
            return tyro.cli(cls, args=asked(words), prog=prog, registry=TYRO_RULES)
        except SettingsError as error:
            # Not chained: the first error has the same text without the next command.
            raise SettingsError(error.cause, hint=f"{prog} --help") from None


@dataclass(frozen=True, kw_only=True)
class ComputingCommand(Command):
    """A command that runs a model in this process; `fit` and `bench` have the flags as settings."""

    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    threads: int | None = None
    """CPU threads of torch (default: torch's own choice)."""

    @contextmanager
    def computing(self, title: str) -> Iterator[Progress]:
        """Compute with the requested number of threads, and show the progress under `title`."""
        from layershuffle.cli.progress import shown_progress

        if self.threads is not None and self.threads < 1:
            raise UsageError(
                f"--threads must be at least 1, got {self.threads}",
                hint="leave it out for as many as there are cores",
            )
        with threads_of(self.threads), shown_progress(title) as progress:
            yield progress


def threads_of(number: int | None) -> AbstractContextManager[None]:
    """Set torch's threads to `number` in the `with` block; `None` keeps torch's own choice."""
    # `None` sets nothing, because torch's choice depends on the machine and may change.
    return torch_threads(number) if number else nullcontext()
