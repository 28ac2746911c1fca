"""YAML 1.2 (core schema), with the place and the source text of every value.

PyYAML follows YAML 1.1: ``time: 1:30:00`` is 5400, ``partition: no`` is False, ``account: 0123`` is 83, ``lr: 1e-4`` is
a string, and of two equal keys the last one wins. Here these are a string, a string, 123 (with the source text
``0123``), a float, and a mistake.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from clusterddp.errors import JobDefinitionError
from clusterddp.keys.node import Fields, Key, Mistake, Node, Place, Scalar, raise_mistakes
from clusterddp.rundir.files import read_text
from clusterddp.rundir.records import LARGEST, retrying


def load(text: str, source: str, mistakes: list[Mistake] | None = None) -> Node:
    """Parses the single document in ``text``. ``source`` names it in messages.

    Raises JobDefinitionError for a syntax error. Duplicate keys and unknown tags are appended to ``mistakes`` and left
    out of the result. Without ``mistakes`` they raise, too.
    """
    found: list[Mistake] = []
    try:
        root = _CoreLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, source) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Place(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        character = f"U+{ord(text[error.position]):04X}"
        raise JobDefinitionError(f"{place}: the character {character} is not allowed in YAML") from error
    except RecursionError as error:
        raise JobDefinitionError(f"{source}: the YAML is nested too deeply") from error
    node = Node(None, "", Place(source, 1, 1)) if root is None else _Reading(source, found).node(root)
    if mistakes is None and found:
        raise_mistakes(found)
    if mistakes is not None:
        mistakes += found
    return node


def scalar(text: str) -> Scalar:
    """The value of a plain scalar."""
    for _, pattern, meaning in _CORE:
        if pattern.fullmatch(text):
            return meaning(text)
    return text


def node_of(value: Any, source: str) -> Node:
    """The node of a Python value, as if written in YAML without quotes. An empty string stays an empty string."""
    place = Place(source)
    if isinstance(value, Mapping):
        return Node({Key(str(key), place): node_of(item, source) for key, item in value.items()}, "", place)
    if isinstance(value, (list, tuple)):
        return Node([node_of(item, source) for item in value], "", place)
    if value is None or value == "":
        return Node(value, "", place)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Node(scalar(text), text, place)


# --- the keys of a document


def file_fields(path: Path, mistakes: list[Mistake]) -> Fields:
    """The fields of a YAML file. Raises JobDefinitionError if it cannot be read, is too large or is not a
    mapping."""
    try:
        if path.stat().st_size > LARGEST:
            raise JobDefinitionError(f"{path} is too large to be a job definition")
        text = retrying(path, lambda: read_text(path))
    except OSError as error:
        raise JobDefinitionError(f"could not read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobDefinitionError(
            f"{path}: expected UTF-8 text, got a different encoding (at byte {error.start})"
        ) from error
    root = load(text, str(path), mistakes)
    fields = fields_of(root, mistakes)
    if not isinstance(root.value, (dict, type(None))):
        raise_mistakes(mistakes)  # further errors would only be consequences
    return fields


def fields_of(node: Node | None, mistakes: list[Mistake]) -> Fields:
    """The fields of a mapping. None for a null, such as an empty file."""
    if node is None or node.value is None:
        return {}
    if isinstance(node.value, dict):
        return node.value
    mistakes.append(Mistake(node.place, f"expected 'key: value' lines, got {node.quoted}"))
    return {}


def get(fields: Fields, name: str) -> Node | None:
    """The node of a key, or None."""
    return next((node for key, node in fields.items() if key == name), None)


#: Keys whose lists in several layers add up.
_ADDED = ("setup", "node_setup")
#: In a mapping in place of such a list: what earlier layers have is dropped.
REPLACE = "replace"


def merged(layers: Iterable[Fields]) -> Fields:
    """All layers of definitions in one. Later ones win. Mappings such as ``checkpoint`` or ``env`` are merged key by
    key, and lists of ``setup`` and ``node_setup`` add up, unless the later one says ``{replace: [...]}``."""
    return _merged(layers, _ADDED)


def _merged(layers: Iterable[Fields], added: Collection[str] = ()) -> Fields:
    result: Fields = {}
    for layer in layers:
        for key, node in layer.items():
            below = result.pop(key, None)
            if below is not None and key in added:
                node = _sum(below, node)
            elif below is not None and isinstance(below.value, dict) and isinstance(node.value, dict):
                node = dataclasses.replace(node, value=_merged([below.value, node.value]))
            result[key] = node  # with the later layer's key, which has its place
    return result


def _sum(below: Node, node: Node) -> Node:
    """The items of two lists, each of which may be one text. A null, or a list that replaces, drops what is below it,
    also in a sum."""
    if node.value is None or isinstance(node.value, dict):
        return node
    place = Place(f"{below.place}, {node.place}")
    replaced = get(below.value, REPLACE) if isinstance(below.value, dict) else None
    if below.value is not None and replaced is None:
        return Node([*_items(below), *_items(node)], "", place)
    items = [*(_items(replaced) if replaced else []), *_items(node)]
    return Node({Key(REPLACE, place): Node(items, "", place)}, "", place)


def _items(node: Node) -> list[Node]:
    return node.value if isinstance(node.value, list) else [node]


# --- the core schema

#: A tag, the plain scalars that it applies to, and their values (YAML 1.2.2, section 10.3.2).
_CORE: list[tuple[str, re.Pattern[str], Callable[[str], Scalar]]] = [
    ("null", re.compile(r"null|Null|NULL|~|"), lambda _: None),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text[0] in "tT"),
    # Python refuses to parse integers of more than 4300 digits.
    ("int", re.compile(r"[-+]?[0-9]{1,4000}"), int),
    ("int", re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+"), lambda text: int(text, 0)),
    ("float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    ("float", re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
]
_TAG = "tag:yaml.org,2002:"
_PLAIN = "plain"


class _CoreLoader(yaml.SafeLoader):
    """Gives every plain scalar without a tag the same tag: ``scalar`` decides by its text."""

    yaml_implicit_resolvers = {None: [(_PLAIN, re.compile(".*", re.DOTALL))]}


class _Reading:
    """Converts the nodes that PyYAML composed, and collects the mistakes in them."""

    def __init__(self, source: str, mistakes: list[Mistake]) -> None:
        self._source, self._mistakes = source, mistakes
        #: An anchored node is converted once, however many aliases refer to it. None: conversion in progress.
        self._read: dict[int, Node | None] = {}

    def node(self, raw: yaml.Node) -> Node:
        if id(raw) not in self._read:
            self._read[id(raw)] = None
            self._read[id(raw)] = self._convert(raw)
        found = self._read[id(raw)]
        return self._mistaken(raw, "this alias refers to itself") if found is None else found

    def _convert(self, raw: yaml.Node) -> Node:
        if isinstance(raw, yaml.ScalarNode):
            return self._scalar(raw)
        kind = "map" if isinstance(raw, yaml.MappingNode) else "seq"
        if raw.tag != _TAG + kind:
            return self._mistaken(raw, f"tag {_short(raw.tag)} is not allowed")
        if isinstance(raw, yaml.MappingNode):
            return Node(self._mapping(raw), "", self._place(raw))
        return Node([self.node(item) for item in raw.value], "", self._place(raw))

    def _scalar(self, raw: yaml.ScalarNode) -> Node:
        text, place = str(raw.value), self._place(raw)
        if raw.tag == _PLAIN:
            return Node(scalar(text), text, place)
        if raw.tag == _TAG + "str":
            return Node(text, text, place)
        for tag, pattern, meaning in _CORE:
            if raw.tag == _TAG + tag and pattern.fullmatch(text):
                return Node(meaning(text), text, place)
        return self._mistaken(raw, f"tag {_short(raw.tag)} is not allowed here")

    def _mapping(self, raw: yaml.MappingNode) -> dict[Key, Node]:
        """The mapping's own keys, and those merged with ``<<``, which the own ones override."""
        own: dict[Key, Node] = {}
        merged: dict[Key, Node] = {}
        for raw_key, raw_value in raw.value:
            if not isinstance(raw_key, yaml.ScalarNode):
                given = "a list" if isinstance(raw_key, yaml.SequenceNode) else "a mapping"
                self._mistaken(raw_key, f"expected a word as the key, got {given}")
                continue
            key = Key(raw_key.value, self._place(raw_key))
            if key == "<<" and raw_key.tag == _PLAIN:
                merged = {**self._merged(raw_value), **merged}
            elif key in own:
                first = next(other for other in own if other == key).place
                self._mistaken(raw_key, f"duplicate key {str(key)!r}, first given on line {first.line}")
            else:
                own[key] = self.node(raw_value)
        return {**{key: value for key, value in merged.items() if key not in own}, **own}

    def _merged(self, raw: yaml.Node) -> dict[Key, Node]:
        """The keys that ``<<`` merges: from one mapping, or from a list of which the first wins."""
        sources = raw.value if isinstance(raw, yaml.SequenceNode) else [raw]
        merged: dict[Key, Node] = {}
        for source in sources:
            value = self.node(source).value
            if isinstance(value, dict):
                merged = {**value, **merged}
            else:
                self._mistaken(source, "expected a mapping, or a list of mappings, after '<<'")
        return merged

    def _mistaken(self, raw: yaml.Node, message: str) -> Node:
        """Records a mistake. The value is replaced by a null."""
        self._mistakes.append(Mistake(self._place(raw), message))
        return Node(None, "", self._place(raw))

    def _place(self, raw: yaml.Node) -> Place:
        return Place(self._source, raw.start_mark.line + 1, raw.start_mark.column + 1)


def _short(tag: str) -> str:
    return "!!" + tag[len(_TAG) :] if tag.startswith(_TAG) else tag


def _syntax_error(error: yaml.MarkedYAMLError, source: str) -> JobDefinitionError:
    mark = error.problem_mark or error.context_mark
    place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    lines = [_line(part) for part in (error.context_mark, mark) if part]
    hint = next((hint for words, hint in _SYNTAX_HINTS.items() if words in problem), "")
    if not hint and any(map(_UNQUOTED_BRACE.search, lines)):
        hint = '. Quote text that begins with a brace, as in "{run_dir}/out"'
    return JobDefinitionError(f"{place}: {problem}{hint}")


def _line(mark: yaml.Mark) -> str:
    """The line that a mark is in."""
    return "".join((mark.buffer or "").splitlines()[mark.line : mark.line + 1])


#: The usual causes of PyYAML's errors.
_SYNTAX_HINTS = {
    "mapping values are not allowed": ". Check the indentation, and quote text that contains ': '",
    "'\\t' that cannot start any token": ". Indent YAML with spaces, not tabs",
    "found unknown escape character": ". In single quotes, a backslash stands for itself",
}
#: A value that begins with a placeholder, which YAML reads as a mapping.
_UNQUOTED_BRACE = re.compile(r"(?:[:,\[-]\s+|\[|^)\{[a-z_]+(?:\}[^\s,\]}]|/)")
