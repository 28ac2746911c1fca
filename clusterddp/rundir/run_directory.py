"""The run directory: every path of a run, and its attempts, history, metrics and outcome.

Permissions: opens a run to its group or closes it, and keeps ``private`` closed to others.

``find_runs`` finds the runs that the words of a command line name: run directories, folders of runs, patterns. For a
wrong path, the error proposes the nearest run.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp import codec
from clusterddp.codec import Misfit
from clusterddp.errors import RunDirectoryError
from clusterddp.protocol import RUNS
from clusterddp.rundir import json_lines, metrics_lines, records, schemas
from clusterddp.rundir.files import (
    at,
    create_folder,
    exists,
    fsync_directory,
    make_folder,
    make_own_folder,
    names_in,
    remove,
    write_atomically,
)

if TYPE_CHECKING:  # a rank needs the paths alone, and starts sooner without the classes of all events
    from clusterddp.history.outcome import Outcome
    from clusterddp.history.view import RunView


def share_run(top: Path, share: str, closed: Path) -> None:
    """Opens the run's folder ``top`` to its group (``share`` is "group") or closes it ("private"), but not ``closed``.

    Only this user's own folders and files change. Symbolic links and hard links may lead outside the run and are left
    unchanged. An executable file stays executable. Raises RunDirectoryError if a mode cannot be changed. A second call
    continues where the first failed.
    """
    mode = 0o2750 if share == "group" else 0o700
    try:
        with at(top) as (place, above):
            if stat.S_IMODE(os.stat(place, dir_fd=above).st_mode) == mode:
                return
            if share != "group":
                os.chmod(place, mode, dir_fd=above)  # first, so that other users cannot enter during the walk
            for folder, folders, files, descriptor in os.fwalk(place, onerror=_raise, dir_fd=above):
                folders[:] = [name for name in folders if Path(top, folder, name) != closed]
                for name in (*folders, *files):
                    _share(descriptor, name, mode)
            if share == "group":
                os.chmod(place, mode, dir_fd=above)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise RunDirectoryError(f"could not change the permissions of {top}{where}: {error.strerror}") from error


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _share(folder: int, name: str, mode: int) -> None:
    """Changes the mode of one entry of an open folder, through a descriptor that no link can redirect."""
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:  # deleted meanwhile
        return
    entry = Path(f"/proc/self/fd/{descriptor}")  # fchmod refuses O_PATH descriptors
    try:
        status = os.fstat(descriptor)
        own = status.st_uid == os.geteuid()
        if own and stat.S_ISDIR(status.st_mode):
            entry.chmod(mode)
        elif own and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            executable = (0o700 | mode) & 0o111 if status.st_mode & 0o100 else 0
            entry.chmod(mode & 0o044 | 0o600 | executable)
    finally:
        os.close(descriptor)


def make_private(path: Path) -> None:
    """Creates a folder for tokens and pickles that only its owner can enter, or closes an existing one.

    Raises RunDirectoryError if the folder belongs to another user or is a symbolic link.
    """
    make_own_folder(path, 0o700, exist_ok=True)
    try:
        with at(path) as (name, above):
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except NotADirectoryError as error:
        raise RunDirectoryError(f"{path} is a symbolic link, not a folder of this run. Remove the link") from error
    except PermissionError as error:
        raise RunDirectoryError(f"user {os.geteuid()} could not open {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid not in (os.geteuid(), 0):
            raise RunDirectoryError(
                f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}. Choose a different run directory"
            )
        if stat.S_IMODE(status.st_mode) & 0o777 != 0o700 and status.st_uid == os.geteuid():
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & 0o7000 | 0o700)
    finally:
        os.close(descriptor)


#: A folder of runs with this file is a sweep.
SWEEP_FILE = "sweep.yaml"
_ATTEMPT = re.compile(r"attempt-(\d{1,18})")


class _Below:
    """A path in a run directory, made at its first use, because a list of runs needs few paths of each run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, _: type, attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, run: RunDirectory, _: type) -> Path:
        path = run.__dict__[self._attribute] = run.path / self._name
        return path


class RunDirectory:
    """The paths of one run, whose identity is its folder. Creating this object does not touch the disk.

    To continue a run, submit with its directory as ``--run-dir``, or call ``sbatch job.sbatch`` by hand. You may delete
    ``logs/`` at any time. A script may write its own files to ``ctx.run_dir``. Ranks start in the
    folder in which you submitted, not in the run directory.

    A file that is written at once, such as ``outcome.json`` or a checkpoint, is complete or absent. The ``.jsonl``
    files grow line by line, and each has one writer at a time. A killed writer may leave an incomplete last line, which
    readers skip. They also skip a line that another program wrote, with a warning that names the line.

    Steps are numbered from 0 in ``run.step`` and in ``metrics.jsonl``. Checkpoints, most events and ``outcome.json``
    have the number of completed steps. Checkpoint 500 is the state after steps 0 to 499, and a run
    that resumes from it runs step 500 next. Attempts, ranks and nodes are numbered from 0.
    """

    job_file = _Below("job.yaml")
    """The complete job definition. Later submissions must agree with it, or use ``--change``."""
    batch_script = _Below("job.sbatch")
    """The batch script, if the run was submitted to Slurm."""
    events_file = _Below("events.jsonl")
    """The history, one event per line.

    ``clusterddp status`` shows it in sentences, and [Events](events.md) lists the fields. An exception's text is
    shortened to 2,000 characters, and ``logs/`` has the rest. The supervisor of the newest attempt writes the file, and
    a supervisor that finds a newer attempt stops writing. Without a supervisor (torchrun, or srun by hand) rank 0
    writes it. ``submit --fork`` writes the first line of a new run, and ``clusterddp cancel`` writes the last one if no
    supervisor runs.
    """
    metrics_file = _Below("metrics.jsonl")
    """The values that the script passed to ``run.log()``, one line per step, written by rank 0.

    A line has ``"step"``, ``"time"`` (unix seconds), ``"attempt"`` and the values::

        {"step": 0, "time": 1795294247.45, "attempt": 0, "loss": 0.2113}

    Steps that were repeated have a line per attempt. A line of attempt a and step s counts unless a later attempt
    resumed at a checkpoint S <= s. For a completed run, the newest line of each step counts::

        metrics = pandas.read_json("runs/train-0/metrics.jsonl", lines=True)
        metrics = metrics.drop_duplicates("step", keep="last")

    JSON has no NaN and no infinity. They are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``,
    which ``float()`` and ``pandas.to_numeric`` read. Lines below a step are on disk before the checkpoint of that step
    is saved. What ``run.log()`` logs outside a step, such as an evaluation after the loop, is a line with
    ``"event": "result"`` and the number of steps completed so far, which the recipe above takes for a step's.
    """
    timing_file = _Below("timing.jsonl")
    """What the steps of each rank spent their time on, in intervals.

    An interval has ``"attempt"``, ``"begin"`` and ``"end"`` (unix seconds), and a list with one entry per rank for
    ``"steps"`` and for the seconds of each phase of the steps. ``"gpus"`` has what each rank's GPUs did, if that is
    known. The first line of an attempt has its ``"hosts"``, one per rank.
    """
    outcome_file = _Below("outcome.json")
    """How the run ended, written once. A run that can continue has none.

    ``"state"`` is ``completed``, ``failed`` or ``cancelled``. The others are ``"step"``, ``"attempts"`` and
    ``"reason"``. ``"step"`` is null for a script whose steps are unknown. ``"confirmed": false`` marks a completion
    whose only evidence is exit code 0, which may mean something else.
    """
    checkpoints = _Below("checkpoints")
    """The checkpoints, ``step-<12 digits>.attempt-<n>.safetensors``, or a folder without that suffix for each."""
    logs = _Below("logs")
    """The output of ranks and jobs.

    ``attempt-<n>/rank-<r>.out`` and ``.err`` are what rank r printed, ``srun.err`` is what srun printed, and
    ``nodes.err`` what ``node_setup`` printed on each node. If a rank hung, its ``.err`` holds the stacks of its
    threads. ``job-<id>.log`` is the output of the batch script: that of ``setup`` and of the supervisor. With
    ``--local``, the supervisor writes to ``supervisor.log``. A new attempt deletes the logs of old ones, except those
    of the first attempt and of the newest ``keep_logs``. ``clusterddp logs`` prints them.
    """
    loop_log = _Below("logs/loop.log")
    """The output of the process that runs a local run in the background."""
    hook_log = _Below("logs/hook.log")
    """The output of the job's ``hook``."""
    hydra = _Below("hydra")
    """The output folder of a Hydra app: ``.hydra/``, its log, and what it saves."""
    code = _Below("code")
    """The snapshots of the code that the run has used."""
    code_file = _Below("code/current.json")
    """Which snapshot the run uses."""
    private = _Below("private")
    """Tokens, pickles, and records of the ranks. Only you can read it, even with ``share: group``."""
    submitted_file = _Below("private/submitted.json")
    package_file = _Below("private/package.zip")
    tracker_id_file = _Below("private/tracker-id")
    loop_file = _Below("private/loop.json")
    notice_file = _Below("private/notice.json")  # why the loop of a local run sends a signal
    debug_file = _Below("private/debug.json")  # the rank of `submit --debug`
    environment_file = _Below("private/environment.json")  # the packed environment (``stage``)
    cancel_mark = _Below("cancelled")
    """Exists once ``clusterddp cancel`` was called."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __str__(self) -> str:
        return str(self.path)

    @property
    def quoted(self) -> str:
        """The path as a word of a shell's command line, for messages with a command to copy."""
        return shlex.quote(str(self.path))

    def exists(self) -> bool:
        """Whether the folder holds a run: it has a job definition. Raises RunDirectoryError if access is denied."""
        try:
            return exists(self.job_file)
        except PermissionError as error:
            raise RunDirectoryError(
                f"{self}: permission denied. Its owner can share the run with `clusterddp submit --run-dir "
                "RUN --change --set share=group`"
            ) from error

    def create(self, share: str | None = None) -> None:
        """Creates the folders, durably. Existing ones are kept.

        ``share``: who may read the run, "private" (its owner alone) or "group" (its group, all but ``private``). None
        leaves the permissions of the run's folder as they are.
        """
        make_folder(self.path, mode=0o777 if share is None else 0o700)  # 0o700: other users cannot add files first
        if share is not None:
            share_run(self.path, share, closed=self.private)
        for folder in (self.checkpoints, self.logs):
            create_folder(folder, exist_ok=True)
        make_private(self.private)
        fsync_directory(self.path)

    def may_be_over(self, job_state: str | None) -> bool:
        """Whether a run without an outcome may have one that is not visible here yet, once its job has ended.

        A shared disk may hide a new file for a minute from a node that has looked for it. Lines that are appended to a
        known file are visible, so the history shows that the run is over, unless it is hidden itself, or lacks the end
        of an attempt because the disk was full. ``job_state``: of the job that has ended, None if unknown.
        """
        from clusterddp.history.ends import RunEnd

        newest = self.history().newest
        if newest is None or newest.is_open:
            return job_state == "COMPLETED"
        return newest.has(RunEnd)

    # --- attempts

    def attempts(self) -> list[int]:
        """The numbers of all attempts so far, ascending: each has a folder in ``logs`` and one in ``private``."""
        names = set(_names_in(self.logs))
        with suppress(PermissionError):  # another user's run
            names.update(_names_in(self.private))
        return sorted(int(match[1]) for match in map(_ATTEMPT.fullmatch, names) if match)

    def newest_attempt(self) -> int | None:
        """The number of the newest attempt, None before the first."""
        return max(self.attempts(), default=None)

    def superseded(self, attempt: int) -> bool:
        """Whether a newer attempt exists."""
        newest = self.newest_attempt()
        return newest is not None and newest > attempt

    def create_attempt(self) -> int:
        """Claims the next attempt number, by an exclusive mkdir."""
        if not exists(self.logs):  # deleted together with the logs of earlier attempts
            create_folder(self.logs, exist_ok=True)
            fsync_directory(self.path)
        make_private(self.private)
        recorded: list[int] = [] if self.attempts() else [attempt.number for attempt in self.history().attempts]
        number = -1
        while True:
            # One that a different node has just created may exist without being listed here for a minute.
            number = max([number, *recorded, *self.attempts()]) + 1
            try:
                create_folder(self.attempt_logs(number))
            except FileExistsError:
                continue
            make_private(self.attempt_private(number))
            fsync_directory(self.private)
            return number

    def attempt_logs(self, attempt: int) -> Path:
        """The folder of an attempt's rank outputs, ``rank-<r>.out`` and ``rank-<r>.err``."""
        return self.logs / f"attempt-{attempt}"

    def launcher_log(self, attempt: int) -> Path:
        """What srun itself printed: errors, and how ranks ended. None with ``--local``."""
        return self.attempt_logs(attempt) / "srun.err"

    def nodes_log(self, attempt: int) -> Path:
        """What was printed before the ranks started, by ``node_setup`` and by the srun that ran it on every node."""
        return self.attempt_logs(attempt) / "nodes.err"

    def attempt_private(self, attempt: int) -> Path:
        """The folder of an attempt's records: how each rank ended, what was resumed."""
        return self.private / f"attempt-{attempt}"

    def result_file(self, attempt: int, rank: int) -> Path:
        """A rank's return value, pickled: that of a launched function, or of a Hydra app's task function."""
        return self.attempt_private(attempt) / f"result-{rank}.pkl"

    def holder_file(self, attempt: int) -> Path:
        """Where an attempt's supervisor records its job or process."""
        return self.attempt_private(attempt) / "holder.json"

    def control_file(self, attempt: int) -> Path:
        """Where an attempt's supervisor records how the user's requests reach it."""
        return self.attempt_private(attempt) / "control.json"

    def rank_record(self, attempt: int, rank: int) -> Path:
        """Where a rank records how it ended."""
        return self.attempt_private(attempt) / f"rank-{rank}.json"

    def child_step_file(self, attempt: int) -> Path:
        """An empty file, once a process that the script has started made a step."""
        return self.attempt_private(attempt) / "child-step"

    def resume_record(self, attempt: int) -> Path:
        """Where rank 0 records, before the first step, which checkpoint the attempt resumed from."""
        return self.attempt_private(attempt) / "resumed.json"

    def resumed(self, attempt: int) -> dict[str, Any] | None:
        """An attempt's resume record: "step", and "parent" with "attempt" and "step". None if it has none."""
        record = records.read_json(self.resume_record(attempt), schemas.RESUMED)
        if record and record.get("parent") and record["parent"]["attempt"] >= attempt:
            raise RunDirectoryError(
                f"{self.resume_record(attempt)}: an attempt cannot resume from itself or a later attempt. Another "
                "program changed the file"
            )
        return record

    # --- history, metrics, outcome

    def history(self) -> RunView:
        """The run's history."""
        from clusterddp.history.codec import decode
        from clusterddp.history.view import RunView

        return RunView(map(decode, self.events()))

    def events(self) -> list[dict[str, Any]]:
        """The run's history, oldest first."""
        return list(json_lines.read_lines(self.events_file, schemas.EVENT))

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics lines that count, ordered by step, with floats for "NaN" and the infinities.

        A line (attempt a, step s) counts unless a later attempt resumed at a checkpoint S <= s.
        """
        return self._counted(schemas.METRICS)

    def _counted(self, schema: schemas.Schema) -> list[dict[str, Any]]:
        lines = list(json_lines.read_lines(self.metrics_file, schema))
        counted = map(metrics_lines.with_floats, filter(self._counts(lines), lines))
        return sorted(counted, key=lambda line: (line["step"], line["attempt"]))

    def logged(self) -> list[dict[str, Any]]:
        """``metrics()``, and the lines of what the script logged outside its steps."""
        return self._counted(schemas.LOGGED)

    def newest_metrics(self) -> dict[str, Any] | None:
        """The last of ``metrics()``, or None. Reads only the end of the file."""
        lines = filter(self._counts(), json_lines.read_backwards(self.metrics_file, schemas.METRICS))
        return next(map(metrics_lines.with_floats, lines), None)

    def last_metrics(self) -> dict[str, Any] | None:
        """The last metrics line, whether or not it counts. None before the first."""
        return next(json_lines.read_backwards(self.metrics_file, schemas.METRICS), None)

    def most_steps(self) -> int:
        """The most steps that an attempt has made, saved or not. 0 if the records cannot be read.

        The last line of the metrics is the last attempt's. Earlier attempts may have made more steps.
        """
        from clusterddp.history.beginnings import Beginning

        try:
            made: list[int] = [(self.last_metrics() or {"step": -1})["step"] + 1]
            made += [event.step + (event.redone or 0) for event in self.history().all(Beginning)]
            return max(made)
        except (OSError, RunDirectoryError):
            return 0

    def _counts(self, lines: Iterable[Mapping[str, Any]] = ()) -> Callable[[Mapping[str, Any]], bool]:
        return metrics_lines.counts(self.first_steps(lines))

    def first_steps(self, lines: Iterable[Mapping[str, Any]] = ()) -> dict[int, int]:
        """The first step of each attempt that has begun to train.

        It is in the attempt's resume record, which only the owner can read, and in an event, which a killed supervisor
        may not have written. Without both, it is that of the attempt's first line in ``lines``.
        """
        from clusterddp.history.beginnings import Beginning

        begun: dict[int, int] = {}
        for line in lines:
            begun[line["attempt"]] = min(line["step"], begun.get(line["attempt"], line["step"]))
        begun |= {event.attempt: event.step for event in self.history().all(Beginning)}
        with suppress(PermissionError):
            begun |= {number: record["step"] for number in self.attempts() if (record := self.resumed(number))}
        return begun

    def outcome(self) -> Outcome | None:
        """How the run ended. None until then. Raises RunDirectoryError for a damaged file."""
        from clusterddp.history.outcome import Outcome

        values = records.read_json(self.outcome_file)
        try:
            return None if values is None else codec.read(Outcome, values)
        except Misfit as error:
            raise RunDirectoryError(f"{self.outcome_file}: {error}. Another program changed it") from error

    @property
    def has_loop(self) -> bool:
        """Whether processes of a machine train the run, or did last, without Slurm. False for another user's run."""
        try:
            return exists(self.loop_file)
        except PermissionError:
            return False

    def mark_cancelled(self) -> None:
        """Records that this run must not start again. Call it before ending its job."""
        write_atomically(self.cancel_mark, "")

    def unmark_cancelled(self) -> None:
        """Undoes that, on the user's request."""
        remove(self.cancel_mark)

    @property
    def cancelled(self) -> bool:
        """Whether ``clusterddp cancel`` was called."""
        return exists(self.cancel_mark)


def _names_in(folder: Path) -> list[str]:
    """The names in a folder. Empty if it does not exist."""
    try:
        return records.retrying(folder, lambda: names_in(folder))
    except FileNotFoundError:
        return []


#: Names that a submission creates before job.yaml, and that remain of a run from which a user has deleted files.
_OF_RUNS = ("private", "logs", "checkpoints", "events.jsonl", "outcome.json", "job.sbatch")


#: The word for the run that the user submitted last.
NEWEST = "newest"
#: The help text of commands for one run.
ONE_RUN = f"a run directory, or a run's name in $CLUSTERDDP_RUNS or ./runs, or {NEWEST}"


def runs_folder(environ: Mapping[str, str]) -> Path:
    """The folder for new runs: $CLUSTERDDP_RUNS, else ./runs."""
    return Path(environ.get(RUNS) or "runs")


@contextmanager
def temporary_beside_runs(prefix: str) -> Iterator[Path]:
    """A folder in the folder for new runs, which all nodes see. It is deleted at the end."""
    runs = runs_folder(os.environ).absolute()
    new = not runs.exists()
    runs.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=runs, ignore_cleanup_errors=True) as path:
            yield Path(path)
    finally:
        if new:
            with suppress(OSError):  # another program has put something into it
                runs.rmdir()


def find_runs(words: Sequence[str]) -> list[RunDirectory]:
    """The runs that ``words`` name, each once. Without words, those of the folder for new runs, which may not exist.

    A word is a run directory, a folder of runs or of folders of runs (as sweeps are), or a pattern, which may also
    match what is no run. It may be relative to the folder for new runs instead of the current one. NEWEST is the user's
    newest run. RunDirectoryError if a word names no run at all.
    """
    if not words:
        return list(_runs_in(runs_folder(os.environ)))
    found: dict[Path, RunDirectory] = {}
    for word in words:
        runs = next((there for place in _places(word) if (there := list(_named(place)))), [])
        if not runs:
            proposal = _proposal(Path(word)) or ". Expected a run directory or a folder of runs"
            raise RunDirectoryError(f"{word}: no run there{proposal}")
        found |= {run.path: run for run in runs}
    return list(found.values())


def open_run(path: str) -> RunDirectory:
    """The run that a path, a path below the folder for new runs, or NEWEST names.

    RunDirectoryError, which proposes the nearest run, if there is none.
    """
    for place in _places(path):
        if (run := RunDirectory(place)).exists():
            return run
    proposal = _proposal(Path(path)) or ". Expected the path that `clusterddp submit` printed"
    raise RunDirectoryError(f"{RunDirectory(path)} is not a run directory (no job.yaml){proposal}")


def names_exactly(word: str, run: RunDirectory) -> bool:
    """Whether a word is the path of a run, from here or below the folder for new runs: no folder, pattern or NEWEST."""
    return any(RunDirectory(place).path == run.path for place in (word, runs_folder(os.environ) / word))


def _places(word: str) -> Iterator[str]:
    """The places that a word may mean, the most likely first."""
    yield word
    if word == NEWEST:
        yield _newest()
    elif not Path(word).is_absolute():
        yield str(runs_folder(os.environ) / word)


def _newest() -> str:
    """The run whose job definition this user wrote last, which submitting a run again also does."""
    own: list[tuple[float, str]] = []
    for run in _runs_in(runs_folder(os.environ)):
        with suppress(OSError):
            status = run.job_file.stat()
            own += [(status.st_mtime, str(run))] if status.st_uid == os.geteuid() else []
    if not own:
        raise RunDirectoryError(f"{NEWEST}: you have no run in {runs_folder(os.environ)}")
    return max(own)[1]


def _named(word: str) -> Iterator[RunDirectory]:
    """The runs of one word. A name that exists is not a pattern: a folder may be called ``lr[1]``."""
    path = Path(word)
    if os.path.lexists(path):
        run = RunDirectory(path)
        yield from [run] if run.exists() else _runs_in(run.path)
        return
    try:
        matches = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    except ValueError as error:  # such as a** before Python 3.13
        raise RunDirectoryError(f"{word}: no such run, and not a valid pattern ({error})") from error
    for match in matches:
        yield from [RunDirectory(match)] if _is_run(str(match)) else _runs_in(match)


def _runs_in(folder: Path, deeper: bool = True) -> Iterator[RunDirectory]:
    """The runs in a folder and, if ``deeper``, in its folders that are not runs. Empty if it cannot be read.

    Links in these are left out: the arrays of a sweep have links to its members.
    """
    try:
        with os.scandir(folder) as entries:
            folders = sorted(entry.path for entry in entries if _is_folder(entry, deeper))
    except OSError:
        return
    for path in folders:
        if _is_run(path):
            yield RunDirectory(path)
        elif deeper:
            yield from _runs_in(Path(path), deeper=False)


def _is_folder(entry: os.DirEntry[str], follow: bool) -> bool:
    """False for a link whose end this user cannot see, such as one in a circle."""
    try:
        return entry.is_dir(follow_symlinks=follow)
    except OSError:
        return False


def _is_run(path: str) -> bool:
    """Whether a folder that the user did not name is a run: it has more than a job definition, which may be the
    user's own."""
    return os.path.lexists(f"{path}/job.yaml") and any(os.path.lexists(f"{path}/{name}") for name in _OF_RUNS)


def _proposal(path: Path) -> str:
    """The end of a message about a path that is no run: the run that contains it, or has the most similar name."""
    if os.path.lexists(path / SWEEP_FILE):
        return f". It is a sweep. List its members with `clusterddp list {shlex.quote(as_typed(path.absolute()))}`"
    # Not the current folder, nor one around it: its job.yaml may be the user's own job definition.
    around = {Path.cwd(), *Path.cwd().parents}
    parents = (folder for folder in path.absolute().parents if folder not in around)
    above = next((folder for folder in parents if os.path.lexists(folder / "job.yaml")), None)
    nearest = above or _nearest(path.name, [*_runs_in(runs_folder(os.environ)), *_runs_in(path.absolute().parent)])
    return f". Did you mean {as_typed(nearest)}?" if nearest else ""


def _nearest(name: str, runs: Iterable[RunDirectory]) -> Path | None:
    """The run with the most similar name. None if none is similar."""
    from difflib import get_close_matches  # a rank needs no suggestions

    paths = {run.path.name: run.path for run in runs}
    similar = get_close_matches(name, paths, 1)
    return paths[similar[0]] if similar else None


def as_typed(path: Path) -> str:
    """A path as a user types it: relative to the current folder if it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
