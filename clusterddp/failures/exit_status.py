"""How a rank that left no record ended, from waitpid's status or srun's messages. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$", re.MULTILINE)
_LAUNCH = re.compile(r"^srun: error: tasks? ([\d,-]+) launch failed: (.+)$", re.MULTILINE)
_EXITED = re.compile(r"Exited with exit code (\d+)")
#: The signals with which a launcher ends the peers of a failed rank.
KILLS = (signal.SIGKILL, signal.SIGTERM)
#: srun names signals as strsignal(3) does.
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


@dataclass(frozen=True)
class ExitStatus:
    """The end of a process, by a signal or with an exit code."""

    signal: int | None = None
    exit_code: int | None = None
    out_of_memory: bool = False
    first: bool = False
    """Whether the launcher reported its end before that of any other rank."""
    not_started: str = ""
    """Why it was not started; empty if it was."""

    @classmethod
    def of_code(cls, code: int) -> ExitStatus:
        """From ``os.waitstatus_to_exitcode``: negative for a signal."""
        return cls(signal=-code) if code < 0 else cls(exit_code=code)

    @property
    def by_itself(self) -> bool:
        """Whether it ended by itself, rather than being ended by its launcher like the peers of a failed rank.

        The order in which connections break is no evidence: Linux closes the newest sockets of a killed process first,
        so a peer in a collective may fail, and report it, earlier.
        """
        alone = self.first or self.out_of_memory or bool(self.not_started)
        return alone or self.signal not in (None, *KILLS)

    def words(self) -> str:
        """The end in words, for a message."""
        if self.not_started:
            return f"was not started: {self.not_started}"
        if self.out_of_memory:
            return "was killed because the job ran out of memory. Request more with --mem"
        if self.signal == signal.SIGKILL:
            return "was killed by SIGKILL, probably out of memory"
        if self.signal is not None:
            return f"was killed by signal {self.signal} ({_name(self.signal)})"
        return f"exited with code {self.exit_code} and no traceback, probably because of os._exit()"


def in_order(exit_statuses: Mapping[int, ExitStatus]) -> dict[int, ExitStatus]:
    """The same, with ``first`` set in the first one."""
    return {rank: replace(death, first=number == 0) for number, (rank, death) in enumerate(exit_statuses.items())}


def of_tasks(messages: str) -> dict[int, ExitStatus]:
    """The ends of tasks, by rank, from srun's messages such as ``srun: error: n2: task 3: Killed``.

    Tasks that could not be started come first, then the order is that of the messages. A task's first one counts.
    """
    exit_statuses = {
        rank: ExitStatus(not_started=why) for tasks, why in _LAUNCH.findall(messages) for rank in _numbers(tasks)
    }
    for tasks, what in _TASKS.findall(messages):
        if death := _death(what):
            for rank in _numbers(tasks):
                exit_statuses.setdefault(rank, death)
    return exit_statuses


def _death(what: str) -> ExitStatus | None:
    if exited := _EXITED.fullmatch(what):
        return ExitStatus(exit_code=int(exited[1]))
    if what == "Out Of Memory":
        return ExitStatus(out_of_memory=True)
    return ExitStatus(signal=_SIGNALS[what]) if what in _SIGNALS else None


def _name(number: int) -> str | None:
    """``SIGSEGV``, for example. Most real-time signals have only a description."""
    return next((known.name for known in signal.Signals if known == number), signal.strsignal(number))


def _numbers(ranges: str) -> list[int]:
    """``0-1,3`` as 0, 1, 3."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return [number for low, _, high in ends for number in range(int(low), int(high or low) + 1)]
