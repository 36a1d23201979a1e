"""What claims are judged by: the numbers of a study by arm, mode, merging and analysis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layershuffle.merging.rows import MergingRow, by_model, group_rows
from layershuffle.stats import Estimate, deviation, mean
from layershuffle.study.merging_report import score_of
from layershuffle.study.pieces import Piece
from layershuffle.study.summary import Column, Summary


@dataclass(frozen=True)
class Evidence:
    """What claims are judged by."""

    summary: Summary
    pieces: tuple[Piece, ...]

    def means(self, arm: str, mode: str, *, kept: int | None = None) -> list[float]:
        """The models' mean top-1 of an arm, blocks chosen as in the main table."""
        cell = self.summary.cell(arm, Column(mode, kept or self.summary.depth))
        return [] if cell is None else cell.model_means

    def by_identity(self, arm: str, kept: int) -> tuple[list[float], list[float]]:
        """Top-1 in arbitrary order of the draws that were the sequential order, and of others."""
        cell = self.summary.cell(arm, Column("arbitrary", kept))
        rows = [] if cell is None else [row for row in cell.rows if row.order]
        straight = ",".join(map(str, range(kept)))
        return (
            [row.top1 for row in rows if row.order == straight],
            [row.top1 for row in rows if row.order != straight],
        )

    def merging(self, arm: str) -> dict[str, Estimate]:
        """Scores of the arm's single models, merges, soups and ensembles; the main variants."""
        groups = group_rows(self._merging_rows(arm))
        return {
            name if kind == "soup" else kind: score_of(rows)
            for (kind, name, _), rows in groups.items()
        }

    def spread_of_single_orders(self, arm: str, kind: str) -> float | None:
        """Standard deviation over (model, order) scores of an arm's single models or merges."""
        return deviation([row.top1 for row in self._merging_rows(arm) if row.kind == kind])

    def merging_means(self, arm: str, kind: str) -> list[float]:
        """The mean top-1 of every single model or merge of an arm, main variant."""
        rows = [row for row in self._merging_rows(arm) if row.kind == kind]
        return [mean(scores) for scores in by_model(rows).values()]

    def fact(self, analysis: str, arm: str, *, path: tuple[str, ...]) -> float | None:
        """A number of an analysis by its path in the facts, averaged over the models asked."""
        found = []
        for piece in self.pieces:
            if (piece.kind, piece.arm) == (analysis, arm) and piece.result is not None:
                value: Any = piece.result.facts
                for key in path:
                    value = value.get(key) if isinstance(value, dict) else None
                if isinstance(value, int | float):
                    found.append(float(value))
        return mean(found) if found else None

    def _merging_rows(self, arm: str) -> list[MergingRow]:
        """The main variants of the arm's merging; none while it is not done."""
        found = [piece for piece in self.pieces if (piece.kind, piece.arm) == ("merging", arm)]
        return [row for piece in found for row in piece.rows if row.main]
