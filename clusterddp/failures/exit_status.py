"""How a process ended that wrote no record: what waitpid says of it, or srun. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$", re.MULTILINE)
_LAUNCH = re.compile(r"^srun: error: tasks? ([\d,-]+) launch failed: (.+)$", re.MULTILINE)
_EXITED = re.compile(r"Exited with exit code (\d+)")
#: What a launcher ends the peers of a failed rank with.
KILLS = (signal.SIGKILL, signal.SIGTERM)
#: srun names signals as strsignal(3) does.
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


@dataclass(frozen=True)
class ExitStatus:
    """The end of a process: by a signal, else with an exit code."""

    signal: int | None = None
    exit_code: int | None = None
    out_of_memory: bool = False
    first: bool = False
    """Whether it ended before all other ranks, as the launcher saw it."""
    not_started: str = ""
    """Why it was never there."""

    @classmethod
    def of_code(cls, code: int) -> ExitStatus:
        """From ``os.waitstatus_to_exitcode``: negative for a signal."""
        return cls(signal=-code) if code < 0 else cls(exit_code=code)

    @property
    def by_itself(self) -> bool:
        """Whether it was not ended by its launcher, as the peers of a failed rank are.

        The order in which connections break does not tell: Linux closes a killed process's newest sockets first, so
        that a peer in a collective may fail, and say so, before.
        """
        alone = self.first or self.out_of_memory or bool(self.not_started)
        return alone or self.signal not in (None, *KILLS)

    def words(self) -> str:
        """What a user is told."""
        if self.not_started:
            return f"never started: {self.not_started}"
        if self.out_of_memory:
            return "killed: out of memory (the job's limit; ask for more with --mem)"
        if self.signal == signal.SIGKILL:
            return "killed by signal 9, no traceback; check memory"
        if self.signal is not None:
            return f"killed by signal {self.signal} ({_name(self.signal)})"
        return f"left by os._exit({self.exit_code}), no traceback"


def in_order(exit_statuses: Mapping[int, ExitStatus]) -> dict[int, ExitStatus]:
    """The same, with the first one marked."""
    return {rank: replace(death, first=number == 0) for number, (rank, death) in enumerate(exit_statuses.items())}


def of_tasks(messages: str) -> dict[int, ExitStatus]:
    """The ends of tasks, by rank, that srun's messages tell: ``srun: error: n2: task 3: Killed``.

    In the order of the messages, those that could not be started in front; a task's first counts.
    """
    exit_statuses = {
        rank: ExitStatus(not_started=why) for tasks, why in _LAUNCH.findall(messages) for rank in _numbers(tasks)
    }
    for tasks, what in _TASKS.findall(messages):
        death = _death(what)
        for rank in _numbers(tasks) if death else ():
            exit_statuses.setdefault(rank, death)  # type: ignore[arg-type]
    return exit_statuses


def _death(what: str) -> ExitStatus | None:
    if exited := _EXITED.fullmatch(what):
        return ExitStatus(exit_code=int(exited[1]))
    if what == "Out Of Memory":
        return ExitStatus(out_of_memory=True)
    return ExitStatus(signal=_SIGNALS[what]) if what in _SIGNALS else None


def _name(number: int) -> str | None:
    """SIGSEGV; most real-time signals have a description only."""
    return next((known.name for known in signal.Signals if known == number), signal.strsignal(number))


def _numbers(ranges: str) -> list[int]:
    """``0-1,3`` as 0, 1, 3."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return [number for low, _, high in ends for number in range(int(low), int(high or low) + 1)]
