"""A run's records: reading JSON files and JSON lines files, and what each of them must hold.

A JSON lines file has one writer, which appends durably. Readers skip what is not a complete line: a torn last line (the
writer was killed), a line that was lost in a machine crash (it reads as NUL), and, with a warning, a line that another
program wrote. Standard library only.

For ``submit --check-resume`` the ranks record their steps: a file per rank, to which each attempt appends.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from clusterddp.errors import RunDirectoryError
from clusterddp.reporter import say
from clusterddp.rundir.files import open_binary

_T = TypeVar("_T")

#: Errors of a network file system that may disappear on retry, and the pauses before each retry, in seconds.
_TRANSIENT = frozenset((errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO))
_PAUSES_S = (0.05, 0.2, 0.75)
#: Bytes read at a time from the end of a file; doubled for as long as a line continues.
_BLOCK = 1 << 16
#: Bytes at the end of a file that are searched for a whole line, as a damaged file may have terabytes of zeros.
_LONGEST_LINE = 1 << 26
#: The most bytes of a file with one JSON object or a job definition, and in the holes of a file of lines. A sparse file
#: of another user may seem to have terabytes, and would fill the memory of its reader.
LARGEST = 1 << 26
#: Lines that are parsed at once.
_TOGETHER = 250


# --- schemas


def is_count(value: Any) -> bool:
    """Whether a value is a valid step or attempt number."""
    return type(value) is int and 0 <= value < 2**63


def is_time(value: Any) -> bool:
    """Whether a value is a unix time in seconds."""
    return type(value) in (int, float) and 0 <= value < 1e11


def is_text(value: Any) -> bool:
    """Whether a value is a string."""
    return isinstance(value, str)


def optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The same check, which a missing value passes."""
    return lambda value: value is None or check(value)


#: The keys that a JSON object must have, each with a check, which gets None for a missing key.
Schema = Mapping[str, Callable[[Any], bool]]

#: A line of events.jsonl. The other keys depend on the event; those of ``result`` are chosen by the script.
EVENT: Schema = {"time": is_time, "attempt": is_count, "event": is_text, "step": optional(is_count)}
#: A line of metrics.jsonl: of a step, or with ``"event": "result"`` what the script logged outside a step.
LOGGED: Schema = {"step": is_count, "attempt": is_count}
#: A line of a step. Readers of these pass over the others.
METRICS: Schema = {**LOGGED, "event": lambda value: value is None}
_RESULT: Schema = {**LOGGED, "event": lambda value: value == "result"}
#: Keys of such a line that are not metrics, and names that a value cannot have, including those of an event.
NOT_METRICS = frozenset(("step", "time", "attempt", "event"))
NOT_VALUES = NOT_METRICS | {"rank"}
OUTCOME: Schema = {
    "state": is_text,
    "step": optional(is_count),
    "reason": is_text,
    "confirmed": optional(lambda value: isinstance(value, bool)),
}
#: What an attempt resumed from: the step, and the checkpoint's attempt and step.
RESUMED: Schema = {
    "step": is_count,
    "parent": optional(lambda parent: schema_error(parent, LOGGED) is None),
}


def schema_error(value: Any, schema: Schema) -> str | None:
    """What is wrong with a value that should be an object of this schema. None if it is one."""
    if not isinstance(value, dict):
        return f"expected an object, got {json.dumps(value)[:60]}"
    for key, check in schema.items():
        if not check(value.get(key)):
            return f"{key!r} is {json.dumps(value.get(key))[:60]}"
    return None


def result_line(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """An event ``result`` as a metrics line: what the script logged outside a step, such as an evaluation behind the
    loop. None for any other event.
    """
    if event["event"] != "result" or not is_count(event.get("step")):
        return None
    values = {name: value for name, value in event.items() if name not in NOT_VALUES}
    return {"step": event["step"], "time": event["time"], "attempt": event["attempt"], **values}


_FLOATS = {text: float(text) for text in ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")}  # the last three: 0.1


def with_floats(line: Mapping[str, Any]) -> dict[str, Any]:
    """A metrics line with floats for "NaN" and the infinities, which JSON cannot represent."""
    return {name: _FLOATS.get(value, value) if is_text(value) else value for name, value in line.items()}


# --- reading


def retrying(path: Path, read: Callable[[], _T]) -> _T:
    """Returns the result of ``read``, which reads ``path``. Transient OSErrors are retried for one second."""
    for pause_s in _PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            if pause_s == _PAUSES_S[0]:
                say(f"could not read {path} ({error.strerror}). Retrying")
        time.sleep(pause_s)
    return read()


def read_json(path: Path, schema: Schema | None = None) -> dict[str, Any] | None:
    """The JSON object in ``path``. None if the file does not exist.

    Raises RunDirectoryError if the content is not JSON or does not match the schema.
    """
    try:
        text = retrying(path, lambda: read_record(path))
    except FileNotFoundError:
        return None
    try:
        value: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is not JSON ({error}). Another program changed it") from error
    if wrong := schema_error(value, schema or {}):
        raise RunDirectoryError(f"{path}: {wrong}. Another program changed it")
    return value


def read_record(path: Path) -> bytes:
    """The content of a file that holds one object. Raises OSError, and RunDirectoryError if it is too large."""
    with open_binary(path, buffered=False) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise RunDirectoryError(f"{path} is too large to be a record. Another program changed it")
        return file.read()


def open_lines(path: Path) -> BinaryIO:
    """Opens a JSON lines file. Raises OSError, also if it has large holes, which were never written."""
    file = open_binary(path)
    if _holes(file.fileno()) > LARGEST:
        file.close()
        raise OSError(errno.EFBIG, "a sparse file, most of which was never written", str(path))
    return file


def _holes(descriptor: int) -> int:
    """The bytes of a large file's holes. 0 if the file system cannot tell. Leaves the file at its beginning."""
    size, found, position = os.fstat(descriptor).st_size, 0, 0
    if size <= LARGEST:
        return 0
    try:
        while found <= LARGEST and (hole := os.lseek(descriptor, position, os.SEEK_HOLE)) < size:
            found += size - hole  # if no data follows
            position = os.lseek(descriptor, hole, os.SEEK_DATA)
            found -= size - position
    except OSError:  # ENXIO: no data follows. EINVAL: the file system cannot tell
        pass
    os.lseek(descriptor, 0, os.SEEK_SET)
    return found


def read_lines(path: Path, schema: Schema | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, oldest first. Empty if the file does not exist.

    Lines that do not match the schema are skipped, with one warning that names the first of them.
    """
    try:
        content = retrying(path, lambda: _all_of(path))
    except FileNotFoundError:
        return
    skipped: list[tuple[int, str]] = []
    for number, (value, wrong) in enumerate(parsed(content.split(b"\n")[:-1], schema), start=1):
        if value is not None:
            yield value
        elif wrong:
            skipped.append((number, wrong))
    _warn(path, skipped)


def _all_of(path: Path) -> bytes:
    with open_lines(path) as file:
        return file.read()


def read_backwards(path: Path, schema: Schema | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, newest first. Skips the same lines as ``read_lines``.

    Reads block by block from the end, so that the newest lines of a long file cost little.
    """
    try:
        file = retrying(path, lambda: open_binary(path))
    except FileNotFoundError:
        return
    warned = False
    with file:
        for start, line in _lines_backwards(path, file):
            value, wrong = parse(line, schema)
            if value is not None:
                yield value
            elif wrong and not warned:
                file.seek(0)
                _warn(path, [(file.read(start).count(b"\n") + 1, wrong)])
                warned = True


def last_lines(path: Path, size: int) -> list[bytes]:
    """The complete lines in the last ``size`` bytes of a file, oldest first. If one line fills these, more are read."""
    return both_ends(path, size, first=0)[1]


def both_ends(path: Path, size: int, first: int | None = None) -> tuple[list[bytes], list[bytes]]:
    """The complete lines in the first and in the last ``size`` bytes of a file, oldest first. Of a small file, none and
    all. The file is opened once. If one line fills the last bytes, more are read. ``first``: the number of bytes at
    the beginning, if it differs."""
    try:
        file = retrying(path, lambda: open_binary(path, buffered=False))
    except FileNotFoundError:
        return [], []
    with file:
        end = file.seek(0, os.SEEK_END)
        block = min(size, end)
        lines = _read_at(path, file, end - block, block).split(b"\n")
        # The first line is cut, and what follows the last line end is torn.
        while block < min(end, _LONGEST_LINE) and len(lines) < 3:
            block = min(2 * block, end)
            lines = _read_at(path, file, end - block, block).split(b"\n")
        most = min(size if first is None else first, end - block)
        beginning = _read_at(path, file, 0, most).split(b"\n") if most else [b""]
    return beginning[:-1], lines[block < end : -1]


def _lines_backwards(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The complete lines, newest first, each with its position in the file."""
    start, block, rest, torn = file.seek(0, os.SEEK_END), _BLOCK, b"", True
    while start > 0:
        size = min(block, start)
        start -= size
        beginning, *lines = (_read_at(path, file, start, size) + rest).split(b"\n")
        rest, block = beginning, _BLOCK if lines else 2 * block
        position = start + len(beginning) + 1 + sum(len(line) + 1 for line in lines)
        for line in reversed(lines):
            position -= len(line) + 1
            if not torn:  # what follows the last line end is
                yield position, line
            torn = False
    if not torn:
        yield 0, rest


def _read_at(path: Path, file: BinaryIO, position: int, size: int) -> bytes:
    def read() -> bytes:
        file.seek(position)
        return file.read(size)

    return retrying(path, read)


def drop_torn_line(path: Path) -> None:
    """Removes an incomplete last line, left by a writer that was killed. The next writer calls it before it appends."""
    try:
        file = retrying(path, lambda: open_binary(path, change=True))
    except FileNotFoundError:
        return
    with file:
        start, line = next(_lines_backwards(path, file), (-1, b""))
        end = start + len(line) + 1
        if end != file.seek(0, os.SEEK_END):
            file.truncate(end)


def parse(line: bytes, schema: Schema | None) -> tuple[dict[str, Any] | None, str | None]:
    """A line's object, or what is wrong with the line. Neither if the line was lost in a machine crash."""
    # Blocks that the machine did not write read as NUL, which JSON never contains.
    written = line.rpartition(b"\0")[2] if b"\0" in line else line
    try:
        value = json.loads(str(written, errors="surrogatepass"))
    except (ValueError, RecursionError) as error:
        return None, None if b"\0" in line else f"not JSON: {error}"
    return _checked(value, schema)


def _checked(value: Any, schema: Schema | None) -> tuple[dict[str, Any] | None, str | None]:
    wrong = schema_error(value, schema or {})
    if wrong is not None and schema is METRICS and schema_error(value, _RESULT) is None:
        return None, None
    return (value, None) if wrong is None else (None, wrong)


class WholeLines:
    """The lines of an open JSON lines file but an incomplete last one. ``torn``: whether there was one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.torn = file, False

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self.torn = not line.endswith(b"\n")
            if not self.torn:
                yield line


def parsed(lines: Iterable[bytes], schema: Schema | None) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """``parse`` of each line. Reads many lines as one JSON array, which takes a third of the time."""
    remaining = iter(lines)
    while together := list(islice(remaining, _TOGETHER)):
        try:
            values = json.loads(str(b"[" + b",".join(together) + b"]", errors="surrogatepass"))
            if len(values) != len(together):
                raise ValueError("not one object per line")
        except (ValueError, RecursionError):
            yield from (parse(line, schema) for line in together)
            continue
        for value in values:
            yield _checked(value, schema)


def counts(first_steps: Mapping[int, int]) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a line of a step and an attempt counts: no later attempt began at its step or before."""
    return lambda line: all(line["step"] < step for later, step in first_steps.items() if later > line["attempt"])


#: The lines that this process has warned about.
_warned: set[tuple[Path, int]] = set()


def _warn(path: Path, skipped: list[tuple[int, str]]) -> None:
    new = [(number, wrong) for number, wrong in skipped if (path, number) not in _warned]
    _warned.update((path, number) for number, _ in new)
    if new:
        (number, wrong), more = new[0], len(new) - 1
        others = f", and {more} other line{'s'[: more != 1]}" if more else ""
        it, lines = ("them", "lines") if more else ("it", "line")
        say(
            f"skipped {path}:{number}{others}, because another program wrote {it} ({wrong}). To fix this, delete the "
            f"{lines}"
        )


#: Of a value or a tensor: its text if it is short, else a hash. Equal for equal contents.
Digest = str
Digests = Mapping[str, Digest]
#: The reason of a stop that the check requests.
WHY = "resume check"


@dataclass(frozen=True)
class Recording:
    """After how many steps an attempt stops, and where its ranks record them."""

    until: int
    folder: Path

    @classmethod
    def parse(cls, text: str) -> Recording:
        """The inverse of ``str``."""
        until, _, folder = text.partition(":")
        return cls(int(until), Path(folder))

    def __str__(self) -> str:
        return f"{self.until}:{self.folder}"

    def file(self, rank: int) -> Path:
        """The file of one rank."""
        return self.folder / f"rank-{rank}.jsonl"


@dataclass(frozen=True)
class States:
    """States between two steps.

    ``parts``: those of ``ctx.run()``, by the part's name and the names in it. ``others``: those of objects with a state
    that the script has, but did not pass to ``ctx.run()``.
    """

    parts: Mapping[str, Digests] = field(default_factory=dict)
    others: Mapping[str, Digests] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank.

    ``epoch``: of its first sample. None without a loader. ``epoch_steps``: steps per epoch, if known. ``batch``: by the
    place in it. ``variables``: plain values of the script, with its batch in hand, to name what may be the cause of a
    difference. ``before``: only in the first step of an attempt.
    """

    step: int
    epoch: int | None
    epoch_steps: int | None
    batch: Digests
    variables: Digests
    logged: Digests
    after: States
    before: States | None = None

    def to_line(self) -> str:
        """The record as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> StepRecord:
        """The inverse of ``to_line``."""
        values: dict[str, Any] = json.loads(line)
        before = values.pop("before")
        return cls(**{**values, "after": States(**values["after"])}, before=States(**before) if before else None)


#: The steps of each rank, in the order in which they were made.
Trial = Mapping[int, list[StepRecord]]


def read_trial(folder: Path) -> Trial:
    """The ranks' records in the folder."""
    files = sorted((int(path.stem.removeprefix("rank-")), path) for path in folder.glob("rank-*.jsonl"))
    return {rank: [StepRecord.from_line(line) for line in path.read_text().splitlines()] for rank, path in files}
