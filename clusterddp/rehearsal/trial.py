"""One run of a rehearsal, as it was observed: its starts, with what each rank reported and how it ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from clusterddp.rehearsal.facts import (
    Cut,
    Fact,
    HandlerSet,
    Loaded,
    Place,
    Reached,
    Renamed,
    SaveBegan,
    Saved,
    States,
    StepMade,
    weights_in,
)

_F = TypeVar("_F", bound=Fact)


@dataclass(frozen=True)
class Stimulus:
    """How one start is disturbed: at ``place``, not before ``after`` steps of the whole run.

    ``notices``: TERMs to every rank, none for a kill. ``notice_s``: seconds until all are killed.
    ``too_short``: a save takes longer than that on purpose. ``kill``: KILL to
    rank 0, without a notice. ``time_limit``: the job ends in any case, and the next start is a new job. ``delay_s``:
    from the ``place`` to the disturbance. ``skipped_saves``: the files of a checkpoint that are saved before the one in
    whose save the disturbance comes. ``full_disk``: the save fails, and nothing else happens. ``seconds`` and
    ``line`` are the user's own moment in place of ``place``: after so many seconds, or once a rank prints a line that
    matches.
    """

    place: Place | None = None
    after: int = 0
    notices: int = 1
    notice_s: float = 20.0
    too_short: bool = False
    kill: bool = False
    full_disk: bool = False
    time_limit: bool = False
    delay_s: float = 0.0
    skipped_saves: int = 0
    seconds: float | None = None
    line: re.Pattern[str] | None = None

    def is_due(self, elapsed_s: float, has_printed: Callable[[re.Pattern[str]], bool]) -> bool:
        """Whether the user's own moment has come."""
        is_time = self.seconds is not None and elapsed_s >= self.seconds
        return is_time or (self.line is not None and has_printed(self.line))


@dataclass(frozen=True)
class Saving:
    """A save of one rank. ``whole``: it has ended without an error."""

    rank: int
    began: SaveBegan
    ended: Saved | None

    @property
    def whole(self) -> bool:
        """Whether it has ended without an error."""
        return self.ended is not None and not self.ended.error


@dataclass(frozen=True)
class Start:
    """One start of all ranks.

    ``codes``: exit codes by rank, negative for a signal. ``disturbed``: whether the stimulus was given.
    ``exit_s``: from the notice to the end of the last rank. ``killed``: the ranks that were still alive at the end of
    the notice, with their ``stacks``. ``output``: the end of each rank's standard error. ``requeued``: the script
    itself has called scontrol or sbatch. ``files``: sizes in the working folder afterwards, by path. ``timed_out``: it
    did not end. ``printed``: the end of rank 0's standard output. ``leftover``: whether processes outlived their rank.
    ``completed``: whether clusterddp has recorded the run as completed. None without clusterddp, where the exit codes
    decide. ``inexact``: the reasons that clusterddp has recorded why its resume is not exact.
    """

    facts: Mapping[int, Sequence[Fact]]
    codes: Mapping[int, int]
    duration_s: float
    disturbed: bool = False
    exit_s: float | None = None
    killed: Sequence[int] = ()
    stacks: Mapping[int, str] = field(default_factory=dict)
    output: Mapping[int, str] = field(default_factory=dict)
    printed: str = ""
    requeued: bool = False
    files: Mapping[str, int] = field(default_factory=dict)
    timed_out: bool = False
    leftover: bool = False
    completed: bool | None = None
    inexact: Sequence[str] = ()

    def of(self, kind: type[_F], rank: int = 0) -> list[_F]:
        """The facts of a kind of one rank."""
        return [fact for fact in self.facts.get(rank, ()) if isinstance(fact, kind)]

    def steps(self, rank: int = 0) -> list[StepMade]:
        """The steps that the rank has made."""
        return self.of(StepMade, rank)

    def states(self) -> list[States]:
        """The script's own objects before each step, on rank 0."""
        return self.of(States)

    @property
    def is_cut(self) -> bool:
        """Whether the rehearsal itself ended this start, after its steps."""
        return bool(self.of(Cut))

    @property
    def is_done(self) -> bool:
        """Whether all ranks have ended by themselves, with success, and the job counts as completed."""
        if self.completed is not None:
            return self.completed
        return all(code == 0 for code in self.codes.values()) and not self.killed and not self.timed_out

    @property
    def reached(self) -> Reached | None:
        """Where rank 0 was disturbed."""
        return next(iter(self.of(Reached)), None)

    def saves(self) -> Iterator[Saving]:
        """The saves of all ranks, those of a rank in their order."""
        for rank in self.facts:
            open_saves: list[SaveBegan] = []
            for fact in self.facts[rank]:
                if isinstance(fact, SaveBegan):
                    open_saves.append(fact)
                elif isinstance(fact, Saved):
                    began = next((one for one in reversed(open_saves) if one.file == fact.file), None)
                    if began is not None:
                        open_saves.remove(began)
                        yield Saving(rank, began, fact)
            yield from (Saving(rank, began, None) for began in open_saves)

    def loads(self, rank: int = 0) -> list[Loaded]:
        """What the rank has loaded before its first step."""
        return [fact for fact in self.of(Loaded, rank) if fact.local == 0]

    def handlers(self, rank: int) -> list[HandlerSet]:
        """The signal handlers that were set, in their order."""
        return self.of(HandlerSet, rank)

    def renames(self, rank: int = 0) -> list[Renamed]:
        """Files that got another name."""
        return self.of(Renamed, rank)


@dataclass(frozen=True)
class Trial:
    """A run: all its starts in the same working folder.

    ``stimuli``: how its first starts were disturbed. ``notice``: the signal of their notices.
    """

    starts: Sequence[Start]
    stimuli: Sequence[Stimulus] = ()
    ranks: int = 2
    notice: signal.Signals = signal.SIGTERM

    @property
    def last(self) -> Start:
        """The last start."""
        return self.starts[-1]

    def weights(self) -> dict[str, int]:
        """How many steps precede the first step that begins with these weights."""
        found: dict[str, int] = {}
        for start in self.starts:
            found = weights_in(start.steps()) | found
        return found


@dataclass(frozen=True)
class Undisturbed:
    """The two undisturbed runs."""

    one: Trial
    other: Trial

    @property
    def start(self) -> Start:
        """The only start of the first one."""
        return self.one.last
