"""The disturbances of a rehearsal, and where each takes place in a script, given its undisturbed run."""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from clusterddp.rehearsal.comparison import epoch_starts
from clusterddp.rehearsal.facts import Evaluated, Place, SaveBegan
from clusterddp.rehearsal.trial import Start, Stimulus


class Disturbance(enum.Enum):
    """What a rehearsal does to a run. The value is its name on the command line and in rehearsal.json."""

    START = "start"
    FIRST_STEPS = "first-steps"
    STEP = "step"
    EVALUATION = "evaluation"
    SAVE = "save"
    AFTER_SAVE = "after-save"
    EPOCH_END = "epoch-end"
    STRETCH = "stretch"
    LAST_STEP = "last-step"
    TWO_NOTICES = "two-notices"
    SHORT_NOTICE = "short-notice"
    TIME_LIMIT = "time-limit"
    KILL = "kill"
    FULL_DISK = "full-disk"
    WORKERS = "workers"
    RANKS = "ranks"
    AT = "at"

    @property
    def words(self) -> str:
        """For a table."""
        return _WORDS[self]


_WORDS = {
    Disturbance.START: "a notice while the script starts",
    Disturbance.FIRST_STEPS: "a notice before the first checkpoint",
    Disturbance.STEP: "a notice in a step",
    Disturbance.EVALUATION: "a notice in an evaluation",
    Disturbance.SAVE: "a notice in a save",
    Disturbance.AFTER_SAVE: "a notice right after a save",
    Disturbance.EPOCH_END: "a notice at the end of an epoch",
    Disturbance.STRETCH: "a notice in the longest stretch without steps",
    Disturbance.LAST_STEP: "a notice after the last step",
    Disturbance.TWO_NOTICES: "two notices in a row",
    Disturbance.SHORT_NOTICE: "a notice shorter than a save",
    Disturbance.TIME_LIMIT: "the time limit, and then a new job",
    Disturbance.KILL: "a rank is killed in a save",
    Disturbance.FULL_DISK: "the disk is full at a save",
    Disturbance.WORKERS: "a notice in a step, with the other choice of loader workers",
    Disturbance.RANKS: "a notice in a step, then another number of ranks",
    Disturbance.AT: "a notice at the moment of --at",
}
#: These are tried in one run first. If its result is right, each of them has passed.
TOGETHER = (
    Disturbance.STEP,
    Disturbance.EVALUATION,
    Disturbance.SAVE,
    Disturbance.AFTER_SAVE,
    Disturbance.EPOCH_END,
    Disturbance.TWO_NOTICES,
)
_PLACES = {
    Disturbance.EVALUATION: Place.EVALUATION,
    Disturbance.SAVE: Place.SAVE,
    Disturbance.AFTER_SAVE: Place.AFTER_SAVE,
    Disturbance.EPOCH_END: Place.EPOCH_END,
    Disturbance.START: Place.START,
    Disturbance.STRETCH: Place.STRETCH,
    Disturbance.FIRST_STEPS: Place.FIRST_STEPS,
    Disturbance.LAST_STEP: Place.LAST_STEP,
}
#: Slurm's default between TERM and KILL at the time limit.
KILL_WAIT_S = 30.0
#: A stretch without steps is notable if it takes this many times the median step, and so many seconds.
_TIMES_STEP, _LEAST_STRETCH_S = 5.0, 0.2
#: The least notice, and the share of a save, of a notice that is too short.
_LEAST_NOTICE_S, _SHARE = 0.02, 0.5


@dataclass(frozen=True)
class Script:
    """What the undisturbed run shows: after how many steps it saves, evaluates and ends an epoch, how long a save
    takes, and whether the rehearsal has cut it off. ``stretch``: the steps before its longest stretch without any, and
    the seconds of that stretch, if it is notable. ``signals``: those that a function of any rank handles.
    ``files``: how many files rank 0 saves after so many steps, where there are several."""

    steps: int
    saves: Sequence[int]
    evaluations: Sequence[int]
    epochs: Sequence[int]
    save_s: float
    loads: bool
    cut: bool
    stretch: tuple[int, float] | None = None
    signals: Collection[int] = ()
    files: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, start: Start, again: Start | None = None) -> Script:
        """Of an undisturbed run. ``again``: of a second one, which must have the stretch, too."""
        steps = start.steps()
        saves = sorted({one.local for rank in start.facts for one in start.of(SaveBegan, rank)})
        lengths = [saving.ended.seconds for saving in start.saves() if saving.ended]
        loads = any(made.samples for made in steps)
        return cls(
            len(steps),
            saves,
            sorted({one.local for one in start.of(Evaluated) if one.local}),
            [number for number in epoch_starts(steps) if number],
            max(lengths, default=0.0),
            loads,
            start.is_cut,
            _longest_stretch(start, again or start),
            {one.signal for rank in start.facts for one in start.handlers(rank) if one.is_function},
            {after: n for after, n in Counter(one.local for one in start.of(SaveBegan)).items() if n > 1},
        )

    def why_not(self, disturbance: Disturbance) -> str | None:
        """Why a disturbance cannot be tried, or None."""
        within = f"within {self.steps} steps"
        if disturbance in (Disturbance.SAVE, Disturbance.AFTER_SAVE, Disturbance.SHORT_NOTICE, Disturbance.FULL_DISK):
            return None if self._last_save() else f"the script saves no checkpoint before its last step {within}"
        if disturbance is Disturbance.EVALUATION:
            return None if self.evaluations else f"no evaluation was seen {within}"
        if disturbance is Disturbance.EPOCH_END:
            return None if self.epochs else f"no epoch ends {within}"
        if disturbance is Disturbance.STRETCH:
            return None if self.stretch else f"no long stretch without steps was seen {within}"
        if disturbance is Disturbance.LAST_STEP:
            return "the rehearsal ends the script before its last step" if self.cut else None
        if disturbance is Disturbance.WORKERS:
            return None if self.loads else "no loader with a map-style dataset was seen"
        return None

    def _last_save(self) -> list[int]:
        return [number for number in self.saves if 0 < number < self.steps]

    def stimuli(self, disturbance: Disturbance, notice_s: float) -> list[Stimulus]:
        """How this disturbance takes place, alone, one per start. Of a checkpoint with several files, the first and
        the last one are interrupted."""
        first = self.stimulus(disturbance, notice_s)
        files = self.files.get(first.after, 1)
        if disturbance is Disturbance.KILL and first.place is Place.SAVE and files > 1:
            return [first, replace(first, skipped_saves=files - 1)]
        return [first]

    def stimulus(self, disturbance: Disturbance, notice_s: float) -> Stimulus:
        """Where and how this disturbance takes place, alone."""
        place = _PLACES.get(disturbance, Place.STEP)
        if disturbance is Disturbance.FULL_DISK:
            return Stimulus(Place.SAVE, self._second(self._last_save()), 0, notice_s, full_disk=True)
        if disturbance is Disturbance.SHORT_NOTICE:
            short = max(_LEAST_NOTICE_S, _SHARE * self.save_s)
            return Stimulus(Place.STEP, self._step(), 1, short, too_short=True)
        if disturbance is Disturbance.KILL:
            saves = self._last_save()
            place, after = (Place.SAVE, self._second(saves)) if saves else (Place.STEP, self._step())
            return Stimulus(place, after, 0, notice_s, kill=True)
        if disturbance is Disturbance.TIME_LIMIT:
            return Stimulus(Place.STEP, self._step(), 1, max(notice_s, KILL_WAIT_S), time_limit=True)
        if disturbance is Disturbance.STRETCH and self.stretch:
            after, length_s = self.stretch
            return Stimulus(place, after, 1, notice_s, delay_s=length_s / 2)
        return Stimulus(place, self._after(place), 2 if disturbance is Disturbance.TWO_NOTICES else 1, notice_s)

    def _after(self, place: Place) -> int:
        if place in (Place.START, Place.FIRST_STEPS):
            return 0
        if place in (Place.SAVE, Place.AFTER_SAVE):
            return self._second(self._last_save())
        if place is Place.EVALUATION:
            after_save = [number for number in self.evaluations if number > min(self.saves, default=0)]
            inside = [number for number in after_save or self.evaluations if number < self.steps]
            return (inside or list(self.evaluations))[0]
        if place is Place.EPOCH_END:
            return self._second(self.epochs)
        return self._step() if place is Place.STEP else 0

    @staticmethod
    def _second(numbers: Sequence[int]) -> int:
        """The second one, as the first one is then there to fall back on."""
        return numbers[min(1, len(numbers) - 1)] if numbers else 0

    def _step(self) -> int:
        """A step about the middle, after a checkpoint, and not beside one, so that a lost step shows."""
        first = min(self._last_save(), default=0)
        middle = max(self.steps // 2, first + 1)
        saves = set(self.saves)
        free = [n for n in range(middle, self.steps - 2) if not saves & {n - 1, n, n + 1}]
        free = free or [n for n in range(middle, self.steps) if n not in saves]
        return min(free, default=min(middle, max(1, self.steps - 1)))

    def in_order(self, disturbances: Sequence[Disturbance], notice_s: float) -> dict[Disturbance, Stimulus]:
        """The stimuli of one run with these, one a start, in the order in which the run comes to their places.

        Each next one is that whose place comes first, unless another one would then have no chance left. Those that may
        be in any step come between them. Those without a chance are left out. A full disk does not end a start, and
        comes last.
        """
        saves = self._last_save()
        chances = {
            Disturbance.START: [0],
            Disturbance.FIRST_STEPS: [1],
            Disturbance.EVALUATION: [number for number in self.evaluations if number < self.steps],
            Disturbance.SAVE: saves,
            Disturbance.KILL: saves,
            Disturbance.AFTER_SAVE: [number + 1 for number in saves],
            Disturbance.EPOCH_END: self.epochs,
        }
        placed = [one for one in disturbances if one in chances]
        anywhere = [one for one in disturbances if one not in chances and one is not Disturbance.FULL_DISK]
        found: dict[Disturbance, Stimulus] = {}
        done = -1

        def add(one: Disturbance, after: int) -> None:
            nonlocal done
            found[one] = replace(self.stimulus(one, notice_s), after=after)
            done = after if one is Disturbance.START else after + 1

        while possible := {one: later for one in placed if (later := [n for n in chances[one] if n > done])}:
            by_next = sorted(possible, key=lambda one: possible[one][0])
            one = next(
                (
                    one
                    for one in by_next
                    if all(possible[other][-1] > possible[one][0] + 1 for other in by_next if other is not one)
                ),
                min(possible, key=lambda one: possible[one][-1]),
            )
            placed.remove(one)
            while anywhere and done > 0 and done + 2 < possible[one][0]:
                add(anywhere.pop(0), done + 1)
            add(one, next(n for n in possible[one] if n > done))
        while anywhere and done + 2 < self.steps:
            add(anywhere.pop(0), done + 1)
        if Disturbance.FULL_DISK in disturbances and any(number > done for number in saves):
            found[Disturbance.FULL_DISK] = replace(self.stimulus(Disturbance.FULL_DISK, notice_s), after=done + 1)
        return found

    def together(self, disturbances: Sequence[Disturbance], notice_s: float) -> dict[Disturbance, Stimulus]:
        """The stimuli of one run with all of these, one per start. Their places are spread over its steps."""
        found = {}
        for index, disturbance in enumerate(disturbances):
            place = _PLACES.get(disturbance, Place.STEP)
            after = max(1, (index + 1) * self.steps // (len(disturbances) + 3))
            notices = 2 if disturbance is Disturbance.TWO_NOTICES else 1
            found[disturbance] = Stimulus(place, after, notices, notice_s)
        return found


def _longest_stretch(start: Start, again: Start) -> tuple[int, float] | None:
    """The steps before the longest notable time between two steps, in both runs, and its seconds.

    One with an evaluation does not count, and neither do the seconds of saves, because these are disturbed by
    themselves.
    """
    known = {one.local for one in start.of(Evaluated)}
    gaps, others = _gaps(start), _gaps(again)
    if len(gaps) < 2:
        return None
    least = max(_TIMES_STEP * statistics.median(gaps.values()), _LEAST_STRETCH_S)
    notable = {after: seconds for after, seconds in gaps.items() if min(seconds, others.get(after, 0.0)) >= least}
    free = {after: seconds for after, seconds in notable.items() if after not in known}
    return max(free.items(), key=lambda one: one[1], default=None)


def _gaps(start: Start) -> dict[int, float]:
    """The seconds from each step to the next one, by the steps done before the gap."""
    saves: dict[int, float] = {}
    for saving in start.saves():
        if saving.rank == 0 and saving.ended is not None:
            saves[saving.began.local] = saves.get(saving.began.local, 0.0) + saving.ended.seconds
    return {
        later.local: later.seconds - made.seconds - saves.get(later.local, 0.0)
        for made, later in pairwise(start.steps())
    }
