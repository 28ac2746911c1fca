"""The words in the pictures of the documentation are still those of the code. If not: ``make pictures``.

A picture of a page has its text in a file beside it.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGES = REPOSITORY / "docs" / "images"
#: Words that are data of the pictured run: names of its script, its host, its metrics and processes.
DATA = {"clusterddp", "rehearse", "jobs", "digits", "yaml", "laptop", "node", "vm", "loss", "attempt", "json", "html"}
#: The shortest piece of a sentence that is looked for.
SHORTEST = 3


@cache
def words_of_the_code() -> tuple[str, ...]:
    """The texts in the sources in small letters, longest first, without what is filled in."""
    found = set()
    for source in (REPOSITORY / "clusterddp").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = re.split(r"\{\w*\}|\n|%\w", node.value.lower())
                found |= {part.strip(" .,:;()|*`'\"-%") for part in parts}
    return tuple(sorted((text for text in found if len(text) >= SHORTEST), key=len, reverse=True))


def lines_of(picture: Path) -> Iterator[str]:
    if picture.suffix == ".svg":
        yield from map(html.unescape, re.findall(r"<text[^>]*>(.*?)</text>", picture.read_text()))
    else:
        yield from picture.read_text().splitlines()


def unknown_words(line: str) -> set[str]:
    """The words of a line that are neither in a text of the code nor data. A line may be cut in a text."""
    line = line.lower()
    last = re.split(r"  +|: |; ", line)[-1].removesuffix("…")
    if line.endswith("…") and any(text.startswith(last) for text in words_of_the_code()):
        line = line.removesuffix(f"{last}…")
    rest = re.sub(r"\S*…$|\S*[/\d]\S*", " ", line)
    for text in words_of_the_code():
        if text in rest:
            rest = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", " ", rest)
    known = DATA | {*words_of_the_code()}
    return {word for word in re.findall(r"[a-z]{3,}", rest) if not known & {word, word.removesuffix("s")}}


PICTURES = [*sorted(IMAGES.glob("*.svg")), *sorted(IMAGES.glob("*.txt"))]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_the_words_of_a_picture_are_in_the_code(picture: Path) -> None:
    unknown = {line: words for line in lines_of(picture) if (words := unknown_words(line))}
    assert not unknown


def test_every_picture_of_a_page_has_its_text_beside_it() -> None:
    assert {picture.stem for picture in IMAGES.glob("*.png")} == {text.stem for text in IMAGES.glob("*.txt")}


def test_a_word_that_no_message_has_is_found() -> None:
    assert unknown_words("restarting all ranks in place, as a gazelle") == {"gazelle"}
