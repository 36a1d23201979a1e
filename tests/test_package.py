"""The published package: wheel, sdist, extras, and commands that work without extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import layershuffle as ls
from layershuffle.cli import main
from layershuffle.ground import extras
from layershuffle.ground.bundled import asset, packaged_file, recipe_file
from layershuffle.ground.errors import UsageError
from layershuffle.ground.extras import EXTRAS, install_line, missing, require
from once import build, built_package
from refusals import refuses
from without import run_without

ABSENT = {module for extra in EXTRAS.values() for module in extra.modules}


@pytest.fixture(scope="module")
def project(repository: Path) -> dict:
    return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist."""
    return built_package(repository, tmp_path_factory)


def source_files(repository: Path) -> set[str]:
    files = (path for path in (repository / "src").rglob("*") if path.is_file())
    names = (str(path.relative_to(repository / "src")) for path in files)
    return {name for name in names if "__pycache__" not in name and ".egg-info" not in name}


def test_the_wheel_holds_the_package_and_nothing_else(repository: Path, built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith("/METADATA"))
        metadata = archive.read(about).decode()
    assert {name for name in names if ".dist-info/" not in name} == source_files(repository)
    for name in ("py.typed", "assets/recipes/digits-quick.yaml", "assets/digit-pair.png"):
        assert f"layershuffle/{name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    # Four digits models of 1.5 MB, packed, and what two calibrations measured.
    assert wheel.stat().st_size < 6.8e6
    # The page of an index has no files beside it.
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", metadata) == []
    assert "raw/main/docs/page-wide.png" in metadata
    for extra in (*EXTRAS, "all"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_the_sdist_makes_the_same_wheel(repository: Path, built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    top = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "PKG-INFO"}
    assert {name for name in names if not name.startswith("src/")} == {
        *top, ".gitignore", "scripts/readme_hook.py",
    }  # fmt: skip
    in_source = {name.removeprefix("src/") for name in names if name.startswith("src/")}
    assert in_source == source_files(repository)
    # Not `extractall(filter="data")`, which Python 3.11.2 of Debian 12 does not know.
    subprocess.run(["tar", "--extract", "--file", sdist, "--directory", tmp_path], check=True)
    (unpacked,) = tmp_path.iterdir()
    build(unpacked, tmp_path / "again", "--target", "wheel")
    (wheel,), (again,) = built.glob("*.whl"), (tmp_path / "again").glob("*.whl")
    assert wheel.read_bytes() == again.read_bytes()


def test_the_installed_wheel_answers_without_the_sources(built: Path, tmp_path: Path) -> None:
    """In an environment of its own, beside the dependencies of this one, as its command."""
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = place / "bin" / "python"
    words = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    # A directory in a .pth file is searched, but its own .pth files are not read: the editable
    # install of this environment stays out.
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    words = ["predict", "bundled:digits-swarm", "bundled:digit-pair.png", "--debug"]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    done = subprocess.run(
        [place / "bin" / "layershuffle", *words],
        cwd=tmp_path, env=env, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("bundled:digit-pair.png: 42 ")
    words = ["-c", "import layershuffle; print(layershuffle.__file__)"]
    done = subprocess.run([python, *words], env=env, check=True, capture_output=True, text=True)
    assert Path(done.stdout).is_relative_to(place), "the wheel is what was tested"


def test_extras_name_what_they_bring(project: dict) -> None:
    """The modules of each extra are those of the distributions that pyproject.toml installs."""
    by_module = packages_distributions()
    for name, extra in EXTRAS.items():
        installed = {
            re.split(r"[<>=\[]", line)[0] for line in project["optional-dependencies"][name]
        }
        # The host may be there as its sources alone.
        names = {by_module.get(m, [m])[0] for m in extra.modules}
        assert {name.lower().replace("_", "-") for name in names} == installed
    everything = project["optional-dependencies"]["all"]
    assert everything == [f"layershuffle[{','.join(EXTRAS)}]"]


def test_version_and_dates_agree(repository: Path, project: dict) -> None:
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert citation["version"] == ls.__version__
    newest = re.search(r"^## (\S+) - (\S+)$", (repository / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest.groups() == (ls.__version__, str(citation["date-released"]))
    assert {"Homepage", "Repository", "Documentation", "Changelog"} <= set(project["urls"])


def test_the_address_of_the_project_stands_in_one_place(repository: Path, project: dict) -> None:
    address = project["urls"]["Homepage"]
    pages = [*repository.glob("*.md"), *(repository / "docs").rglob("*.md")]
    pages += [*(repository / "src").rglob("*.py"), repository / "CITATION.cff"]
    assert [str(page) for page in pages if address in page.read_text()] == []


# --- what ships beside code -----------------------------------------------------------------------


def test_recipes_go_by_name_in_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = asset("recipes", "digits-quick.yaml")
    assert recipe_file(Path("digits-quick")) == shipped
    (tmp_path / "digits-quick").mkdir()  # an --out of an earlier run
    assert recipe_file(Path("digits-quick")) == shipped
    mine = Path("digits-quick.yaml")
    mine.write_text(shipped.read_text().replace("digits-quick", "mine"))
    assert recipe_file(mine) == mine
    with refuses(UsageError, "elsewhere/digits-quick.yaml"):
        recipe_file(Path("elsewhere/digits-quick.yaml"))
    with refuses(UsageError):
        recipe_file(Path("digit-quick"))
    with refuses(UsageError):
        recipe_file(Path("x"))
    words = ["reproduce", "digits-quick", "--data", "digit-pairs?train=640", "--dry-run"]
    assert main(words) == 0
    assert "digit-pairs?train=640" in capsys.readouterr().out


def test_the_picture_is_there() -> None:
    with Image.open(packaged_file(Path("bundled:digit-pair.png"))) as picture:
        assert picture.size == (20, 12)
    assert packaged_file(Path("mine.png")) == Path("mine.png")


# --- without the extras ---------------------------------------------------------------------------


def test_require_names_the_extra() -> None:
    require("study")
    assert missing("study", "umap", "no_such_module", "sklearn") == ["no_such_module"]
    with refuses(UsageError):
        require("study", "no_such_module")


class Record:
    """What pip wrote of an installation; without a text it came from an index."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.text


def test_the_line_that_installs_an_extra_is_that_of_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an index, from a clone, editable from a clone, from a wheel, and from a clone that
    somebody has moved."""
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    there = f'"url": "{clone.as_uri()}"'
    records = {
        None: "'layershuffle[swarm]'",
        f'{{{there}, "dir_info": {{}}}}': f"'{clone}[swarm]' '{clone}/host'",
        f'{{{there}, "dir_info": {{"editable": true}}}}': (
            f"--editable '{clone}[swarm]' --editable '{clone}/host'"
        ),
        f'{{{there}, "archive_info": {{}}}}': "'layershuffle[swarm]'",
        '{"url": "file:///nowhere", "dir_info": {}}': "'layershuffle[swarm]'",
    }
    for text, words in records.items():
        monkeypatch.setattr(extras, "distribution", lambda name, text=text: Record(text))
        assert install_line("swarm").endswith(f"pip install {words}"), text


CORE = """
from layershuffle.cli import main

def check(expected, *words):
    code = main(list(words))
    assert code == expected, (code, words)

model = "dir:base"
short = ["--data", "folder:.", "--steps", "1", "--batch-size", "4", "--holdout", "0.5"]
for seed in ("0", "1"):
    check(0, "fit", "--method", "layershuffle", "--model", model, *short, "--seed", seed,
          "--out", f"run{seed}")
check(0, "eval", "run0", "--data", "folder:.", "--num-orders", "2")
# A model of timm was trained and scored without what only models of transformers need.
assert "transformers.modeling_utils" not in sys.modules
check(0, "merge", "run0", "run1", "--random", "1", "--num-orders", "1", "--data", "folder:.")
check(0, "predict", "run0", "val/a/0.png")
check(0, "predict", "bundled:digits-swarm", "bundled:digit-pair.png")
check(0, "reproduce", "imagenet-paper", "--dry-run")
check(0, "doctor")
for words in (
    ["reproduce", "digits-quick"],
    ["report", "x"],
    ["analyze", "norms", "run0", "--data", "folder:.", "--out", "x"],
    ["eval", "run0", "--data", "digit-pairs"],
    ["eval", "run0", "--data", "hf:x"],
    ["swarm", "up"],
    ["swarm", "demo"],
    ["classify", "val/a/0.png"],
):
    check(2, *words)
"""


def test_the_core_alone_fits_scores_merges_and_predicts(tmp_path: Path) -> None:
    for split, name, number in np.ndindex(2, 2, 8):
        folder = tmp_path / ("train", "val")[split] / "ab"[name]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (12, 20), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    model = (
        "timm:vit_tiny_patch16_224?pretrained=false&num_classes=2&in_chans=1&img_size=12,20"
        "&patch_size=4&embed_dim=32&depth=2&num_heads=2&mlp_ratio=2"
    )
    ls.save(ls.load(model), tmp_path / "base")
    done = run_without(ABSENT, CORE, at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<svg" not in (tmp_path / "run0" / "index.html").read_text()
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    named = [re.search(r"Next: .*pip install .*\[(\w+)\]", line) for line in errors]
    extras = [match and match[1] for match in named]
    assert extras == ["study"] * 4 + ["datasets"] + ["swarm"] * 3, done.stderr
    assert "bundled:digit-pair.png: 42 " in done.stdout
    # Extras are no fault to `doctor`.
    for name in EXTRAS:
        assert f"not installed; {install_line(name)} for" in done.stdout
    assert f"{install_line('study')} && layershuffle reproduce digits-quick" in done.stdout
