"""The errors of this project in tests: class and place in the test, sentences in one file.

`refusals.txt` has every sentence that a test provokes, once, over the names of its tests, so a
change of words is a change of one line. What differs from run to run is a mark there: TMP is a
directory of this run, REPOSITORY the root of this one, <OSError> the words of another library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from layershuffle.errors import LayerShuffleError

SNAPSHOT = Path(__file__).with_name("refusals.txt")
RENEW = "RENEW_REFUSALS"
INDENT = "    "
Sentences = dict[str, list[str]]
E = TypeVar("E", bound=LayerShuffleError)


def parse(text: str) -> Sentences:
    """Test -> its sentences, in the order in which they are raised."""
    found: dict[str, dict[int, str]] = {}
    sentence = ""
    for line in text.splitlines():
        if line.startswith(INDENT):
            *words, counts = line.removeprefix(INDENT).split(" ")
            numbered = found.setdefault(" ".join(words), {})
            numbered.update(dict.fromkeys(map(int, counts.split(",")), sentence))
        else:
            sentence = line
    return {test: [of[count] for count in sorted(of)] for test, of in found.items()}


def as_text(sentences: Sentences) -> str:
    """The inverse of `parse`: every sentence once, in the order of the first tests that raise it,
    over its tests and, after each, which one of the sentences of this test it is."""
    raised: dict[str, dict[str, list[str]]] = {}
    for test in sorted(sentences):
        for count, sentence in enumerate(sentences[test], start=1):
            raised.setdefault(sentence, {}).setdefault(test, []).append(str(count))
    lines = []
    for sentence, tests in raised.items():
        lines += [sentence, *(f"{INDENT}{test} {','.join(of)}" for test, of in tests.items())]
    return "".join(f"{line}\n" for line in lines)


@dataclass
class _Test:
    """The test that runs, what it shall say, and what it said so far."""

    name: str
    directories: Path  # those of all tests of this run
    known: list[str]
    said: list[str] = field(default_factory=list)

    def how(self) -> str:
        file = self.name.partition("::")[0]
        return f"If that is meant: {RENEW}=1 pytest {file}, and read how {SNAPSHOT.name} changes."


_running: list[_Test] = []


@contextmanager
def sentences_of(name: str, *, known: Sentences, directories: Path) -> Iterator[None]:
    """While the test `name` runs. Where it passes, it has said all that is known of it."""
    test = _Test(name, directories, known.get(name, []))
    _running.append(test)
    try:
        yield
    finally:
        _running.pop()
    if os.environ.get(RENEW):
        _renew(test)
    elif left := test.known[len(test.said) :]:
        pytest.fail(f"No longer raised:\n{INDENT}{left[0]}\n{test.how()}", pytrace=False)


def _renew(test: _Test) -> None:
    if test.said == test.known:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail(f"{RENEW} writes one file: run pytest without -n.", pytrace=False)
    sentences = parse(SNAPSHOT.read_text("utf-8"))
    sentences.pop(test.name, None)
    if test.said:
        sentences[test.name] = test.said
    SNAPSHOT.write_text(as_text(sentences), "utf-8")


@contextmanager
def refuses(
    error: type[E] | tuple[type[E], ...], place: str | Path | None = None
) -> Iterator[pytest.ExceptionInfo[E]]:
    """`pytest.raises` for our own errors: exactly this class, this place where one is given, and
    the sentence of `refusals.txt`.

    >>> with refuses(DataError, tmp_path / "a.png"):
    ...     read_image(tmp_path / "a.png")
    """
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    value = caught.value
    assert type(value) in (error if isinstance(error, tuple) else (error,)), repr(value)
    assert "\n" not in str(value), "an error is one paragraph"
    assert place is None or str(value.place) == str(place)
    test = _running[-1]
    said = f"{type(value).__name__}: {_marked(value, test.directories)}"
    known = (test.known[len(test.said) :] or ["(nothing)"])[0]
    test.said.append(said)
    if not os.environ.get(RENEW) and said != known:
        pytest.fail(
            f"The error is\n{INDENT}{said}\nand {SNAPSHOT.name} has\n{INDENT}{known}\n{test.how()}"
        )


def _marked(error: LayerShuffleError, directories: Path) -> str:
    text = str(error)
    cause, seen = error.__cause__ or error.__context__, set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))  # a cause may have been raised while its own effect was handled
        words = " ".join(str(cause).split())
        # One word alone (the key of a KeyError) may stand in our own sentence, too.
        if " " in words and not isinstance(cause, LayerShuffleError):
            for length in (len(words), 300, 200):  # the limits of `one_line`
                text = text.replace(words[:length], f"<{type(cause).__name__}>")
        cause = cause.__cause__ or cause.__context__
    text = re.sub(rf"{re.escape(str(directories))}/[^/\s,;:'\")]*[^/\s,;:'\").]", "TMP", text)
    return text.replace(str(SNAPSHOT.parent.parent), "REPOSITORY")
