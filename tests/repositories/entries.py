"""What is known of each tested repository: one file of ``entries/`` each, and its working copy."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from tests.repositories.data import MAKERS

ENTRIES = Path(__file__).with_name("entries")


class Unusable(Exception):
    """A repository that cannot be tested here, with the reason."""


@dataclass(frozen=True)
class Substitution:
    """A change that small sizes, other versions of torch or a CPU need: ``find`` is a regular expression."""

    file: str
    find: str
    put: str
    why: str = ""


@dataclass(frozen=True)
class Moments:
    """Lines of rank 0's log after which a run is disturbed."""

    before: str
    middle: str
    end: str


@dataclass(frozen=True)
class Repository:
    """One row of the table. In ``job`` and ``substitutions``, ``{data}`` is the folder of the synthetic data."""

    name: str
    url: str
    commit: str
    #: The checkout's name in the folder of checkouts.
    checkout: str
    #: What its README says.
    readme: str
    #: How the tested command differs from it, in words.
    differences: tuple[str, ...]
    #: Python packages that it needs.
    packages: tuple[str, ...]
    #: The maker of its data, in ``data.py``.
    data: str
    #: ``cpu``, or ``stand-in`` for the stand-in GPUs.
    device: str
    #: The job definition without what makes it resume.
    job: dict[str, Any]
    #: The preset, or the keys that make it resume.
    resume: dict[str, Any]
    #: Lines changed in its code so that it resumes; 0 is the aim.
    changed_lines: int
    moments: Moments
    #: Matches a log line per step; its groups number the step over the whole training. Without groups, the lines are
    #: counted.
    step: str
    #: Matches the line with the final metric.
    metric: str
    #: What the metric is, in words.
    metric_name: str = "the last loss"
    #: Its name in the table; default: owner and name.
    title: str = ""
    #: The folder that the command runs in.
    folder: str = "."
    #: Whether it runs in an empty folder instead, because it writes to the current one.
    own_folder: bool = False
    #: Copied from the checkout; all of it by default.
    copied: tuple[str, ...] = ()
    substitutions: tuple[Substitution, ...] = ()
    #: Lines of code with which it loses no step.
    no_step_lost: tuple[Substitution, ...] = ()
    #: How many lines match each step, where several processes print to one log.
    lines_per_step: int = 1
    #: Files of the data that are put into the copy.
    placed: dict[str, str] = field(default_factory=dict)
    #: Whether two undisturbed runs give the same metric.
    repeatable: bool = True
    #: What else was seen.
    notes: tuple[str, ...] = ()
    #: What is different in the job when it is rehearsed.
    rehearsal: dict[str, Any] = field(default_factory=dict)
    #: What a preemption costs by its own means, and why, read in its code.
    loses: str = ""

    @classmethod
    def read(cls, path: Path) -> Repository:
        """Raises ValueError with the file's name for unknown, missing or wrong keys."""
        given = yaml.safe_load(path.read_text())
        known = {item.name for item in fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"{path.name}: unknown keys: {', '.join(unknown)}")
        lists = {name: tuple(given[name]) for name in ("differences", "packages", "copied", "notes") if name in given}
        for name in ("substitutions", "no_step_lost"):
            given[name] = tuple(Substitution(**entry) for entry in given.get(name, ()))
        given["moments"] = Moments(**given["moments"])
        made = cls(name=path.stem, **{**given, **lists})
        for expression in (made.step, made.metric, made.moments.before, made.moments.middle, made.moments.end):
            re.compile(expression)
        if made.data not in MAKERS:
            raise ValueError(f"{path.name}: data: {made.data} is none of {', '.join(MAKERS)}")
        return made

    @property
    def lines_of_yaml(self) -> int:
        """The lines that the job definition needs so that the run resumes."""
        return len(yaml.safe_dump(self.resume, default_flow_style=None, width=1000).splitlines())

    @property
    def preset(self) -> str | None:
        """The preset that it names."""
        named = self.resume.get("resume")
        return named if isinstance(named, str) else None


def read_all() -> list[Repository]:
    return [Repository.read(path) for path in sorted(ENTRIES.glob("*.yaml"))]


@dataclass(frozen=True)
class Copy:
    """A repository's working copy with its data, ready to run."""

    repository: Repository
    root: Path

    @property
    def code(self) -> Path:
        """The folder that the command runs in."""
        return self.root / "code" / self.repository.folder

    @property
    def data(self) -> Path:
        return self.root / "data"


def prepare(repository: Repository, checkouts: Path, root: Path) -> Copy:
    """Copies the checkout, makes its data and carries out the substitutions. Raises Unusable."""
    source = checkouts / repository.checkout
    if not source.is_dir():
        raise Unusable(f"no checkout {source.name} in {checkouts}")
    if (source / ".git").exists():
        command = ["git", "-C", str(source), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if commit != repository.commit:
            raise Unusable(f"{source.name} is at {commit[:10]}, not at {repository.commit[:10]}")
    shutil.rmtree(root, ignore_errors=True)
    copy = Copy(repository, root)
    for part in repository.copied or (".",):
        target = root / "code" / part
        if (source / part).is_dir():
            ignored = shutil.ignore_patterns(".git", "*.ipynb", "__pycache__")
            shutil.copytree(source / part, target, ignore=ignored, dirs_exist_ok=True, symlinks=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / part, target)
    MAKERS[repository.data](copy.data)
    for name, place in repository.placed.items():
        target = root / "code" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (copy.data / name).is_dir() else shutil.copy)(copy.data / name, target)
    _substitute(copy, repository.substitutions)
    return copy


def with_lines(copy: Copy) -> int:
    """Adds the lines with which the repository loses no step; returns how many, without ``import clusterddp``."""
    changes = copy.repository.no_step_lost
    paths = {copy.root / "code" / change.file for change in changes}
    before = {path: path.read_text().splitlines() for path in paths}
    _substitute(copy, changes)
    lines = [line for path in paths for line in difflib.ndiff(before[path], path.read_text().splitlines())]
    added = [line[2:].strip() for line in lines if line.startswith("+ ")]
    return sum(bool(line) and not line.startswith("import clusterddp") for line in added)


def _substitute(copy: Copy, changes: Iterable[Substitution]) -> None:
    for change in changes:
        path = copy.root / "code" / change.file
        text, found = re.subn(change.find, change.put.replace("{data}", str(copy.data)), path.read_text())
        if not found:
            raise Unusable(f"{copy.repository.name}: {change.file} has no match of {change.find!r}")
        path.write_text(text)
