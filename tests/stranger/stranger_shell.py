"""A stranger's machine: an environment with the wheel and its dependencies, and no source tree.

pip installs the wheel without a network; what it depends on is seen in the environment of these
tests, and this project's own editable install there is not. Every command runs in a process of its
own, forked from one that has imported torch: 40 processes would import it for minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_SHELL = """
import json, os, sys
import layershuffle.training, layershuffle.evaluation, layershuffle.merging.scoring
import layershuffle.data.digits, layershuffle.study.runner, transformers.modeling_utils
from layershuffle.cli import main

def command(asked):
    for number, name in ((0, os.devnull), (1, asked["out"]), (2, asked["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
    if asked["python"] is None:
        return main(asked["words"])
    exec(asked["python"], {"__name__": "__main__"})
    return 0

print(json.dumps({"file": layershuffle.__file__}), flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 70
        try:
            code = command(json.loads(line))
            sys.stdout.flush()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
"""


def make_environment(place: Path, wheel: Path) -> None:
    """A virtual environment at `place` with the wheel, beside the dependencies of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = place / "bin" / "python"
    words = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    # A directory in a .pth file is searched, but its own .pth files are not read: the editable
    # install of this environment stays out.
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout
    Path(own.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def clean_variables(home: Path) -> dict[str, str]:
    """The variables of a new user's shell, and those that keep tests offline and on one thread."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)


class Stranger:
    """Somebody at a shell in an empty directory, with the commands of an environment."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.folder, self.bin = folder, environment / "bin"
        self.variables = clean_variables(folder / "home")
        (folder / "home").mkdir()
        self._log = (folder / "home" / "shell.err").open("w")
        self._shell = subprocess.Popen(
            [self.bin / "python", "-c", _SHELL],
            cwd=folder, env=self.variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        first = self._answer()
        assert Path(first["file"]).is_relative_to(environment), "the wheel is not what is tested"

    def types(self, *words: str, code: int = 0, python: str | None = None) -> Done:
        """Run `layershuffle WORDS`, or lines of Python; it has to end with that exit code."""
        done = self._run(words, python)
        assert done.code == code, (words or python, done)
        return done

    def refused(self, *words: str, saying: str) -> None:
        """Run a command that cannot be done: one paragraph with the cause, and exit code 1 or 2."""
        done = self._run(words, None)
        assert done.code in (1, 2), (words, done)
        (paragraph,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert saying in paragraph, (words, paragraph)
        assert "fault of layershuffle" not in paragraph, paragraph

    def starts(self, *words: str, log: IO[str]) -> subprocess.Popen[str]:
        """A command as a process of its own, which goes on."""
        return subprocess.Popen(
            [self.bin / "layershuffle", *words],
            cwd=self.folder, env={**self.variables, "PYTHONUNBUFFERED": "1"},
            stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def _run(self, words: tuple[str, ...], python: str | None) -> Done:
        out, err = (self.folder / "home" / name for name in ("out", "err"))
        asked = {"words": words, "python": python, "out": str(out), "err": str(err)}
        assert self._shell.stdin is not None
        self._shell.stdin.write(json.dumps(asked) + "\n")
        self._shell.stdin.flush()
        return Done(self._answer(), out.read_text(), err.read_text())

    def leaves(self) -> None:
        """End the shell."""
        # Killed, because torch takes seconds to leave in good order.
        with self._shell, self._log:
            self._shell.kill()

    def _answer(self) -> Any:
        assert self._shell.stdout is not None
        line = self._shell.stdout.readline()
        assert line, Path(self._log.name).read_text()
        return json.loads(line)


@contextmanager
def a_stranger(environment: Path, folder: Path) -> Iterator[Stranger]:
    """A stranger in the new directory `folder`, gone afterwards."""
    folder.mkdir()
    stranger = Stranger(environment, folder)
    try:
        yield stranger
    finally:
        stranger.leaves()
