"""Finds hangs and stragglers from the ranks' heartbeats, which arrive every few seconds.

A heartbeat has the number of boundaries that the rank has reached, for how long it has not reached the next one, how
long that may take, and, meanwhile, where its main thread is. Time is measured by the supervisor's clock, which stops
while the supervisor itself is stopped (a suspended job); clocks of different hosts are never compared.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.process import RunningClock
from clusterddp.rundir.records import Schema, is_count, is_text, optional, schema_error

#: Heartbeats between a rank's timeout and the verdict that the run hangs: meanwhile the ranks' stacks are written.
PATIENCE_BEATS = 3
#: A rank is silent after so many missing heartbeats.
SILENCE_BEATS = 4
#: The most ranks that a message lists.
NAMED = 4
#: A rank is slow if its compute time is so many times the others', and the difference such a fraction of a step.
SLOW_RATIO, SLOW_SHARE = 1.5, 0.1
_TOLD = ("count", "step", "allowed_s", "place", "waits", "own_s", "step_s", "still_s")


@dataclass(frozen=True)
class Sign:
    """A rank's last heartbeat. ``moved`` (to its last boundary) and ``heard`` are seconds on the supervisor's clock.

    ``count``: the boundaries it has reached. ``step``: the steps it has completed. ``allowed_s``: the timeout to the
    next boundary; None before training, infinity while the watchdog is suspended. ``place``: where its main thread is,
    '' while it makes progress. ``waits``: whether it waits there for other ranks. ``own_s``, ``step_s``: its compute
    time in a step, and the whole step. ``still_s``: for how long its main thread has been at one place.
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
    """A straggler: its compute time in a step, in seconds, and the ratio to the others' median."""

    rank: int
    host: str
    own_s: float
    ratio: float


@dataclass(frozen=True)
class Hang:
    """The ranks at fault, in order; the host and step of the first; ``what``: the message."""

    late: tuple[int, ...]
    host: str
    step: int
    seconds: float
    what: str


def find_hang(signs: Iterable[Sign], now: float, beat_s: float) -> Hang | None:
    """The hang, once a rank has timed out, unless it waits for one that works or whose watchdog is suspended.

    A rank that works without end is left to torch's own timeout, as others wait for it in a collective.
    """
    signs = sorted(signs, key=lambda sign: sign.rank)
    over = [sign for sign in signs if _over(sign, now, beat_s)]
    if not over:
        return None
    silent = [sign for sign in signs if _silent(sign, now, beat_s)]
    if not silent and (mismatch := _mismatch(signs, over, now)) is not None:
        return mismatch
    late = _late(signs, silent)
    if not any(sign.allowed_s is None or sign in over for sign in late):
        return None  # they are back from something long, and the others still wait
    if any(sign.allowed_s == math.inf for sign in late):
        return None
    if late != silent and any(_works(sign, now) for sign in late):
        return None
    seconds = now - min(sign.moved for sign in late)
    what = f"{_names(late)} last at step {late[0].step}, {seconds:.0f} s ago"
    if late == silent:
        what += ", no heartbeat since (stopped, or holding the GIL)"
    elif place := _most_common(late):
        what += f", in {place}"
    others = [sign for sign in signs if sign not in late]
    if place := _most_common([sign for sign in others if sign.waits]):
        what += f"; the others wait in {place}"
    return Hang(tuple(sign.rank for sign in late), late[0].host, late[0].step, round(seconds, 1), what)


def _mismatch(signs: list[Sign], over: list[Sign], now: float) -> Hang | None:
    """A hang because the ranks call different collectives: some wait in one whose step others have already passed.

    All ranks take part in a collective, so that those ahead skipped it, or those behind call one too many: the smaller
    group is at fault, or nobody knows which.
    """
    least = min(sign.count for sign in signs)
    behind, ahead = [s for s in signs if s.count == least], [s for s in signs if s.count > least]
    if not ahead or not all(sign.waits and sign in over for sign in behind):
        return None
    first, second = (behind, ahead) if len(behind) < len(ahead) else (ahead, behind)
    late = first if len(first) < len(second) else signs
    seconds = now - min(sign.moved for sign in behind)
    groups = ", ".join(
        f"{_names(group)} at step {group[0].step}" + (f" in {place}" if (place := _most_common(group)) else "")
        for group in (first, second)
    )
    what = f"{groups}, for {seconds:.0f} s: the ranks called different collectives"
    return Hang(tuple(sign.rank for sign in late), late[0].host, late[0].step, round(seconds, 1), what)


def _silent(sign: Sign, now: float, beat_s: float) -> bool:
    """Whether the whole process is stopped: no heartbeat for more than half of the time without a boundary."""
    return now - sign.heard > max(SILENCE_BEATS * beat_s, 0.5 * (now - sign.moved))


def _over(sign: Sign, now: float, beat_s: float) -> bool:
    """Whether a rank has timed out, and its stacks are written."""
    return sign.allowed_s is not None and now - sign.moved > sign.allowed_s + PATIENCE_BEATS * beat_s


def _works(sign: Sign, now: float) -> bool:
    """Whether its code made progress lately without reaching a boundary: perhaps a long evaluation."""
    return sign.still_s < 0.5 * (now - sign.moved)


def _late(signs: list[Sign], silent: list[Sign]) -> list[Sign]:
    """The ranks that the others wait for, by the first criterion that tells them apart: they are silent, have reached
    fewer boundaries, do not wait for others, or are in a place where fewer than half of the ranks are."""
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
    """Looks for a hang repeatedly; it counts if it is still there after the next heartbeat of each rank at fault.

    Heartbeats come at different moments: when a long evaluation ends, a rank that waited for it seems to be behind
    until its own next heartbeat.
    """

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._suspected: float | None = None

    def look(self, signs: Iterable[Sign], now: float) -> Hang | None:
        """The hang, once it is confirmed."""
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
    """The ranks whose compute time is much longer than the others' median, by a good part of the step."""
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
    """Finds hung and slow ranks in their heartbeats; a slow rank once, and again when its ratio doubles.

    Time passes with each look that counts.
    """

    def __init__(self, beat_s: float) -> None:
        self._clock, self._search = RunningClock(beat_s), Search(beat_s)
        self._warned: dict[int, float] = {}
        self._signs: dict[int, Sign] = {}

    def hear(self, rank: int, host: str, beat: Mapping[str, Any]) -> None:
        """A rank's heartbeat has come. ValueError unless it is of the expected form."""
        if wrong := schema_error(beat, _BEAT):
            raise ValueError(wrong)
        now, told = self._clock.now, {name: beat[name] for name in _TOLD if name in beat}
        self._signs[rank] = Sign(rank, host, moved=now - beat["age_s"], heard=now, **told)

    def look(self, counts: bool = True) -> list[Hang | Slow]:
        """What has been found by now; to be called every ``beat_s`` seconds."""
        self._clock.look(counts)
        signs = list(self._signs.values())
        found: list[Hang | Slow] = []
        for slow in find_slow(signs):
            if slow.ratio > 2 * self._warned.get(slow.rank, 0.0):
                self._warned[slow.rank] = slow.ratio
                found.append(slow)
        hang = self._search.look(signs, self._clock.now)
        return [*found, hang] if hang else found


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float)


_BEAT: Schema = {
    "count": is_count,
    "step": is_count,
    "age_s": _is_seconds,
    "allowed_s": optional(_is_seconds),
    "place": optional(is_text),
    "own_s": optional(_is_seconds),
    "step_s": optional(_is_seconds),
    "still_s": optional(_is_seconds),
}
