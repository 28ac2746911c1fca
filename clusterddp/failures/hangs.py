"""Tells a hang from a slow step, and finds stragglers, from the heartbeats that the ranks send every two seconds.

A run hangs if a rank has not reached a step boundary within its timeout and three more heartbeats (``find_hang``).
Heartbeats have the timeout (``training/heartbeat.Pace``): ``watchdog.start_s`` (1800 s) until the first step is
complete, then ``watchdog.step_s`` (600 s), or four times the rank's longest step if that is more. A script with its own
loop keeps ``start_s`` as the minimum. There is no timeout during a save or in ``ctx.unwatched()``. It is no hang while
the rank that the others wait for makes progress (``_works``): its main thread moves, or its GPU completes steps.
``Watch.confirmed_hang`` waits for one more heartbeat of that rank, so a hang is found after about 610 s.
``decide._on_hang`` then asks all ranks to exit and kills them after 3 s. They restart, or the run fails
(``watchdog.on_hang``).

A rank is slow if it reaches its boundaries, but its own work takes longer than that of the others (``find_slow``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from clusterddp.history.failures import Slow, StragglerRecovered
from clusterddp.messages.reports import Alive, Row
from clusterddp.process import RunningClock
from clusterddp.protocol import IDLE, OWN, WAIT
from clusterddp.rundir.timing import SLOW_RATIO, is_slow

#: The most process groups that a rank reports, and the most characters of a collective's sizes.
MOST_GROUPS, LONGEST_SIZES = 8, 60
#: Collectives whose inputs have the same sizes on all ranks.
_EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce")


@dataclass(frozen=True)
class Apart:
    """Ranks that differ. ``groups``: ranks, and what they did, in words. ``late``: those at fault. Empty if unknown.
    ``different``: whether they called different collectives."""

    groups: tuple[tuple[tuple[int, ...], str], ...]
    late: tuple[int, ...]
    different: bool = False


def outline(record: Mapping[str, Any]) -> Sequence[Row]:
    """A row for each process group in a flight record. Raises KeyError for a record of an unknown format."""
    rows: dict[str, list[Any]] = {}
    for entry in record["entries"]:  # the oldest first
        if entry["is_p2p"]:
            continue
        backend = entry["profiling_name"].partition(":")[0]  # each of a group counts its own
        name, number = f"{entry['process_group'][0]} {backend}", entry["collective_seq_id"]
        row = rows.setdefault(name, [name, number - 1, number, ""])
        row[2] = number
        if not row[3] and _complete(entry):
            row[1] = number
        elif not row[3]:
            row[3] = _words(entry)
    return [(name, complete, last, pending) for name, complete, last, pending in rows.values()][:MOST_GROUPS]


def _complete(entry: Mapping[str, Any]) -> bool:
    """NCCL's that timed out are also retired. gloo's stay "scheduled" when they are complete (torch 2.13)."""
    if entry["profiling_name"].startswith("gloo:"):
        return bool(entry["retired"])
    return bool(entry["state"] == "completed")


def _words(entry: Mapping[str, Any]) -> str:
    name: str = entry["profiling_name"]
    if name.partition(":")[2] not in _EQUAL_SIZES:
        return name
    sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry["input_sizes"])
    return f"{name} of {sizes[:LONGEST_SIZES]}"


def compare(outlines: Mapping[int, Sequence[Row]]) -> Apart | None:
    """The first difference between the ranks' Flight Recorder traces, by the group's name. None if there is none.

    A collective's number counts those of its group, and is the same on all ranks: a rank did not call a collective,
    called a different one, or has not completed one that others have.
    """
    by_group: dict[str, dict[int, Row]] = {}
    for rank, rows in sorted(outlines.items()):
        for row in rows:
            by_group.setdefault(row[0], {})[rank] = row
    found = [apart for _, rows in sorted(by_group.items()) if (apart := _compare_group(rows)) is not None]
    return min(found, key=lambda apart: not apart.different, default=None)


def _compare_group(rows: Mapping[int, Row]) -> Apart | None:
    waiting = {rank: row for rank, row in rows.items() if row[3]}
    if not waiting:
        return None
    first = min(row[1] for row in waiting.values()) + 1
    at_first = {rank: row[3] for rank, row in waiting.items() if row[1] + 1 == first}
    number = f"collective {first} of the process group"
    if len(set(at_first.values())) > 1:
        groups = [
            (tuple(rank for rank, words in at_first.items() if words == one), f"called {one}")
            for one, _ in sorted(Counter(at_first.values()).items(), key=lambda item: item[1])
        ]
        few = tuple(rank for ranks, _ in groups[:-1] for rank in ranks)
        late = few if len(few) < len(groups[-1][0]) else ()
        return Apart(tuple((ranks, f"{words} as {number}") for ranks, words in groups), late, different=True)
    words = next(iter(at_first.values()))
    if absent := tuple(rank for rank, row in rows.items() if row[2] < first):
        return Apart(((absent, f"did not call {words}, {number}"),), absent)
    if len(at_first) < len(rows):
        behind = tuple(at_first)
        return Apart(((behind, f"did not complete {words}, {number}, unlike the others"),), behind)
    return None


#: Heartbeats between a rank's timeout and the verdict that the run hangs. Meanwhile the ranks write their stacks.
PATIENCE_BEATS = 3
#: A rank is silent after this many missing heartbeats.
SILENCE_BEATS = 4
#: A rank is explained once its work has taken this many times as long as the others' for so many seconds. What varies
#: from step to step does not last ten minutes. The ratio is therefore smaller than that of a straggler.
LASTING_RATIO, EXPLAINED_S = 1.2, 600.0
#: The most ranks that a message lists.
NAMED = 4
#: A device makes progress if its last step took less than this many times the usual time of a step.
DEVICE_GAP = 4.0


@dataclass(frozen=True)
class RankStatus:
    """A rank's last heartbeat. ``moved`` (to its last boundary) and ``heard`` are seconds on the supervisor's clock.

    On a GPU, the place of the main thread is rarely where the run hangs, because the hosts are ahead of their devices,
    by different numbers of steps, and wait for them in any line. After a timeout the heartbeat therefore also has where
    the device is, and which collective is not complete.

    ``count``: the boundaries it has reached. ``step``: the steps it has completed. ``allowed_s``: the timeout to the
    next boundary. None before training, infinity while the watchdog is suspended. ``place``: where its main thread is,
    '' while it makes progress. ``waits``: whether it waits there for other ranks. ``line``: of the script, then.
    ``own_s``, ``step_s``: its compute time in a step, and the whole step. ``still_s``: for how long its main thread has
    been at one place.
    ``device``: the step that its device is in, and whether it does its OWN work there, WAITs for other ranks or is
    IDLE. None if unknown, and on a CPU. ``device_still_s``: for how long. ``collectives``: of its flight record.
    ``of_attempt``: whether steps are counted from the attempt's beginning, as their numbers in the run are unknown.
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
    line: str = ""
    own_s: float | None = None
    step_s: float | None = None
    still_s: float = math.inf
    device: tuple[int, str] | None = None
    device_still_s: float = math.inf
    collectives: Sequence[Row] = ()
    of_attempt: bool = False

    @property
    def at(self) -> str:
        """The number of the step, for a message."""
        return f"{self.step}{' of this attempt' if self.of_attempt else ''}"


@dataclass(frozen=True)
class StillSlow:
    """A rank has been slow by LASTING_RATIO for EXPLAINED_S."""

    rank: int
    ratio: float
    seconds: float


@dataclass(frozen=True)
class Hang:
    """The ranks at fault, in order. The host and step of the first. ``what``: the message.

    ``step`` is None if its number in the run is unknown.

    ``seconds``: since their last boundary. ``stalled_s``: since any rank's, which is the better start of the hang,
    because what a rank did after its last heartbeat is unknown. ``of_device``: whether these ranks' devices do not
    complete their own work, for which the others' wait: the node is suspect.
    """

    late: tuple[int, ...]
    host: str
    step: int | None
    seconds: float
    what: str
    stalled_s: float
    of_device: bool = False
    silent: bool = False
    """Whether these ranks send no heartbeats, either."""


#: What ``Watch.look`` finds.
Finding = Hang | Slow | StillSlow | StragglerRecovered


def find_hang(statuses: Iterable[RankStatus], now: float, beat_s: float) -> Hang | None:
    """The hang, once a rank has timed out, unless it waits for one that works or whose watchdog is suspended.

    A rank that works without end is left to torch's own timeout, because others wait for it in a collective.
    """
    statuses = sorted(statuses, key=lambda status: status.rank)
    if not (over := [status for status in statuses if _over(status, now, beat_s)]):
        return None
    silent = [status for status in statuses if _silent(status, now, beat_s)]
    on_devices = not silent and any(status.device is not None and status.device[1] != IDLE for status in statuses)
    if on_devices and any(status.device is None and _is_watched(status) for status in statuses):
        if not all(_over(status, now, beat_s) for status in statuses if _is_watched(status)):
            return None  # their devices' positions are known only once they have timed out, too
        on_devices = False
    apart = compare({status.rank: status.collectives for status in statuses})
    if on_devices and apart is not None and apart.different:
        return _different(apart, statuses, now)
    if not silent and not on_devices and (mismatch := _mismatch(statuses, over, now)) is not None:
        return mismatch
    late = _late_devices(statuses) if on_devices else _late(statuses, silent)
    if len(late) == len(statuses) > 1 and apart is not None and apart.late:
        late = [status for status in statuses if status.rank in apart.late]
    else:
        apart = None
    # A silent rank may have stopped right after its first step, for which it was last heard to have half an hour.
    if late is not silent and not any(status.allowed_s is None or _over(status, now, beat_s) for status in late):
        return None  # they are back from something long, and the others still wait
    if any(status.allowed_s == math.inf for status in late):
        return None
    if late is not silent and any(_works(status, now) for status in late):
        return None
    seconds = now - min(status.moved for status in late)
    have, they = ("has", "It") if len(late) == 1 else ("have", "They")
    what = f"{_names(late)} {have} been stuck at step {late[0].at} for {seconds:.0f} s"
    if late is silent:
        what += " without a heartbeat (stopped, or holding the GIL)"
    elif place := _most_common(late):
        what += f" in {place}"
    at_fault = {status.rank for status in late}
    others = [status for status in statuses if status.rank not in at_fault]
    if apart is not None:
        what += f". {they} {apart.groups[0][1]}"
    elif on_devices:
        what += f". {_devices(late, bool(others))}"
    waiting = [status.device[0] for status in others if status.device and status.device[1] == WAIT]
    if on_devices and waiting:
        what += f". The other ranks' GPUs wait in step {min(waiting)}"
    elif place := _most_common([status for status in others if status.waits]):
        what += f". The others wait in {place}"
    of_device = on_devices and apart is None and bool(others) and all(s.device and s.device[1] == OWN for s in late)
    return replace(_hang(late, seconds, what, statuses, now), of_device=of_device, silent=late is silent)


def _hang(late: Sequence[RankStatus], seconds: float, what: str, statuses: Sequence[RankStatus], now: float) -> Hang:
    stalled_s = round(now - max(status.moved for status in statuses), 1)
    ranks, first = tuple(status.rank for status in late), late[0]
    step = None if first.of_attempt else first.step
    return Hang(ranks, first.host, step, round(seconds, 1), what, stalled_s)


def _is_watched(status: RankStatus) -> bool:
    return status.allowed_s is not None and status.allowed_s != math.inf


def _late_devices(statuses: list[RankStatus]) -> list[RankStatus]:
    """The ranks that the others' devices wait for: of those whose device is furthest behind, the ones that do not wait
    there for others. A device without work waits for its host, which may wait for other ranks itself.

    An idle device comes first, because one that waits in a collective of the script may seem to do its own work.
    """
    least = min(status.device[0] for status in statuses if status.device)
    behind = [status for status in statuses if status.device and status.device[0] == least]
    hosts = [status for status in behind if status.device and status.device[1] == IDLE and not status.waits]
    return hosts or [status for status in behind if status.device and status.device[1] == OWN] or behind


def _devices(late: list[RankStatus], apart: bool) -> str:
    """Where the devices of these ranks are, all at the same step. ``apart``: whether the others' are ahead."""
    assert late[0].device is not None
    step, does = late[0].device
    gpu = "Its GPU is" if len(late) == 1 else "Their GPUs are"
    if does == OWN:
        return f"{gpu} still working on step {step}"
    if does == IDLE:
        return f"{gpu} idle in step {step}"
    return f"{gpu if apart else 'All GPUs are'} still in a collective of step {step}"


def _different(apart: Apart, statuses: list[RankStatus], now: float) -> Hang:
    """A hang in which the ranks' flight records show different collectives with the same number."""
    by_rank = {status.rank: status for status in statuses}
    late = [by_rank[rank] for rank in apart.late] or statuses
    seconds = now - min(status.moved for status in late)
    where = ", ".join(f"{_names([by_rank[rank] for rank in ranks])} {words}" for ranks, words in apart.groups[-NAMED:])
    return _hang(late, seconds, f"{_CALLED}: {where}. They have waited for {seconds:.0f} s. {_ORDER}", statuses, now)


_CALLED, _ORDER = (
    "the ranks called different collectives",
    "Every rank must call the same collectives in the same order",
)


def _mismatch(statuses: list[RankStatus], over: list[RankStatus], now: float) -> Hang | None:
    """A hang because the ranks call different collectives: some wait in one whose step others have already passed, or
    all wait in the same step, but in different places.

    All ranks take part in a collective, so those ahead skipped it, or those behind call one too many. The smaller group
    is at fault. If there is none, that is unknown.
    """
    least = min(status.count for status in statuses)
    behind, ahead = [s for s in statuses if s.count == least], [s for s in statuses if s.count > least]
    timed_out = {status.rank for status in over}
    if not all(status.waits and status.rank in timed_out for status in behind):
        return None
    groups = sorted([behind, ahead] if ahead else _by_place(behind), key=len)
    if len(groups) == 1:
        return None
    if ahead and len(behind) == len(ahead):
        groups = [ahead, behind]
    few = [status for group in groups[:-1] for status in group]
    late = few if len(few) < len(groups[-1]) else statuses
    seconds = now - min(status.moved for status in behind)
    where = ", ".join(map(_where, groups[-NAMED:]))
    same = not ahead and len({status.place for status in statuses}) == 1
    said = "the ranks are waiting in different calls" if same else _CALLED
    what = f"{said}: {where}. They have waited for {seconds:.0f} s. {_ORDER}"
    return _hang(late, seconds, what, statuses, now)


def _by_place(statuses: Iterable[RankStatus]) -> list[list[RankStatus]]:
    groups: dict[tuple[str, str], list[RankStatus]] = {}
    for status in statuses:
        groups.setdefault((status.place, status.line), []).append(status)
    return list(groups.values())


def _where(group: list[RankStatus]) -> str:
    """``ranks 0 (n0), 1 (n0) at step 100 in barrier at train.py:40``."""
    place, line = _most_common(group), next((status.line for status in group if status.line), "")
    return f"{_names(group)} at step {group[0].at}{f' in {place}' if place else ''}{f' at {line}' if line else ''}"


def _silent(status: RankStatus, now: float, beat_s: float) -> bool:
    """Whether the whole process is stopped: no heartbeat for more than half of the time without a boundary."""
    return now - status.heard > max(SILENCE_BEATS * beat_s, 0.5 * (now - status.moved))


def _over(status: RankStatus, now: float, beat_s: float) -> bool:
    """Whether a rank has timed out, and its stacks are written."""
    return status.allowed_s is not None and now - status.moved > status.allowed_s + PATIENCE_BEATS * beat_s


def _works(status: RankStatus, now: float) -> bool:
    """Whether its code made progress lately without reaching a boundary, as in a long evaluation. Or its device did,
    for which the host waits: with CUDA graphs it may have a thousand steps to do."""
    steps = status.device_still_s < DEVICE_GAP * (status.step_s or 0.0)
    return steps or status.still_s < 0.5 * (now - status.moved)


def _late(statuses: list[RankStatus], silent: list[RankStatus]) -> list[RankStatus]:
    """The ranks that the others wait for, by the first criterion that distinguishes them: they are silent, have reached
    fewer boundaries, do not wait for others, or are in a place where fewer than half of the ranks are."""
    least = min(status.count for status in statuses)
    at = Counter(status.place for status in statuses)
    if silent:
        return silent
    marked = [
        [status for status in statuses if status.count == least],
        [status for status in statuses if not status.waits],
        [status for status in statuses if 2 * at[status.place] < len(statuses)],
    ]
    return next((some for some in marked if 0 < len(some) < len(statuses)), statuses)


def _names(statuses: list[RankStatus]) -> str:
    return named({status.rank: status.host for status in statuses})


def named(hosts: Mapping[int, str]) -> str:
    """Ranks with their hosts, at most NAMED: ``ranks 0 (n1), 1 (n1)``."""
    names = ", ".join(f"{rank} ({host})" for rank, host in islice(hosts.items(), NAMED))
    more = f" and {len(hosts) - NAMED} more" if len(hosts) > NAMED else ""
    return f"rank{'s' if len(hosts) > 1 else ''} {names}{more}"


def _most_common(statuses: list[RankStatus]) -> str:
    places = Counter(status.place for status in statuses if status.place)
    return places.most_common(1)[0][0] if places else ""


def find_slow(statuses: Iterable[RankStatus], least_ratio: float = SLOW_RATIO) -> list[Slow]:
    """The ranks whose compute time is much longer than the others' median, by a good part of the step."""
    statuses = list(statuses)
    times = sorted(status.own_s for status in statuses if status.own_s is not None)
    found = []
    for status in statuses:
        if len(times) < 2 or status.own_s is None or status.step_s is None:
            continue
        usual = _median_without(times, status.own_s)
        if is_slow(status.own_s, usual, status.step_s, least_ratio):
            ratio = status.own_s / max(usual, 1e-3 * status.step_s)
            own_s = round(status.own_s, 4)
            found.append(Slow(rank=status.rank, host=status.host, own_s=own_s, ratio=round(ratio, 2)))
    return found


def _median_without(times: Sequence[float], left_out: float) -> float:
    """The median of sorted values without one of them, in the same time for any number."""
    at, last = bisect_left(times, left_out), len(times) - 1
    first, second = (index + (index >= at) for index in ((last - 1) // 2, last // 2))
    return (times[first] + times[second]) / 2


class Watch:
    """Finds hung and slow ranks in their heartbeats, a slow rank once, and again when its ratio doubles.

    Time is that of the supervisor's clock, which stops while the supervisor itself is stopped (a suspended job), and
    passes only with looks that count. Clocks of different hosts are never compared.
    """

    def __init__(self, beat_s: float) -> None:
        self._clock, self._beat_s = RunningClock(beat_s), beat_s
        #: When the hang was found that is not confirmed yet.
        self._suspected: float | None = None
        self._warned: dict[int, float] = {}
        self._slow: set[int] = set()
        #: Since when each rank has been slow, on this clock, and the ranks that were explained.
        self._slow_since: dict[int, float] = {}
        self._explained: set[int] = set()
        self._statuses: dict[int, RankStatus] = {}

    def update(self, rank: int, host: str, beat: Alive) -> None:
        """Records a rank's heartbeat."""
        now = self._clock.now
        step, does, still_s = beat.device or (0, "", math.inf)
        self._statuses[rank] = RankStatus(
            rank,
            host,
            beat.count,
            beat.step,
            beat.allowed_s,
            moved=now - beat.age_s,
            heard=now,
            place=beat.place,
            waits=beat.waits,
            line=beat.line,
            own_s=beat.own_s,
            step_s=beat.step_s,
            still_s=beat.still_s,
            device=None if beat.device is None else (step, does),
            device_still_s=still_s,
            collectives=beat.collectives,
            of_attempt=beat.made is not None,
        )

    def look(self, counts: bool = True, gone: Collection[int] = ()) -> list[Finding]:
        """What has been found by now. Call this every ``beat_s`` seconds.

        ``gone``: the ranks that have ended regularly. Others may work alone from then on, but they send heartbeats.
        """
        self._clock.look(counts)
        statuses = [status for rank, status in self._statuses.items() if rank not in gone]
        if gone:
            silent = [status for status in statuses if _silent(status, self._clock.now, self._beat_s)]
            hang = self.confirmed_hang(silent, self._clock.now)
            return [hang] if hang else []
        found: list[Finding] = []
        slow_now = {slow.rank: slow for slow in find_slow(statuses)}
        for rank in sorted(self._slow - slow_now.keys()):
            found.append(StragglerRecovered(rank=rank, host=self._statuses[rank].host))
        self._slow &= slow_now.keys()
        for slow in slow_now.values():
            if slow.ratio > 2 * self._warned.get(slow.rank, 0.0):
                self._warned[slow.rank] = slow.ratio
                self._slow.add(slow.rank)
                found.append(slow)
        found += self._still_slow({slow.rank: slow for slow in find_slow(statuses, LASTING_RATIO)})
        hang = self.confirmed_hang(statuses, self._clock.now)
        return [*found, hang] if hang else found

    def _still_slow(self, slow_now: Mapping[int, Slow]) -> Iterator[StillSlow]:
        """The ranks that have been slow long enough, each once."""
        now = self._clock.now
        self._slow_since = {rank: self._slow_since.get(rank, now) for rank in slow_now}
        for rank, since in self._slow_since.items():
            if now - since >= EXPLAINED_S and rank not in self._explained:
                self._explained.add(rank)
                yield StillSlow(rank, slow_now[rank].ratio, now - since)

    def behind(self) -> str:
        """Which ranks all others wait for at this moment, and where they are, in words. Empty if that is unknown.

        Hosts with GPUs run ahead of their devices and do not wait for other ranks, so that none is named there.
        """
        statuses = sorted(self._statuses.values(), key=lambda status: status.rank)
        late = [status for status in statuses if not status.waits]
        if not late or len(late) == len(statuses):
            return ""
        place = _most_common(late)
        return f"waiting for {_names(late)} at step {late[0].at}{f' in {place}' if place else ''}"

    def confirmed_hang(self, statuses: Sequence[RankStatus], now: float) -> Hang | None:
        """A hang that is still there after the next heartbeat of each rank at fault.

        Heartbeats come at different moments: when a long evaluation ends, a rank that waited for it seems to be behind
        until its own next heartbeat.
        """
        hang = find_hang(statuses, now, self._beat_s)
        if hang is None:
            self._suspected = None
            return None
        if self._suspected is None:
            self._suspected = now
        at_fault = frozenset(hang.late)
        late = [status for status in statuses if status.rank in at_fault]
        confirmed = all(status.heard > self._suspected or _silent(status, now, self._beat_s) for status in late)
        return hang if confirmed else None
