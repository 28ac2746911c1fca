"""What a command shows of a run: its events as sentences, its ranks' output, its progress and its first failure."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, RunDirectoryError
from clusterddp.failures.exit_status import LaunchFailure
from clusterddp.history.beginnings import Started
from clusterddp.history.codec import decode, sentence
from clusterddp.history.ends import AttemptEnd
from clusterddp.history.event import Event
from clusterddp.history.failures import Failure, Hung, LaunchFailed, RankFailed
from clusterddp.history.steps import Progress as StepProgress
from clusterddp.history.view import AttemptView, RunView
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.masking import masked
from clusterddp.jobdef.secrets import secret_values
from clusterddp.messages.reports import End
from clusterddp.reporter import forgiving, one_line, printable, say, show, what_failed
from clusterddp.rundir.growing_file import GrowingFile
from clusterddp.rundir.json_lines import parse
from clusterddp.rundir.progress import recent
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import EVENT, METRICS, Schema
from clusterddp.supervisor.verdict import FirstFailure, RankEnd, added_arguments, failure_text

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

#: Seconds between two updates of the line on a terminal.
_LINE_EVERY_S = 1.0


class _Words:
    """What a process writes to a pipe, line by line, without waiting."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._rest = pipe, b""
        os.set_blocking(pipe.fileno(), False)

    def lines(self) -> list[str]:
        """The lines completed since the last call."""
        data = self._rest
        with suppress(BlockingIOError):
            while more := os.read(self._pipe.fileno(), 1 << 16):
                data += more
        *whole, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def _after_return(line: str) -> str:
    """What a terminal shows of a line in the end: what follows the last carriage return, as in a progress bar. One at
    the end of the line has overwritten nothing."""
    line = line.rstrip("\r")
    return line[line.rfind("\r") + 1 :]


def _objects(lines: list[str], form: Schema) -> Iterator[dict[str, Any]]:
    """The objects in lines of JSON. Invalid lines are skipped, because a command that only looks must not fail."""
    for line in lines:
        value, _ = parse(line.encode(), form)
        if value is not None:
            yield value


@dataclass(frozen=True)
class Shown:
    """What a waiting command shows of a run."""

    progress: bool = True
    """Whether to show the progress: on a terminal as a line that changes, elsewhere as one at an interval."""
    output: bool = True
    """Whether to show rank 0's output: its stdout and its stderr."""
    events: Collection[str] | None = None
    """Which events are shown. None: all."""
    failures: bool = True
    """Whether to show the sentence about a first failure. In a local run, the supervisor prints a box."""
    label: str = ""
    """The beginning of each event's line."""


_ALL = Shown()


class Progress:
    """Follows a run directory, as a context manager. Call ``update()`` a few times per second.

    ``every_s``: the interval of progress lines, in seconds. None: no lines.
    """

    def __init__(
        self, run: RunDirectory, total_steps: int | None, every_s: float | None = None, shown: Shown = _ALL
    ) -> None:
        self._run, self._shown = run, shown
        self._events = GrowingFile(run.events_file, from_end=True)
        self._metrics = GrowingFile(run.metrics_file, from_end=True)
        self._output: list[GrowingFile] = []
        self._secrets: list[str] = []
        self._words: _Words | None = None
        self._total = total_steps
        self._live: Live | None = None
        self._every_s = every_s if shown.progress else None
        self._line_at, self._steps_shown = time.monotonic(), 0
        #: Attempts started since this object was created, and steps done.
        self.starts = self.steps_done = 0
        self._failed = False

    def __enter__(self) -> Progress:
        if self._shown.progress and sys.stderr.isatty():
            self._live = _live()
            self._live.start()
            self._every_s = _LINE_EVERY_S
        return self

    @property
    def shows_output(self) -> bool:
        """Whether it shows rank 0's output."""
        return self._shown.output

    def follow(self, supervisor: IO[bytes] | None) -> None:
        """From now on shows what this supervisor prints, such as the box of a first failure. It follows what rank 0
        had printed before."""
        self._words = None if supervisor is None else _Words(supervisor)

    def __exit__(self, *_: object) -> None:
        self.update()
        if self._live:
            self._live.stop()

    def update(self) -> None:
        """Shows new events, output and steps.

        The command may be the loop of a local run, which an error of the display or of reading must not end.
        """
        try:
            self._update()
        except (OSError, ClusterddpError) as error:
            if not self._failed:
                why = what_failed(error) if isinstance(error, OSError) else error
                say(f"could not show the progress ({why}). Will try again")
            self._failed = True

    def _update(self) -> None:
        for event in _objects(self._events.lines(), EVENT):
            self._event(decode(event))
        self._say_words()
        for metrics in _objects(self._metrics.lines(), METRICS):
            self.steps_done = metrics["step"] + 1
        if self._every_s is not None and time.monotonic() >= self._line_at + self._every_s:
            self._line_at = time.monotonic()
            self._show_line()

    def _show_line(self) -> None:
        """Shows step, speed, time left and metrics, if there are new steps."""
        found = recent(self._run.metrics_file) if self.steps_done != self._steps_shown else None
        if found is None:
            return
        self._steps_shown = self.steps_done
        line = found.line(self._total)
        if self._live:
            self._live.update(_on_one_line(line), refresh=True)
        else:
            show(line)

    def _event(self, event: Event) -> None:
        self.starts += isinstance(event, Started)
        self._line_at = time.monotonic()  # the sentence about the run's end is the last line
        self._total = event.steps if isinstance(event, StepProgress) else self._total
        shown = self._shown.events is None or event.name in self._shown.events
        said = sentence(event) if shown and (self._shown.failures or not isinstance(event, RankFailed)) else None
        if isinstance(event, AttemptEnd):  # the ranks have exited, and the box comes before the end's sentence
            self._say_words(ended=True)
        else:
            self._say_output()
        if said:
            self._say(f"{self._shown.label}{said}")
        if isinstance(event, Started) and self._shown.output:
            log = Log(self._run.attempt_logs(event.attempt), event.attempt, 0)
            self._output = []
            self._secrets = _secrets(self._run)  # without them, no output is shown
            self._output = [GrowingFile(log.path(kind)) for kind in ("out", "err")]

    def _say_words(self, ended: bool = False) -> None:
        """Shows what the supervisor has printed, below what rank 0 had printed by then, so that it is read first."""
        words = [] if self._words is None else self._words.lines()
        self._say_output(ended)
        for line in words:
            self._say(line, raw=True)

    def _say_output(self, ended: bool = False) -> None:
        """Shows the output of the user's own script with its colours, and with its secrets masked: a terminal is often
        a log of something else, such as CI.

        ``ended``: also a last line without an end, as rank 0 has exited."""
        for output in self._output:
            lines = [*output.lines(), *([output.rest()] if ended else [])]
            text = "\n".join(filter(None, map(_after_return, lines)))
            for line in filter(None, masked(text, self._secrets).split("\n")):
                self._say(line, raw=True)

    def _say(self, line: str, raw: bool = False) -> None:
        if self._live:
            self._live.console.print(line if raw else printable(line), markup=False, highlight=False, soft_wrap=True)
        else:
            show(line, raw)


def _live() -> Live:
    """The last line of the terminal, below everything else that is printed."""
    from rich.console import Console
    from rich.live import Live

    # A terminal that is closed gives EIO. A script's output may have `:fire:` in it.
    console = Console(file=forgiving(2), emoji=False)
    return Live(console=console, auto_refresh=False, transient=True)


def _on_one_line(text: str) -> Text:
    from rich.text import Text

    return Text(one_line(text), no_wrap=True, overflow="ellipsis")


_RECORD = re.compile(r"rank-(\d{1,9})\.json", re.ASCII)


def _secrets(run: RunDirectory) -> list[str]:
    """The secrets of a run that this user may read, and those of this process."""
    return secret_values(load_resolved(run.job_file), os.environ)


def newest_failure(history: RunView) -> Failure | None:
    """The event that names the first failure of the newest attempt that had one, or None if no rank failed."""
    failed = [event for event in history if isinstance(event, Failure)]
    return failed[-1] if failed else None


def described(run: RunDirectory, event: Failure) -> str:
    """A first failure in words, as the supervisor described it, but without the failures that followed from it."""
    attempt, when = event.attempt, event.time
    if isinstance(event, LaunchFailed):
        end = RankEnd.of_launch(LaunchFailure(event.error, tuple(event.lines), event.refused), when)
    elif isinstance(event, Hung):
        end = RankEnd(event.rank, event.host, End.HUNG, when, error=event.what)
    else:
        end = RankEnd.read(event.rank, event.host, when, run.rank_record(attempt, event.rank))
        if end.end is End.DIED:  # the supervisor's event has the cause of its death
            end = replace(end, error=event.error)
    secrets = _secrets(run)
    more = [added_arguments(run, run.history().attempt(attempt))]
    first = FirstFailure(end.without(secrets), step=event.at_step)
    return failure_text(run, attempt, first, when, secrets, more)


def failed_ranks(run: RunDirectory, attempt: AttemptView) -> set[int]:
    """The first rank that failed in an attempt, and those whose own records report an error.

    Another user of the group, who cannot read the records, sees only the first.
    """
    failed: set[int] = set()
    for event in attempt:
        if isinstance(event, Hung):
            failed |= {event.rank, *event.late}
        elif isinstance(event, RankFailed):
            failed.add(event.rank)
    with suppress(FileNotFoundError, PermissionError):
        for match in filter(None, map(_RECORD.fullmatch, os.listdir(run.attempt_private(attempt.number)))):
            rank = int(match[1])
            if RankEnd.read(rank, "", 0.0, run.rank_record(attempt.number, rank)).by_itself:
                failed.add(rank)
    return failed


_NAME = re.compile(r"rank-(\d{1,9})\.(out|err)", re.ASCII)
#: Whether to include a rank's logs.
Wanted = Callable[[int], bool]


@dataclass(frozen=True)
class Log:
    """What one rank wrote in one attempt: ``rank-R.out`` (its stdout) and ``rank-R.err`` (its stderr)."""

    folder: Path
    attempt: int
    rank: int

    def path(self, kind: str) -> Path:
        """The file of ``out`` or ``err``."""
        return self.folder / f"rank-{self.rank}.{kind}"


def logs_of(run: RunDirectory, attempt: int, wanted: Wanted) -> list[Log]:
    """The logs of an attempt's ranks, in their order, or none if the attempt has no folder."""
    folder = run.attempt_logs(attempt)
    try:
        found = {int(match[1]) for match in map(_NAME.fullmatch, os.listdir(folder)) if match}
    except FileNotFoundError:
        return []
    return [Log(folder, attempt, rank) for rank in sorted(found) if wanted(rank)]


def find_log(run: RunDirectory, rank: int, attempt: int | None) -> tuple[int, Path]:
    """The attempt (None: the newest) and the file of a rank's stdout. Its stderr is beside it, as ``.err``."""
    number = started(run, run.newest_attempt() if attempt is None else attempt)
    log = Log(run.attempt_logs(number), number, rank)
    if not log.path("out").exists():
        check_not_deleted(run, number)
        raise RunDirectoryError(f"attempt {number} of {run} has no rank {rank}: {log.path('out')} does not exist")
    return number, log.path("out")


def started(run: RunDirectory, attempt: int | None) -> int:
    if attempt is None:
        raise RunDirectoryError(
            f"{run} has not started yet and has no output. See the run's state with: clusterddp status {run.quoted}"
        )
    return attempt


def check_not_deleted(run: RunDirectory, attempt: int) -> None:
    if not run.attempt_logs(attempt).exists():
        raise RunDirectoryError(
            f"the logs of attempt {attempt} of {run} were deleted. A run keeps the logs of its first attempt and "
            "of its newest attempts. The key keep_logs sets how many"
        )
