"""The keys of a definition: one for each field of a dataclass, whose annotation says everything that is known about it.

A field's type, its default and the string below it are enough for most keys::

    @dataclass(frozen=True)
    class Limits:
        attempts: int | None = None
        \"\"\"The number of attempts, including the first.\"\"\"

``Annotated`` adds what the type does not say: a ``Kind`` of values, and marks such as ``Option``, ``Named`` and
``Parts``. The reader, the writer, the JSON Schema and everything else about keys are derived from ``entries``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from clusterddp.keys import kinds
from clusterddp.keys.kinds import Kind, Schema, Value, Wrong, did_you_mean, either, or_null
from clusterddp.keys.node import Fields, Mistake, Node, OptionSource

Mark = TypeVar("Mark")


# --- marks


@dataclass(frozen=True)
class Named:
    """The key has another name than the field."""

    name: str


@dataclass(frozen=True, init=False)
class Parts:
    """Other fields that the key sets, too. They are no keys themselves."""

    fields: tuple[str, ...]

    def __init__(self, *fields: str) -> None:
        object.__setattr__(self, "fields", fields)


@dataclass(frozen=True)
class NoKey:
    """The field is no key."""


@dataclass(frozen=True)
class Text:
    """What the key means, where it differs from what the field means."""

    text: str


@dataclass(frozen=True)
class Option:
    """The option of the command line that sets the key."""

    usage: str
    """As in a command's help: ``-N, --nodes N``."""
    help: str
    sets: Any = None
    """The value that an option without an argument sets."""

    @property
    def flags(self) -> list[str]:
        """``-N`` and ``--nodes``."""
        return [word.rstrip(",") for word in self.usage.split() if word.startswith("-")]

    @property
    def metavar(self) -> str:
        """``N``."""
        return self.usage.split()[-1]


# --- the table


@dataclass(frozen=True)
class Entry:
    """A key."""

    name: str
    """In YAML."""
    fields: tuple[str, ...]
    """The fields that it sets. Usually, the one with its name."""
    kind: Kind
    owner: type
    """The dataclass of the fields."""
    marks: tuple[object, ...]

    def mark(self, wanted: type[Mark]) -> Mark | None:
        """The mark of this class, or None."""
        return next((mark for mark in self.marks if isinstance(mark, wanted)), None)

    @property
    def text(self) -> str:
        """What the key means: the string below its field."""
        other = self.mark(Text)
        return other.text if other else _docstrings(self.owner)[self.fields[0]]

    def read(self, node: Node, prefix: str, mistakes: list[Mistake]) -> dict[str, Any]:
        """The values of its fields. Raises Wrong, or appends mistakes."""
        value = self.kind.read(node, f"{prefix}{self.name}", mistakes)
        return dict(zip(self.fields, value if len(self.fields) > 1 else (value,), strict=True))

    def write(self, owner: object) -> Any:
        """The value in YAML."""
        return self.kind.write(*(getattr(owner, name) for name in self.fields))


@cache
def entries(owner: type) -> Mapping[str, Entry]:
    """The keys of a dataclass by name, in the order of its fields."""
    hints = {name: _without_none(hint) for name, hint in get_type_hints(owner, include_extras=True).items()}
    found = {}
    for item in dataclasses.fields(owner):
        hint, marks = _marked(hints[item.name])
        if any(isinstance(mark, NoKey) for mark in marks):
            continue
        named = next((mark.name for mark in marks if isinstance(mark, Named)), item.name)
        parts = next((mark.fields for mark in marks if isinstance(mark, Parts)), ())
        kind = next((mark for mark in marks if hasattr(mark, "schema")), None) or _kind_of(hint)
        found[item.name] = Entry(named, (item.name, *parts), kind, owner, marks)
    inside = {name for entry in found.values() for name in entry.fields[1:]}
    return {entry.name: entry for name, entry in found.items() if name not in inside}


def _marked(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its marks, and these."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    plain, *marks = get_args(hint)
    inner, more = _marked(_without_none(plain))
    return inner, (*marks, *more)


def _without_none(hint: Any) -> Any:
    """The type of the values that can be given."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    others = tuple(part for part in get_args(hint) if part is not NoneType)
    return others[0] if len(others) == 1 else hint


def _kind_of(hint: Any) -> Any:
    """The kind of a type that describes its values."""
    if get_origin(hint) is Literal:
        return kinds.choice(*get_args(hint))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return Section(hint)
    plain: Mapping[Any, Kind] = {
        bool: kinds.TRUTH,
        int: kinds.whole(),
        str: kinds.TEXT,
        tuple[str, ...]: kinds.ARGUMENTS,
    }
    return plain.get(hint)


@cache
def _docstrings(owner: type) -> Mapping[str, str]:
    """The string below each field of a dataclass, by the field's name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        ast.unparse(item.target): " ".join(below.value.value.replace("``", "`").split())
        for item, below in pairwise(body)
        if isinstance(item, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


# --- reading, writing and describing all keys of a table


def read_fields(
    fields: Fields,
    table: Mapping[str, Entry],
    mistakes: list[Mistake],
    prefix: str = "",
    instead: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Reads all keys into values of the dataclass, and appends a mistake for each that is unknown or has a wrong value.

    A null leaves the built-in default. ``prefix``: the section's key and a dot, for messages. ``instead``: as in
    ``check_keys``.
    """
    check_keys(fields, table, mistakes, prefix, instead)
    values: dict[str, Any] = {}
    for key, node in fields.items():
        if key not in table or node.value is None:
            continue
        try:
            values |= table[key].read(node, prefix, mistakes)
        except Wrong as wrong:
            named = "" if isinstance(node.place.source, OptionSource) else f"{prefix}{key}: "
            mistakes.append(Mistake(node.place, f"{named}{wrong}", prefix + key))
    return values


def check_keys(
    fields: Fields,
    known: Sequence[str] | Mapping[str, Any],
    mistakes: list[Mistake],
    prefix: str = "",
    instead: Mapping[str, str] | None = None,
) -> None:
    """Appends a mistake for each unknown key, with what to use ``instead`` of it or the most similar one."""
    names = list(known)
    for key in fields:
        if key not in names:
            hint = (instead or {}).get(key.replace("-", "_"))
            hint = f": {hint}" if hint else did_you_mean(key, names) or f". Valid keys: {', '.join(names)}"
            mistakes.append(Mistake(key.place, f"unknown key {prefix + key!r}{hint}", prefix + key))


def written(owner: object, table: Mapping[str, Entry]) -> dict[str, Any]:
    """The values of a dataclass by YAML key."""
    return {name: entry.write(owner) for name, entry in table.items()}


def properties(table: Mapping[str, Entry], defaults: Mapping[str, Any]) -> Schema:
    """The JSON Schema of each key."""
    described: Schema = {}
    for name, entry in table.items():
        default = defaults.get(name)
        shown = {} if default in (None, "", (), {}) else {"default": default}
        described[name] = {"description": entry.text, **shown, **or_null(entry.kind.schema())}
    return described


def collections(table: Mapping[str, Entry], prefix: str = "") -> Iterator[str]:
    """The dotted keys whose values may be lists or mappings."""
    for name, entry in table.items():
        if _may_be_collection(entry.kind.schema()):
            yield f"{prefix}{name}"
        inner = entry.kind.inner if isinstance(entry.kind, OrOff) else entry.kind
        if isinstance(inner, Section):
            yield from collections(inner.table, f"{prefix}{name}.")


def _may_be_collection(schema: Schema) -> bool:
    return schema.get("type") in ("array", "object") or any(map(_may_be_collection, schema.get("anyOf", [])))


# --- kinds with keys inside


class Section:
    """A mapping with fixed keys, read into a dataclass."""

    def __init__(self, owner: type, expected: str = "") -> None:
        """``expected``: the values in words, for messages."""
        self.owner, self._expected = owner, expected

    @property
    def table(self) -> Mapping[str, Entry]:
        """The keys inside."""
        return entries(self.owner)

    @property
    def expected(self) -> str:
        """The values in words."""
        return self._expected or f"a mapping with the keys {', '.join(self.table)}"

    def read(self, node: Node, name: str, mistakes: list[Mistake]) -> Any:
        """As every kind."""
        if not isinstance(node.value, dict):
            raise Wrong(f"expected {self.expected}, got {node.quoted}")
        return self.owner(**read_fields(node.value, self.table, mistakes, f"{name}."))

    def write(self, *values: Any) -> Any:
        """As every kind. The mapping has what differs from None, and from an empty list that is the default."""
        (section,) = values
        if section is None:
            return None
        defaults = {item.name: item.default for item in dataclasses.fields(self.owner)}
        found = {}
        for name, entry in self.table.items():
            value = entry.write(section)
            if value is not None and (value != () or defaults[entry.fields[0]] != ()):
                found[name] = value
        return found

    def schema(self) -> Schema:
        """As every kind."""
        return {"type": "object", "properties": properties(self.table, {}), "additionalProperties": False}


class Short(Section):
    """A mapping, or a value of one of its keys alone."""

    def __init__(self, owner: type, name: str, expected: str) -> None:
        """``name``: the key, which is also the name of its field."""
        super().__init__(owner, expected)
        self.name = name

    @property
    def _entry(self) -> Entry:
        return self.table[self.name]

    def read(self, node: Node, name: str, mistakes: list[Mistake]) -> Any:
        """As every kind."""
        if isinstance(node.value, dict):
            return super().read(node, name, mistakes)
        try:
            return self.owner(**self._entry.read(node, "", mistakes))
        except Wrong as wrong:
            raise Wrong(f"expected {self.expected}, got {node.quoted}") from wrong

    def write(self, *values: Any) -> Any:
        """As every kind."""
        mapping = super().write(*values)
        return mapping[self.name] if mapping is not None and mapping.keys() == {self.name} else mapping

    def schema(self) -> Schema:
        """As every kind."""
        return either(self._entry.kind.schema(), super().schema())


class Switch(Short):
    """``true`` or ``false``, a value of one key alone, or a mapping. False is None."""

    def __init__(self, owner: type, name: str, what: str) -> None:
        """``what``: a value of the key ``name`` in words."""
        super().__init__(owner, name, f"true, false, {what}, or a mapping such as {{{name}: digits}}")

    def read(self, node: Node, name: str, mistakes: list[Mistake]) -> Any:
        """As every kind."""
        if isinstance(node.value, bool):
            return self.owner() if node.value else None
        if isinstance(node.value, (int, float)):  # in a mapping, it may be one
            raise Wrong(f"expected {self.expected}, got {node.quoted}")
        if isinstance(node.value, dict):
            return Section(self.owner).read(node, name, mistakes)
        return self.owner(**self._entry.read(node, "", mistakes))

    def write(self, *values: Any) -> Any:
        """As every kind."""
        mapping = Section.write(self, *values)
        return True if mapping == {} else mapping

    def schema(self) -> Schema:
        """As every kind."""
        value = {**self._entry.kind.schema(), "type": "string"}
        return either({"type": "boolean"}, value, Section.schema(self))


@dataclass(frozen=True, eq=False)
class OrOff:
    """``off`` for None, or a value of another kind."""

    inner: Value | Section

    def read(self, node: Node, name: str, mistakes: list[Mistake]) -> Any:
        """As every kind."""
        if node.text == "off":
            return None
        try:
            return self.inner.read(node, name, mistakes)
        except Wrong as wrong:
            raise Wrong(f"expected off, or {self.inner.expected}, got {node.quoted}") from wrong

    def write(self, *values: Any) -> Any:
        """As every kind."""
        return "off" if values[0] is None else self.inner.write(*values)

    def schema(self) -> Schema:
        """As every kind."""
        return either({"const": "off"}, self.inner.schema())
