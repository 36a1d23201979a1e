"""The machine of a new user: an environment with the wheel and its dependencies, without sources.

pip installs the wheel without a network; what it depends on is seen in the environment of these
tests, and this project's own editable install there is not. Every command runs in a process of its
own, forked from one that has imported torch: 40 processes would import it for minutes. All
strangers share that one and its home, and each works in a directory of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import layershuffle_host

_SHELL = """
import gc, json, os, sys
gc.disable()
import layershuffle.training, layershuffle.core.evaluation, layershuffle.merging.scoring
import layershuffle.data.digits, layershuffle.study.runner, transformers.modeling_utils
from layershuffle.cli import main
gc.freeze()  # no command looks through what was imported, or copies its pages

def command(asked):
    gc.enable()
    os.chdir(asked["folder"])
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
    # The host may be there as its sources alone.
    hosts = Path(layershuffle_host.__file__).parents[1]
    paths = Path(own.strip(), "dependencies.pth")
    paths.write_text(f"{sysconfig.get_path('purelib')}\n{hosts}\n")


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
    """The result of a command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The output, parsed as JSON."""
        return json.loads(self.out)


class Shell:
    """Runs commands in `environment`, one after the other. Call `end` after the last one."""

    def __init__(self, environment: Path, home: Path) -> None:
        self.home, self.bin = home, environment / "bin"
        self.variables = clean_variables(home)
        self._log = (home / "shell.err").open("w")
        self._process = subprocess.Popen(
            [self.bin / "python", "-c", _SHELL],
            cwd=home, env=self.variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        first = self._answer()
        assert Path(first["file"]).is_relative_to(environment), "the wheel is not what is tested"

    def run(self, words: tuple[str, ...], python: str | None, *, folder: Path) -> Done:
        """Run a command, or lines of Python, in the directory `folder`."""
        out, err = self.home / "out", self.home / "err"
        asked = {"words": words, "python": python, "folder": str(folder)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**asked, "out": str(out), "err": str(err)}) + "\n")
        self._process.stdin.flush()
        return Done(self._answer(), out.read_text(), err.read_text())

    def end(self) -> None:
        """End the process."""
        # Killed, because torch takes seconds to leave in good order.
        with self._process, self._log:
            self._process.kill()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, Path(self._log.name).read_text()
        return json.loads(line)


@dataclass(frozen=True)
class Stranger:
    """A user at a shell in the empty directory `folder`."""

    shell: Shell
    folder: Path

    def types(self, *words: str, code: int = 0, python: str | None = None) -> Done:
        """Run `layershuffle WORDS`, or lines of Python, and check the exit code."""
        done = self.shell.run(words, python, folder=self.folder)
        assert done.code == code, (words or python, done)
        return done

    def refused(self, *words: str, saying: str) -> None:
        """Run an invalid command and check for one paragraph with the cause, and code 1 or 2."""
        done = self.shell.run(words, None, folder=self.folder)
        assert done.code in (1, 2), (words, done)
        (paragraph,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert saying in paragraph, (words, paragraph)
        assert "fault of layershuffle" not in paragraph, paragraph

    def starts(self, *words: str, log: IO[str]) -> subprocess.Popen[str]:
        """Start a command as a background process."""
        return subprocess.Popen(
            [self.shell.bin / "layershuffle", *words],
            cwd=self.folder, env={**self.shell.variables, "PYTHONUNBUFFERED": "1"},
            stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
