"""The settings of a study recipe. Plain data, no torch."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from layershuffle.analysis import find_analysis
from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.errors import UsageError
from layershuffle.merging.settings import MergingSettings
from layershuffle.settings import (
    EvalSettings,
    FitSettings,
    KeysOf,
    Name,
    Positive,
    Seed,
    Settings,
)

Names = Annotated[tuple[Name, ...], Field(min_length=1)]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1)]


class Arm(Settings):
    """A row of a study: a method with its options."""

    method: str
    name: Name | None = None
    """Label in tables (default: the method)."""
    seeds: Seeds | None = None
    """Seeds of this arm (default: those of the study)."""
    fit: Annotated[dict[str, Any], KeysOf(FitSettings)] = Field(default_factory=dict)
    """Training settings of this arm, which override those of the study."""
    evaluate: Annotated[dict[str, Any], KeysOf(EvalSettings)] = Field(default_factory=dict)
    """Scoring settings of this arm, which override the study's `evaluate`."""

    @property
    def label(self) -> str:
        """The name of this arm in tables and files."""
        return self.name or self.method


class Budget(Settings):
    """The same arms trained for other numbers of steps: accuracy against training."""

    arms: Names
    """Labels of the arms, whose own length is part of the curve, too."""
    steps: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Lengths in optimiser steps."""
    seeds: Seeds | None = None
    """Seeds of every length (default: those of the study)."""


class Merging(Settings):
    """Merges, soups and ensembles of the models of an arm (paper, section 4.4)."""

    arms: Names
    """Labels of the arms; the models of all seeds of an arm are its donors."""
    options: MergingSettings = MergingSettings()


class AnalysisTask(Settings):
    """An analysis of the models of an arm."""

    name: Name
    """umap, norms, attention, attribution, leave-one-out, cka or position."""
    arm: Name
    """Label of the arm; that of a budget curve at one length ends in -N-steps."""
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
    fit: Annotated[dict[str, Any], KeysOf(FitSettings)] = Field(default_factory=dict)
    """Training settings shared by all arms."""
    evaluate: EvalSettings = EvalSettings()
    budget: tuple[Budget, ...] = ()
    """Curves over numbers of steps; each may have its own arms and seeds."""
    merging: tuple[Merging, ...] = ()
    """Merges; an arm may have its own options."""
    analyses: tuple[AnalysisTask, ...] = ()
    workers: Positive | None = None
    """Runs at a time (default: one per GPU, else one per CPU core with a thread each)."""

    @field_validator("budget", "merging", mode="before")
    @classmethod
    def _single(cls, value: object) -> object:
        # Recipes and plans name a single entry without a list.
        if value is None:
            return ()
        return (value,) if isinstance(value, dict | Settings) else value

    @model_validator(mode="after")
    def _check(self) -> StudySettings:
        labels = [arm.label for arm in self.arms]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two arms have one label: {sorted(labels)}; give them a name")
        for seeds in (self.seeds, *(arm.seeds for arm in self.arms)):
            if seeds is not None and len(set(seeds)) < len(seeds):
                # Two runs of the same name would share a directory.
                raise ValueError(f"a seed is named twice: {list(seeds)}")
        # All settings are built now, or a mistake in the last arm would appear after hours.
        for arm in self.arms:
            self.evaluate_settings(arm)
            for seed in self.seeds_of(arm):
                self.fit_settings(arm, seed)
        self._check_names()
        self._check_unique()
        return self

    def _check_unique(self) -> None:
        lists: dict[str, list[object]] = {
            "budget": [
                (arm, n) for curve in self.budget for arm in curve.arms for n in curve.steps
            ],
            "merging": [arm for merging in self.merging for arm in merging.arms],
            "analyses": [
                (analysis.name, analysis.arm, seed)
                for analysis in self.analyses
                for seed in analysis.seeds or self.seeds_of(self.arm(analysis.arm))[:1]
            ],
        }
        for where, values in lists.items():
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                # Two tasks of the same name would share a directory.
                raise ValueError(f"{where} holds {twice[0]} twice")

    def _check_names(self) -> None:
        # A curve must name the recipe's arms, not those of another curve, which `arm` also accepts.
        recipe = self.model_copy(update={"budget": ()})
        for arm in (arm for curve in self.budget for arm in curve.arms):
            recipe.arm(arm)
        for arm in (arm for merging in self.merging for arm in merging.arms):
            self.arm(arm)
        for analysis in self.analyses:
            # Raises for an unknown name, hours before the analysis would.
            find_analysis(analysis.name)
            seeds = self.seeds_of(self.arm(analysis.arm))
            unknown = sorted(set(analysis.seeds or ()) - set(seeds))
            if unknown:
                raise ValueError(
                    f"{analysis.name} asks for seed {unknown[0]}, {analysis.arm} has {seeds}"
                )

    def arm(self, label: str) -> Arm:
        """The arm with this label, of the recipe or of a curve. Raises `UsageError` for others."""
        named = {arm.label: arm for arm in self.arms}
        for curve in self.budget:
            for arm, steps in product(curve.arms, curve.steps):
                # An arm of the recipe comes before one of a curve.
                if arm in named and f"{arm}-{steps}-steps" == label and label not in named:
                    return self.curve_arm(arm, steps=steps, curve=curve)
        if label not in named:
            hint = f"its arms are {', '.join(named)}"
            raise UsageError(f"The study has no arm {label!r}", hint=hint)
        return named[label]

    def curve_arm(self, label: str, *, steps: int, curve: Budget) -> Arm:
        """The arm of a curve at one length, named after it: "layershuffle-500-steps"."""
        return _with_steps(self.arm(label), steps, seeds=curve.seeds or self.seeds)

    def seeds_of(self, arm: Arm) -> tuple[int, ...]:
        """The seeds of an arm."""
        return arm.seeds or self.seeds

    def fit_settings(self, arm: Arm, seed: int) -> FitSettings:
        """The training settings of one run of the study."""
        # An arm may have its own model, but `fit` cannot change method and seed.
        fields = {"model": self.model, "data": self.data, **self.fit, **arm.fit}
        return FitSettings(**{**fields, "method": arm.method, "seed": seed})

    def evaluate_settings(self, arm: Arm) -> EvalSettings:
        """The scoring settings of the runs of an arm."""
        return EvalSettings(**{**self.evaluate.model_dump(), **arm.evaluate})


def _with_steps(arm: Arm, steps: int, *, seeds: tuple[int, ...]) -> Arm:
    """The arm at another length, with four evaluations that may pick the checkpoint."""
    # Without `epochs`, which would contradict the number of steps.
    fit = {**arm.fit, "steps": steps, "epochs": None, "eval_every": max(1, steps // 4)}
    fields = {**arm.model_dump(), "name": f"{arm.label}-{steps}-steps", "fit": fit, "seeds": seeds}
    return Arm(**{**fields, "evaluate": {**arm.evaluate, "modes": "sequential,arbitrary"}})
