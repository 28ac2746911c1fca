"""What a sweep varies: read from SWEEP.yaml, from ``--sweep KEY=VALUES``, or from Python values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

from clusterddp.errors import UsageError
from clusterddp.jobdef import yaml12
from clusterddp.jobdef.load import fields_of, file_fields, get
from clusterddp.jobdef.schema import check_keys
from clusterddp.jobdef.values import quoted
from clusterddp.jobdef.yaml12 import Mistake, Node, Place, node_of, raise_mistakes
from clusterddp.sweeps.members import Values, combinations, expanded

KEYS = ("job", "grid", "members")


@dataclass(frozen=True)
class Definition:
    """A sweep as its file describes it. ``job``: the path of the job definition, None if it is the file's own section
    ``job``. ``members``: the values of each."""

    job: Path | None
    members: list[Values]


def read_definition(path: Path) -> Definition:
    """Reads SWEEP.yaml; the path of a job in it is relative to its folder. JobDefinitionError for all mistakes."""
    mistakes: list[Mistake] = []
    fields = file_fields(path, mistakes)
    check_keys(fields, KEYS, mistakes)
    place, job = Place(str(path)), get(fields, "job")
    if job is None or job.value is None or isinstance(job.value, list):
        wrong = "expected job: JOB.yaml, or job: with the keys of a job definition"
        mistakes.append(Mistake(job.place if job else place, wrong))
    grid, listed = get(fields, "grid"), get(fields, "members")
    if (grid is None) == (listed is None):
        mistakes.append(Mistake(place, "expected either grid: {KEY: [VALUES]} or members: [{KEY: VALUE}]"))
    members = [*_of_grid(grid, mistakes), *_of_list(listed, mistakes)]
    if not members:
        mistakes.append(Mistake(place, "this sweep has no members"))
    raise_mistakes(mistakes)
    assert job is not None
    return Definition(None if isinstance(job.value, dict) else path.parent / job.text, members)


def of_options(texts: Sequence[str]) -> list[Values]:
    """The combinations of ``--sweep lr=1e-3,1e-4`` and ``--sweep seed=0..4``; UsageError for all mistakes."""
    grid: dict[str, Node] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not (key and equals and values):
            raise UsageError(f"--sweep {text}: expected KEY=VALUE,VALUE or KEY=0..4, such as lr=1e-3,1e-4")
        if key in grid:
            raise UsageError(f"--sweep {text}: {key} is given twice; give all its values at once")
        place = Place(f"--sweep {text}")
        if values.startswith("["):
            grid[key] = yaml12.load(values, str(place))
        else:
            grid[key] = Node([Node(yaml12.scalar(value), value, place) for value in values.split(",")], "", place)
    mistakes: list[Mistake] = []
    members = _combined(grid, mistakes)
    raise_mistakes(mistakes)
    return members


def of_python(grid: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The combinations of a mapping of keys to values, or the members that are listed, as Python values."""
    if isinstance(grid, Mapping):
        listed = {key: [values] if isinstance(values, str) else list(values) for key, values in grid.items()}
        members = combinations(listed)
    else:
        members = [dict(values) for values in grid]
    if not members or not all(members):
        raise UsageError("this sweep has no members: expected a mapping of keys to values, or a list of mappings")
    return members


def nodes_of(members: Iterable[Mapping[str, Any]]) -> list[Values]:
    """The same as nodes, for names and job definitions.

    UsageError for a value that has no text which is the same in every process.
    """
    for values in members:
        if wrong := [key for key, value in values.items() if not _is_plain(value)]:
            key = wrong[0]
            raise UsageError(
                f"{key}={values[key]!r:.80}: expected numbers, text or lists of them, which name the run; sweep a name "
                "or an index, and look the object up in the function"
            )
    return [{key: node_of(value, f"{key}={value}"[:80]) for key, value in values.items()} for values in members]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (str, Number))


def _of_grid(grid: Node | None, mistakes: list[Mistake]) -> list[Values]:
    fields = fields_of(grid, mistakes)
    return _combined(fields, mistakes) if fields else []


def _of_list(listed: Node | None, mistakes: list[Mistake]) -> list[Values]:
    if listed is None:
        return []
    if not isinstance(listed.value, list):
        mistakes.append(Mistake(listed.place, f"members: expected a list of mappings, got {quoted(listed)}"))
        return []
    members: list[Values] = []
    for item in listed.value:
        values = fields_of(item, mistakes)
        if values:
            members.append({str(key): node for key, node in values.items()})
        elif item.value is None:
            mistakes.append(Mistake(item.place, "members: expected a mapping such as {lr: 1e-3, seed: 0}, got nothing"))
    return members


def _combined(grid: Mapping[Any, Node], mistakes: list[Mistake]) -> list[Values]:
    values = {str(key): expanded(node, mistakes) for key, node in grid.items()}
    return list(combinations(values))
