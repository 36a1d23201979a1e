"""The house rules, read from the source: imports, sizes, names, errors, no global random generator.

Exceptions from a rule are in a table here, with the reason.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "layershuffle"
PACKAGE = "layershuffle"

# The ground needs nothing of the project but itself.
GROUND = ("_version", "ground")
# A part of the house -> the parts that its modules may import, beside the ground and itself.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "core": (),
    "images": (),
    "models": ("core", "images"),
    "data": ("core", "images"),
    "scoring": ("core", "images", "models", "data"),
    "training": ("core", "images", "models", "data", "scoring"),
    "merging": ("core", "images", "models", "data", "scoring"),
    "export": ("core", "images", "models", "scoring"),
    "analysis": ("core", "images", "models", "data", "scoring"),
    "study": ("core", "models", "data", "scoring", "training", "merging", "analysis"),
    # No torch in a gateway: of the method it knows orders alone.
    "gateway": (),
    "gateway.brain": ("core",),
    "gateway.calibration": ("gateway.brain", "models"),
    "gateway.hosts": ("gateway.brain", "gateway.calibration", "models", "export"),
    "gateway.http": ("gateway.brain", "gateway.calibration", "gateway.hosts", "images", "models"),
    # It runs where torch is: asking a gateway, and measuring what its answers may promise.
    "gateway.client": (
        "gateway.brain", "gateway.calibration", "gateway.http",
        "core", "images", "models", "data", "scoring",
    ),
    # The page of the demo has the limits and the files of a gateway, which knows nothing of it.
    "page": ("core", "images", "models", "data", "scoring", "gateway.http"),
}  # fmt: skip
# The command line imports everything, and nothing imports it.
COMMANDS = ("cli", "__main__")
# Guards against what nobody can read, and no goals.
FUNCTION_LINES = 100
FILE_LINES = 800
POSITIONAL = 2

TREES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
    for path in sorted(SOURCE.rglob("*.py"))
}
MODULES = {name: tree for name, tree in TREES.items() if name != "__init__"}


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    """All syntax nodes of a module, cached because most rules need them and walking takes long."""
    return tuple(ast.walk(TREES[module]))


# --- imports --------------------------------------------------------------------------------------


def room(module: str) -> str:
    """The part of the house that a module belongs to: its folder, or its own name.

    The gateway is a floor of several rooms: `gateway.brain`, `gateway.hosts` and others.
    """
    words = module.split(".")
    return ".".join(words[:2]) if words[0] == "gateway" and len(words) > 1 else words[0]


def may_import(module: str) -> set[str]:
    """The rooms that `module` may import from. A module of an unknown room is an error."""
    here = room(module)
    if here in COMMANDS:
        return {here, *GROUND, *MAY_IMPORT, "cli"}
    if here in GROUND:
        return set(GROUND)
    assert here in MAY_IMPORT, (
        f"say in MAY_IMPORT of tests/test_house.py what {module!r} may import"
    )
    return {here, *GROUND, *MAY_IMPORT[here]}


@cache
def imports(module: str) -> frozenset[str]:
    """Modules of this package that `module` imports, also inside functions."""
    modules = set()
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom):
            modules |= set(_targets(node))
        elif isinstance(node, ast.Import):
            modules |= {a.name.partition(".")[2] for a in node.names if _ours(a.name)}
    return frozenset(modules)


def _targets(node: ast.ImportFrom) -> Iterator[str]:
    assert node.level == 0, "imports are absolute"
    if not _ours(node.module or ""):
        return
    base = (node.module or "").partition(".")[2]
    for alias in node.names:
        below = f"{base}.{alias.name}".lstrip(".")
        yield below if below in TREES or f"{below}.__init__" in TREES else base


def _ours(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] == PACKAGE


def _file_of(module: str) -> str:
    return module if module in MODULES else f"{module}.__init__"


def bad_arrows(module: str) -> Iterator[str]:
    """The wrong imports of a module, a sentence for each."""
    for target in imports(module):
        if not target:
            yield f"{module} imports the package itself: the public face is for users"
        elif _file_of(target) not in MODULES:
            yield f"{module} imports {target}, which is not there"
        elif room(target) not in may_import(module):
            yield f"{module} imports {target}"


def test_rooms_import_only_what_they_may() -> None:
    assert [bad for module in MODULES for bad in bad_arrows(module)] == []


def test_no_circular_imports() -> None:
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"a circle: {' -> '.join((*trail, module))}"
        if module not in done:
            for target in imports(module):
                visit(_file_of(target), (*trail, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())
    assert done == set(MODULES)


# Where there is no public name; the files say why.
PRIVATE_NAMES = {("models.timm_models", "_model_args")}
# Public, although named tuples write them so to keep the names of fields free.
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def private_names(module: str) -> Iterator[str]:
    """Names with an underscore in front that `module` takes from other objects or libraries."""
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom | ast.Import):
            for name in _imported(node):
                if not _ours(name) and any(map(is_private, name.split("."))):
                    yield name
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield str(name.value)


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def test_private_names_of_libraries_stand_in_one_file() -> None:
    found = set()
    for module in MODULES:
        if module != "core.torch_private":
            found |= {(module, name) for name in private_names(module)}
    assert found == PRIVATE_NAMES


HEAVY = {"torch", "timm", "transformers", "torchvision", "datasets"}
HEAVY |= {"sklearn", "scipy", "accelerate"}
LIGHT = (
    "ground.errors", "ground.files", "ground.settings", "training.settings", "scoring.settings",
    "core.draws", "core.orders", "core.policies", "core.methods", "core.position_forms",
)  # fmt: skip


def test_light_modules_import_nothing_heavy_at_the_top() -> None:
    light = [*LIGHT, "study.plan", *(m for m in MODULES if room(m) == "cli")]
    top = [(m, node) for m in light for node in MODULES[m].body]
    imported = [
        (module, name)
        for module, node in top
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in _imported(node)
    ]
    assert [pair for pair in imported if pair[1].split(".")[0] in HEAVY] == []


# Windows lacks these modules. A function of the library may import one after a look at the system.
POSIX = {"fcntl", "grp", "pwd", "resource", "syslog", "termios"}


def test_the_library_is_imported_without_modules_that_windows_lacks() -> None:
    found = []
    for module, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom) and POSIX & set(_imported(node)):
                found.append(module)
    assert found == []


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names]


# --- sizes ----------------------------------------------------------------------------------------


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a module, nested ones too."""
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_functions_are_short() -> None:
    lines = {(module, f.name): _lines(f) for module in TREES for f in functions(module)}
    assert {name: length for name, length in lines.items() if length > FUNCTION_LINES} == {}


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def test_files_are_short() -> None:
    paths = [*SOURCE.rglob("*.py"), *TESTS.rglob("*.py")]
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in paths}
    assert {path: length for path, length in lines.items() if length > FILE_LINES} == {}


def positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that can be passed by position, except for `self` and `cls`."""
    return sum(a.arg not in ("self", "cls") for a in (*node.args.posonlyargs, *node.args.args))


def offered(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods that other modules may call: no underscore, and not nested."""
    for node in TREES[module].body:
        inside = node.body if isinstance(node, ast.ClassDef) else []
        for f in (node, *(() if getattr(node, "name", "_").startswith("_") else inside)):
            if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) and f.name[0] != "_":
                yield f


# Functions of a user's own loop, where everybody writes (model, images, ...).
AS_IN_A_LOOP = {
    ("core.forwards", "forward_many"),
    ("core.methods", "loss"),
    ("core.methods", "loss_and_logits"),
}


def test_parameters_after_the_second_are_keyword_only() -> None:
    """Of public functions; private helpers may have four."""
    many = {(m, f.name) for m in TREES for f in offered(m) if positional(f) > POSITIONAL}
    assert many == AS_IN_A_LOOP
    every = {(m, f.name): positional(f) for m in TREES for f in functions(m)}
    assert {name: count for name, count in every.items() if count > 2 * POSITIONAL} == {}


def test_every_module_has_a_docstring() -> None:
    assert [module for module, tree in TREES.items() if not ast.get_docstring(tree)] == []


# --- names ----------------------------------------------------------------------------------------


def type_names(tree: ast.Module) -> set[str]:
    """Classes and type aliases of a file, without leading underscores."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and "TypeVar(" not in ast.unparse(node.value):
            names |= {ast.unparse(target) for target in node.targets}
    names = {name.lstrip("_") for name in names}
    return {name for name in names if name[:1].isupper() and not name.isupper()}


def test_no_two_files_define_one_name() -> None:
    paths = [p for name in ("scripts", "benchmarks") for p in (TESTS.parent / name).glob("*.py")]
    trees = [*TREES.values(), *(ast.parse(path.read_text("utf-8")) for path in paths)]
    homes = Counter(name for tree in trees for name in type_names(tree))
    assert {name for name, files in homes.items() if files > 1} == set()


# --- errors and output ----------------------------------------------------------------------------


# Modules that may catch everything once, or print, and why.
CATCH_ALL = {
    "core.checks.trials": "a trial may end in any error of a model, which is the reason said",
    "models.onnx_models": "what ONNX Runtime raises has no class of its own",
    "gateway.hosts.health": "an answer to a canary may be anything, and the watch goes on",
    "gateway.hosts.on_ray": "a cluster that does not say its nodes is asked again",
    "gateway.hosts.service": "a watch that breaks is logged and begins anew",
    "study.worker": "one task of a study has failed, and others go on",
    "cli.__init__": "the last line of defence: a paragraph for users, --debug for us",
}
PRINTS = {"study.worker": "a process of its own: what it prints is its log file"}


def test_no_catch_all() -> None:
    handlers = [(m, n) for m in TREES for n in nodes(m) if isinstance(n, ast.ExceptHandler)]
    wide = [(m, handler.lineno) for m, handler in handlers if _catches_everything(handler)]
    assert sorted(module for module, _ in wide) == sorted(CATCH_ALL), wide


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    caught = {ast.unparse(part) for part in ast.walk(handler.type or ast.Name("Exception"))}
    return bool(caught & {"Exception", "BaseException"})


def test_the_library_prints_nothing() -> None:
    calls = [(m, node) for m in MODULES for node in nodes(m) if isinstance(node, ast.Call)]
    prints = {module for module, call in calls if ast.unparse(call.func) == "print"}
    assert {module for module in prints if room(module) != "cli"} == PRINTS.keys()


# --- randomness -----------------------------------------------------------------------------------

DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
DRAWS |= {"rand_like", "randn_like", "randint_like"}
DRAWS_IN_PLACE = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "trunc_normal_"}
DRAWS_IN_PLACE |= {"xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"}
SEEDS = {"manual_seed", "manual_seed_all", "seed_all", "set_rng_state", "set_seed"}
SEEDS |= {"seed_everything", "enable_full_determinism"}
HARMLESS = {"random.Random", "random.getstate", "np.random.get_state", "torch.get_rng_state"}
HARMLESS |= {"np.random.default_rng", "torch.Generator().manual_seed"}

# (module, call): why users cannot notice this use of a global generator.
GLOBAL_GENERATORS = {
    ("training.state", "set_seed"): "dropout draws globally; a run owns the process it trains in",
    ("training.checkpoints", "torch.set_rng_state"): "a resumed run draws what it would have",
    ("training.checkpoints", "torch.cuda.set_rng_state"): "as above",
    ("training.checkpoints", "torch.mps.set_rng_state"): "as above",
    ("training.mixing", "np.random.seed"): "timm's mixup draws globally; the state is put back",
    ("training.mixing", "np.random.set_state"): "puts the state back",
    ("core.checks.untouched", "random.setstate"): "puts the state back after a trial",
    ("data.transforms", "random.seed"): "timm's augmentations draw globally; states are put back",
    ("data.transforms", "np.random.seed"): "as above",
    ("data.transforms", "torch.set_rng_state"): "as above",
    ("data.transforms", "random.setstate"): "puts the state back",
    ("data.transforms", "np.random.set_state"): "puts the state back",
}


def global_draws(tree: ast.AST) -> Iterator[str]:
    """Calls that draw from, or seed, a global generator outside a `with ... fork_rng`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.With) and "fork_rng(" in ast.unparse(node.items[0]):
            continue
        if isinstance(node, ast.Call) and _is_global_draw(node):
            yield ast.unparse(node.func)
        yield from global_draws(node)


def _is_global_draw(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    first, _, last = name.rpartition(".")
    if name in HARMLESS or "generator" in {keyword.arg for keyword in call.keywords}:
        return False
    if first == "random" or first.endswith((".random", "np.random")):
        return True
    return (
        (first == "torch" and last in DRAWS | {"seed"})
        or last in SEEDS
        or (last in DRAWS_IN_PLACE and bool(first))
    )


def test_no_global_generator() -> None:
    draws = {(module, name) for module, tree in MODULES.items() for name in global_draws(tree)}
    assert draws == GLOBAL_GENERATORS.keys()


BAD_CODE = {
    "torch.rand(3)": True,
    "torch.rand(3, generator=g)": False,
    "torch.randn_like(x)": True,
    "torch.manual_seed(0)": True,
    "torch.Generator().manual_seed(0)": False,
    "torch.default_generator.manual_seed(0)": True,
    "with torch.random.fork_rng():\n    torch.manual_seed(0)": False,
    "def f():\n    x = [random.random() for _ in y]": True,
    "random.Random(0)": False,
    "np.random.shuffle(x)": True,
    "np.random.default_rng(0)": False,
    "numpy.random.rand()": True,
    "nn.init.normal_(x)": True,
    "nn.init.normal_(x, generator=g)": False,
    "x.uniform_(-1, 1)": True,
    "transformers.set_seed(1)": True,
}


@pytest.mark.parametrize(("code", "wrong"), BAD_CODE.items(), ids=repr)
def test_the_check_sees_global_draws(code: str, wrong: bool) -> None:
    assert bool(list(global_draws(ast.parse(code)))) == wrong


def test_the_check_sees_bad_arrows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of imports can fail: the core needs no model library."""
    bad = ast.parse("def f():\n    from layershuffle.models import load")
    monkeypatch.setitem(TREES, "core.orders", bad)
    nodes.cache_clear()
    imports.cache_clear()
    assert list(bad_arrows("core.orders")) == ["core.orders imports models"]
    nodes.cache_clear()
    imports.cache_clear()
