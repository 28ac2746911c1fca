"""``clusterddp logs``: prints or follows the output of ranks, or shows the first failure of a failed run.

Files are opened one at a time and read in blocks, to save memory with thousands of ranks or large logs.
"""

from __future__ import annotations

import argparse
import codecs
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from clusterddp.cli.live import coloured
from clusterddp.errors import FAILED, RunDirectoryError, UsageError
from clusterddp.history.failures import LaunchFailed
from clusterddp.jobdef.load import load_resolved
from clusterddp.reporter import counted, in_one_line, is_unread, printable, put, say, show
from clusterddp.rundir.claims import JobClaim, taken_over, waiting_claim
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.job_log import job_log
from clusterddp.rundir.run_directory import NEWEST, ONE_RUN, RunDirectory, open_run
from clusterddp.runs.progress_display import (
    Log,
    Wanted,
    check_not_deleted,
    described,
    failed_ranks,
    find_log,
    logs_of,
    newest_failure,
    started,
)
from clusterddp.supervisor.verdict import end_of_file, failure_box

#: The most bytes read at once. A longer line is searched, and labelled, in pieces.
BLOCK = 1 << 20
#: The least seconds between two looks at followed files, and the seconds for each file, if these are more.
FOLLOW_S, FOLLOW_PER_FILE_S = 0.2, 0.0005
#: ANSI colours of the ranks' labels.
_COLOURS = (36, 33, 32, 35, 34, 31)

# --- whole files


def print_one(log: Log, pattern: re.Pattern[str] | None) -> bool:
    """Prints a rank's stdout to stdout and its stderr to stderr. Returns whether it printed anything."""
    printed = False
    for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
        for piece in _pieces(log.path(kind), pattern, stream):
            stream.buffer.write(piece)
            printed = True
        stream.flush()
    return printed


def print_grouped(logs: Iterable[Log], pattern: re.Pattern[str] | None) -> bool:
    """Prints logs to stdout, each nonempty file below a line with its name. Returns whether it printed anything."""
    printed = False
    for log in logs:
        write = sys.stdout.buffer.write
        for kind, name in (("out", "stdout"), ("err", "stderr")):
            last = b""
            for piece in _pieces(log.path(kind), pattern, sys.stdout):
                if not last:
                    title = f"==> rank {log.rank}, attempt {log.attempt}: {name} <==\n"
                    write(("\n" * printed + title).encode())
                write(piece)
                last, printed = piece, True
            if last and not last.endswith(b"\n"):
                write(b"\n")
    sys.stdout.flush()
    return printed


def print_launcher(
    run: RunDirectory, attempts: Iterable[int], pattern: re.Pattern[str] | None, below: bool = False
) -> bool:
    """Prints what srun itself printed in these attempts. Returns whether anything was printed, or was before."""
    for attempt in attempts:
        write = sys.stdout.buffer.write
        for number, piece in enumerate(_pieces(run.launcher_log(attempt), pattern, sys.stdout)):
            if number == 0:
                write(("\n" * below + f"==> srun, attempt {attempt} <==\n").encode())
            write(piece)
            below = True
    sys.stdout.flush()
    return below


def _shown(file: BinaryIO, stream: TextIO) -> Callable[[bytes], bytes]:
    """What a stream gets of a file's bytes. All of them, with a rank's colours. A terminal gets ``printable`` text of a
    file that is another user's, wherever it is: its folder may be reached through a link."""
    if not stream.isatty() or os.fstat(file.fileno()).st_uid == os.geteuid():
        return lambda data: data
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a block may end within a letter
    return lambda data: printable(decoder.decode(data)).encode(errors="replace")


def _pieces(path: Path, pattern: re.Pattern[str] | None, stream: TextIO) -> Iterator[bytes]:
    """What the stream gets of a file, in blocks, or its lines that match. Empty if it does not exist."""
    try:
        file = open_binary(path)
    except FileNotFoundError:
        return
    with file:
        shown = _shown(file, stream)
        if pattern is None:
            while block := file.read(BLOCK):
                yield shown(block)
        else:
            while line := file.readline(BLOCK):
                if _matches(pattern, line.rstrip(b"\r\n")):
                    yield shown(line)


def _matches(pattern: re.Pattern[str] | None, line: bytes) -> bool:
    return pattern is None or pattern.search(line.decode(errors="replace")) is not None


# --- as lines arrive


class Follower:
    """Follows logs of a run's ranks. Those of several ranks get a label on each line.

    ``alone``: print one rank as ``print_one`` does.
    """

    def __init__(self, run: RunDirectory, wanted: Wanted, pattern: re.Pattern[str] | None, alone: bool) -> None:
        self._run, self._wanted, self._pattern, self._alone = run, wanted, pattern, alone
        self._coloured = coloured(sys.stdout)
        #: How much of each file of the present attempt has been printed.
        self._offsets: dict[Path, int] = {}

    def follow(self, number: int | None, later: bool) -> None:
        """Follows an attempt until it is superseded or the run is over. With ``later``, follows the next ones, too.

        ``number``: its number. None: wait for the first.
        """
        while number is None and self._run.outcome() is None:
            self._pause(FOLLOW_S)
            number = min(self._run.attempts(), default=None)
        while number is not None:
            following = self._follow_one(number)
            number = following if later else None
            if number is not None:
                show(f"==> attempt {number} <==")

    def _follow_one(self, number: int) -> int | None:
        """Follows one attempt. Returns the number of the next, or None if the run is over."""
        self._offsets.clear()
        while True:
            # Before reading: what is read after an attempt's end is complete.
            following = min((other for other in self._run.attempts() if other > number), default=None)
            ended = following is not None or self._run.outcome() is not None
            logs = logs_of(self._run, number, self._wanted)
            more = [self._print_new(log, kind, ended) for log in logs for kind in ("out", "err")]
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if ended and not any(more):
                return following
            if not any(more):
                self._pause(max(FOLLOW_S, FOLLOW_PER_FILE_S * len(more)))

    def _pause(self, seconds: float) -> None:
        """Waits for output. Raises RunDirectoryError if none can follow, and BrokenPipeError if the reader is gone."""
        if not os.path.lexists(self._run.path):
            raise RunDirectoryError(f"{self._run} was deleted")
        if is_unread(sys.stdout):
            raise BrokenPipeError
        time.sleep(seconds)

    def _print_new(self, log: Log, kind: str, ended: bool) -> bool:
        """Prints at most a block of a file's new complete lines, and the incomplete last one if the attempt has ended.

        Returns whether there may be more.
        """
        path = log.path(kind)
        offset = self._offsets.get(path, 0)
        stream = sys.stderr if self._alone and kind == "err" else sys.stdout
        try:
            with open_binary(path) as file:
                shown = _shown(file, stream)
                file.seek(offset)
                data = file.read(BLOCK)
        except FileNotFoundError:
            return False
        size = data.rfind(b"\n") + 1
        if not size and (ended or len(data) == BLOCK):
            size = len(data)
        if size:
            self._offsets[path] = offset + size
            self._print(log, data[:size], stream, shown)
        return size > 0 and (ended or len(data) == BLOCK)

    def _print(self, log: Log, data: bytes, stream: TextIO, shown: Callable[[bytes], bytes]) -> None:
        if self._alone and self._pattern is None:
            stream.buffer.write(shown(data))
            return
        label = b"" if self._alone else self._label(log.rank)
        for line in data.removesuffix(b"\n").split(b"\n"):
            if _matches(self._pattern, line):
                stream.buffer.write(label + shown(line + b"\n"))

    def _label(self, rank: int) -> bytes:
        label = f"[rank {rank}]"
        return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m " if self._coloured else f"{label} ").encode()


_ALL, _FAILED = "all", "failed"


class Ranks:
    """The value of ``--rank``: ``3``, ``0,4-7``, ``all`` or ``failed``."""

    def __init__(self, text: str) -> None:
        self.text, self.failed = text, text == _FAILED
        self._ranges: list[range] | None = None
        if text not in (_ALL, _FAILED):
            self._ranges = [_range(part) for part in text.split(",")]

    @property
    def single(self) -> int | None:
        """The rank, if the value is a number."""
        return int(self.text) if self.text.isdecimal() else None

    @property
    def highest(self) -> int | None:
        """The highest rank that the value names, or None for all or failed."""
        return max(part[-1] for part in self._ranges) if self._ranges else None

    def __str__(self) -> str:
        """In words, as after "no output from"."""
        words = {_ALL: "any rank", _FAILED: "the failed ranks"}
        return words.get(self.text, f"rank {self.text}" if self.single is not None else f"ranks {self.text}")

    def __contains__(self, rank: int) -> bool:
        return self._ranges is None or any(rank in part for part in self._ranges)


def _range(part: str) -> range:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip(), re.ASCII)
    if not match or int(match[1]) > int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"expected ranks such as 3 or 0,4-7, all, or failed, got {part!r}")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _attempt(text: str) -> int | str:
    if text != _ALL and not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected the number of an attempt, or all, got {text!r}")
    return text if text == _ALL else int(text)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``logs``."""
    parser.add_argument("run", metavar="RUN", nargs="?", default=NEWEST, help=f"{ONE_RUN} (default: {NEWEST})")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the output, across restarts, to the end")
    parser.add_argument(
        "--rank",
        type=Ranks,
        metavar="R",
        help="ranks such as 3 or 0,4-7, all, or failed for those that failed by themselves (default: 0, or for a "
        "failed run without other options its first failure)",
    )
    parser.add_argument(
        "--attempt",
        type=_attempt,
        metavar="N",
        help="an attempt, or all (default: the newest, or with --rank failed the newest with a failure)",
    )
    parser.add_argument(
        "--grep", type=_pattern, metavar="REGEX", help="print only lines that match. The exit code is 1 without a match"
    )


def run(arguments: argparse.Namespace, _: object) -> int:
    """Runs ``logs`` and returns the exit code."""
    run = open_run(arguments.run)
    by_default = arguments.rank is None and arguments.attempt is None and arguments.grep is None
    ranks = arguments.rank or Ranks("0")
    if isinstance(arguments.attempt, int) and arguments.attempt not in (made := run.attempts()):
        available = ", ".join(map(str, made)) or "none yet"
        raise RunDirectoryError(f"{run} has no attempt {arguments.attempt}. Available: {available}")
    if arguments.follow and run.outcome() is None:
        _follow(run, ranks, arguments.attempt, arguments.grep)
        if by_default:
            _show_failure(run)
        return 0
    if by_default and (_show_failure(run) or _show_job_log(run) or _show_launcher(run)):
        return 0
    if ranks.text == _ALL and arguments.attempt is None and _show_launcher(run):
        return 0
    logs = _chosen(run, ranks, arguments.attempt)
    alone = len(logs) == 1 and ranks.single is not None and arguments.attempt != _ALL
    printed = print_one(logs[0], arguments.grep) if alone else print_grouped(logs, arguments.grep)
    if ranks.text == _ALL:
        printed = print_launcher(run, sorted({log.attempt for log in logs}), arguments.grep, printed)
    if arguments.grep is not None and not printed:
        say(f"no line matches {arguments.grep.pattern!r}")
        return FAILED
    if not printed:
        earlier = logs[-1].attempt > 0 and arguments.attempt is None
        so_far = "" if run.outcome() else " so far"
        hint = ". To print earlier attempts, use --attempt all" if earlier else ""
        if arguments.attempt == _ALL:
            show(f"no output from {ranks} in any attempt{so_far}")
        else:
            show(f"no output from {ranks} in attempt {logs[-1].attempt}{so_far}{hint}")
    return 0


def _chosen(run: RunDirectory, ranks: Ranks, attempt: int | str | None) -> list[Log]:
    """The logs to print, by rank and then by attempt. Raises RunDirectoryError if there is none."""
    if ranks.failed:
        logs = _failed_logs(run, attempt)
    elif attempt != _ALL:
        number = started(run, run.newest_attempt() if attempt is None else int(attempt))
        if ranks.single is not None:
            find_log(run, ranks.single, number)
        check_not_deleted(run, number)
        logs = logs_of(run, number, ranks.__contains__)
    else:
        started(run, run.newest_attempt())
        logs = [log for number in run.attempts() for log in logs_of(run, number, ranks.__contains__)]
    if not logs:
        where = "" if attempt in (_ALL, None) else f" in attempt {attempt}"
        raise RunDirectoryError(f"{run} has no log of {ranks}{where}. To print all logs, use --rank all")
    return sorted(logs, key=lambda log: (log.rank, log.attempt))


def _failed_logs(run: RunDirectory, attempt: int | str | None) -> list[Log]:
    """The logs of the ranks that failed by themselves in an attempt. None: in the newest with such a failure."""
    history = run.history()
    if attempt is None and (newest := newest_failure(history)) is not None:
        attempt = newest.attempt
    numbers = run.attempts() if attempt in (_ALL, None) else [attempt]
    found = [(int(number), failed_ranks(run, history.attempt(int(number)))) for number in numbers]
    if not any(ranks for _, ranks in found):
        where = "" if attempt in (_ALL, None) else f" in attempt {attempt}"
        raise RunDirectoryError(
            f"no rank of {run} failed{where}. See the run's history with: clusterddp status {run.quoted}"
        )
    return [log for number, ranks in found for log in logs_of(run, number, ranks.__contains__)]


def _follow(run: RunDirectory, ranks: Ranks, attempt: int | str | None, pattern: re.Pattern[str] | None) -> None:
    if ranks.failed:
        raise UsageError("--rank failed: the run has not ended. With -f, name ranks such as 3 or 0,4-7, or all")
    size = load_resolved(run.job_file).world_size
    if (highest := ranks.highest) is not None and highest >= size:
        raise UsageError(f"--rank {ranks.text}: {run} has {counted(size, 'rank')}, numbered from 0")
    follower = Follower(run, ranks.__contains__, pattern, alone=ranks.single is not None)
    if isinstance(attempt, int):
        follower.follow(attempt, later=False)
    else:
        follower.follow(min(run.attempts(), default=None) if attempt == _ALL else run.newest_attempt(), later=True)


def _show_failure(run: RunDirectory) -> bool:
    """Shows a failed run's first failure, and how to see the rest. Returns whether there is one."""
    outcome = run.outcome()
    if outcome is None or not outcome.failed:
        return False
    show(f"{run} failed: {in_one_line(outcome.reason)}")
    failure = newest_failure(run.history())
    if failure is None:
        return False
    put(failure_box(described(run, failure)))
    if isinstance(failure, LaunchFailed):
        return True
    rank, attempt = failure.rank, failure.attempt
    show(f"See the whole output of rank {rank} with: clusterddp logs {run.quoted} --rank {rank} --attempt {attempt}")
    show("For other ranks, use --rank failed, --rank 0,4-7 or --rank all. For all attempts, use --attempt all")
    return True


def _show_launcher(run: RunDirectory) -> bool:
    """Shows what srun printed if it has started no rank of the newest attempt. Returns whether it did."""
    newest = run.newest_attempt()
    if newest is None or logs_of(run, newest, lambda _: True):
        return False
    return print_launcher(run, [newest], None)


def _show_job_log(run: RunDirectory) -> bool:
    """Shows the log of the run's job if no supervisor has taken the run over yet. Returns whether it did.

    The job may have ended before that, and its log then has the reason. After earlier attempts, only names the log.
    """
    try:
        claim = waiting_claim(run, run.attempts())
    except PermissionError:  # another user's run
        return False
    if not isinstance(claim, JobClaim):
        return False
    log = job_log(run, claim.job)
    if not log.is_file() or not log.stat().st_size or taken_over(run, claim):
        return False
    show(f"job {claim.job} has not started its supervisor yet, or ended before it could. See the job's log: {log}")
    if run.attempts():
        return False
    put(end_of_file(log).rstrip())
    return True
