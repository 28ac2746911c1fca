"""How ``--watch`` fills a terminal: wrapped facts, and as many of the newest events as have room. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.cli.runs.text import clipped, columns_of
from clusterddp.reporter import printable

#: The columns of a fact's name.
INDENT = 10
#: Events that are shown where there is no terminal, and the fewest on a terminal.
EVENTS, LEAST_EVENTS = 5, 3
#: The most lines of a fact on a terminal.
MOST_LINES = 4
_NARROWEST = 20

Fact = tuple[str, str]


@dataclass(frozen=True)
class Size:
    """A terminal's columns and lines."""

    columns: int
    lines: int


def composed(above: Sequence[str], events: Sequence[str], end: str, size: Size | None) -> str:
    """Lines, the newest events and a last line, for a terminal of this size or for a pipe (None).

    Where not even LEAST_EVENTS have room, the lowest of the lines above them are left out.
    """
    if size is None:
        return "\n".join([*above, *events[-EVENTS:], end])
    room = max(1, size.lines - 2)  # without the last line and the one before it
    above = above[: max(1, room - min(LEAST_EVENTS, len(events)))]
    shown = events[-(room - len(above)) :] if room > len(above) else []
    below = [clipped(line, size.columns) for line in [*shown, "", end]]
    return "\n".join([*above, *below][: size.lines])


def fact_lines(facts: Sequence[Fact], columns: int | None = None) -> list[str]:
    """``name      words``, wrapped below the words if there are more than fit."""
    lines = []
    for name, words in facts:
        text = printable(f"{name:{INDENT - 1}} {words}")
        if columns is None or columns_of(text) <= columns:
            lines.append(text)
        else:
            lines += _wrapped(text, columns)
    return lines


def _wrapped(text: str, columns: int) -> list[str]:
    indent = " " * (INDENT if columns >= INDENT + _NARROWEST else 2)
    wrapper = textwrap.TextWrapper(
        max(columns, INDENT), subsequent_indent=indent, max_lines=MOST_LINES, placeholder=" ...", break_on_hyphens=False
    )
    return wrapper.wrap(text)
