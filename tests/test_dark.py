"""Colours of figures: a style for every method, and on a dark page colours that are seen there."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from layershuffle.core.methods import PRESETS
from layershuffle.ground.plotting import (
    GROUND,
    INK,
    METHOD_STYLES,
    RULE,
    STYLES,
    dark_colours,
    figure_bytes,
    new_figure,
    style_axes,
)


def test_every_method_has_a_style_of_its_own() -> None:
    assert METHOD_STYLES.keys() == PRESETS.keys()
    assert len(set(METHOD_STYLES.values())) == len(METHOD_STYLES)


def luminance(colour: str) -> float:
    """The relative luminance of #rrggbb (WCAG 2)."""
    total = 0.0
    for place, weight in ((1, 0.2126), (3, 0.7152), (5, 0.0722)):
        value = int(colour[place : place + 2], 16) / 255
        linear = value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4
        total += weight * linear
    return total


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colour", [INK, *(colour for colour, _, _ in STYLES)])
def test_every_colour_is_seen_on_both_grounds(colour: str) -> None:
    dark = dark_colours()
    assert contrast(colour, GROUND) >= 3  # of graphics; words are in ink
    assert contrast(dark[colour], dark[GROUND]) >= 4.5


def test_a_figure_follows_the_page_that_shows_it() -> None:
    figure = new_figure(3, 2)
    axes = figure.subplots()
    style_axes(axes, "a title")
    axes.grid(color=RULE)
    for colour, marker, dash in STYLES:
        axes.plot([0, 1], [0, 1], color=colour, marker=marker, linestyle=dash)
    text = figure_bytes(figure, "svg").decode()
    ElementTree.fromstring(text)
    drawn = set(re.findall(r'style="[^"]*?(?:fill|stroke): (#[0-9a-f]{6})', text))
    assert drawn <= set(dark_colours())
    (style,) = re.findall(r"prefers-color-scheme:dark\)\{(.*?)\}</style>", text)
    for light, dark in dark_colours().items():
        assert f'[style*="fill: {light}"]{{fill:{dark}!important}}' in style
