"""The members of a sweep: their values, their names, the job of each, the sweep's record, and which member is best.

``compare`` has the members of a sweep at the same step, and the best one.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from clusterddp.errors import JobDefinitionError, UsageError
from clusterddp.jobdef import program, yaml12
from clusterddp.jobdef.job import KEYS as JOB_KEYS
from clusterddp.jobdef.job import Job, best_metric
from clusterddp.jobdef.load import load_resolved, variants, why_no_file
from clusterddp.jobdef.masking import is_secret
from clusterddp.jobdef.program import with_overrides
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.jobdef.slurm_kinds import INSTEAD_OF_KEY
from clusterddp.jobdef.yaml12 import fields_of, file_fields, get, node_of
from clusterddp.keys.node import Mistake, Node, Place, raise_mistakes
from clusterddp.keys.table import check_keys
from clusterddp.reporter import counted
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.rundir.schemas import NOT_METRICS
from clusterddp.rundir.summary import Summary
from clusterddp.slurm.run_states import RunState

T = TypeVar("T")
#: One member: the value of each key, as written.
Values = Mapping[str, Node]
#: The maximum number of members. More are probably a mistake, as in ``seed=0..1000000``.
MOST_MEMBERS = 10_000
#: The longest name of a member's folder, in characters. File systems allow 255 bytes.
LONGEST_NAME = 120
_RANGE = re.compile(r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})", re.ASCII)


def expanded(node: Node, mistakes: list[Mistake]) -> list[Node]:
    """The values of a key: those of a list, a single one, and the numbers of a range ``0..4``, which includes both."""
    values: list[Node] = []
    before = len(mistakes)
    for item in node.value if isinstance(node.value, list) else [node]:
        match = _RANGE.fullmatch(item.text)
        if not match:
            values.append(item)
            continue
        low, high = int(match[1]), int(match[2])
        if not 0 <= high - low < MOST_MEMBERS:
            expected = f"an ascending range of at most {MOST_MEMBERS} numbers"
            mistakes.append(Mistake(item.place, f"expected {expected}, such as 0..4, got {item.text}"))
            continue
        values += [Node(number, str(number), item.place) for number in range(low, high + 1)]
    if len(mistakes) == before and (not values or (node.value is None and not node.text)):
        mistakes.append(Mistake(node.place, "expected a value, a list of values, or a range such as 0..4, got none"))
    return values


def combinations(grid: Mapping[str, Sequence[T]]) -> list[dict[str, T]]:
    """Every combination of the values. The last key changes first. Raises JobDefinitionError for too many."""
    size = math.prod(map(len, grid.values()))
    if size > MOST_MEMBERS:
        raise JobDefinitionError(f"expected a sweep of at most {MOST_MEMBERS} members, got {size}")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


# --- names


def keys_of(members: Iterable[Mapping[str, object]]) -> list[str]:
    """The keys of all members, in the order in which they come."""
    return list(dict.fromkeys(key for values in members for key in values))


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, for names and tables, or the whole key if several end in the same part."""
    keys = list(keys)
    last = {key: key.rpartition(".")[2] for key in keys}
    shared = [part for part in last.values() if list(last.values()).count(part) > 1]
    return {key: key if last[key] in shared else last[key] for key in keys}


def named(members: Sequence[Values]) -> dict[str, Values]:
    """The members by name. A repeated member counts once. Raises JobDefinitionError for two of one name."""
    short, texts = short_keys(keys_of(members)), dict[str, dict[str, str]]()
    found: dict[str, Values] = {}
    for values in members:
        own = {short[key]: text_of(node) for key, node in values.items()}
        name = member_name(own)
        if texts.setdefault(name, own) != own:
            raise JobDefinitionError(
                f"two members would have the name {name!r}: {texts[name]} and {own}. Use values without commas"
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
    """A value as it was written. A list or a mapping in YAML's one-line form."""
    if isinstance(node.value, list):
        return f"[{','.join(map(text_of, node.value))}]"
    if isinstance(node.value, dict):
        return f"{{{','.join(f'{key}:{text_of(item)}' for key, item in node.value.items())}}}"
    return node.text or ("null" if node.value is None else "")


_SAFE = re.compile(r"[^\w.+=@-]+")


def default_name(job: Job, keys: Sequence[str]) -> str:
    """The name of the folder of a sweep without a file: ``train-by-lr-seed``, the same for the same keys."""
    return _SAFE.sub("-", f"{job.name}-by-{'-'.join(keys)}")[:120]


# --- definitions

KEYS = ("job", "grid", "members")


@dataclass(frozen=True)
class Definition:
    """A sweep as its file describes it. ``job``: the file of the job definition. ``section``: the key that holds it
    there, None if it is the whole file. ``members``: the values of each."""

    job: Path
    section: str | None
    members: list[Values]


def is_sweep(path: Path) -> bool:
    """Whether a YAML file describes a sweep, and no job. Raises JobDefinitionError if it cannot be read."""
    return bool(file_fields(path, []).keys() & {*KEYS})


def read_definition(path: Path) -> Definition:
    """Reads SWEEP.yaml. A job's path in it is relative to its folder. Raises JobDefinitionError for all mistakes."""
    mistakes: list[Mistake] = []
    fields = file_fields(path, mistakes)
    check_keys(fields, KEYS, mistakes)
    place, job = Place(str(path)), get(fields, "job")
    if job is None or job.value is None or isinstance(job.value, list):
        wrong = "expected job: JOB.yaml, or job: with the keys of a job definition"
        mistakes.append(Mistake(job.place if job else place, wrong))
    elif not isinstance(job.value, dict) and not os.path.isfile(path.parent / job.text):  # noqa: PTH113
        mistakes.append(Mistake(job.place, why_no_file("job", job.text, path.parent)))
    grid, listed = get(fields, "grid"), get(fields, "members")
    if (grid is None) == (listed is None):
        mistakes.append(Mistake(place, "expected either grid: {KEY: [VALUES]} or members: [{KEY: VALUE}]"))
    members = [*_of_grid(grid, mistakes), *_of_list(listed, mistakes)]
    if not members and not mistakes:
        mistakes.append(Mistake(place, "this sweep has no members"))
    raise_mistakes(mistakes)
    assert job is not None
    if isinstance(job.value, dict):
        return Definition(path, "job", members)
    return Definition(path.parent / job.text, None, members)


def of_options(texts: Sequence[str]) -> list[Values]:
    """The combinations of ``--sweep lr=1e-3,1e-4`` and ``--sweep seed=0..4``. Raises UsageError for all mistakes."""
    grid: dict[str, Node] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not (key and equals and values):
            raise UsageError(f"--sweep {text}: expected KEY=VALUE,VALUE or KEY=0..4, such as lr=1e-3,1e-4")
        if key in grid:
            raise UsageError(f"--sweep {text}: {key} is given twice. Give all its values at once")
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
        raise UsageError(
            "this sweep has no members, or an empty one. Expected a mapping of keys to values, or a list of mappings"
        )
    return members


def nodes_of(members: Iterable[Mapping[str, Any]]) -> list[Values]:
    """The values as nodes, for names and job definitions.

    Raises UsageError for a value whose text differs between processes.
    """
    for values in members:
        if wrong := [key for key, value in values.items() if not _is_plain(value)]:
            key = wrong[0]
            raise UsageError(
                f"{key}={values[key]!r:.80}: expected numbers, text or lists of them, because the run's name contains "
                "the values. Sweep a name or an index, and look the object up in the function"
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
        mistakes.append(Mistake(listed.place, f"members: expected a list of mappings, got {listed.quoted}"))
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


_ARGUMENT = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


def jobs_of(base: Job, members: Sequence[Values]) -> list[Job]:
    """The job of each member: ``base`` with its values. A JobDefinitionError lists all mistakes."""
    mistakes = [*_wrong_keys(members, bool(base.hydra)), *_wrong_arguments(members, bool(base.hydra))]
    raise_mistakes(mistakes)
    changes = [{key: node for key, node in values.items() if not argument_of(key)} for values in members]
    jobs = [
        replace(job, args=with_overrides(job.args, _overrides(values)) if job.hydra else (*job.args, *_words(values)))
        for job, values in zip(variants(base, changes), members, strict=True)
    ]
    _check_own_checkpoints(jobs)
    return jobs


def _check_own_checkpoints(jobs: Sequence[Job]) -> None:
    """Members whose scripts save to the same place would continue from each other's checkpoints."""
    patterns = [pattern for job in jobs if job.resume for pattern in job.resume.checkpoint]
    shared = [one for one in patterns if "run_dir" not in program.placeholders_in(one) and patterns.count(one) > 1]
    if shared:
        raise JobDefinitionError(
            f"resume.checkpoint: {shared[0]!r} is the same for several members, which would continue from each other's "
            "checkpoints. Save below {run_dir}, and begin the pattern with it"
        )


def argument_of(key: str) -> str | None:
    """The name of the script's argument that a key stands for. None for a key of the job definition."""
    if key.startswith("args."):
        return key.removeprefix("args.")
    return None if key.partition(".")[0] in JOB_KEYS else key


def _words(values: Values) -> Iterator[str]:
    """The script's arguments: ``--lr 1e-3``. true becomes the option alone, and false and null omit it."""
    for key, node in values.items():
        name = argument_of(key)
        if name is None or node.value is None or node.value is False:
            continue
        option = f"-{name}" if len(name) == 1 else f"--{name}"
        if node.value is True:
            yield option
        elif node.text.startswith("-"):  # argparse would take -x for an option
            yield f"{option}={node.text}"
        else:
            yield option
            yield node.text


def _overrides(values: Values) -> Iterator[str]:
    """The same for a Hydra app: ``model.lr=1e-3``."""
    for key, node in values.items():
        if name := argument_of(key):
            yield f"{name}={program.hydra_value(node)}"


def _wrong_keys(members: Sequence[Values], hydra: bool) -> Iterator[Mistake]:
    first = {key: node for values in reversed(members) for key, node in values.items()}
    for key, node in first.items():
        name, top = argument_of(key), key.partition(".")[0]
        if is_secret(key):
            yield Mistake(
                node.place, f"{key}: a secret cannot be swept, because its values would appear in the names of folders"
            )
        elif key == "args":
            yield Mistake(node.place, "args: expected args.NAME, for the script's argument --NAME")
        elif name is not None and not (program.HYDRA_KEY if hydra else _ARGUMENT).fullmatch(name):
            yield Mistake(node.place, f"{key}: expected a key of the job definition or the name of an argument")
        elif name == key and (hint := _meant(top)):
            yield Mistake(node.place, f"{key} is not a key of a job definition. {hint} For --{key}, write args.{key}")


def _meant(key: str) -> str | None:
    """A hint for a key that looks like one of the job definition."""
    if instead := INSTEAD_OF_KEY.get(key.replace("-", "_")):
        return f"{instead[0].upper()}{instead[1:]}."
    candidates = JOB_KEYS.keys() - {"script", "module"}  # --model is an argument of many scripts
    near = difflib.get_close_matches(key, sorted(candidates), 1, cutoff=0.75)
    return f"Did you mean {near[0]}?" if near else None


def _wrong_arguments(members: Sequence[Values], hydra: bool) -> Iterator[Mistake]:
    for values in members:
        for key, node in values.items():
            if argument_of(key) and ((isinstance(node.value, (list, dict)) and not hydra) or "\0" in node.text):
                yield Mistake(node.place, f"{key}: expected a single value for the script's argument")
            elif argument_of(key) and (why := program.wrong_placeholder(node.text)):
                yield Mistake(node.place, f"{key}: {why}")


# --- the record of a sweep


@dataclass(frozen=True)
class Record:
    """What ``sweep.yaml`` holds. ``job``: the definition that the members vary, secrets masked. ``members``: the values
    of each, as text. ``left``: the members that an earlier definition had and the present one has not."""

    job: Job
    members: Mapping[str, Mapping[str, str]]
    left: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def known(self) -> dict[str, Mapping[str, str]]:
        """All members that the sweep has or had."""
        return {**self.members, **self.left}

    def to_yaml(self) -> str:
        """As ``read_record`` reads it."""
        job = "".join(f"  {line}\n" for line in without_secrets(self.job)[0].to_yaml().splitlines())
        named = {"members": self.members, **({"left": self.left} if self.left else {})}
        tables = {key: {name: dict(values) for name, values in table.items()} for key, table in named.items()}
        return f"job:\n{job}{yaml.safe_dump(tables, sort_keys=False, allow_unicode=True, width=2**20)}"


def read_record(folder: Path) -> Record | None:
    """The record of the sweep in a folder, or None if there is no sweep."""
    path = folder / SWEEP_FILE
    if not path.exists():
        return None
    mistakes: list[Mistake] = []
    fields = file_fields(path, mistakes)
    members, left = (_table(get(fields, key), mistakes) for key in ("members", "left"))
    raise_mistakes(mistakes)
    return Record(load_resolved(path, section="job"), members, left)


def _table(node: Node | None, mistakes: list[Mistake]) -> dict[str, dict[str, str]]:
    """Members with their values, as written."""
    rows = {str(name): fields_of(values, mistakes) for name, values in fields_of(node, mistakes).items()}
    return {name: {str(key): text_of(value) for key, value in row.items()} for name, row in rows.items()}


# --- comparison

MemberAndState: TypeAlias = "tuple[Summary, RunState]"
#: States of members that train, or continue once they can.
_UNDER_WAY = ("running", "held", "pending")


@dataclass(frozen=True)
class Comparison:
    """``values``: those of the members, by key (``lr=``, unlike a metric) and run directory. ``steps``: after how many
    steps the metrics are compared. None: each member's newest, because none is under way."""

    values: Mapping[str, Mapping[Path, str]]
    steps: int | None
    members: Sequence[MemberAndState]

    @property
    def sentence(self) -> str:
        """Which metrics are compared, for the user."""
        if self.steps is None:
            return "Metrics: the newest values of each member"
        return f"Metrics after {counted(self.steps, 'step')}, which all members in progress have reached"


def compare(members: Sequence[MemberAndState], metrics: Collection[str]) -> Comparison | None:
    """The members with their metrics at equal steps, or None unless all are members of one sweep."""
    folders = {summary.run.path.parent for summary, _ in members if summary.sweep is not None}
    if len(folders) != 1 or any(summary.sweep is None for summary, _ in members):
        return None
    record = read_record(*folders)
    if record is None:
        return None
    steps = common_steps(members)
    if steps is not None:
        members = [
            (replace(summary, metrics=metrics_after(summary.run, steps, metrics)) if metrics else summary, state)
            for summary, state in members
        ]
    return Comparison(_by_key(record, [summary.run for summary, _ in members]), steps, members)


def common_steps(members: Sequence[MemberAndState]) -> int | None:
    """The most steps that all members under way have done. None if none is. A member that waits for its first attempt
    does not count."""
    done = [summary.step for summary, state in members if state.word in _UNDER_WAY and summary.step is not None]
    return min(done, default=None)


def metrics_after(run: RunDirectory, steps: int, names: Collection[str]) -> dict[str, Any]:
    """The newest values of these metrics after this many steps, as a metrics line."""
    found: dict[str, Any] = {}
    for line in reversed(run.logged()):
        if line["step"] < steps:
            found = {**{name: value for name, value in line.items() if not found or name in names}, **found}
            if all(name in found for name in names):
                break
    return found


def _by_key(record: Record, runs: Sequence[RunDirectory]) -> dict[str, dict[Path, str]]:
    known = record.known
    return {
        f"{name}=": {run.path: known[run.path.name][key] for run in runs if key in known.get(run.path.name, {})}
        for key, name in short_keys(keys_of(known.values())).items()
    }


# --- the best


@dataclass(frozen=True)
class Best:
    """The member with the best value of a metric."""

    run: RunDirectory
    metric: str
    value: float
    smallest: bool

    @property
    def sentence(self) -> str:
        """``smallest loss: 0.12, lr=1e-3``."""
        order = "smallest" if self.smallest else "largest"
        return f"{order} {self.metric}: {self.value:.6g}, {self.run.path.name}"


def metric_of(text: str) -> tuple[str, bool]:
    """The metric in ``accuracy``, ``accuracy max`` or ``loss min``, and whether its smallest value is best."""
    if (found := best_metric(text)) is None:
        raise UsageError(f"--best {text}: expected the name of a metric, optionally with max or min, such as 'f1 max'")
    return found


def best(members: Sequence[MemberAndState], text: str) -> Best:
    """The best member, among those that completed or are under way. Raises UsageError if none has logged the metric."""
    metric, smallest = metric_of(text)
    ranked: list[tuple[float, RunDirectory]] = []
    for summary, state in members:
        value = summary.metrics.get(metric)
        if state.word in ("completed", *_UNDER_WAY) and _is_number(value):
            ranked.append((float(value or 0), summary.run))
    if not ranked:
        names = sorted({name for summary, _ in members for name in summary.metrics} - NOT_METRICS)
        raise UsageError(f"--best {text}: no member has logged {metric}. Logged: {', '.join(names) or 'nothing'}")
    value, run = min(ranked, key=lambda pair: (pair[0] if smallest else -pair[0], pair[1].path.name))
    return Best(run, metric, value, smallest)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)
