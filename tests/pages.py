"""What tests of generated pages ask of each."""

from __future__ import annotations

import re

DECIMAL = r"\d+\.\d+"


def loose_numbers(page: str) -> set[str]:
    """Numbers with a decimal point in the words of a page, or of a part, which no table has."""
    lines = page.splitlines()
    table = " ".join(line for line in lines if line.startswith("|"))
    words = " ".join(line for line in lines if not line.startswith("|"))
    assert re.search(DECIMAL, words), "there is nothing to check"
    return set(re.findall(DECIMAL, words)) - set(re.findall(DECIMAL, table))
