"""`layershuffle fit` and, from a recipe alone, `layershuffle pretrain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, ClassVar, Self

import tyro
from pydantic_core import PydanticUndefined

from layershuffle.bundled import recipe_file
from layershuffle.cli.command import TYRO_RULES, Command, Inline, asked
from layershuffle.errors import SettingsError, UsageError
from layershuffle.settings import FitSettings, check_known, field_value, read_recipe


@dataclass(frozen=True, kw_only=True)
class _Training(Command):
    """A training whose settings come from a recipe, from flags, or from both (flags win)."""

    out: Path
    """Directory of the run: model, results, checkpoints."""
    recipe: Path | None
    settings: Inline[FitSettings]

    no_recipe: ClassVar[Any] = None

    @classmethod
    def recipe_in(cls, words: Sequence[str]) -> Path | None:
        """The recipe that `words` name. It is read before they are parsed, as it sets defaults."""
        raise NotImplementedError

    @classmethod
    def parse(cls, words: Sequence[str], *, prog: str) -> Self:
        """As `Command.parse`, with the recipe's settings as defaults.

        A misspelt key is refused here, before tyro reports the missing setting that it causes.
        """
        recipe = cls.recipe_in(words)
        try:
            # MISSING makes tyro require the value as if the field had no default.
            default = cls(
                out=tyro.MISSING, recipe=recipe or cls.no_recipe, settings=_defaults(recipe)
            )
            return tyro.cli(cls, args=asked(words), prog=prog, default=default, registry=TYRO_RULES)
        except SettingsError as error:
            raise SettingsError(error.cause, place=recipe, hint=f"{prog} --help") from None

    def run(self) -> int:
        """Train, then print the result and the next command."""
        from layershuffle.cli.progress import progress_listener
        from layershuffle.training import fit, is_first_process

        if not is_first_process():  # torchrun starts several processes; only the first one prints
            fit(self.settings, self.out)
            return 0
        with progress_listener() as listener:
            result = fit(self.settings, self.out, on_event=listener)
        print(
            f"{result.method}, seed {result.seed}: best {result.selected['metric']} "
            f"{result.selected['value']:.4f} at step {result.selected['step']} of {result.steps}, "
            f"{result.train_seconds:.0f} s in all, "
            f"{result.images_per_second:.0f} images/s in training "
            f"({result.hardware['gpu'] or result.hardware['processor']}, "
            f"{result.hardware['precision']}, batch {self.settings.batch_size})\n"
            f"Model: {self.out}/model\n"
            # Quoted, because specs hold "?" and "&", which a shell would interpret.
            f"Next: layershuffle eval {quote(str(self.out))} --data {quote(self.settings.data)}"
        )
        return 0


@dataclass(frozen=True, kw_only=True)
class FitCommand(_Training):
    """Refine a model so that its blocks run in any order.

    Settings that are marked as required may also be in the recipe. You can stop this command at
    any time; run it again to continue.
    """

    recipe: Path | None = None
    """YAML file of settings with the names of the flags, or the name of a recipe of this package;
    flags override it."""

    @classmethod
    def recipe_in(cls, words: Sequence[str]) -> Path | None:
        """The value of --recipe, `None` without one."""
        if not any(word.startswith("--recipe") for word in words):
            return None  # a second parser would cost 50 ms of every --help
        options, _ = tyro.cli(
            _RecipeFlag, args=list(words), add_help=False, return_unknown_args=True
        )
        return options.recipe


@dataclass(frozen=True)
class _RecipeFlag:
    recipe: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PretrainCommand(_Training):
    """Train a base model from a recipe, as the shipped digits checkpoint was trained.

    The recipe is one for the method `baseline` whose model starts from random weights, for example
    digits-base, which is in this package. Settings that are marked as required may be in the
    recipe. You can stop this command at any time; run it again to continue.
    """

    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """YAML file of settings with the names of the flags, or the name of a recipe of this package;
    flags override it. It comes before all flags."""

    no_recipe: ClassVar[Any] = tyro.MISSING

    @classmethod
    def recipe_in(cls, words: Sequence[str]) -> Path | None:
        """The first word. Raises `UsageError` if that is a flag other than --help."""
        # Flags take values, so without a parser only the first word is certain to be the recipe.
        if words and not words[0].startswith("-"):
            return Path(words[0])
        if {"-h", "--help"} & set(words):
            return None
        raise UsageError("No recipe was given", hint="layershuffle pretrain digits-base --out DIR")


def _defaults(recipe: Path | None) -> FitSettings:
    """The recipe's settings over the defaults, not checked as a whole: flags may complete them."""
    fields = read_recipe(recipe_file(recipe)) if recipe else {}
    if "arms" in fields:
        raise UsageError(
            "This is the recipe of a study, not of a single training",
            place=recipe,
            hint=f"layershuffle reproduce {quote(str(recipe))}",
        )
    check_known(FitSettings, fields)
    values: dict[str, Any] = {}
    for name, field in FitSettings.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        if name in fields:
            # Checked here, so that the error names the recipe and not a flag.
            values[name] = field_value(FitSettings, name, value=fields[name])
        else:
            values[name] = tyro.MISSING if default is PydanticUndefined else default
    # pydantic would refuse MISSING; tyro builds the settings anew, checked, from all values.
    return FitSettings.model_construct(None, **values)
