"""LayerShuffle: vision transformers whose blocks run in any order, on whatever subset is there.

`import layershuffle as ls` is cheap: every name below is loaded when it is first used, and torch
only with the names that need it. What is not listed here may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from layershuffle._version import __version__

if TYPE_CHECKING:
    from layershuffle.core.evaluation import evaluate as evaluate
    from layershuffle.core.orders import ExecutionOrder as ExecutionOrder
    from layershuffle.core.policies import Fixed as Fixed
    from layershuffle.core.policies import Kept as Kept
    from layershuffle.core.policies import LayerDrop as LayerDrop
    from layershuffle.core.policies import Sequential as Sequential
    from layershuffle.core.policies import Shuffled as Shuffled
    from layershuffle.core.position import PositionedModel as PositionedModel
    from layershuffle.core.position import add_position as add_position
    from layershuffle.core.position_forms import EncodingForm as EncodingForm
    from layershuffle.core.position_forms import PredictionForm as PredictionForm
    from layershuffle.core.stack import blocks_of as blocks_of
    from layershuffle.core.stack import depth_of as depth_of
    from layershuffle.core.stack import running as running
    from layershuffle.core.stack import tap as tap
    from layershuffle.core.stack import unwrap as unwrap
    from layershuffle.core.stack import wrap as wrap
    from layershuffle.errors import DataError as DataError
    from layershuffle.errors import Interrupted as Interrupted
    from layershuffle.errors import LayerShuffleError as LayerShuffleError
    from layershuffle.errors import ModelFileError as ModelFileError
    from layershuffle.errors import SettingsError as SettingsError
    from layershuffle.errors import StackError as StackError
    from layershuffle.errors import TrainingError as TrainingError
    from layershuffle.errors import UsageError as UsageError
    from layershuffle.merging.ensembles import evaluate_ensemble as evaluate_ensemble
    from layershuffle.merging.group import MergeGroup as MergeGroup
    from layershuffle.merging.group import merge as merge
    from layershuffle.merging.plans import MergePlan as MergePlan
    from layershuffle.merging.plans import sample_plans as sample_plans
    from layershuffle.merging.soups import greedy_soup as greedy_soup
    from layershuffle.merging.soups import uniform_soup as uniform_soup
    from layershuffle.models import load as load
    from layershuffle.models import save as save

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
    "ExecutionOrder": "core.orders",
    "Sequential": "core.policies",
    "Shuffled": "core.policies",
    "LayerDrop": "core.policies",
    "Kept": "core.policies",
    "Fixed": "core.policies",
    "EncodingForm": "core.position_forms",
    "PredictionForm": "core.position_forms",
    "wrap": "core.stack",
    "unwrap": "core.stack",
    "running": "core.stack",
    "tap": "core.stack",
    "blocks_of": "core.stack",
    "depth_of": "core.stack",
    "add_position": "core.position",
    "PositionedModel": "core.position",
    "load": "models",
    "save": "models",
    "evaluate": "core.evaluation",
    "MergePlan": "merging.plans",
    "sample_plans": "merging.plans",
    "MergeGroup": "merging.group",
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
