"""A case of the GPU check: what it shows, how long it may take, and what it may use."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from clusterddp.protocol import PREEMPT
from clusterddp.rundir.run_directory import RunDirectory
from tests.waiting import story

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "benchmarks" / "scripts"
TRAINING = SCRIPTS / "gpu_training.py"
#: The most characters of what a failed case's run left behind.
STORY = 6000

Finding = tuple[str, dict[str, Any]]


class NotRun(Exception):
    """Why a case makes no sense here."""


@dataclass(frozen=True)
class Sizes:
    """How large the cases are. A result with values other than these is marked as one of reduced size."""

    steps: int = 300
    """Steps of a run that is compared with another one."""
    megabytes: int = 256
    """The state that the cases ``snapshot``, ``costs`` and ``graph`` save."""
    pairs: int = 20
    """Pairs of measurements in ``costs``, of as many steps each."""
    held_gb: float = 70.0
    """Device memory that a process holds when it is killed, and that its restart allocates."""
    state_gb: float = 20.0
    """The state of ``large-state``: parameters and AdamW's moments."""
    tensors: int = 3000
    """The tensors of that state."""

    def reduced(self) -> list[str]:
        """The sizes that are not the full ones, such as ``steps=60``."""
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        return [f"{name}={getattr(self, name):g}" for name in changed]


#: For a stand-in, on which the cases show that they work, and nothing about speed.
SMALL = Sizes(steps=100, megabytes=4, pairs=3, held_gb=0.5, state_gb=0.03, tensors=30)


@dataclass(frozen=True)
class Speeds:
    """What was measured on this machine before the first case; GB are 10^9 bytes."""

    start_s: float
    """From the start of a Python process to its first all-reduce over NCCL."""
    copy: float
    """GB/s from the device into pinned memory."""
    fill: float
    """GB/s of fresh host memory that is filled and pinned."""
    disk: float
    """GB/s of a file that is written and synced."""


@dataclass
class Lab:
    """Where one case runs: a process and a folder of its own. ``shared`` has runs that several cases compare with."""

    sizes: Sizes
    ranks: int
    stand_in: bool
    folder: Path
    shared: Path
    backend: str
    """torch.compile's."""
    runs: list[RunDirectory] = field(default_factory=list)

    def need_gpu(self, reason: str) -> None:
        """NotRun, with the reason, on a stand-in."""
        if self.stand_in:
            raise NotRun(reason)

    def train(self, *script: object, **options: Any) -> RunDirectory:
        """One whole run; AssertionError, with the end of what the command said, if it does not complete."""
        run, process = self.start(*script, **options)
        code = process.wait()
        assert code == 0, f"exit code {code}: {self.said(run)}"
        return run

    def start(
        self,
        *script: object,
        program: Path = TRAINING,
        ranks: int | None = None,
        nodes: int = 1,
        options: Sequence[object] = (),
        environment: Mapping[str, str] | None = None,
        preempted: Sequence[int] = (),
        path: Path | None = None,
    ) -> tuple[RunDirectory, subprocess.Popen[bytes]]:
        """A run under ``submit --local``, as a user's: with supervisor, watchdog and writer. ``preempted``: after these
        steps, one an attempt."""
        run = RunDirectory(path or self.folder / f"run-{len(self.runs)}")
        self.runs.append(run)
        shape = ["--device", "cuda", "--nodes", nodes, "--gpus", ranks or self.ranks, *options]
        submit = [sys.executable, "-m", "clusterddp", "submit", program, "--local", "--run-dir", run]
        with self._log(run).open("wb") as log:
            how: dict[str, Any] = {
                "cwd": REPOSITORY,
                "env": {**os.environ, **(environment or {}), PREEMPT: json.dumps(preempted)},
            }
            command = list(map(str, [*submit, *shape, "--", *script]))
            return run, subprocess.Popen(command, stdout=log, stderr=log, **how)

    def said(self, run: RunDirectory) -> str:
        """The end of what the command said."""
        return self._log(run).read_text(errors="replace").strip()[-1500:]

    def _log(self, run: RunDirectory) -> Path:
        return self.folder / f"{run.path.name}.log"

    def reference(self, *script: object, **options: Any) -> RunDirectory:
        """An uninterrupted run. The first case that asks for one with these arguments makes it."""
        name = hashlib.sha256(repr((script, options)).encode()).hexdigest()[:12]
        run = RunDirectory(self.shared / f"reference-{name}")
        outcome = run.outcome() if run.path.exists() else None
        if outcome is not None and outcome.completed:
            return run
        return self.train(*script, path=run.path, **options)

    def piece(self, name: str, *arguments: object, program: Path = SCRIPTS / "gpu_pieces.py") -> dict[str, Any]:
        """What a function of a script finds, in a single process without a supervisor."""
        out = self.folder / f"{name}.json"
        command = [sys.executable, program, name, out, *arguments]
        done = subprocess.run(
            list(map(str, command)), cwd=self.folder, capture_output=True, text=True, errors="replace"
        )
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}"
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def story(self) -> str:
        """What the newest run left behind."""
        return story(self.runs[-1])[-STORY:] if self.runs and self.runs[-1].path.exists() else ""


def _nothing(_: Sizes) -> float:
    return 0.0


@dataclass(frozen=True)
class Case:
    """A name, what a pass shows, and the function that returns the finding in one sentence, with its figures.

    The function raises AssertionError if something is wrong, and NotRun where it makes no sense. It starts ranks
    ``starts`` times one after another, takes ``work_s`` seconds besides, and moves ``moved`` GB from device to disk.
    """

    name: str
    shows: str
    act: Callable[[Lab], Finding]
    starts: int = 1
    work_s: float = 5.0
    moved: Callable[[Sizes], float] = _nothing

    def expected_s(self, speeds: Speeds, sizes: Sizes) -> float:
        """How long it takes on a machine with these speeds."""
        per_gb = 1 / speeds.copy + 1 / speeds.fill + 1 / speeds.disk
        return self.starts * (speeds.start_s + 2) + self.work_s + self.moved(sizes) * per_gb

    def bound_s(self, speeds: Speeds, sizes: Sizes) -> float:
        """When it is killed."""
        return 10 + 3 * self.expected_s(speeds, sizes)


@dataclass
class Result:
    """``state``: passed, failed, or not run. ``words``: the finding in one sentence; ``figures``: what it rests on.

    ``counts``: it is of a GPU, at full size; otherwise ``on`` and ``reduced`` say what it is of.
    """

    name: str
    state: str
    words: str
    figures: dict[str, Any] = field(default_factory=dict)
    story: str = ""
    seconds: float = 0.0
    bound_s: float = 0.0
    on: str = ""
    reduced: list[str] = field(default_factory=list)
    counts: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def carry_out(case: Case, lab: Lab) -> Result:
    """The case's result, whatever it raises."""
    try:
        words, figures = case.act(lab)
    except NotRun as reason:
        return Result(case.name, "not run", str(reason))
    except Exception as error:
        words = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        return Result(case.name, "failed", words, story=lab.story())
    return Result(case.name, "passed", words, figures)
