"""LayerShuffle: vision transformers whose blocks run in any order, on whatever subset is there.

`import layershuffle as ls` is cheap: every name below is loaded when it is first used, and torch
only with the names that need it. What is not listed here may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from layershuffle._version import __version__

if TYPE_CHECKING:
    from layershuffle.errors import DataError as DataError
    from layershuffle.errors import Interrupted as Interrupted
    from layershuffle.errors import LayerShuffleError as LayerShuffleError
    from layershuffle.errors import ModelFileError as ModelFileError
    from layershuffle.errors import SettingsError as SettingsError
    from layershuffle.errors import StackError as StackError
    from layershuffle.errors import TrainingError as TrainingError
    from layershuffle.errors import UsageError as UsageError
    from layershuffle.evaluation import evaluate as evaluate
    from layershuffle.merging.ensembles import evaluate_ensemble as evaluate_ensemble
    from layershuffle.merging.group import Family as Family
    from layershuffle.merging.group import MergeGroup as MergeGroup
    from layershuffle.merging.group import merge as merge
    from layershuffle.merging.plans import MergePlan as MergePlan
    from layershuffle.merging.plans import sample_plans as sample_plans
    from layershuffle.merging.soups import greedy_soup as greedy_soup
    from layershuffle.merging.soups import uniform_soup as uniform_soup
    from layershuffle.models import load as load
    from layershuffle.models import save as save
    from layershuffle.orders import ExecutionOrder as ExecutionOrder
    from layershuffle.policies import Fixed as Fixed
    from layershuffle.policies import Kept as Kept
    from layershuffle.policies import LayerDrop as LayerDrop
    from layershuffle.policies import Sequential as Sequential
    from layershuffle.policies import Shuffled as Shuffled
    from layershuffle.position import PositionedModel as PositionedModel
    from layershuffle.position import add_position as add_position
    from layershuffle.position_forms import EncodingForm as EncodingForm
    from layershuffle.position_forms import PredictionForm as PredictionForm
    from layershuffle.stack import blocks_of as blocks_of
    from layershuffle.stack import depth_of as depth_of
    from layershuffle.stack import running as running
    from layershuffle.stack import tap as tap
    from layershuffle.stack import unwrap as unwrap
    from layershuffle.stack import wrap as wrap

# Name -> module: `__getattr__` (PEP 562) imports it at the first use of the name.
_HOME = {
    "LayerShuffleError": "errors",
    "UsageError": "errors",
    "SettingsError": "errors",
    "StackError": "errors",
    "DataError": "errors",
    "ModelFileError": "errors",
    "TrainingError": "errors",
    "Interrupted": "errors",
    "ExecutionOrder": "orders",
    "Sequential": "policies",
    "Shuffled": "policies",
    "LayerDrop": "policies",
    "Kept": "policies",
    "Fixed": "policies",
    "EncodingForm": "position_forms",
    "PredictionForm": "position_forms",
    "wrap": "stack",
    "unwrap": "stack",
    "running": "stack",
    "tap": "stack",
    "blocks_of": "stack",
    "depth_of": "stack",
    "add_position": "position",
    "PositionedModel": "position",
    "load": "models",
    "save": "models",
    "evaluate": "evaluation",
    "MergePlan": "merging.plans",
    "sample_plans": "merging.plans",
    "MergeGroup": "merging.group",
    "Family": "merging.group",
    "merge": "merging.group",
    "uniform_soup": "merging.soups",
    "greedy_soup": "merging.soups",
    "evaluate_ensemble": "merging.ensembles",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604 -- the table is the list


if not TYPE_CHECKING:  # else type checkers would take every misspelt name for one of ours

    def __getattr__(name: str) -> Any:
        # hasattr, doctest and copy probe for names and expect an AttributeError for absent ones.
        if name not in _HOME:
            raise AttributeError(f"module 'layershuffle' has no attribute {name!r}")
        return getattr(import_module(f"layershuffle.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
