"""Text in the columns of a terminal: its width, clipping, odd characters. Pure."""

from __future__ import annotations

import unicodedata

from clusterddp.reporter import printable


def one_line(text: str) -> str:
    """``printable`` text in one line: tabs and line ends become question marks, too."""
    return text if text.isprintable() else printable(text).translate({9: "?", 10: "?"})


def columns_of(text: str) -> int:
    """The columns of a terminal that a text takes: East Asian letters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def clipped(text: str, width: int, keep_end: bool = False) -> str:
    """A text in so many columns. The end of a path tells runs apart."""
    if columns_of(text) <= width:
        return text
    room, kept = max(width - 3, 0), 0
    for letter in reversed(text) if keep_end else text:  # it may have a million
        room -= columns_of(letter)
        if room < 0:
            break
        kept += 1
    return f"...{text[len(text) - kept :]}" if keep_end else f"{text[:kept]}..."
