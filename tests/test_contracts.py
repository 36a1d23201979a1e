"""The contract of `contracts.py` on every supported family of host models."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import contracts
import contracts_rounds
from common import FAMILIES, Family

CHECKS = {
    name.removeprefix("check_"): check
    for name, check in {**vars(contracts), **vars(contracts_rounds)}.items()
    if name.startswith("check_") and name != "check_export_of_one_order"
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_contract(check: Callable[[Family], None], family: Family) -> None:
    check(family)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_export(family: Family) -> None:
    contracts.check_export_of_one_order(family)


def test_the_suite_is_whole() -> None:
    assert len(CHECKS) >= 25
    libraries = {family.library for family in FAMILIES.values()}
    assert libraries == {"timm", "transformers", "torchvision"}
