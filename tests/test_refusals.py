"""The snapshot of all sentences of errors, and that a changed sentence is noticed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from layershuffle.errors import DataError, LayerShuffleError, UsageError
from refusals import RENEW, SNAPSHOT, as_text, parse, refuses, sentences_of


@pytest.fixture(autouse=True)
def _no_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests here have snapshots of their own, which no run writes."""
    monkeypatch.delenv(RENEW, raising=False)


def broken(place: Path) -> DataError:
    return DataError("cannot read image", place=place / "0.png", hint="repair the file")


KNOWN = {"a": ["DataError: cannot read image. Where: TMP/0.png. Next: repair the file."]}


def test_the_sentence_is_compared_without_the_directory_of_this_run(tmp_path: Path) -> None:
    for place in (tmp_path / "one", tmp_path / "another"):
        with (
            sentences_of("a", known=KNOWN, directories=tmp_path),
            refuses(DataError, place / "0.png"),
        ):
            raise broken(place)


def test_words_of_other_libraries_are_left_out(tmp_path: Path) -> None:
    known = {"a": ["DataError: cannot read this (<OSError>). Next: copy it again."]}
    for words in ("truncated file", "file is truncated " * 30):
        with sentences_of("a", known=known, directories=tmp_path), refuses(DataError):
            try:
                raise OSError(words)
            except OSError as error:
                cause = f"cannot read this ({words.strip()[:300]})"
                raise DataError(cause, hint="copy it again") from error


@pytest.mark.parametrize(
    ("test", "asked", "place"),
    [
        ("a", UsageError, None),  # another class
        ("a", LayerShuffleError, None),  # a class above
        ("a", DataError, "1.png"),
        ("b", DataError, None),  # a sentence that the file does not have
    ],
)
def test_other_errors_fail(
    tmp_path: Path, test: str, asked: type[LayerShuffleError], place: str | None
) -> None:
    failures = (AssertionError, DataError, pytest.fail.Exception)
    with (
        pytest.raises(failures),
        sentences_of(test, known=KNOWN, directories=tmp_path),
        refuses(asked, place),
    ):
        raise broken(tmp_path / "x")


def test_a_sentence_that_is_no_longer_raised_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(pytest.fail.Exception, match=r"(?s)No longer raised.*RENEW_REFUSALS=1"),
        sentences_of("a", known=KNOWN, directories=tmp_path),
    ):
        pass


def test_the_snapshot_is_sorted_and_has_no_test_that_is_gone(
    repository: Path, request: pytest.FixtureRequest
) -> None:
    text = SNAPSHOT.read_text("utf-8")
    sentences = parse(text)
    assert as_text(sentences) == text
    names = [test.partition("[")[0].split("::") for test in sentences]
    functions = {file: functions_of(repository / file) for file in {file for file, _ in names}}
    assert [(file, name) for file, name in names if name not in functions[file]] == []
    # Of files that are collected as a whole, the parameters are known, too.
    if request.config.option.keyword or any("::" in word for word in request.config.args):
        return
    here = {item.nodeid for item in request.session.items}
    files = {test.partition("::")[0] for test in here}
    assert [t for t in sentences if t.partition("::")[0] in files and t not in here] == []


def functions_of(file: Path) -> set[str]:
    """The names of all functions of a test file that is there."""
    assert file.is_file(), f"{SNAPSHOT.name} has sentences of {file}, which is gone"
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
