"""What the runs of a rehearsal have in common, whatever starts the script again."""

from __future__ import annotations

import os
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from clusterddp.protocol import REHEARSAL, REHEARSAL_WRITABLE
from clusterddp.rehearsal.confinement import is_available
from clusterddp.rehearsal.disturbances import Disturbance, Script
from clusterddp.rehearsal.facts import Orders
from clusterddp.rehearsal.rank import STACKS
from clusterddp.rehearsal.trial import Start, Stimulus, Trial
from clusterddp.rehearsal.workspace import Workspace

#: Seconds between two looks at the ranks, and between two notices.
LOOK_S, BETWEEN_S = 0.02, 0.15
#: Seconds for the stacks of ranks that are about to be killed.
_STACKS_S = 1.0
#: The most starts after the last disturbance.
MORE_STARTS = 2
#: How much of a rank's standard error is kept.
_OUTPUT_BYTES = 20_000


@dataclass(frozen=True)
class Baseline:
    """What later runs need to know: how many steps precede given weights, and where the undisturbed run ends.

    If the script is not repeatable, no weights are known, and ``last_number`` is that of the last step.
    """

    known: Mapping[str, int] = field(default_factory=dict)
    last: str = ""
    cut: bool = False
    last_number: int | None = None


@dataclass(frozen=True)
class Plan:
    """What happens in one run. ``stimuli``: of its first starts. ``later_ranks``: of all starts after the first one."""

    ranks: int
    stimuli: Sequence[Stimulus] = ()
    baseline: Baseline = field(default_factory=Baseline)
    toggle_workers: bool = False
    later_ranks: int | None = None

    def stimulus(self, index: int) -> Stimulus:
        """How the start with this index is disturbed."""
        return self.stimuli[index] if 0 <= index < len(self.stimuli) else Stimulus()


@dataclass
class Conductor(ABC):
    """Carries out runs of one script in new folders below ``folder``.

    ``steps``: the most steps of a start. ``limit_s``: its most seconds. ``notice``: the signal of a notice.
    """

    folder: Path
    workspace: Workspace
    command: Sequence[str]
    steps: int
    limit_s: float
    notice: signal.Signals = signal.SIGTERM
    #: How many starts there were.
    starts: int = field(default=0, init=False)
    _runs: int = field(default=0, init=False)
    is_supervised: ClassVar[bool]
    #: The disturbances that are not tried with any script, and why.
    not_tried: ClassVar[Mapping[Disturbance, str]] = {}

    def run(self, plan: Plan) -> Trial:
        """One run in a fresh working folder."""
        self._runs += 1
        work = self.folder / f"run-{self._runs}"
        starts = self._carry_out(plan, work, self.workspace.create(work, link=is_available()))
        self.starts += len(starts)
        shutil.rmtree(work, ignore_errors=True)
        return Trial(starts, tuple(plan.stimuli), plan.ranks, self.notice)

    @abstractmethod
    def _carry_out(self, plan: Plan, work: Path, here: Path) -> Sequence[Start]:
        """The starts of a run. ``here``: the folder in ``work`` that the script starts in."""

    @abstractmethod
    def together(
        self, script: Script, wanted: Sequence[Disturbance], notice_s: float
    ) -> Mapping[Disturbance, Stimulus]:
        """The wanted disturbances that one run tries first, one per start."""

    @property
    def orders_file(self) -> Path:
        """The file that ranks read their orders from."""
        return self.folder / "orders.json"

    def facts_file(self, name: str) -> str:
        """The file for a rank's facts, with ``{rank}``. ``name``: of the start, or of the run with ``{attempt}``."""
        return str(self.folder / f"facts-{name}-{{rank}}")

    def orders(self, plan: Plan, stimulus: Stimulus, known: Mapping[str, int], name: str) -> Orders:
        """What the ranks of a start do. ``name``: as for ``facts_file``."""
        return Orders(
            facts=self.facts_file(name),
            socket=str(self.folder / "socket"),
            steps=self.steps,
            last=plan.baseline.last,
            cut=plan.baseline.cut,
            place=None if stimulus.full_disk else stimulus.place,
            after=stimulus.after,
            full_disk=stimulus.full_disk,
            toggle_workers=plan.toggle_workers,
            supervised=self.is_supervised,
            last_number=plan.baseline.last_number,
            delay_s=stimulus.delay_s,
            skipped_saves=stimulus.skipped_saves,
            known=known,
        )

    def confined(self) -> dict[str, str]:
        """The variables of an observed rank that keep what it does inside the folder of the rehearsal."""
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        writable = (self.folder, "/dev", "/proc", Path.home() / ".cache")
        return {
            "TMPDIR": str(temporary),
            "WANDB_MODE": "offline",
            "PYTHONDONTWRITEBYTECODE": "1",
            REHEARSAL: str(self.orders_file),
            REHEARSAL_WRITABLE: ":".join(map(str, writable)),
        }


def stacks_of(pids: Mapping[int, int], logs: Mapping[int, Path]) -> dict[int, str]:
    """The stacks that ranks print, by rank. Ranks that have ended have none."""
    sizes = {rank: logs[rank].stat().st_size for rank in pids}
    alive = []
    for rank, pid in pids.items():
        with suppress(ProcessLookupError):
            os.kill(pid, STACKS)
            alive.append(rank)
    deadline = time.monotonic() + _STACKS_S
    while time.monotonic() < deadline and any(logs[rank].stat().st_size == sizes[rank] for rank in alive):
        time.sleep(LOOK_S)
    return {rank: logs[rank].read_bytes()[sizes[rank] :].decode(errors="replace") for rank in alive}


def end_of(log: Path) -> str:
    """The end of what a rank has printed."""
    return log.read_bytes()[-_OUTPUT_BYTES:].decode(errors="replace")
