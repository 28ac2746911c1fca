"""Does the run hang, and on which rank? Is a rank slow? From what the ranks say of themselves every few seconds.

A rank says how many boundaries it has come to, for how long it has been without the next one, for how long it may be,
and, meanwhile, what it is at. Time is the supervisor's own and stands still while the supervisor does (a suspended
job); no clock is compared with another host's.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.process import RunningClock

#: Beats after a rank's time is over until the run counts as hung: in these the stacks get into the ranks' logs.
PATIENCE_BEATS = 3
#: Beats without which a rank is silent.
SILENCE_BEATS = 4
#: How many ranks a sentence names.
NAMED = 4
#: A rank is slow when its own part of a step is so many times the others', and the difference such a part of a step.
SLOW_RATIO, SLOW_SHARE = 1.5, 0.1
_TOLD = ("count", "step", "allowed_s", "place", "waits", "own_s", "step_s", "still_s")


@dataclass(frozen=True)
class Sign:
    """What a rank last said of itself; ``moved`` and ``heard`` are seconds on the supervisor's clock.

    ``count``: the boundaries it has come to. ``step``: how many steps it has done. ``allowed_s``: how long it may be
    without moving; None: it has not begun to train; infinity: as long as it likes. ``place``: what it is at, '' while
    it moves. ``waits``: whether that is waiting for other ranks. ``own_s``, ``step_s``: how long its own part of a step
    takes, and a whole step. ``still_s``: for how long the script has stood at one place.
    """

    rank: int
    host: str
    count: int
    step: int
    allowed_s: float | None
    moved: float
    heard: float
    place: str = ""
    waits: bool = False
    own_s: float | None = None
    step_s: float | None = None
    still_s: float = math.inf


@dataclass(frozen=True)
class Slow:
    """A rank that all others wait for in every step: its own seconds, and how many times the others' that is."""

    rank: int
    host: str
    own_s: float
    ratio: float


@dataclass(frozen=True)
class Hang:
    """The ranks that the others wait for, in order; the first one's host and step; the sentence that says it all."""

    late: tuple[int, ...]
    host: str
    step: int
    seconds: float
    what: str


def find_hang(signs: Iterable[Sign], now: float, beat_s: float) -> Hang | None:
    """The hang, once some rank's time is over, unless it waits for one that may take as long as it likes, or works.

    One that works for ever is left to torch's own time-out, where others wait for it.
    """
    signs = sorted(signs, key=lambda sign: sign.rank)
    over = [sign for sign in signs if _over(sign, now, beat_s)]
    if not over:
        return None
    silent = [sign for sign in signs if _silent(sign, now, beat_s)]
    late = _late(signs, silent)
    if not any(sign.allowed_s is None or sign in over for sign in late):
        return None  # they have come back from what took long, and the others still wait
    if any(sign.allowed_s == math.inf for sign in late):
        return None
    if late != silent and any(_works(sign, now) for sign in late):
        return None
    seconds = now - min(sign.moved for sign in late)
    what = f"{_names(late)} last at step {late[0].step}, {seconds:.0f} s ago"
    if late == silent:
        what += ", and not heard of since (stopped, or holding Python's lock)"
    elif place := _most_common(late):
        what += f", in {place}"
    others = [sign for sign in signs if sign not in late]
    if place := _most_common([sign for sign in others if sign.waits]):
        what += f"; the others wait in {place}"
    return Hang(tuple(sign.rank for sign in late), late[0].host, late[0].step, round(seconds, 1), what)


def _silent(sign: Sign, now: float, beat_s: float) -> bool:
    """Whether the whole process stands still: it has not been heard of for the better part of the time."""
    return now - sign.heard > max(SILENCE_BEATS * beat_s, 0.5 * (now - sign.moved))


def _over(sign: Sign, now: float, beat_s: float) -> bool:
    """Whether a rank has had its time, and that in which its stacks are written."""
    return sign.allowed_s is not None and now - sign.moved > sign.allowed_s + PATIENCE_BEATS * beat_s


def _works(sign: Sign, now: float) -> bool:
    """Whether its code was seen to move on lately, without coming to a step's end: a long evaluation, perhaps."""
    return sign.still_s < 0.5 * (now - sign.moved)


def _late(signs: list[Sign], silent: list[Sign]) -> list[Sign]:
    """Those that the others wait for, by the first mark that tells the ranks apart: they are not heard of, have come to
    fewer boundaries, do not wait for others, are fewer at their place than the others are elsewhere."""
    least = min(sign.count for sign in signs)
    at = Counter(sign.place for sign in signs)
    if silent:
        return silent
    marked = [
        [sign for sign in signs if sign.count == least],
        [sign for sign in signs if not sign.waits],
        [sign for sign in signs if 2 * at[sign.place] < len(signs)],
    ]
    return next((some for some in marked if 0 < len(some) < len(signs)), signs)


def _names(signs: list[Sign]) -> str:
    names = ", ".join(f"{sign.rank} ({sign.host})" for sign in signs[:NAMED])
    more = f" and {len(signs) - NAMED} more" if len(signs) > NAMED else ""
    return f"rank{'s' if len(signs) > 1 else ''} {names}{more}"


def _most_common(signs: list[Sign]) -> str:
    places = Counter(sign.place for sign in signs if sign.place)
    return places.most_common(1)[0][0] if places else ""


class Search:
    """Looks for a hang again and again; one is found when it is still there once its late ranks were heard of anew.

    Ranks speak at different moments. When a long evaluation ends, the one that waited for it seems to be behind until
    it speaks, too.
    """

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._suspected: float | None = None

    def look(self, signs: Iterable[Sign], now: float) -> Hang | None:
        """The hang, if it is one at a second look."""
        signs = list(signs)
        hang = find_hang(signs, now, self._beat_s)
        if hang is None:
            self._suspected = None
            return None
        if self._suspected is None:
            self._suspected = now
        late = [sign for sign in signs if sign.rank in hang.late]
        anew = all(sign.heard > self._suspected or _silent(sign, now, self._beat_s) for sign in late)
        return hang if anew else None


def find_slow(signs: Iterable[Sign]) -> list[Slow]:
    """The ranks whose own part of a step is much longer than the others' median, and much of the step."""
    known = [sign for sign in signs if sign.own_s is not None]
    found = []
    for sign in known:
        others = [other.own_s for other in known if other is not sign and other.own_s is not None]
        if not others or sign.own_s is None or sign.step_s is None:
            continue
        usual = statistics.median(others)
        if sign.own_s > SLOW_RATIO * usual and sign.own_s - usual > SLOW_SHARE * sign.step_s:
            ratio = sign.own_s / max(usual, 1e-3 * sign.step_s)
            found.append(Slow(sign.rank, sign.host, round(sign.own_s, 4), round(ratio, 2)))
    return found


class Watch:
    """A thread that looks for a hang until it is closed or has found one: ``on_hang`` is called once, in the thread.

    Nothing is looked for any more when the line to a rank breaks: a lost node is no hang. ``on_slow`` is called for a
    slow rank, and again when it becomes slower by as much again. Time in which nobody listens to the ranks (``deaf``: a
    history on a disk that does not answer) does not count.
    """

    def __init__(
        self,
        beat_s: float,
        on_hang: Callable[[Hang], None],
        on_slow: Callable[[Slow], None],
        deaf: Callable[[], bool] = lambda: False,
    ) -> None:
        self._beat_s, self._on_hang, self._on_slow, self._deaf = beat_s, on_hang, on_slow, deaf
        self._warned: dict[int, float] = {}
        self._signs: dict[int, Sign] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._clock, self._search = RunningClock(beat_s), Search(beat_s)
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def hear(self, rank: int, host: str, beat: Mapping[str, Any]) -> None:
        """A rank's word of itself has come."""
        with self._lock:
            now, told = self._clock.now, {name: beat[name] for name in _TOLD if name in beat}
            self._signs[rank] = Sign(rank, host, moved=now - beat["age_s"], heard=now, **told)

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()

    def _look(self) -> None:
        while not self._end.wait(self._beat_s):
            with self._lock:
                self._clock.look(counts=not self._deaf())
                signs = list(self._signs.values())
            hang = self._search.look(signs, self._clock.now)
            for slow in find_slow(signs):
                if slow.ratio > 2 * self._warned.get(slow.rank, 0.0):
                    self._warned[slow.rank] = slow.ratio
                    self._on_slow(slow)
            if hang is not None:
                self._on_hang(hang)
                return
