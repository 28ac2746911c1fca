"""The members of a sweep: a grid's combinations, and the name of each."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef.yaml12 import Mistake, Node

T = TypeVar("T")
#: One member: the value of each key, as written.
Values = Mapping[str, Node]

#: More members are a mistake, as in ``seed=0..1000000``.
MOST_MEMBERS = 10_000
#: The longest name of a member's folder, in characters; file systems allow 255 bytes.
LONGEST_NAME = 120

_RANGE = re.compile(r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})", re.ASCII)


def expanded(node: Node, mistakes: list[Mistake]) -> list[Node]:
    """The values of a key: those of a list, a single one, and the numbers of a range ``0..4``, which includes both."""
    values: list[Node] = []
    for item in node.value if isinstance(node.value, list) else [node]:
        match = _RANGE.fullmatch(item.text)
        if not match:
            values.append(item)
            continue
        low, high = int(match[1]), int(match[2])
        if not 0 <= high - low < MOST_MEMBERS:
            expected = f"a range from the smaller number to the larger, of at most {MOST_MEMBERS} numbers"
            mistakes.append(Mistake(item.place, f"expected {expected}, such as 0..4; got {item.text}"))
            continue
        values += [Node(number, str(number), item.place) for number in range(low, high + 1)]
    if not values or (node.value is None and not node.text):
        mistakes.append(Mistake(node.place, "expected a value, a list of values, or a range such as 0..4; got none"))
    return values


def combinations(grid: Mapping[str, Sequence[T]]) -> list[dict[str, T]]:
    """Every combination of the values; the last key changes first. JobDefinitionError if there are too many."""
    size = math.prod(map(len, grid.values()))
    if size > MOST_MEMBERS:
        raise JobDefinitionError(f"expected a sweep of at most {MOST_MEMBERS} members, got {size}")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


# --- names


def keys_of(members: Iterable[Mapping[str, object]]) -> list[str]:
    """The keys of all members, in the order in which they come."""
    return list(dict.fromkeys(key for values in members for key in values))


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, as names and tables show it; the whole key where another key ends in the same part."""
    keys = list(keys)
    last = {key: key.rpartition(".")[2] for key in keys}
    shared = [part for part in last.values() if list(last.values()).count(part) > 1]
    return {key: key if last[key] in shared else last[key] for key in keys}


def named(members: Sequence[Values]) -> dict[str, Values]:
    """The members by name; a member that is given twice counts once. JobDefinitionError for two of one name."""
    short, texts = short_keys(keys_of(members)), dict[str, dict[str, str]]()
    found: dict[str, Values] = {}
    for values in members:
        own = {short[key]: text_of(node) for key, node in values.items()}
        name = member_name(own)
        if texts.setdefault(name, own) != own:
            raise JobDefinitionError(
                f"two members would have the name {name!r}, {texts[name]} and {own}: expected values without commas"
            )
        found[name] = values
    return found


def member_name(texts: Mapping[str, str]) -> str:
    """The name of a member's folder: ``lr=1e-3,seed=0``.

    Characters that have a meaning in a shell or in a batch script become ``-``, and a long name is cut: such a name
    ends in a hash of all values, so that different members have different names.
    """
    text = ",".join(f"{key}={value}" for key, value in texts.items())
    name = re.sub(r"[^A-Za-z0-9_.+=,-]+", "-", text)
    if name == text and len(name) <= LONGEST_NAME:
        return name
    ending = "-" + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return name[: LONGEST_NAME - len(ending)] + ending


def text_of(node: Node) -> str:
    """A value as it was written; a list or a mapping in YAML's one-line form."""
    if isinstance(node.value, list):
        return f"[{','.join(map(text_of, node.value))}]"
    if isinstance(node.value, dict):
        return f"{{{','.join(f'{key}:{text_of(item)}' for key, item in node.value.items())}}}"
    return node.text or ("null" if node.value is None else "")
