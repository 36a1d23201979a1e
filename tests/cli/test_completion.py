"""Completion as in a shell: the script is sourced, and its function called."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from test_help import FLAGS

from layershuffle.cli import COMMANDS, SWARM_COMMANDS, main

# What bash does at the tab key: it sets these variables and calls the registered function.
ASK = """
source "$1"
shift
function=$(complete -p layershuffle | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=(layershuffle "$@") COMP_CWORD=$# COMPREPLY=()
$function
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_flags(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "layershuffle"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> set[str]:
        done = subprocess.run(
            ["bash", "-c", ASK, "bash", str(script), *words],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return set(done.stdout.split("\n")) - {""}

    assert completed("") == {*COMMANDS, "swarm"}
    assert completed("sw") == {"swarm"}
    assert completed("swarm", "") == set(SWARM_COMMANDS)
    assert completed("eval", "--num-o") == {"--num-orders"}
    for command in ("fit", "swarm up"):
        assert {f"--{flag}" for flag in FLAGS[command].split()} <= completed(*command.split(), "--")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_too(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in (*COMMANDS, *SWARM_COMMANDS) if name not in script] == []
