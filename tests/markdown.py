"""Tables in Markdown, and the pages that have some made by a command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats get two decimals."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Replaces tables of a page, each between ``<!-- NAME: its command -->`` and ``<!-- end of NAME -->``."""
    text = page.read_text()
    for name, table in tables.items():
        pattern = rf"(<!-- {re.escape(name)}: [^\n]* -->\n).*?(<!-- end of {re.escape(name)} -->)"
        text = re.sub(pattern, lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text, flags=re.DOTALL)  # noqa: B023
    page.write_text(text)
