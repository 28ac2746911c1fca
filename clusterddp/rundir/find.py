"""Finds the runs that the words of a command line name: run directories, folders of runs, patterns. Proposes the
nearest run to a wrong path."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.protocol import RUNS
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory

#: Names that a submission creates before job.yaml, and that remain of a run from which a user has deleted files.
_OF_RUNS = ("private", "logs", "checkpoints", "events.jsonl", "outcome.json", "job.sbatch")


#: The word for the run that the user submitted last.
NEWEST = "newest"
#: The help text of commands for one run.
ONE_RUN = f"a run directory, or a run's name in $CLUSTERDDP_RUNS or ./runs, or {NEWEST}"


def runs_folder(environ: Mapping[str, str]) -> Path:
    """The folder for new runs: $CLUSTERDDP_RUNS, else ./runs."""
    return Path(environ.get(RUNS) or "runs")


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
    paths = {run.path.name: run.path for run in runs}
    similar = get_close_matches(name, paths, 1)
    return paths[similar[0]] if similar else None


def as_typed(path: Path) -> str:
    """A path as a user types it: relative to the current folder if it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
