"""Kinds of values: how each is read from a YAML node, written back and described to editors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from clusterddp.keys.node import Mistake, Node

#: A JSON Schema, or a part of one.
Schema = dict[str, Any]


class Wrong(Exception):
    """A value that its key does not accept. The message follows the key's place and name."""


class Kind(Protocol):
    """The values of a key."""

    def read(self, node: Node, name: str, mistakes: list[Mistake]) -> Any:
        """The value of a node. Raises Wrong, or appends mistakes whose place is further inside. ``name``: the dotted
        key, for messages. A kind of a key that sets several fields returns a tuple of their values."""
        ...

    def write(self, *values: Any) -> Any:
        """The value as YAML has it. None is left out. One argument for each field that the key sets."""
        ...

    def schema(self) -> Schema:
        """Which values the kind accepts."""
        ...


@dataclass(frozen=True, eq=False)
class Value:
    """A kind without keys inside."""

    reader: Callable[[Node], Any]
    """Returns the value, or raises Wrong."""
    accepts: Schema
    _: KW_ONLY
    writer: Callable[..., Any] = lambda value: value
    expected: str = ""
    """The values in words, for kinds that extend this one."""

    def read(self, node: Node, name: str, mistakes: list[Mistake]) -> Any:  # noqa: ARG002
        """As every kind."""
        return self.reader(node)

    def write(self, *values: Any) -> Any:
        """As every kind."""
        return self.writer(*values)

    def schema(self) -> Schema:
        """As every kind."""
        return self.accepts


@dataclass(frozen=True, eq=False)
class Table:
    """A mapping with keys that the user chooses, read into a dict."""

    check_key: Callable[[str, Node], None]
    """Raises Wrong for a key that is not allowed. Gets its value, too."""
    reader: Callable[[Node], Any]
    accepts: Callable[[], Schema]

    def read(self, node: Node, name: str, mistakes: list[Mistake]) -> Any:
        """As every kind."""
        if not isinstance(node.value, dict):
            given = "a list" if isinstance(node.value, list) else "text"  # which may hold a secret
            raise Wrong(f"expected a mapping such as {{NAME: value}}, got {given}")
        table = {}
        for key, item in node.value.items():
            try:
                self.check_key(key, item)
                table[str(key)] = self.reader(item)
            except Wrong as wrong:
                mistakes.append(Mistake(key.place, f"{name}.{key}: {wrong}"))
        return table

    def write(self, *values: Any) -> Any:
        """As every kind."""
        return values[0]

    def schema(self) -> Schema:
        """As every kind."""
        return self.accepts()


# --- parts of a JSON Schema

#: Text: also what YAML reads as a number or a boolean.
SCALAR = ["string", "number", "boolean"]


def text_schema(pattern: str = "", **more: Any) -> Schema:
    """Text that matches a pattern."""
    return {"type": SCALAR, "minLength": 1, **({"pattern": f"^(?:{pattern})$"} if pattern else {}), **more}


def list_schema(**more: Any) -> Schema:
    """A list of text."""
    return {"type": "array", "items": {"type": [*SCALAR, "null"]}, **more}


def count_schema(least: int = 1, **more: Any) -> Schema:
    """A whole number."""
    return {"type": "integer", "minimum": least, **more}


def either(*schemas: Schema) -> Schema:
    """One of several."""
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    """The same, or null, which leaves the built-in default."""
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if "type" not in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return schema | {"type": [*types, "null"]}


# --- text


def read_text(node: Node) -> str:
    """Nonempty text on one line, including text that YAML reads as a number or a boolean."""
    if isinstance(node.value, (dict, list)):
        raise Wrong(f"expected text, got {node.quoted}. Quote it if it is meant as text")
    if not node.text:
        raise Wrong("expected text, got an empty value")
    for character in node.text:  # text after a line break would be an option or a command in the batch script
        if not character.isprintable():
            raise Wrong(f"expected text without line breaks or control characters, got U+{ord(character):04X}")
    return node.text


TEXT = Value(read_text, text_schema())


def _word(node: Node) -> str:
    """Text without blanks and quotes, which would split it on an #SBATCH line."""
    given = read_text(node)
    if re.search(r"[\s\"'\\]", given):
        raise Wrong(f"expected one word without blanks, quotes or backslashes, got {given!r}")
    return given


WORD = Value(_word, text_schema(r"""[^\s"'\\]+"""))


def matching(pattern: str, expected: str, schema: Schema | None = None) -> Value:
    """Text that matches a regular expression, which ``expected`` describes in words."""

    def read(node: Node) -> str:
        given = read_text(node)
        if not re.fullmatch(pattern, given):
            raise Wrong(f"expected {expected}, got {given!r}")
        return given

    return Value(read, schema or text_schema(pattern))


def _regex(node: Node) -> str:
    given = read_text(node)
    try:
        re.compile(given)
    except re.error as error:
        raise Wrong(f"expected a regular expression, got {given!r}: {error}") from error
    return given


#: A regular expression of Python. JSON Schema has no way to describe one.
REGEX = Value(_regex, text_schema())


def read_choice(node: Node, choices: Sequence[str]) -> str:
    """One of these words."""
    if node.text not in choices:
        hint = ". Did you mean 'cuda'?" if node.text == "gpu" else did_you_mean(node.text, choices)
        raise Wrong(f"expected {' or '.join(choices)}, got {node.quoted}{hint}")
    return node.text


def choice(*choices: str) -> Value:
    """One of these words."""

    def read(node: Node) -> str:
        return read_choice(node, choices)

    return Value(read, {"enum": list(choices)})


# --- numbers and booleans


def whole(least: int = 1) -> Value:
    """A whole number of at least ``least``."""

    def read(node: Node) -> int:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Wrong(f"expected a whole number of at least {least}, got {node.quoted}")
        return value

    return Value(read, count_schema(least))


def positive(unit: str) -> Value:
    """A positive number of ``unit``."""
    expected = f"a positive number of {unit}"

    def read(node: Node) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise Wrong(f"expected {expected}, got {node.quoted}")
        return float(value)

    return Value(read, {"type": "number", "exclusiveMinimum": 0}, expected=expected)


def _truth(node: Node) -> bool:
    if not isinstance(node.value, bool):
        raise Wrong(f"expected true or false, got {node.quoted}")
    return node.value


TRUTH = Value(_truth, {"type": "boolean"})


# --- lists


def read_argument(node: Node) -> str:
    """An item of a list, as written: ``1e-3`` stays ``1e-3``."""
    if isinstance(node.value, (dict, list)) or (node.value is None and not node.text):
        hint = "" if node.value is None else ". Quote it if it is meant as text"
        raise Wrong(f"expected only text and numbers in the list, got {node.quoted}{hint}")
    if "\0" in node.text:
        raise Wrong("expected arguments without U+0000")
    return node.text


def read_arguments(node: Node) -> tuple[str, ...]:
    """A list of arguments."""
    if not isinstance(node.value, list):
        raise Wrong(f"expected a list such as [--lr, 1e-3], got {node.quoted}")
    return tuple(read_argument(item) for item in node.value)


ARGUMENTS = Value(read_arguments, list_schema())


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of a message with the known name that was probably meant, or an empty text."""
    names, spelt = list(known), given.lower().replace("-", "_")
    near = [known_name for known_name in names if known_name == spelt] or difflib.get_close_matches(spelt, names, 1)
    near = near or [known_name for known_name in names if len(spelt) > 2 and known_name.startswith(spelt)]
    return f". Did you mean {near[0]!r}?" if near else ""
