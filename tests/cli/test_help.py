"""Flags are frozen, explained and completed, the docs name no others, and `--help` is quick."""

import re
import resource
import shutil
import subprocess
import sys
from functools import cache

import pytest

from layershuffle.analysis import ANALYSES
from layershuffle.cli import APP, COMMANDS, MEANINGS, SWARM_COMMANDS, main
from layershuffle.cli.fit import GROUPS
from layershuffle.core.methods import PRESETS
from layershuffle.training.settings import FitSettings

NAMES = [*COMMANDS, *(f"swarm {name}" for name in SWARM_COMMANDS)]
FLAG = r"--[a-z][a-z0-9.-]*[a-z0-9]"


@cache
def arguments_of(command):
    """The help text of each argument of a command, by its flags."""
    app = APP
    for word in command.split():
        app = app[word]
    arguments = app.assemble_argument_collection(
        default_parameter=APP.default_parameter, parse_docstring=True
    )
    return {argument.names: argument.parameter.help for argument in arguments if argument.show}


def flags_of(command):
    return {flag for names in arguments_of(command) for flag in names} | {"--help", "--debug"}


@pytest.mark.parametrize("command", NAMES)
def test_every_argument_has_a_sentence(command):
    for names, text in arguments_of(command).items():
        assert text, names
        assert text.endswith((".", ".)")), (names, text)


def test_the_flags_are_frozen():
    """A new flag enters this list and the command's page in the same commit."""
    for command in NAMES:
        flags = {names[0].removeprefix("--") for names in arguments_of(command)}
        assert flags == set(FLAGS[command].split()), command
    assert set(FLAGS) == set(NAMES)


def test_every_setting_of_fit_has_a_place_in_its_help():
    places = [name for names in GROUPS.values() for name in names]
    assert len(places) == len(set(places))
    assert set(places) == set(FitSettings.model_fields) - {"model"}


def test_what_other_programs_call_an_option_is_none_of_ours():
    every = set().union(*map(flags_of, NAMES))
    assert set(MEANINGS) & set(flags_of("fit")) == set()
    named = {flag for text in MEANINGS.values() for flag in re.findall(FLAG, text)}
    assert named <= every


def test_one_thing_has_one_spelling():
    """--modes, --max-images, --num-orders, --top, --random and --ensemble-combine."""
    others = {"mode", "images", "orders", "top-k", "merges", "combine"}
    assert {word for flags in FLAGS.values() for word in flags.split()} & others == set()


@pytest.mark.parametrize("words", ["help fit", "help swarm drain", "fit --help", "swarm -h"])
def test_help(words, capsys):
    assert main(words.split()) == 0
    command = re.sub("help |--help|-h", "", words).strip()
    assert f"Usage: layershuffle {command}" in capsys.readouterr().out


def test_lists_of_names_in_help_texts_are_complete():
    """Help texts repeat names from modules that are too slow to import for `--help`."""
    analysis = arguments_of("analyze")["--name",]
    assert [name for name in ANALYSES if name not in analysis] == []
    method = arguments_of("fit")["--method",]
    assert set(PRESETS) <= set(re.findall(r"[a-z]+(?:-[a-z]+)*", method))


def test_no_help_imports_a_heavy_library():
    """All in one process without other imports, because each process would take seconds."""
    code = f"""
import sys
from layershuffle.cli import main
for command in {["", "swarm", *NAMES]!r}:
    main([*command.split(), "--help"])
heavy = {HEAVY!r} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


HEAVY = {
    *("accelerate", "datasets", "fastapi", "httpx", "matplotlib", "numpy", "pandas", "PIL"),
    *("ray", "scipy", "sklearn", "timm", "torch", "torchvision", "transformers", "uvicorn"),
}


def processor_time(*words):
    """Seconds of processor time that a process takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick():
    """Less than half of the time that torch takes to be imported, beside it on any machine."""
    ratios = dict.fromkeys(("", "fit", "reproduce", "swarm up"), 1.0)
    for _ in range(5):
        torch = processor_time("-c", "import torch")
        for command, least in ratios.items():
            if least >= 0.5:
                seconds = processor_time("-m", "layershuffle", *command.split(), "--help")
                ratios[command] = min(least, seconds / torch)
        if max(ratios.values()) < 0.5:
            break
    assert max(ratios.values()) < 0.5, ratios


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


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("eval ", ["bundled:digits", "runs/a", "saved", "timm:"]),
        ("eval runs/", ["runs/a"]),
        ("merge runs/a ", ["runs/a", "saved"]),
        ("fit --method ", [*PRESETS]),
        ("fit --recipe ", ["digits-base", "own.yaml"]),
        ("reproduce ", ["digits-quick", "own.yaml"]),
        ("analyze ", [*ANALYSES, "all"]),
        ("analyze norms ", ["runs/a"]),
    ],
)
def test_words_that_are_completed(words, offered, tmp_path, monkeypatch, capsys):
    """As the scripts of all shells ask for them."""
    monkeypatch.chdir(tmp_path)
    for place in ("runs/a/model", "saved"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "layershuffle.json").touch()
    (tmp_path / "own.yaml").touch()
    assert main(["__complete", *words.split(" ")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(offered) <= set(lines)
    assert "runs/a/model" not in lines


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_too(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in (*COMMANDS, *SWARM_COMMANDS) if name not in script] == []


# --- the docs -------------------------------------------------------------------------------------

OTHERS = {
    "index.md": "--to --execute --inplace",  # of jupyter nbconvert
    "swarm.md": "--data-binary --ca --memory --name",  # of curl, and of layershuffle-host
    # of sbatch and torchrun
    "distributed.md": "--array --gpus --wrap "
    "--max-restarts --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id",
    "performance.md": "--smoke",  # of benchmarks/
    "getting-started.md": "--index-url",  # of pip
    "deploy.md": "--detach --memory --now",  # of docker, layershuffle-host and systemctl
    "pis.md": "--memory --ca",
}
"""Flags of other programs, by the page that names them."""
INVOCATION = re.compile(r"layershuffle ((?:swarm )?[a-z]+)\b((?:[^`\n|&;#]|\\\n)*)")


def pages_of(repository):
    """All pages with commands."""
    return [*(repository / "docs").rglob("*.md"), repository / "README.md"]


def test_every_command_has_a_section(repository):
    page = (repository / "docs" / "commands.md").read_text()
    assert re.findall("^## (.+)", page, re.MULTILINE) == re.findall(r"^\| \[`(\w+)`\]", page, re.M)
    sections = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    assert set(sections) == {*COMMANDS, "swarm"}
    assert [name for name in SWARM_COMMANDS if f"swarm {name}" not in sections["swarm"]] == []
    assert [
        name for name in COMMANDS if not re.search(rf"^layershuffle {name}\b", sections[name], re.M)
    ] == []


def test_commands_and_flags_in_the_docs_exist(repository):
    wrong, seen = [], set()
    every = set().union(*map(flags_of, NAMES))
    for page in pages_of(repository):
        text = re.sub("`python benchmarks/[^`]*`", "", page.read_text())
        for command, words in INVOCATION.findall(text):
            if command in NAMES:  # else prose, as in "layershuffle is ..."
                seen.add(command)
                unknown = set(re.findall(FLAG, words)) - flags_of(command)
                wrong += [f"{page.name}: {command} {flag}" for flag in unknown]
                wrong += re.findall(rf"{FLAG} (?:True|False)", words)  # it is --no-compile
        others = set(OTHERS.get(page.name, "").split())
        wrong += [f"{page.name}: {flag}" for flag in set(re.findall(FLAG, text)) - every - others]
    assert wrong == []
    assert len(seen) > 15


FLAGS = {
    "demo": "browser data model ordinary port",
    "fit": "accumulate activation-checkpointing augment batch-size block-drop branch-scale "
    "checkpoint-every choose classes clip compile cutmix data data-changed device distinct "
    "drop-path encoding.dropout encoding.features encoding.projection-init encoding.table "
    "encoding.table-init epochs eval-batch-size eval-every eval-orders exit-weight fixed "
    "freeze holdout keep-features kept layer-decay log-every log-with lr max-parallel method "
    "min-kept mixup model opt orders-per-batch out paper-protocol parallel position precision "
    "prediction.init prediction.loss prediction.pooling prediction.weight rank-orders recipe "
    "resize schedule seed select-by self-distillation sequential-every skip-corrupt smoothing "
    "steps threads warmup weight-decay workers",
    "predict": "classes device fixed image json model modes order seed threads top",
    "eval": "batch-size classes compile data device draw fixed json max-images model modes "
    "num-orders order precision resize seed skip-corrupt stop threads",
    "compare": "batch-size classes compile data device draw first fixed json max-images modes "
    "num-orders precision resize second seed skip-corrupt threads",
    "export": "data model order out precision whole",
    "analyze": "batch-size block data device max-images model name neighbours num-orders "
    "out resize seed skip-corrupt threads",
    "merge": "base batch-size classes compile data device draw ends ensemble-combine "
    "ensemble-orders json max-images model modes num-orders out overwrite precision random "
    "replacement resize seed skip-corrupt slots soups threads",
    "ensemble": "batch-size classes compile data device draw ensemble-combine ensemble-orders json "
    "max-images model modes num-orders precision resize seed skip-corrupt threads",
    "reproduce": "data dry-run out ray recipe workers",
    "report": "directory",
    "classify": "address api-key-file authority confidence deadline-ms image json min-blocks top",
    "completion": "shell",
    "doctor": "",
    "swarm up": "copies hosts hosts-port https-certificate https-key keys listen log-json "
    "memory-mb min-accuracy model page port public ray state token-file trusted-proxy wire",
    "swarm demo": "",
    "swarm status": "address api-key-file authority json",
    "swarm drain": "address authority host operator-key-file state",
    "swarm readmit": "address authority host operator-key-file state",
    "swarm calibrate": "data device json max-images model num-orders seed threads",
}
