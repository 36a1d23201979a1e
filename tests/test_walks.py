"""`scripts/walks.py` says what runs: a file that a walk does not need is not on its list."""

import re
import subprocess
import sys
from pathlib import Path


def test_the_walks_of_an_image_an_order_and_a_request(repository: Path) -> None:
    command = [sys.executable, "-W", "error::SyntaxWarning", repository / "scripts" / "walks.py"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    walks: list[list[str]] = []
    for line in run.stdout.splitlines():
        if not line.startswith(" "):
            walks.append([])
            assert line.endswith(" files")
        else:
            walks[-1].append(line.strip())
    counts = [int(line.split()[-2]) for line in run.stdout.splitlines() if line.endswith(" files")]
    assert counts == [len(files) for files in walks]
    fit, evaluation, command, machine, model, data, request, meanwhile = walks
    # docs/architecture.md says of every file what it is for: a longer walk needs a reason there.
    page = (repository / "docs" / "architecture.md").read_text()
    told: list[set[str]] = []
    for section in page.split("\n**A")[1:]:
        told.append(set(re.findall(r"`(?:\w+/)*(\w+)`", section)))
    for files, names in ((fit, told[0]), (evaluation, told[0] | told[1]), (request, told[2])):
        assert {Path(file).stem for file in files} <= names
    assert len(fit) <= 22
    assert len(evaluation) <= 22
    assert len(request) <= 14
    assert fit[0] == "layershuffle/training/loop.py"
    assert "layershuffle/core/entries.py" in fit
    assert "layershuffle/core/draws.py" in fit
    assert evaluation[0] == "layershuffle/cli/__init__.py"
    assert "layershuffle/images/pixels.py" in evaluation  # the images are part of the walk
    # What is done once for all orders is counted apart.
    assert "layershuffle/scoring/settings.py" in command
    assert model[0] == "layershuffle/models/store.py"
    assert "layershuffle/data/loading.py" in data
    assert "layershuffle/ground/machine.py" in machine
    for once in (command, machine, model, data):
        assert not set(evaluation) & set(once)
    # The order is given, it is the only one, and nothing is tried.
    assert "layershuffle/core/draws.py" not in evaluation
    assert "layershuffle/core/forwards.py" not in evaluation
    assert "layershuffle_host/blocks.py" in request
    # Nobody assigns blocks or looks at files for a request.
    # They run every tenth of a second, so a request may end before they do.
    assert "layershuffle/gateway/hosts/coordinator.py" not in request
    assert "layershuffle/gateway/brain/assignment.py" not in request
    assert not set(request) & set(meanwhile)
    for files in walks:
        assert len(set(files)) == len(files)
