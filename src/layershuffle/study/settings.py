"""The settings of a study recipe. Plain data, no torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.ground.settings import KeysOf, Name, Positive, Seed, Settings
from layershuffle.merging.settings import MergingSettings
from layershuffle.scoring.settings import EvalSettings
from layershuffle.training.settings import FitSettings

# Settings of a training that the study sets itself -> where.
_NOT_UNDER_FIT = {"data": "data of the study", "method": "method of an arm", "seed": "seeds"}
Names = Annotated[tuple[Name, ...], Field(min_length=1)]


def _once(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The seeds. Raises `ValueError` if one is there twice: its results would be counted twice."""
    if len(set(seeds)) < len(seeds):
        raise ValueError("name every seed once")
    return seeds


def _without_own(fit: dict[str, Any]) -> dict[str, Any]:
    """The settings. Raises `ValueError` for one that the study sets itself, and would replace."""
    for name, place in _NOT_UNDER_FIT.items():
        if name in fit:
            raise ValueError(f"{name} is not set here, but as {place}")
    return fit


Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), AfterValidator(_once)]


FitKeys = Annotated[dict[str, Any], KeysOf(FitSettings), AfterValidator(_without_own)]


class Arm(Settings):
    """A row of a study: a method with its options."""

    method: str
    name: Name | None = None
    """Label in tables (default: the method)."""
    seeds: Seeds | None = None
    """Seeds of this arm (default: those of the study)."""
    fit: FitKeys = Field(default_factory=dict)
    """Training settings of this arm, which override those of the study."""
    evaluate: Annotated[dict[str, Any], KeysOf(EvalSettings)] = Field(default_factory=dict)
    """Scoring settings of this arm, which override the study's `evaluate`."""

    @property
    def label(self) -> str:
        """The name of this arm in tables and files."""
        return self.name or self.method


class Merging(Settings):
    """Merges, soups and ensembles of the models of an arm (paper, section 4.4)."""

    arms: Names
    """Labels of the arms; the models of all seeds of an arm are its donors."""
    options: MergingSettings = MergingSettings()


class AnalysisTask(Settings):
    """An analysis of the models of an arm."""

    name: Name
    """umap, norms, attention, attribution, leave-one-out or position."""
    arm: Name
    """Label of the arm."""
    seeds: Seeds | None = None
    """Seeds of the models to analyse (default: the first seed of the arm)."""
    options: AnalysisSettings = AnalysisSettings()


class StudySettings(Settings):
    """All runs, evaluations, tables and figures of one experiment."""

    name: Name
    model: str
    data: str
    seeds: Seeds = (0,)
    """One run per arm and seed."""
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]
    fit: FitKeys = Field(default_factory=dict)
    """Training settings shared by all arms."""
    evaluate: EvalSettings = EvalSettings()
    merging: tuple[Merging, ...] = ()
    """Merges; an arm may have its own options."""
    analyses: tuple[AnalysisTask, ...] = ()
    workers: Positive | None = None
    """Runs at a time (default: one per GPU, else one per CPU core with a thread each)."""

    def arm_seeds(self, arm: Arm) -> tuple[int, ...]:
        """The seeds of an arm."""
        return arm.seeds or self.seeds

    def fit_settings(self, arm: Arm, seed: int) -> FitSettings:
        """The training settings of one run of the study."""
        fit = {"model": self.model, **self.fit, **arm.fit}  # an arm may have its own model
        return FitSettings(**fit, data=self.data, method=arm.method, seed=seed)

    def evaluate_settings(self, arm: Arm) -> EvalSettings:
        """The scoring settings of the runs of an arm."""
        return EvalSettings(**{**self.evaluate.model_dump(), **arm.evaluate})
