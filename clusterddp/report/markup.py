"""Builds HTML and SVG: every text and every attribute is escaped, so that nothing in a run's files becomes markup."""

from __future__ import annotations

import html
import re
from typing import Any

#: Characters that XML cannot contain, not even escaped.
_NOT_XML = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
#: Letters that reverse the order of the text around them: a name could pretend to be another one.
_REORDERING = re.compile("[\u202a-\u202e\u2066-\u2069]")


class Markup(str):
    """Text that is markup already. Only this module makes it from other text, and ``page.py`` from its style sheet."""

    __slots__ = ()


def escaped(value: object) -> Markup:
    """A value as text for an element or an attribute; ``Markup`` stays as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_REORDERING.sub("?", _NOT_XML.sub("?", str(value)))))


def joined(*parts: object) -> Markup:
    """The parts, one after the other; None is left out."""
    return Markup("".join(escaped(part) for part in parts if part is not None))


def tag(name: str, /, *children: object, **attributes: Any) -> Markup:
    """An element. ``class_`` stands for class, ``_`` for ``-``; an attribute that is None is left out."""
    names = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    given = "".join(f' {key}="{escaped(value)}"' for key, value in names.items())
    inside = joined(*children)
    return Markup(f"<{name}{given}>{inside}</{name}>" if inside or name not in _EMPTY else f"<{name}{given}/>")


def with_code(text: str) -> Markup:
    """A sentence in which what is between backticks is code."""
    return joined(*(tag("code", part) if place % 2 else part for place, part in enumerate(text.split("`"))))


#: Elements that are written without an end tag if they are empty: those of SVG, and the empty ones of HTML.
_EMPTY = frozenset(("svg", "g", "path", "rect", "line", "circle", "meta", "col"))


def clipped(text: object, most: int) -> str:
    """At most ``most`` characters of a text, with a mark where it was cut."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[: most - 4]} ..."
