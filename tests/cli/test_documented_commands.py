"""The commands of the pages: all are read as they stand, those of `docs/commands.md` are run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from layershuffle.cli import APP, main

COMMAND = re.compile(r"(?:torchrun .* -m )?layershuffle (.+)")
RECIPE = "data: digit-pairs\nmodel: bundled:digits\n"
# They need no more than the package, and the folder in which those before them ran.
RUN = ("fit", "eval", "compare", "predict", "reproduce", "ensemble", "analyze", "doctor")


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of every `layershuffle` command in the blocks of a page, one after the other."""
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = COMMAND.match(line)
            if command:
                words = shlex.split(command[1], comments=True)
                yield words[: words.index(">")] if ">" in words else words


def test_every_command_of_the_pages_is_read_as_it_stands(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its options and their values, in a folder with the recipe that a page calls my.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RECIPE)
    count = 0
    for page in (repository / "README.md", *sorted((repository / "docs").rglob("*.md"))):
        for words in commands_of(page):
            APP.parse_args(words, exit_on_error=False, print_error=False)
            count += 1
    assert count > 45


def test_the_commands_of_the_page_on_commands_print_what_it_says(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From top to bottom in one folder. Every line of the page is printed, up to its digits."""
    page = repository / "docs" / "commands.md"
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    promises = {}
    for block, after in zip(blocks, [*blocks[1:], ""], strict=True):
        printed = after if not after.startswith("layershuffle") else ""
        promises[block.partition("\n")[0].split()[1]] = printed
    ran = []
    for words in commands_of(page):
        if words[0] not in RUN:
            continue
        if "digits" in words and words[0] == "eval":  # of the files that `export` writes
            continue
        capsys.readouterr()
        assert main(words) == 0, words
        shown = without_numbers(capsys.readouterr().out)
        ran.append(words[0])
        for line in promises[words[0]].splitlines():
            for part in line.split("..."):
                assert without_numbers(part) in shown, (words, part)
    assert ran == list(RUN)


def without_numbers(text: str) -> str:
    """Another processor rounds otherwise, and columns are as wide as their numbers."""
    return " ".join(re.sub(r"[+-]?\d[\d.,]*", "0", text.replace("─", "")).split())
