"""`layershuffle fit`: refine a model, or train one from random weights."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

from cyclopts import App, ArgumentCollection, Group, Parameter
from cyclopts.argument import update_argument_collection
from pydantic import ValidationError

from layershuffle.cli.command import Command, Inline
from layershuffle.cli.words import METHOD, MODEL, RECIPE
from layershuffle.ground.bundled import recipe_file
from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.ground.settings import read_recipe
from layershuffle.training.settings import FitSettings

_FIRST = Group("Used most", sort_key=1)
# How `--help` groups the settings: what people set first comes first (with MODEL, --out and
# --recipe these are twenty), and the paper's forms last.
GROUPS = {
    _FIRST: (
        "data", "method", "epochs", "batch_size", "lr", "opt", "weight_decay", "warmup",
        "layer_decay", "freeze", "augment", "smoothing", "mixup", "cutmix", "drop_path", "seed",
        "device",
    ),
    Group("Data", sort_key=2): ("classes", "resize", "holdout", "skip_corrupt", "data_changed"),
    Group("Method", sort_key=3): (
        "orders_per_batch", "sequential_every", "exit_weight", "self_distillation",
        "branch_scale", "block_drop", "min_kept", "max_parallel", "distinct", "fixed",
    ),
    Group("Training", sort_key=4): ("steps", "schedule", "clip", "accumulate", "keep_features"),
    Group("Machine", sort_key=5): (
        "precision", "workers", "threads", "compile", "activation_checkpointing", "parallel",
        "rank_orders",
    ),
    Group("Evaluations, checkpoints and logs", sort_key=6): (
        "eval_every", "eval_orders", "eval_batch_size", "select_by", "checkpoint_every",
        "log_every", "log_with",
    ),
    Group("Of the paper", sort_key=7): (
        "position", "kept", "choose", "paper_protocol", "encoding", "prediction",
    ),
}  # fmt: skip
_SHORT = {"batch_size": ("--batch-size", "-b")}
# The model is the word of the command, so this flag of the settings is out of sight.
_HIDDEN = "--settings.model"


def _arranged() -> None:
    """Give the settings their group and their place in `--help`, which they do not know."""
    for group, names in GROUPS.items():
        for name in names:
            mark = Parameter(group=group, name=_SHORT.get(name))
            FitSettings.model_fields[name].metadata.append(mark)
    FitSettings.model_fields["method"].metadata.append(METHOD)
    FitSettings.model_fields["model"].metadata.append(Parameter(name=_HIDDEN, show=False))


_arranged()


@dataclass(frozen=True)
class FitCommand(Command):
    """Fine-tune a model so that its blocks run in any order, and with some of them missing.

    Such a model answers while the machines that hold some of its blocks are gone, and one model
    fits many budgets. Most people need MODEL, --data, --out, --epochs, --batch-size and --lr. The
    settings come from flags, from a recipe, or from both (flags win): those that are marked as
    required may be in the recipe. You can stop this command at any time; run it again to continue.
    """

    model: Annotated[str | None, Parameter(group=_FIRST), MODEL] = None
    """Backbone: bundled:digits, timm:NAME, hf:NAME_OR_DIR (Hugging Face) or dir:PATH."""
    _: KW_ONLY
    recipe: Annotated[Path | None, Parameter(group=_FIRST), RECIPE] = None
    """YAML file of settings with the names of the flags, or the name of a recipe of this package
    (digits-base trains a base model from random weights)."""
    out: Annotated[Path, Parameter(group=_FIRST)]
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


def _filled_in(_app: App, _path: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give the arguments without a flag their values of the recipe, and the settings the MODEL."""
    if arguments["--recipe"].tokens:
        _add_recipe(Path(arguments["--recipe"].tokens[0].value), arguments)
    arguments[_HIDDEN].tokens = [*arguments["--model"].tokens]


def _add_recipe(recipe: Path, arguments: ArgumentCollection) -> None:
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


FIT = App(name="fit", config=_filled_in)
FIT.default(FitCommand)
