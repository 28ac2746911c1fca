"""``clusterddp wait``: waits until runs are over, and reports the outcome as the exit code. It does not touch them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from clusterddp.errors import TIMED_OUT, WAITED, RunDirectoryError
from clusterddp.events import how_it_ended, is_unconfirmed
from clusterddp.reporter import show
from clusterddp.rundir.files import exists
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import summarize
from clusterddp.slurm.commands import TIMEOUT_S
from clusterddp.slurm.pace import QUIET_S, SILENT_S, Activity, Pace
from clusterddp.slurm.run_states import RunState, run_states

#: Seconds between two looks at the runs' files.
LOOK_S = 1.0
#: Seconds for which a run without an outcome must be stopped, or unknown, to have ended. A job may be submitted, or an
#: outcome be written, between a look at the files and the controller's answer, and the controller may be restarting.
SETTLE_S, UNKNOWN_S = 3.0, 300.0
#: Seconds for which a shared disk may hide an outcome (NFS: acdirmax is 60 s), with some reserve.
HIDDEN_S = 90.0
_CONTINUES = ("pending", "held", "running")


class _Wait:
    """A run that is waited for."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.activity = Activity(run)
        #: How it ended: completed, or a key of WAITED. None until then.
        self.end: str | None = None
        #: Its state if that may be an end, and the time since then.
        self._doubt: tuple[str, float] | None = None
        #: Who may have trained it when the controller was asked.
        self.claims: tuple[Mapping[str, Any], ...] = ()

    @property
    def about_to_end(self) -> bool:
        """Whether the controller's next answer may end the wait."""
        return self.end is None and self._doubt is not None and self._doubt[0] != "unknown"

    @property
    def in_doubt(self) -> bool:
        """Whether the run is not known to continue."""
        return self._doubt is not None

    def newly_unknown(self, state: RunState) -> bool:
        """Whether the run's state is unknown, and was not at the last look."""
        return state.word == "unknown" and (self._doubt is None or self._doubt[0] != "unknown")

    def look(self) -> None:
        """Reads the run's outcome."""
        with suppress(RunDirectoryError, OSError):  # then its state is unknown
            if (outcome := self.run.outcome()) is not None:
                self._ended("unconfirmed" if is_unconfirmed(outcome) else outcome["state"], how_it_ended(outcome))

    def update(self, state: RunState, now: float) -> None:
        """Takes the run's state at the time ``now``."""
        if state.word in _CONTINUES:
            self._doubt = None
        elif self._doubt is None or self._doubt[0] != state.word:
            self._doubt = (state.word, now)
        elif now - self._doubt[1] >= SETTLE_S and now - self._doubt[1] >= self._settle_s(state):
            self.look()  # the answer may have taken long
            if self.end is not None:
                return
            if summarize(self.run).claims != self.claims:  # the run was submitted again meanwhile
                self._doubt = None
                return
            deleted = state.word == "stopped" and not exists(self.run.path)
            word, reason = ("unknown", "its run directory was deleted") if deleted else (state.word, state.reason)
            self._ended(word, f"{word}: {reason}")

    def _settle_s(self, state: RunState) -> float:
        """Seconds for which the run must be in this state to have ended."""
        if state.word == "unknown":
            return UNKNOWN_S
        with suppress(RunDirectoryError, OSError):
            if self.run.may_be_over(None if state.job is None else state.job.state):
                return HIDDEN_S
        return SETTLE_S

    def _ended(self, word: str, sentence: str) -> None:
        self.end = word
        show(f"{self.run}: {sentence}")


def wait(runs: Sequence[RunDirectory], timeout_s: float | None, for_any: bool) -> int:
    """Waits until all runs, or any of them, are over or stopped. Returns the exit code."""
    waits = [_Wait(run) for run in runs]
    enough = 1 if for_any else len(waits)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pace = Pace()
    while True:
        for one in _left(waits):
            one.look()
        if len(waits) - len(_left(waits)) < enough and pace.due(tuple(one.activity.seen() for one in _left(waits))):
            left_s = TIMEOUT_S if deadline is None else deadline - time.monotonic()
            _ask(_left(waits), pace, min(TIMEOUT_S, max(LOOK_S, left_s)))
            pace.asked(_longest_pause_s(_left(waits)))
        left = _left(waits)
        if len(waits) - len(left) >= enough:
            return _exit_code({one.end for one in waits})
        if deadline is not None and time.monotonic() >= deadline:
            names = ", ".join([*(one.run.path.name for one in left[:5]), *(["..."] if len(left) > 5 else [])])
            show(f"timed out: {len(left)} of {len(waits)} runs have not ended ({names})")
            return TIMED_OUT
        time.sleep(LOOK_S)


def _left(waits: Sequence[_Wait]) -> list[_Wait]:
    return [one for one in waits if one.end is None]


def _longest_pause_s(left: Sequence[_Wait]) -> float:
    """The longest pause until the controller is asked again."""
    if any(one.about_to_end for one in left):
        return LOOK_S
    return SILENT_S if any(one.activity.silent or one.in_doubt for one in left) else QUIET_S


def _ask(left: Sequence[_Wait], pace: Pace, timeout_s: float) -> None:
    """Finds the states of the runs that have not ended, by at most one call of squeue for all."""
    summaries = [summarize(one.run) for one in left]
    states = run_states(summaries, timeout_s=timeout_s, queue=pace)
    for one, summary in zip(left, summaries, strict=True):
        one.claims = summary.claims
    now = time.monotonic()
    if doubts := [state.reason for one, state in zip(left, states, strict=True) if one.newly_unknown(state)]:
        show(f"state unknown, retrying: {doubts[0]}")
    for one, state in zip(left, states, strict=True):
        one.update(state, now)


def _exit_code(ends: Collection[str | None]) -> int:
    """0 if all runs that ended completed, else the code of the worst end."""
    return next((code for word, code in WAITED.items() if word in ends), 0)
