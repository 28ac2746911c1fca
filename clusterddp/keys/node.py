"""A value of a definition as written: its text and its place, with which mistakes are reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from clusterddp.errors import JobDefinitionError

Scalar: TypeAlias = "bool | int | float | str | None"


@dataclass(frozen=True, order=True)
class Place:
    """Where a value was written: a file with line and column, from 1, or a source without lines (0)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


class OptionSource(str):
    """The source of a value that is given as an option, which names the key itself: ``--set epochs=x``."""


class PresetSource(str):
    """The source of a preset's values."""


class Key(str):
    """A mapping's key, with its place."""

    place: Place

    def __new__(cls, text: str, place: Place) -> Key:
        key = super().__new__(cls, text)
        key.place = place
        return key


@dataclass(frozen=True)
class Node:
    """A value, its source text and its place."""

    value: Scalar | list[Node] | dict[Key, Node]
    text: str
    """A scalar's source text, without quotes. Empty for a list or a mapping."""
    place: Place

    @property
    def quoted(self) -> str:
        """The value as messages quote it."""
        if isinstance(self.value, (dict, list)):
            kind = "mapping" if isinstance(self.value, dict) else "list"
            return f"a {kind}" if self.value else f"an empty {kind}"
        return repr(self.text) if self.text or self.value is not None else "nothing"


#: Nodes by key, as written.
Fields = dict[Key, Node]


@dataclass(frozen=True, order=True)
class Mistake:
    """An error in a document. Sorts by place. ``key``: the key with the error, if there is one."""

    place: Place
    message: str
    key: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


def raise_mistakes(mistakes: list[Mistake]) -> None:
    """Raises one JobDefinitionError that lists all mistakes by place, one per line. Returns if there are none."""
    if mistakes:
        raise JobDefinitionError("\n".join(str(mistake) for mistake in sorted(set(mistakes))))
