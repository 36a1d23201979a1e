"""`--help` is complete, and the docs name no other flags, by the printed help."""

import io
import re
import resource
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from itertools import pairwise

import pytest

from layershuffle.analysis import ANALYSES
from layershuffle.bench.settings import KINDS
from layershuffle.cli import ROOT, SWARM, CommandGroup, main, swarm
from layershuffle.cli.eval import EvalCommand
from layershuffle.core.methods import PRESETS
from layershuffle.swarm.chaos import KINDS as KINDS_OF_FAULTS
from layershuffle.swarm.plan import DEFAULT_MODEL
from layershuffle.swarm.policy import ROUTINGS

COMMANDS = [
    name for name, (_, target) in ROOT.commands.items() if not isinstance(target, CommandGroup)
]
COMMANDS += [f"swarm {name}" for name in SWARM.commands]
FLAG = r"--[a-z][a-z0-9.-]*[a-z0-9]"


@cache
def help_of(command):
    """What `layershuffle COMMAND --help` prints."""
    with redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as exit_:
        main([*command.split(), "--help"])
    assert exit_.value.code == 0
    return output.getvalue()


@cache
def arguments_of(command):
    """The arguments in the help of a command: the form of each, and its description."""
    arguments = []
    for line in help_of(command).splitlines():
        text = line[1:].rstrip("│ ")  # without the sides of the box
        if re.match(r" (-[a-z-]|[A-Z.]+(  |$))", text) and "---" not in text:
            written, _, about = text.strip().partition("  ")
            arguments.append([written, about.strip()])
        elif arguments and text.startswith("   "):  # continues the description
            arguments[-1][1] = f"{arguments[-1][1]} {text.strip()}".strip()
    return arguments


def flags_of(command):
    return {flag for written, _ in arguments_of(command) for flag in re.findall(FLAG, written)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_has_a_type_a_default_and_a_sentence(command):
    for written, about in arguments_of(command):
        if written == "-h, --help":
            continue
        assert not about.endswith("(default: None)"), written
        match = re.fullmatch(r"(.+) \((required[a-z -]*|optional|default: [^)]+\)?)\)", about)
        match = match or re.fullmatch(r"(.*\b[Dd]efault\b.*)", about)
        assert match, (written, about)
        assert len(match[1].split()) >= 2, (written, about)
        assert match[1].endswith((".", ".)")), (written, about)
        is_switch = re.fullmatch(rf"{FLAG}(, --no-\S+)?", written)
        has_type = re.fullmatch(rf"({FLAG} .+)|[A-Z.]+", written)
        assert is_switch or has_type, written


@pytest.mark.parametrize("command", COMMANDS)
def test_optional_values_are_shown_by_their_type_alone(command):
    assert not [written for written, _ in arguments_of(command) if "None" in written]


def test_an_optional_value_is_none_a_number_or_a_plain_error(capsys):
    command = EvalCommand.parse(["m", "--data", "d", "--threads", "None"], prog="eval")
    assert command.threads is None
    assert EvalCommand.parse(["m", "--data", "d", "--threads", "3"], prog="eval").threads == 3
    with pytest.raises(SystemExit) as exit_:
        EvalCommand.parse(["m", "--data", "d", "--threads", "x"], prog="eval")
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert "invalid literal for int() with base 10: 'x'" in error
    assert "NoneType" not in error


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_required_comes_first(command):
    """Of a command's own flags. tyro puts the settings of a training behind them."""
    flags = [about for written, about in arguments_of(command) if not written[0].isupper()]
    needed = ["(required" in about for about in flags[1:]]  # behind --help
    assert needed == sorted(needed, reverse=True) or command in ("fit", "pretrain")


@pytest.mark.parametrize("command", COMMANDS)
def test_only_the_width_of_the_terminal_breaks_a_text(command, monkeypatch):
    """In a terminal wide enough for all, the text of an argument stands in one line: beside the
    argument, or below one that is long."""
    monkeypatch.setenv("COLUMNS", "1000")
    lines = [line[1:].rstrip("│ ") for line in help_of.__wrapped__(command).splitlines()]
    for above, line in pairwise(lines):
        if line.startswith("   "):
            assert re.match(r" (-[a-z-]|[A-Z.]+$)", above), (above, line)
            assert "  " not in above.strip(), (above, line)
    if command == "swarm drill":
        assert any("the other: kill one of Ray's processes or the" in line for line in lines)


def test_the_flags_are_frozen():
    """A new flag enters this list and the command's page in the same commit."""
    assert set(FLAGS) == set(COMMANDS)
    for command in COMMANDS:
        written = {words.split(" ")[0] for words, _ in arguments_of(command)} - {"-h,", "--debug"}
        expected = {word if word.isupper() else f"--{word}" for word in FLAGS[command].split()}
        assert {word.strip(".,") for word in written} == expected, command


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--device", "Where to compute; auto takes a GPU if there is one."),
        ("--threads", "CPU threads of torch (default: torch's own choice)."),
    ],
)
def test_a_flag_means_the_same_in_every_command(flag, sentence):
    """Hosts of a swarm are other processes, so the help of their threads differs."""
    texts = {
        command: about.partition(" (default: auto")[0]
        for command in COMMANDS
        for written, about in arguments_of(command)
        if written.startswith(f"{flag} ") and not command.startswith(("swarm up", "swarm deploy"))
    }
    assert {"fit", "eval", "predict", "analyze", "merge", "ensemble", "bench"} <= set(texts)
    assert {command for command, text in texts.items() if text != sentence} <= {"swarm host"}


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("analyze", {"NAME": "", "MODEL": "", "--data": "", "--out": ""}),
        ("merge", {"MODEL...": "", "--out": " with a recipe", "--data": " with --random"}),
        ("ensemble", {"MODEL...": "", "--data": ""}),
        ("predict", {"MODEL": "", "IMAGE...": ""}),
        ("classify", {"IMAGE...": ""}),
    ],
)
def test_help_says_which_arguments_are_required(command, needed):
    """Also those that `run` requires and tyro does not."""
    texts = {written.partition(" ")[0]: about for written, about in arguments_of(command)}
    said = {name: about for name, about in texts.items() if "(required" in about}
    assert said.keys() == needed.keys()
    for name, when in needed.items():
        assert said[name].endswith(f"(required{when})")


@pytest.mark.parametrize(
    ("command", "given"),
    [*(("bench", kind) for kind in KINDS), ("merge", "a b"), ("swarm drain", "pi")],
)
def test_help_names_the_arguments_that_were_given(command, given):
    """Once `bench train --help` showed neither KIND nor the other kinds."""
    assert help_of(f"{command} {given}") == help_of(command)


@pytest.mark.parametrize("words", ["help fit", "swarm help host", "help swarm host"])
def test_help_is_a_command_too(words, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert capsys.readouterr().out == help_of(words.replace("help ", ""))


def test_the_help_of_ensemble_says_nothing_of_merges():
    """`merge` and `ensemble` share settings, whose texts are about merges."""
    words = set(re.findall(r"[a-z]+", help_of("ensemble").lower()))
    assert words & {"merge", "merges", "soup", "soups", "donor", "ends"} == set()


def test_lists_of_names_in_help_texts_are_complete():
    """Help texts repeat names from modules that are too slow to import for `--help`."""
    (analysis,) = [about for written, about in arguments_of("analyze") if written == "NAME"]
    assert [name for name in ANALYSES if name not in analysis] == []
    (kind,) = [about for written, about in arguments_of("bench") if written == "KIND"]
    assert [name for name in KINDS if name not in kind] == []
    (method,) = [about for written, about in arguments_of("fit") if written == "--method STR"]
    assert set(PRESETS) <= set(re.findall(r"[a-z]+(?:-[a-z]+)*", method))
    (routing,) = [about for word, about in arguments_of("swarm up") if word.startswith("--routing")]
    assert set(ROUTINGS) <= set(re.findall(r"[a-z]+(?:-[a-z]+)*", routing))
    assert (swarm.DEFAULT_MODEL, swarm.ROUTINGS) == (DEFAULT_MODEL, ROUTINGS)
    assert swarm.FAULT_KINDS == KINDS_OF_FAULTS


def test_no_help_imports_a_heavy_library():
    """All in one process without other imports, because each process would take seconds."""
    code = f"""
import sys
from layershuffle.cli import main
for command in {["", "swarm", *COMMANDS]!r}:
    try:
        main([*command.split(), "--help"])
    except SystemExit:
        pass
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
    """Seconds of processor time that a process takes, and what it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


@pytest.mark.parametrize("command", ["", "fit", "merge", "reproduce", "swarm deploy"])
def test_help_is_quick(command):
    """Less than half of the time that torch takes to be imported, beside it on any machine."""
    ratios = []
    while len(ratios) < 5 and min(ratios, default=1) >= 0.5:
        seconds, printed = processor_time("-m", "layershuffle", *command.split(), "--help")
        ratios.append(seconds / processor_time("-c", "import torch")[0])
        assert "usage: layershuffle" in printed
    assert min(ratios) < 0.5, ratios


# --- the docs -------------------------------------------------------------------------------------

HISTORY = ("docs/decisions/",)
"""Pages that name flags as they once were."""
OTHERS = {
    "distributed.md": "--max-restarts --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint "
    "--rdzv-id",  # of torchrun
    "performance.md": "--smoke",  # of benchmarks/
}
"""Flags of other programs, by the page that names them."""
INVOCATION = re.compile(r"layershuffle ((?:swarm )?[a-z]+)\b((?:[^`\n|&;#]|\\\n)*)")


def pages_of(repository):
    """All pages with commands, and the examples that they link."""
    docs = repository / "docs"
    pages = [*docs.rglob("*.md"), *(docs / "examples").glob("*.yaml"), repository / "README.md"]
    named = {page.relative_to(repository).as_posix(): page for page in sorted(pages)}
    return [page for name, page in named.items() if not name.startswith(HISTORY)]


def command_pages(repository):
    return sorted((repository / "docs" / "commands").glob("*.md"))


def commands_on(page):
    """The commands that a page in docs/commands documents, from its name."""
    own = page.parent.name == "commands"
    return [name for name in COMMANDS if own and name.split()[0] == page.stem]


def test_every_command_has_a_page_and_every_subcommand_is_on_it(repository):
    assert {page.stem for page in command_pages(repository)} == set(ROOT.commands)
    text = (repository / "docs" / "commands" / "swarm.md").read_text()
    assert [name for name in SWARM.commands if f"swarm {name}" not in text] == []


def test_commands_in_the_docs_can_be_typed(repository):
    """Each `layershuffle COMMAND ...` names a command, and flags of that command."""
    wrong, seen = [], set()
    for page in pages_of(repository):
        for command, words in INVOCATION.findall(page.read_text()):
            if command not in COMMANDS:
                continue  # prose, as in "layershuffle is ..."
            seen.add(command)
            unknown = set(re.findall(FLAG, words)) - flags_of(command)
            wrong += [f"{page.name}: {command} {flag}" for flag in unknown]
    assert wrong == []
    assert len(seen) > 15


def test_flags_named_in_the_docs_exist(repository):
    """On the page of a command: its own flags, or those of commands that the page links or calls.
    Elsewhere: flags of any command."""
    wrong = []
    every = set().union(*map(flags_of, COMMANDS))
    for page in pages_of(repository):
        # Benchmarks are programs of their own.
        text = re.sub("`python benchmarks/[^`]*`", "", page.read_text())
        allowed = every
        if own := commands_on(page):
            linked = set(re.findall(r"\]\(([a-z]+)\.md\)", text))
            called = {command for command, _ in INVOCATION.findall(text)}
            related = [name for name in COMMANDS if name in called or name.split()[0] in linked]
            allowed = set().union(*map(flags_of, [*own, *related]))
        named, others = set(re.findall(FLAG, text)), set(OTHERS.get(page.name, "").split())
        assert others <= named, page.name
        wrong += [f"{page.name}: {flag}" for flag in named - allowed - others]
    assert wrong == []


def test_a_page_names_every_flag_or_says_where_they_are_listed(repository):
    shared = set.intersection(*map(flags_of, COMMANDS))  # --help and --debug
    missing = []
    for page in command_pages(repository):
        text = page.read_text()
        for command in commands_on(page):
            if re.search(rf"`layershuffle {command.split()[0]}( COMMAND)? --help` lists", text):
                continue
            pairs = [re.findall(FLAG, written) for written, _ in arguments_of(command)]
            flags = [pair for pair in pairs if pair and not shared & set(pair)]
            named = set(re.findall(FLAG, text))
            missing += [f"{page.name}: {pair[0]}" for pair in flags if not named & set(pair)]
    assert missing == []


FLAGS = {
    "demo": "browser port swarm",
    "fit": "accumulate activation-checkpointing augment batch-size checkpoint-every choose "
    "clip compile data device distinct drop ema encoding.dropout encoding.features "
    "encoding.projection-init encoding.table encoding.table-init epochs "
    "eval-batch-size eval-every eval-orders exit-weight holdout kept log-every lr max-parallel "
    "method min-kept model orders-per-batch out paper-protocol parallel position precision "
    "prediction.init prediction.loss prediction.pooling prediction.weight rank-orders recipe "
    "resize schedule seed select-by sequential-every skip-corrupt steps streaming threads warmup "
    "weight-decay workers",
    "eval": "MODEL batch-size compile data device draw json max-images modes num-orders order "
    "precision resize seed skip-corrupt streaming threads",
    "predict": "IMAGE MODEL device json mode order seed threads top",
    "export": "MODEL out precision data whole order",
    "cache": "DATA out quality size skip-corrupt verify workers",
    "analyze": "MODEL NAME batch-size block data device images json list neighbours orders out "
    "resize seed skip-corrupt streaming threads",
    "merge": "MODEL base batch-size compile data device draw ends ensemble-combine ensemble-orders "
    "json max-images mixed mode num-orders out overwrite precision random replacement "
    "resize seed slots skip-corrupt soups threads",
    "ensemble": "MODEL batch-size combine compile data device draw json max-images mode "
    "num-orders orders precision resize seed skip-corrupt threads",
    "reproduce": "RECIPE data dry-run only out ray workers",
    "report": "DIR",
    "pretrain": "RECIPE accumulate activation-checkpointing augment batch-size checkpoint-every "
    "choose clip compile data device distinct drop ema encoding.dropout encoding.features "
    "encoding.projection-init encoding.table encoding.table-init epochs "
    "eval-batch-size eval-every eval-orders exit-weight holdout kept log-every lr max-parallel "
    "method min-kept model orders-per-batch out paper-protocol parallel position precision "
    "prediction.init prediction.loss prediction.pooling prediction.weight rank-orders resize "
    "schedule seed select-by sequential-every skip-corrupt steps streaming threads warmup "
    "weight-decay workers",
    "bench": "KIND batch compile device json model orders-per-batch precision steps threads "
    "workers",
    "classify": "IMAGE address api-key api-key-file authority deadline-ms json min-blocks order "
    "top-k",
    "completion": "SHELL",
    "doctor": "json",
    "swarm up": "hosts https-certificate https-key model page page-may-break plan port replicas "
    "reports routing state threads wire",
    "swarm demo": "deadline-ms hosts requests seed",
    "swarm head": "ip port store tls-authority tls-certificate tls-key token",
    "swarm host": "address ip name port threads tls-authority tls-certificate tls-key token",
    "swarm deploy": "PLAN address bind https-certificate https-key keys page port public reports "
    "state threads "
    "tls-authority tls-certificate tls-key token wait",
    "swarm status": "address api-key api-key-file authority json",
    "swarm drain": "HOST state",
    "swarm readmit": "HOST state",
    "swarm swap": "BLOCK HOST donor state",
    "swarm drill": "PLAN address api-key api-key-file authority concurrency data deadline-ms json "
    "kill kinds requests routings scenarios seed state",
    "swarm plan": "HOSTS floor model objective out overwrite reach replicas time-limit wire",
    "swarm simulate": "PLAN churn clients hosts json kill min-blocks profile rate requests "
    "routings seed",
    "swarm calibrate": "MODEL data device images json orders seed threads",
}
