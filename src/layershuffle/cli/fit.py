"""`layershuffle fit`: refine a model, or train one from random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from cyclopts import App, ArgumentCollection
from cyclopts.argument import update_argument_collection
from pydantic import ValidationError

from layershuffle.cli.command import Command, Inline
from layershuffle.ground.bundled import recipe_file
from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.ground.settings import read_recipe
from layershuffle.training.settings import FitSettings


@dataclass(frozen=True, kw_only=True)
class FitCommand(Command):
    """Refine a model so that its blocks run in any order.

    The settings come from flags, from a recipe, or from both (flags win): those that are marked as
    required may be in the recipe. You can stop this command at any time; run it again to continue.
    """

    recipe: Path | None = None
    """YAML file of settings with the names of the flags, or the name of a recipe of this package
    (digits-base trains a base model from random weights)."""
    out: Path
    """Directory of the run: model, results, checkpoints."""
    settings: Inline[FitSettings]

    def run(self) -> int:
        """Train, then print the result and the next command."""
        from layershuffle.cli.progress import shown_progress, training_listener
        from layershuffle.training import fit, is_first_process

        if not is_first_process():  # torchrun starts several processes; only the first one prints
            fit(self.settings, self.out)
            return 0
        with shown_progress("fit") as shown:
            result = fit(self.settings, self.out, on_event=training_listener(shown))
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


def _add_recipe(_app: App, _path: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give the arguments that no flag has set their values of the recipe."""
    if not (tokens := arguments["--recipe"].tokens):
        return
    recipe = Path(tokens[0].value)
    fields = read_recipe(recipe_file(recipe))
    if "arms" in fields:
        raise UsageError(
            "This is the recipe of a study, not of a single training",
            place=recipe,
            hint=f"layershuffle reproduce {quote(str(recipe))}",
        )
    try:
        # Here, so that the error names the recipe. What a recipe need not have, flags may give.
        FitSettings(**{"model": "", "data": "", **fields})
    except SettingsError as error:
        cause = error.__cause__
        # What does not fit together without the flags may fit with them.
        if not isinstance(cause, ValidationError) or any(each["loc"] for each in cause.errors()):
            raise SettingsError(error.cause, place=recipe) from None
    update_argument_collection(fields, str(recipe), arguments, root_keys=(), allow_unknown=False)


FIT = App(name="fit", config=_add_recipe)
FIT.default(FitCommand)
