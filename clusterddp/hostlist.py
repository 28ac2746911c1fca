"""Notations: Slurm's host lists (``rack[1-2]node[01-02]``) and task counts (``2(x3),1``), and ranks (``0,3-5``)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product

from clusterddp.errors import LauncherEnvironmentError

#: A part of a list up to the next comma outside of brackets, or the end. A bracket that is not closed is an ordinary
#: character here, and refused later.
_PART = re.compile(r"(?:[^,\[]+|\[[^\[\]]*\]|\[)*")
#: A part with one bracket that lists numbers: a list may consist of thousands of these.
_LISTED = re.compile(r"([\w.:-]*)\[(\d{1,18}(?:,\d{1,18})*)\]([\w.:-]*)(?=,|\Z)", re.ASCII)
#: A list of names only, such as thousands of nodes with odd names.
_NAMES = re.compile(r"[\w.:-]+(?:,[\w.:-]+)*", re.ASCII)
_HOST = re.compile(r"(?:[\w.:-]|\[[^\[\]]*\])+", re.ASCII)
_ONE_BRACKET = re.compile(r"([\w.:-]*)(\[[^\[\]]*\])([\w.:-]*)", re.ASCII)
_PIECE = re.compile(r"\[[^\[\]]*\]|[^\[\]]+")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
#: Slurm refuses longer ranges, too.
_LONGEST_RANGE = _MOST_HOSTS = 65536


def expand(hostlist: str) -> list[str]:
    """The host names in ``hostlist``, in the order of ``scontrol show hostnames``. An empty list for an empty string.

    Raises LauncherEnvironmentError for malformed lists, also where scontrol does not: it accepts ``n[1`` as a host and
    drops the empty part of ``a,,b``. Unlike scontrol 22.05 it allows text after the last bracket (``cn[1-2]-ib0``).
    """
    if not hostlist:
        return []
    if _NAMES.fullmatch(hostlist):
        names = hostlist.split(",")
        if len(names) > _MOST_HOSTS:
            raise _malformed(hostlist, f"it names more than {_MOST_HOSTS} hosts")
        return names
    names, at = [], 0
    while at <= len(hostlist):  # in one pass over the text
        if match := _LISTED.match(hostlist, at):
            before, numbers, after = match.groups()
            names += [f"{before}{number}{after}" for number in numbers.split(",")]
            at = match.end() + 1
        else:
            part = _PART.match(hostlist, at)
            assert part is not None  # it may be empty
            names += _expand_part(part[0], hostlist)
            at = part.end() + 1
        if len(names) > _MOST_HOSTS:
            raise _malformed(hostlist, f"it names more than {_MOST_HOSTS} hosts")
    return names


def _expand_part(part: str, hostlist: str) -> list[str]:
    if match := _ONE_BRACKET.fullmatch(part):
        before, bracket, after = match.groups()
        return [f"{before}{number}{after}" for number in _alternatives(bracket, hostlist)]
    if not _HOST.fullmatch(part):
        raise _malformed(hostlist, f"{part!r} is not a host" if part else "it has an empty part")
    if "[" not in part:
        return [part]
    texts = _PIECE.findall(part)
    pieces = [_alternatives(piece, hostlist) for piece in texts]
    brackets = [index for index, piece in enumerate(texts) if piece.startswith("[")]
    if math.prod(map(len, pieces)) > _MOST_HOSTS:
        raise _malformed(hostlist, f"{part} names more than {_MOST_HOSTS} hosts")
    # Slurm's order: the last bracket varies fastest, then the first, then the second, and so on.
    slowest_first = [*reversed(brackets[:-1]), *brackets[-1:]]
    fields = {index: f"{{{place}}}" for place, index in enumerate(slowest_first)}
    name = "".join(fields.get(index, text) for index, text in enumerate(texts)).format  # a host has no braces
    return [name(*chosen) for chosen in product(*(pieces[index] for index in slowest_first))]


def _alternatives(piece: str, hostlist: str) -> list[str]:
    """A piece of a host name, or the numbers of a bracket, padded like the start of their range."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for part in piece[1:-1].split(","):
        if len(part) <= 18 and part.isdecimal() and part.isascii():
            numbers.append(part)
            continue
        if not (match := _RANGE.fullmatch(part)):
            raise _malformed(hostlist, f"{part!r} in {piece} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _LONGEST_RANGE:
            raise _malformed(hostlist, f"the range {part} is reversed or longer than {_LONGEST_RANGE}")
        numbers += map(f"%0{len(first)}d".__mod__, range(int(first), int(last) + 1))
        if len(numbers) > _MOST_HOSTS:
            break
    if len(numbers) > _MOST_HOSTS:
        raise _malformed(hostlist, f"{piece[:40]} names more than {_MOST_HOSTS} hosts")
    return numbers


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from Slurm's run-length form: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        if not (match := _COUNT.fullmatch(part)):
            raise LauncherEnvironmentError(f"malformed tasks per node {text!r}: expected, for example, '2(x3),1'")
        if len(counts) + int(match[2] or 1) > _MOST_HOSTS:
            raise LauncherEnvironmentError(f"malformed tasks per node {text!r}: it names more than {_MOST_HOSTS} nodes")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _malformed(hostlist: str, reason: str) -> LauncherEnvironmentError:
    return LauncherEnvironmentError(
        f"malformed host list {hostlist!r}: {reason}. Expected, for example, 'a1,rack[1-2]node[01-02]'"
    )


def ranks_in(text: str) -> list[int]:
    """The ranks in ``0,3-5``. Raises ValueError for another form."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise ValueError(f"{part.strip()!r} is neither a rank nor a range. Expected, for example, 0,3-5")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)


def ranges(ranks: Sequence[int]) -> str:
    """``0-2,5`` for 0, 1, 2 and 5."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
