"""`--ray`: the same workers, started by Ray, which these tests do not start."""

import pytest
import yaml
from fixture import TINY

from layershuffle.cli import main


def test_no_cluster_at_the_address(tmp_path, capsys):
    pytest.importorskip("ray")
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(TINY))
    for address in ("127.0.0.1:1", "nowhere"):
        words = ["reproduce", str(recipe), "--out", str(tmp_path / "out"), "--ray", address]
        assert main(words) == 2
        assert f"No Ray cluster answers at '{address}'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
