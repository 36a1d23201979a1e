"""What a section of the report is made of. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from layershuffle.study.facts import Table


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure: its file below the study's directory, a caption, and its SVG.

    `svg` is `None` for a file that is there already.
    """

    file: str
    caption: str
    svg: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with sentences, a command to type, pictures and tables."""

    title: str
    sentences: tuple[str, ...] = ()
    command: str = ""
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
