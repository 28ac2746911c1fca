"""docs/guide/messages.md quotes messages that the code can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
PAGE = (REPOSITORY / "docs" / "guide" / "messages.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| `", line)]
QUOTES = [quote for row in ROWS for quote in re.findall(r"`([^`]+)`", row[0])]


def literals(folder: Path) -> Iterator[str]:
    """All texts in the code but docstrings, with an unprintable character for each value in an f-string."""
    for file in folder.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


TEXTS = list(literals(REPOSITORY / "clusterddp"))


def can_be_printed(quote: str) -> bool:
    """Whether one text has the quote's fixed words, in their order."""
    pattern = re.compile(".*".join(map(re.escape, quote.split("..."))), re.DOTALL)
    return any(pattern.search(text) for text in TEXTS)


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_in_the_code(quote: str) -> None:
    assert len(re.sub(r"\W|\.\.\.", "", quote)) >= 7, f"{quote!r}: too few fixed words to find it by"
    assert can_be_printed(quote), f"{quote!r} is not a message of clusterddp any more: adapt docs/guide/messages.md"


def test_every_row_has_a_cause_and_a_remedy() -> None:
    assert len(ROWS) > 100
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in ROWS)


def test_a_message_that_is_not_in_the_code_is_found() -> None:
    assert not can_be_printed("the disk is ... on fire")
