"""docs/design/faults.md: every test that is named there exists."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (REPOSITORY / "docs" / "design" / "faults.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]


def test_every_named_test_exists() -> None:
    """By its file below tests/ and its function."""
    tests = [found for row in ROWS for found in re.findall(r"`(\w+/\w+\.py)::(\w+)`", row[-1])]
    assert len(tests) > 80 and len(tests) == sum(row[-1].count("::") for row in ROWS)
    for file, name in tests:
        text = (REPOSITORY / "tests" / file).read_text()
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{file} has no {name}"
