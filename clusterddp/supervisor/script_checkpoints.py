"""A script's own checkpoints (key ``resume``): which files match, which of them is the newest complete one.

A checkpoint counts as complete as far as can be seen without torch: a zip, as ``torch.save`` writes it, has its
directory at its end, a safetensors file has the size that its header gives, and a folder has complete files, those that
it names itself (``checkpoint_sets.py``), and those that an older one has.
"""

from __future__ import annotations

import glob
import json
import os
import re
import struct
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp import protocol
from clusterddp.history import checkpoints
from clusterddp.history.beginnings import OwnResume, Started
from clusterddp.history.checkpoints import NoMatch, OwnCheckpointRejected, Saved
from clusterddp.history.ends import AttemptEnd
from clusterddp.history.event import Event
from clusterddp.history.view import RunView
from clusterddp.jobdef.job import Job, Resume
from clusterddp.jobdef.program import OF_RANK, checkpoint_values, fill, fill_pattern, placeholders_in, shown_path
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.reporter import counted, say
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.checkpoint_sets import why_not_all

#: Seconds between two looks for a new checkpoint while the ranks run.
SEARCH_INTERVAL_S = 30.0
#: The interval is at least this many times what a look takes.
RARELY = 50
#: Seconds that the supervisor waits for the look at the end of an attempt.
LAST_SEARCH_S = 5.0
#: Names of files that are still being written.
_TEMPORARY = re.compile(r"\.(tmp(?![a-z])|part(?![a-z0-9-]))", re.IGNORECASE)  # model.part1.pt is whole
#: Files of a folder that hold a state. Others may be empty: markers, logs, a patch of the code.
_DATA = frozenset(
    (".bin", ".ckpt", ".distcp", ".h5", ".json", ".npy", ".npz", ".pkl", ".pt", ".pth", ".safetensors", ".tar")
)
#: The most passed-over files that a message explains, and the most files of which a rank watches whether they are read.
MOST_EXPLAINED, MOST_WATCHED = 5, 20


@dataclass(frozen=True)
class ScriptCheckpoint:
    """A file or folder, and when it was written last, in unix seconds."""

    path: str
    written: float
    content: int | None = None
    """Of a zip: a hash of its tensors' checksums; None if there is none."""


@dataclass(frozen=True)
class SearchResult:
    """The newest complete checkpoint, and why newer ones were passed over. ``matches``: all files, the newest first."""

    newest: ScriptCheckpoint | None = None
    passed_over: tuple[tuple[str, str], ...] = ()
    matches: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Match:
    """A file or folder that matches a pattern. ``names``: a folder's files, with # in place of numbers, and how many
    have each name."""

    path: str
    written_ns: int
    names: Mapping[str, int] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, list[int | str]]:
        """By time, then by name, in which numbers count as such."""
        parts = re.split(r"(\d+)", self.path)
        return self.written_ns, [int(part) if index % 2 else part for index, part in enumerate(parts)]

    @property
    def beside(self) -> str:
        """The folder that it is in, with # in place of numbers."""
        return _without_numbers(os.path.dirname(self.path))  # noqa: PTH120


#: By path and time in ns: why a file or folder is no complete checkpoint, and its content as in ``ScriptCheckpoint``.
_Judged = dict[tuple[str, int], tuple[str | None, int | None]]


class ScriptCheckpoints:
    """The checkpoints in a script's own format, as an attempt sees them. A job without the key ``resume`` has none."""

    def __init__(self, run: RunDirectory, job: Job, number: int, history: RunView) -> None:
        self._run, self._job, self._number = str(run), job, number
        self._earlier = RunView(event for event in history if event.attempt < number)
        #: The file that the script named to continue from, which need not match a pattern.
        self._saved = self._earlier.last(Saved)
        self._created = time.time()
        self._began = self._created if self._earlier.began is None else self._earlier.began
        #: The newest complete one that is known; at first that from which the attempt continues.
        self.newest: ScriptCheckpoint | None = None
        #: The newest file that a rank is known to have saved, whether it matches or not.
        self.written: str | None = None
        #: All files that match as the attempt begins, the newest first.
        self._matches: tuple[str, ...] = ()
        self._judged: _Judged = {}
        #: With these, by path and time, the script failed before its first step.
        self._rejected = {(event.file, event.written) for event in self._earlier.all(OwnCheckpointRejected)}

    def begin(self) -> OwnResume | None:
        """Looks for the one that the attempt continues from. Returns that as an event, if any."""
        found = self._look()
        self._matches = found.matches
        if self._job.resume is None or not (self._number or found.passed_over):
            return None
        resume = without_secrets(self._job)[0].resume or Resume()
        words = [*(resume.replace or ()), *resume.args]
        passed_over = tuple(f"{self.named(path)}: {why}" for path, why in found.passed_over)
        if (newest := found.newest) is None:
            adds = bool(words) or resume.replace is not None
            return OwnResume(patterns=self._patterns(), from_start=adds, passed_over=passed_over)
        return OwnResume(
            file=self.named(newest.path),
            written=newest.written,
            before_s=max(0.0, self._stopped() - newest.written),
            arguments=tuple(fill(word, checkpoint_values(newest.path)) for word in words),
            passed_over=passed_over,
        )

    def watch(self, ended: threading.Event, report: Callable[[Event], None]) -> None:
        """Reports new ones while the ranks run, and once more when they have ``ended``. Also reports, once, that the
        script saves, but no file matches.

        Some scripts save the state again that they have just loaded, which is no new checkpoint.
        """
        last, loaded, pause_s = self._job.resume is None, self.newest and self.newest.content, SEARCH_INTERVAL_S
        warned = False
        while not last:
            written = self.written
            last, known, began = ended.wait(pause_s), self.newest, time.monotonic()
            look = self._look()
            found = look.newest
            pause_s = max(SEARCH_INTERVAL_S, RARELY * (time.monotonic() - began))
            if found is not None and found != known and (found.content is None or found.content != loaded):
                report(checkpoints.OwnCheckpoint(file=self.named(found.path), written=found.written))
            written = self.written if last else written  # it may be about to write the others
            if look.newest is None and not look.passed_over and written is not None and not warned:
                warned = True
                report(NoMatch(file=self.named(written), patterns=self._patterns()))

    def variables(self) -> dict[str, str]:
        """The job's variables. Each rank fills in the placeholders whose values depend on the rank."""
        path = self.newest.path if self.newest else ""
        known = {
            **checkpoint_values(path),
            "run_dir": self._run,
            "attempt": str(self._number),
            "nodes": str(self._job.nodes),
        }
        variables = dict(self._job.env)
        of_rank = [name for name, value in variables.items() if placeholders_in(value) & OF_RANK]
        variables |= {name: fill(value, known) for name, value in variables.items() if name not in of_rank}
        variables |= {protocol.CHECKPOINT: path} if path else {}
        return variables | ({protocol.PLACEHOLDERS: " ".join(of_rank)} if of_rank else {})

    def saved(self) -> dict[str, str]:
        """The files from which the script may continue, as variables of the ranks, which watch whether it reads them.

        They are those that match, and what it named in ``requeue(saved=...)`` in the last attempt. So is an older one
        that records how far into an epoch the script was, as long as the script has written neither that file again nor
        a newer match.
        """
        variables: dict[str, str] = {}
        if self._matches:
            named = self.newest.path if self.newest is not None else ""
            watched = [named, *(path for path in self._matches if path != named)]
            variables[protocol.RESUMABLE] = json.dumps(watched[:MOST_WATCHED])
        if (saved := self._saved) is None:
            return variables
        path, last = saved.file, self._earlier.with_ranks[-1]
        variables |= {protocol.SAVED: path} if saved.attempt == last.number else {}
        if saved.items is None or saved.written is None or not self._continues_from(path, saved.written):
            return variables
        started = self._earlier.attempt(saved.attempt).last(Started)
        if started is not None and started.ranks != self._job.world_size:
            had = counted(started.ranks, "rank")
            say(
                f"continue_epoch: the last attempt stopped within an epoch, with {had}. With "
                f"{self._job.world_size}, the batches differ, so the epoch restarts from its beginning"
            )
            return variables
        return {**variables, protocol.SAVED: path, protocol.SAVED_ITEMS: str(saved.items)}

    def _continues_from(self, path: str, written: float) -> bool:
        try:
            unchanged = Path(path).stat().st_mtime == written
            newest = Path(path if self.newest is None else self.newest.path)
            return unchanged and any(map(Path(path).samefile, (newest, *newest.parents)))
        except OSError:  # one of them has been removed
            return False

    def _look(self) -> SearchResult:
        if self._job.resume is None:
            return SearchResult()
        also = [] if self._saved is None else [self._saved.file]
        rejects = lambda one: (self.named(one.path), one.written) in self._rejected  # noqa: E731
        found = find(self._job.resume, self._run, self._began, also, self._judged, rejects, self._ranks_at)
        self.newest = found.newest or self.newest
        return found

    def _ranks_at(self, written: float) -> int:
        """The ranks of the attempt that ran at this time."""
        if written < self._created:
            started = [event for event in self._earlier.all(Started) if event.time <= written]
            if started:
                return started[-1].ranks
        return self._job.world_size

    def _stopped(self) -> float:
        """When the previous attempt ended, or recorded its last event."""
        if (last := self._earlier.newest) is None:
            return self._began
        return max(event.time for event in last.all(AttemptEnd) or last)

    def named(self, path: str) -> str:
        """A path as in the history."""
        return shown_path(path, self._run)

    def _patterns(self) -> tuple[str, ...]:
        return tuple(shown_path(pattern, self._run) for pattern in (self._job.resume or Resume()).checkpoint)


def find(
    resume: Resume,
    run_dir: str,
    since: float,
    also: Sequence[str] = (),
    judged: _Judged | None = None,
    rejects: Callable[[ScriptCheckpoint], bool] = lambda _: False,
    ranks: Callable[[float], int] = lambda _: 0,
) -> SearchResult:
    """The newest complete checkpoint that was written after ``since``, the run's begin, in unix seconds.

    An older one is of another training, which this run must not continue. ``also``: further files or folders.
    ``judged``: what earlier calls found. A file is opened again only if it was written again, because an open would
    look like the script's own, which shows that it resumes. ``rejects``: whether the script failed with a checkpoint,
    which is then taken only if there is no other. ``ranks``: the number of ranks at a time, with which the number of
    files in a folder may change.
    """
    folder = str(Path.cwd())
    paths = {
        os.path.normpath(Path(folder, path))  # a link such as last.pth keeps its name
        for pattern in resume.checkpoint
        for path in glob.glob(fill_pattern(pattern, run_dir), recursive=True)  # noqa: PTH207
    }
    paths.update(path for path in also if os.path.lexists(path))
    passed_over: list[tuple[str, str]] = []
    judged = {} if judged is None else judged

    def why_not(match: _Match) -> str | None:
        key = match.path, match.written_ns
        if key not in judged:
            judged[key] = why_incomplete(match.path), _content(match.path)
        return judged[key][0]

    matches = sorted(filter(None, map(_match, sorted(paths))), key=lambda match: match.order, reverse=True)
    names = tuple(match.path for match in matches)
    rejected: ScriptCheckpoint | None = None
    for index, match in enumerate(matches):
        if match.written_ns < since * 1e9:
            passed_over.append((match.path, "it is older than this run"))
            break
        why = why_not(match) or _what_is_missing(match, matches[index + 1 :], why_not, ranks)
        if why is None:
            content = judged[match.path, match.written_ns][1]
            newest = ScriptCheckpoint(match.path, match.written_ns / 1e9, content)
            if rejects(newest):
                rejected = rejected or newest
                passed_over.append((match.path, "the script failed with it"))
                continue
            return SearchResult(newest, tuple(passed_over[:MOST_EXPLAINED]), names)
        passed_over.append((match.path, why))
    if rejected is not None:
        return SearchResult(
            rejected, tuple(one for one in passed_over if one[0] != rejected.path)[:MOST_EXPLAINED], names
        )
    passed_over += [(path, "a dangling link") for path in paths - {match.path for match in matches}]
    return SearchResult(None, tuple(passed_over[:MOST_EXPLAINED]), names)


def _content(path: str) -> int | None:
    """A hash of the checksums of the tensors in a file of ``torch.save``. None if there are none."""
    try:
        with zipfile.ZipFile(path) as file:
            parts = [(entry.filename.partition("/")[2], entry.CRC) for entry in file.infolist()]
        sums = [(name, crc) for name, crc in parts if name.startswith("data/")]
    except (OSError, zipfile.BadZipFile, ValueError):  # another format
        return None
    return hash(tuple(sums)) if any(crc for _, crc in sums) else None


def _match(path: str) -> _Match | None:
    """None if it has been removed meanwhile, or is a dangling link."""
    try:
        files = _files(path)
        written_ns = max((file.stat().st_mtime_ns for file in files), default=Path(path).stat().st_mtime_ns)
    except OSError:
        return None
    return _Match(path, written_ns, Counter(_without_numbers(str(file.relative_to(path))) for file in files))


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _files(folder: str) -> list[Path]:
    """All files below a folder, sorted, without those in hidden folders. Empty for a file."""
    found: list[Path] = []
    for inner, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(inner, name) for name in names]
    return sorted(found)


def _what_is_missing(
    match: _Match, older: Sequence[_Match], why_not: Callable[[_Match], str | None], ranks: Callable[[float], int]
) -> str | None:
    """What a folder lacks that the previous one has, because the script was stopped while it was writing it."""
    alike = (one for one in older if one.names and one.beside == match.beside)
    before = next((one for one in alike if why_not(one) is None), None)
    if before is None or not match.names:
        return None
    name = os.path.basename(before.path)  # noqa: PTH119
    for lacking in sorted(before.names.keys() - match.names.keys()):
        return f"{lacking} is missing, but {name} has it"
    if ranks(match.written_ns / 1e9) != ranks(before.written_ns / 1e9):
        return None
    for file, number in sorted(before.names.items()):  # such as a file of each rank
        if match.names[file] < number and os.path.splitext(file)[1] in _DATA - {".distcp"}:  # noqa: PTH122
            return f"it has {match.names[file]} of {number} files {file} that {name} has"
    return None


def why_incomplete(path: str) -> str | None:
    """Why a file or folder is no complete checkpoint. None if it may be one."""
    try:
        if not Path(path).is_dir():
            return _why_file(Path(path))
        files = _files(path)
        if not files:
            return "an empty folder"
        for file in files:
            if why := _why_file(file, inside=True):
                return f"{file.relative_to(path)}: {why}"
    except OSError as error:
        return error.strerror or str(error)
    return why_not_all(files)


def _why_file(file: Path, inside: bool = False) -> str | None:
    """``inside``: of a folder."""
    if _TEMPORARY.search(file.name):
        return "a temporary file"
    with open_binary(file) as opened:
        size, begin = os.fstat(opened.fileno()).st_size, opened.read(8)
        if size == 0:
            return None if inside and file.suffix not in _DATA else "empty"
        if file.suffix == ".safetensors":
            length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size
            return "truncated" if 8 + length > size else _why_safetensors(opened.read(length), size - 8 - length)
        if begin.startswith(b"PK\x03\x04"):
            try:
                zipfile.ZipFile(opened).close()
            except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):
                return "truncated: the directory at the end of the zip is missing"
    return None


def _why_safetensors(header: bytes, size: int) -> str | None:
    """``size``: the bytes after the header."""
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "damaged: its header is not valid"
    return None if max(ends, default=0) == size else "truncated: its size does not match its header"
