"""Fixtures of the tests of hosts."""

from pathlib import Path

import pytest
from gateway_end import Gateway

from exported import exported_digits


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model as files; no test may change them."""
    return exported_digits(tmp_path_factory)


@pytest.fixture
def gateway(digits: Path) -> Gateway:
    """A gateway with these files, which does not listen yet."""
    return Gateway(digits)
