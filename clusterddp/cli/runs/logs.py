"""``clusterddp logs``: prints or follows the output of ranks, or shows the first failure of a failed run."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from clusterddp.cli.runs.first_failure import box, failed_ranks, newest_failure
from clusterddp.cli.runs.rank_logs import Follower, Log, logs_of, print_grouped, print_one
from clusterddp.errors import FAILED, RunDirectoryError, UsageError
from clusterddp.jobdef.load import load_resolved
from clusterddp.reporter import counted, put, say, show
from clusterddp.rundir.claims import waiting_claim
from clusterddp.rundir.find import NEWEST, ONE_RUN, open_run
from clusterddp.rundir.job_log import job_log, taken_over
from clusterddp.rundir.run_directory import RunDirectory

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
        """The highest rank that the value names; None for all or failed."""
        return max(part[-1] for part in self._ranges) if self._ranges else None

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
    parser.add_argument("run", metavar="RUN", nargs="?", default=NEWEST, help=f"{ONE_RUN}; default: {NEWEST}")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the output, across restarts, to the end")
    parser.add_argument(
        "--rank",
        type=Ranks,
        metavar="R",
        help="ranks such as 3 or 0,4-7; all; or failed: those that failed by themselves; default: 0, or for a failed "
        "run without other options its first failure",
    )
    parser.add_argument(
        "--attempt",
        type=_attempt,
        metavar="N",
        help="an attempt, or all; default: the newest, with --rank failed the newest with a failure",
    )
    parser.add_argument(
        "--grep", type=_pattern, metavar="REGEX", help="only lines with a match; exit code 1 if there is none"
    )


def run(arguments: argparse.Namespace, _: object) -> int:
    """Carries out ``logs``; returns the exit code."""
    run = open_run(arguments.run)
    by_default = arguments.rank is None and arguments.attempt is None and arguments.grep is None
    ranks = arguments.rank or Ranks("0")
    if isinstance(arguments.attempt, int) and arguments.attempt not in (made := run.attempts()):
        available = ", ".join(map(str, made)) or "none yet"
        raise RunDirectoryError(f"{run} has no attempt {arguments.attempt}; available: {available}")
    if arguments.follow and run.outcome() is None:
        _follow(run, ranks, arguments.attempt, arguments.grep)
        if by_default:
            _show_failure(run)
        return 0
    if by_default and (_show_failure(run) or _show_job_log(run)):
        return 0
    logs = _chosen(run, ranks, arguments.attempt)
    alone = len(logs) == 1 and ranks.single is not None and arguments.attempt != _ALL
    printed = print_one(logs[0], arguments.grep) if alone else print_grouped(logs, arguments.grep)
    if arguments.grep is not None and not printed:
        say(f"no line matches {arguments.grep.pattern!r}")
        return FAILED
    if not printed:
        earlier = logs[-1].attempt > 0 and arguments.attempt is None
        so_far = "" if run.outcome() else " so far"
        hint = "; --attempt all prints earlier attempts', too" if earlier else ""
        which = "any rank" if ranks.text == _ALL else f"rank {ranks.text}"
        show(f"no output of {which} in attempt {logs[-1].attempt}{so_far}{hint}")
    return 0


def find_log(run: RunDirectory, rank: int, attempt: int | None) -> tuple[int, Path]:
    """The attempt (None: the newest) and the file of a rank's stdout; its stderr is beside it, as ``.err``."""
    number = _started(run, run.newest_attempt() if attempt is None else attempt)
    log = Log(run.attempt_logs(number), number, rank)
    if not log.path("out").exists():
        _check_not_deleted(run, number)
        raise RunDirectoryError(f"attempt {number} of {run} has no rank {rank}: {log.path('out')} does not exist")
    return number, log.path("out")


def _started(run: RunDirectory, attempt: int | None) -> int:
    if attempt is None:
        raise RunDirectoryError(
            f"{run} has not started yet: no output; `clusterddp status {run.quoted}` shows its state"
        )
    return attempt


def _check_not_deleted(run: RunDirectory, attempt: int) -> None:
    if not run.attempt_logs(attempt).exists():
        raise RunDirectoryError(
            f"the logs of attempt {attempt} of {run} were deleted: a run keeps those of its first and its newest "
            "attempts, as many as the key keep_logs says"
        )


def _chosen(run: RunDirectory, ranks: Ranks, attempt: int | str | None) -> list[Log]:
    """The logs to print, by rank and then by attempt; RunDirectoryError if there is none."""
    if ranks.failed:
        logs = _failed_logs(run, attempt)
    elif attempt != _ALL:
        number = _started(run, run.newest_attempt() if attempt is None else int(attempt))
        if ranks.single is not None:
            find_log(run, ranks.single, number)
        _check_not_deleted(run, number)
        logs = logs_of(run, number, ranks.__contains__)
    else:
        _started(run, run.newest_attempt())
        logs = [log for number in run.attempts() for log in logs_of(run, number, ranks.__contains__)]
    if not logs:
        which = "the attempts" if attempt in (_ALL, None) else f"attempt {attempt}"
        raise RunDirectoryError(f"{which} of {run} have no log of rank {ranks.text}; --rank all prints those there are")
    return sorted(logs, key=lambda log: (log.rank, log.attempt))


def _failed_logs(run: RunDirectory, attempt: int | str | None) -> list[Log]:
    """The logs of the ranks that failed by themselves in an attempt; None: in the newest in which one did."""
    events = run.events()
    if attempt is None and (newest := newest_failure(events)) is not None:
        attempt = int(newest["attempt"])
    numbers = run.attempts() if attempt in (_ALL, None) else [attempt]
    found = [(int(number), failed_ranks(run, int(number), events)) for number in numbers]
    if not any(ranks for _, ranks in found):
        where = "" if attempt in (_ALL, None) else f" in attempt {attempt}"
        raise RunDirectoryError(f"no rank of {run} failed{where}; `clusterddp status {run.quoted}` shows its history")
    return [log for number, ranks in found for log in logs_of(run, number, ranks.__contains__)]


def _follow(run: RunDirectory, ranks: Ranks, attempt: int | str | None, pattern: re.Pattern[str] | None) -> None:
    if ranks.failed:
        raise UsageError("--rank failed: the run is not over; with -f, expected ranks such as 3 or 0,4-7, or all")
    size = load_resolved(run.job_file).world_size
    if (highest := ranks.highest) is not None and highest >= size:
        raise UsageError(f"--rank {ranks.text}: {run} has {counted(size, 'rank')}, numbered from 0")
    follower = Follower(run, ranks.__contains__, pattern, alone=ranks.single is not None)
    if isinstance(attempt, int):
        follower.follow(attempt, later=False)
    else:
        follower.follow(min(run.attempts(), default=None) if attempt == _ALL else run.newest_attempt(), later=True)


def _show_failure(run: RunDirectory) -> bool:
    """Shows a failed run's first failure, and how to see the rest; returns whether the run failed and has one."""
    outcome = run.outcome()
    if outcome is None or outcome["state"] != "failed":
        return False
    show(f"{run}: failed: {outcome['reason']}")
    failure = newest_failure(run.events())
    if failure is None:
        return False
    put(box(run, failure))
    rank, attempt = failure["rank"], failure["attempt"]
    show(f"the whole output of rank {rank}: clusterddp logs {run.quoted} --rank {rank} --attempt {attempt}")
    show("of others: --rank failed, --rank 0,4-7 or --rank all; of all attempts: --attempt all")
    return True


def _show_job_log(run: RunDirectory) -> bool:
    """Shows the log of the run's job if no supervisor has taken the run over yet; returns whether it did.

    The job may have ended before, for a reason that is in its log. After earlier attempts it only names the log.
    """
    try:
        claim = waiting_claim(run, run.attempts())
    except PermissionError:  # another user's run
        return False
    log = job_log(run, str((claim or {}).get("job")))
    if claim is None or not log.is_file() or not log.stat().st_size or taken_over(run, claim):
        return False
    show(f"job {claim['job']} has not started its supervisor, or ended before that; its log: {log}")
    if run.attempts():
        return False
    put(log.read_text(errors="replace").rstrip())
    return True
