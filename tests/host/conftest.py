"""Fixtures of the tests of hosts."""

from pathlib import Path

import pytest
from gateway_end import Gateway

from exported import exported_without_ends


@pytest.fixture(scope="session")
def digits() -> Path:
    """All twelve blocks of the shipped model as files; no test may change them."""
    return exported_without_ends()


@pytest.fixture
def gateway(digits: Path) -> Gateway:
    """A gateway with these files, which does not listen yet."""
    return Gateway(digits)
