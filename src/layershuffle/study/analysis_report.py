"""Figure 4 and the questions the paper leaves for later: what each analysis shows."""

from __future__ import annotations

from collections.abc import Iterable

from layershuffle.study.pieces import Piece
from layershuffle.study.sections import Picture, Section
from layershuffle.study.summary import label


def analysis_sections(pieces: Iterable[Piece]) -> list[Section]:
    """One section per analysis name, with a paragraph and the figures of every model asked."""
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.result is not None:
            groups.setdefault(piece.kind, []).append(piece)
    return [_section(found) for found in groups.values()]


def _section(pieces: list[Piece]) -> Section:
    result = pieces[0].result
    assert result is not None  # grouped above
    paragraphs = [f"{label(p.arm)} ({p.name}): {p.result.paragraph}" for p in pieces if p.result]
    return Section(
        title=f"Figure 4: {result.title}" if result.name == "umap" else result.title,
        sentences=tuple(paragraphs),
        pictures=tuple(picture for piece in pieces for picture in _pictures(piece)),
    )


def _pictures(piece: Piece) -> list[Picture]:
    if piece.result is None:
        return []
    return [
        Picture(file=f"{piece.place}/files/{name}", caption=f"{piece.name}: {name}")
        for name in piece.result.files
        if name.endswith(".svg")
    ]
