"""``timing.jsonl``: the time that each rank's steps spent in each phase. The supervisor writes it, reports read it.

Ranks send totals with their heartbeats, so that the supervisor does nothing per step. It writes a line per interval,
with an array over all ranks for each phase. Intervals grow with the age of the run: the file of a run of T seconds has
at most about PARTS x (1 + ln(T / (PARTS x SHORTEST_S))) of these lines and one more per attempt. With 64 ranks that is
2 MB after a week, and 20 kB more for each attempt. With more ranks there are fewer lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.messages.reports import Alive, Figures
from clusterddp.reporter import say
from clusterddp.rundir.files import append_line
from clusterddp.rundir.json_lines import WholeLines, drop_torn_line, last_lines, open_lines, parse
from clusterddp.rundir.records import retrying
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import Schema, is_count, is_text, is_time, optional, schema_error

#: The phases of a step: waiting for the batch, this rank's own work, waiting for other ranks, a save.
PHASES = ("data_s", "own_s", "wait_s", "save_s")
#: What its GPUs do: the percentage of the time in which they compute, and of their memory that is used, watts, degrees
#: Celsius, the percentage of the time in which they are throttled, and uncorrectable memory errors; None if unknown.
GPU_FIGURES = ("busy", "memory", "watts", "celsius", "throttled", "memory_errors")
#: Of several values, the largest counts; of the others the mean.
GPU_LARGEST = ("memory", "celsius", "memory_errors")
#: A rank is slow if its work in a step takes this many times as long as the work that it is compared with, and is
#: longer by this fraction of the step. Loaders and kernels vary by less than half, and the other ranks hardly notice a
#: tenth of a step.
SLOW_RATIO, SLOW_SHARE = 1.5, 0.1
#: The shortest interval in seconds, and the parts that the age of a run is divided into: fewer with many ranks.
SHORTEST_S, PARTS, FEWEST_PARTS = 10.0, 100, 20
#: The number of ranks up to which there are PARTS, and that from which on the shortest interval grows with it.
_FEW_RANKS, _MANY_RANKS = 64, 1024
#: Bytes at the end of the file that hold a line, of a thousand ranks, too.
_END_BYTES = 1 << 17


def is_slow(work_s: float, usual_s: float, step_s: float, ratio: float = SLOW_RATIO) -> bool:
    """Whether a rank is slow, for the watchdog, ``status``, the booking of time and the report.

    All three are seconds per step: of its own work, of the work that it is compared with, and of the whole step.
    """
    return work_s > ratio * usual_s and work_s - usual_s > SLOW_SHARE * step_s


def interval_s(age_s: float, ranks: int) -> float:
    """The length of an interval that ends when the run is ``age_s`` old."""
    shortest_s = SHORTEST_S * max(1.0, ranks / _MANY_RANKS)
    return max(shortest_s, age_s / max(FEWEST_PARTS, min(PARTS, PARTS * _FEW_RANKS // ranks)))


class TimingLines:
    """Makes the lines of one attempt from its ranks' reports. Pure: the caller has the clock and the file.

    ``began``: when the run began, in unix seconds.
    """

    def __init__(self, attempt: int, ranks: int, began: float) -> None:
        self._attempt, self._ranks, self._began = attempt, ranks, began
        self._totals: dict[int, Sequence[Any]] = {}
        self._written: dict[int, Sequence[Any]] = {}
        #: The GPU figures of each rank since the last line: of each, how many, their sum, and the largest.
        self._figures: dict[int, list[tuple[int, float, float]]] = {}
        self._begin: float | None = None
        self._until = 0.0  # when the newest of the totals were added up
        self._written_at = 0.0
        self._hosts_written = False
        #: How many steps rank 0 has made in this attempt, by its last heartbeat; None if it counts those of the run.
        self.made: int | None = None

    def update(self, rank: int, beat: Alive, now: float) -> None:
        """Records the totals in a rank's heartbeat, if it has any."""
        totals, age_s = beat.timing, beat.timing_age_s
        if rank == 0 and beat.made is not None:
            self.made = beat.made
        if totals is not None:
            self._totals[rank] = totals
            self._until = max(self._until, now - age_s)
            if self._begin is None and totals[0]:
                self._begin = self._written_at = now - age_s - sum(seconds or 0.0 for seconds in totals[1:])

    def update_gpus(self, rank: int, figures: Figures) -> None:
        """Records what a rank's GPUs did lately."""
        before = self._figures.get(rank, [(0, 0.0, 0.0)] * len(GPU_FIGURES))
        self._figures[rank] = [
            known if new is None else (known[0] + 1, known[1] + new, max(known[2], new))
            for known, new in zip(before, figures, strict=True)
        ]

    def due(self, now: float) -> bool:
        """Whether an interval ends. Takes the same time for any number of ranks."""
        return self._begin is not None and now - self._written_at >= interval_s(now - self._began, self._ranks)

    def interval(self, now: float, hosts: Sequence[str]) -> list[dict[str, Any]]:
        """The line of the interval that ends with the newest reported step, if a step ended in it. The first one
        follows a line with the ranks' hosts."""
        if self._begin is None:
            return []
        end = max(self._begin, min(self._until, now))
        ranks = range(self._ranks)
        steps = [self._since_written(rank, 0) for rank in ranks]
        phases = {
            name: [self._since_written(rank, place) for rank in ranks] for place, name in enumerate(PHASES, start=1)
        }
        line = {"attempt": self._attempt, "begin": round(self._begin, 3), "end": round(end, 3), "steps": steps}
        self._begin, self._written_at, self._written = end, now, dict(self._totals)
        if not any(steps):
            return []
        first = [] if self._hosts_written else [{"attempt": self._attempt, "hosts": list(hosts)}]
        self._hosts_written = True
        made = {} if self.made is None else {"made": self.made}
        return [*first, line | phases | made | self._gpu_line()]

    def _gpu_line(self) -> dict[str, Any]:
        """The figures of each rank's GPUs since the last line. Empty if there are none."""
        gathered, self._figures = self._figures, {}
        if not gathered:
            return {}
        found = {}
        for place, name in enumerate(GPU_FIGURES):
            known = (gathered[rank][place] if rank in gathered else (0, 0.0, 0.0) for rank in range(self._ranks))
            found[name] = [
                round(most if name in GPU_LARGEST else total / count) if count else None for count, total, most in known
            ]
        return {"gpus": found}

    def _since_written(self, rank: int, place: int) -> Any:
        total = self._totals.get(rank, [None] * 5)[place]
        if total is None:
            return None
        return round(total - (self._written.get(rank, [0] * 5)[place] or 0), 3)


class TimingFile:
    """Appends lines to a run's ``timing.jsonl``. Without space on the disk they are lost, and reports lack them."""

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.timing_file
        self._begun = self._closed = self._failed = False

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Appends these lines, unless the file was closed."""
        try:
            for line in lines if not self._closed else ():
                if not self._begun:
                    drop_torn_line(self._path)
                    self._begun = True
                append_line(self._path, line)
        except OSError as error:
            if not self._failed:
                say(f"could not write {self._path.name} ({error.strerror}). Reports will lack some step times")
            self._failed = True

    def close(self) -> None:
        """Stops writing, because a newer attempt's supervisor writes the file from now on. Any thread."""
        self._closed = True


# --- reading


@dataclass(frozen=True)
class TimedInterval:
    """The steps of each rank from ``begin`` to ``end`` (unix seconds), and their seconds in each phase.

    None where a rank's values are unknown. ``hosts`` is empty if the line with them was lost. ``made``: how many steps
    rank 0 has made in the attempt, of a script whose steps have no known numbers. ``gpus``: each of GPU_FIGURES, if
    they were reported.
    """

    attempt: int
    begin: float
    end: float
    steps: tuple[int | None, ...]
    seconds: Mapping[str, tuple[float | None, ...]]
    hosts: tuple[str, ...] = ()
    made: int | None = None
    gpus: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Timings:
    """All of the file, oldest first. ``skipped``: how many lines are of a different form.
    ``torn``: whether the last one is incomplete."""

    intervals: tuple[TimedInterval, ...] = ()
    skipped: int = 0
    torn: bool = False


def read_timings(run: RunDirectory) -> Timings:
    """A run's ``timing.jsonl``. A missing file counts as empty. Lines of a different form, and a torn one, are skipped.

    Raises OSError if the file cannot be read.
    """
    try:
        return retrying(run.timing_file, lambda: _timings(run.timing_file))
    except FileNotFoundError:
        return Timings()


def _timings(path: Path) -> Timings:
    hosts: dict[int, tuple[str, ...]] = {}
    intervals: list[TimedInterval] = []
    skipped = 0
    with open_lines(path) as file:
        lines = WholeLines(file)
        for text in lines:
            line, wrong = parse(text, {"attempt": is_count})
            attempt = line["attempt"] if line else None
            if line is None or attempt is None:
                skipped += wrong is not None
            elif _are(line.get("hosts"), is_text):
                hosts[attempt] = tuple(line["hosts"])
            elif (interval := _interval(line, hosts.get(attempt, ()))) is not None:
                intervals.append(interval)
            else:
                skipped += not {"begin", "hosts"}.isdisjoint(line)  # other lines are those of a later version
    return Timings(tuple(intervals), skipped, lines.torn)


def newest_interval(run: RunDirectory) -> TimedInterval | None:
    """The last one of the file, of which only the end is read. Without hosts. None if there is none."""
    for text in reversed(last_lines(run.timing_file, _END_BYTES)):
        line, _ = parse(text, {"attempt": is_count})
        if line is not None and (interval := _interval(line, ())) is not None:
            return interval
    return None


def _interval(line: Mapping[str, Any], hosts: tuple[str, ...]) -> TimedInterval | None:
    if schema_error(line, _INTERVAL) or line["begin"] > line["end"]:
        return None
    ranks = len(line["steps"])
    if any(len(line[name]) != ranks for name in PHASES):
        return None
    return TimedInterval(
        line["attempt"],
        line["begin"],
        line["end"],
        tuple(line["steps"]),
        {name: tuple(line[name]) for name in PHASES},
        hosts if len(hosts) == ranks else (),
        line["made"] if is_count(line.get("made")) else None,
        _gpus(line.get("gpus"), ranks),
    )


def _gpus(found: Any, ranks: int) -> dict[str, tuple[float | None, ...]]:
    if not isinstance(found, Mapping):
        return {}
    figures = {name: tuple(found[name]) for name in GPU_FIGURES if _are(found.get(name), optional(is_time))}
    return figures if len(figures) == len(GPU_FIGURES) and {len(one) for one in figures.values()} == {ranks} else {}


def _are(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(check, value))


_INTERVAL: Schema = {
    "begin": is_time,
    "end": is_time,
    "steps": lambda value: _are(value, optional(is_count)),
    **{name: lambda value: _are(value, optional(is_time)) for name in PHASES},
}
