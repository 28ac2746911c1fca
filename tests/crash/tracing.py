"""strace: the calls with which a process changes a run directory, recorded, or answered with a signal or an error."""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

#: Every call that changes files or folders or makes them durable; ``disk`` refuses those that it does not know.
CALLS = (
    "open,openat,openat2,creat,close,lseek,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice,mmap,"
    "truncate,ftruncate,fallocate,fsync,fdatasync,syncfs,msync,rename,renameat,renameat2,link,linkat,symlink,symlinkat,"
    "unlink,unlinkat,rmdir,mkdir,mkdirat"
)
_LINE = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>.*)")
_UNFINISHED = re.compile(r"(?P<pid>\d+) +(?P<begin>\w+\(.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. \w+ resumed>(?P<rest>.*)")
_TEXT = r"(?:\\x[0-9a-f]{2})*"
_DESCRIPTOR = re.compile(rf"(?P<number>\d+|AT_FDCWD)<(?P<path>{_TEXT})>(?P<deleted>\(deleted\))?")
_QUOTED = re.compile(rf'"(?P<text>{_TEXT})"')


@dataclass(frozen=True, eq=False)
class Call:
    """A finished call. ``paths``: those it names, absolute; ``descriptor`` and ``at``: the file it acts on through one.

    ``error``: errno's name when it failed.
    """

    name: str
    pid: int
    paths: tuple[str, ...] = ()
    descriptor: int | None = None
    at: str | None = None
    data: bytes = b""
    numbers: tuple[int, ...] = ()
    flags: frozenset[str] = frozenset()
    result: int | None = None
    error: str | None = None
    deleted: bool = False

    @property
    def touched(self) -> tuple[str, ...]:
        """All paths that the call is about."""
        return (*self.paths, *([self.at] if self.at else []))

    def __str__(self) -> str:
        return f"{self.name} {' -> '.join(self.touched)}"


@dataclass(frozen=True, eq=False)
class Promise:
    """What the process had been promised at this moment."""

    what: dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """The ``count``th call ``name`` that touches ``path``, by one thread, after so many promises: what strace can be
    told to act at, which counts each thread's calls by themselves.

    ``of_all``: its number among that thread's calls of that name in the run directory since then.
    """

    promises: int
    name: str
    path: str
    count: int
    of_all: int


def moments(recording: Sequence[Call | Promise], changing: Container[Call]) -> Iterator[Moment]:
    """The moments of the calls in ``changing``; other calls count, too."""
    seen: Counter[tuple[int, str, str]] = Counter()
    promises = 0
    for call in recording:
        if isinstance(call, Promise):
            promises += 1
            seen.clear()
            continue
        for path in {*call.touched, ""}:
            seen[call.pid, call.name, path] += 1
        if call in changing:
            path = call.touched[0]
            yield Moment(promises, call.name, path, seen[call.pid, call.name, path], seen[call.pid, call.name, ""])


def available() -> str | None:
    """Why strace cannot be used here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed; `make test` installs it on Debian and Ubuntu, as root"
    return None


class Subject:
    """A server that plays scenarios: ``tests.crash.subject``, or ``tests.crash.sharded_subject``."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", module]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def play(
        self,
        place: Path,
        stop_after: int = 0,
        inject: str | None = None,
        paths: Sequence[str] = (),
        once: bool = False,
    ) -> Played:
        """Runs the scenario in a new folder ``place``; from so many promises on, strace records and injects.

        With ``paths`` it looks at calls that touch one of them alone; ``once``: no longer than until a save has failed.
        """
        place.mkdir()
        traced = ["strace", "-f", "-y", "-xx", "-s", "100000000", "-o", str(place / "trace"), "-e", f"trace={CALLS}"]
        traced += ["-e", f"inject={inject}"] if inject else []
        traced += [part for path in paths for part in ("-P", path)]
        where = {"run": str(place / "runs" / "run"), "promises": str(place / "promises")}
        request = {**where, "stop_after": stop_after, "once": once, "strace": traced}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Played(place, **json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class Played:
    """What a scenario left."""

    place: Path
    code: int
    strace: str

    @property
    def run(self) -> Path:
        return self.place / "runs" / "run"

    @property
    def trace(self) -> str:
        """What strace wrote."""
        return (self.place / "trace").read_text()

    @property
    def promises(self) -> list[dict[str, Any]]:
        """What it had been promised."""
        return [json.loads(line) for line in (self.place / "promises").read_text().splitlines()]

    @property
    def errors(self) -> str:
        """What it said."""
        return (self.place / "promises.err").read_text()

    @cached_property
    def recording(self) -> list[Call | Promise]:
        """Its calls about anything below ``place``, and its promises, in the order in which they were finished."""
        said = str(self.place / "promises")
        below = f"{self.place}/"
        found: list[Call | Promise] = []
        for call in parse(self.trace):
            if call.at == said:
                found += [Promise(json.loads(call.data))] if call.data else []
            elif any(f"{path}/".startswith(below) for path in call.touched) and f"{said}.err" not in call.touched:
                found.append(call)
        return found


def parse(trace: str) -> Iterator[Call]:
    """The calls in what ``strace -f -y -xx`` wrote. Calls that the end of their process cut off are left out."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        if match := _UNFINISHED.fullmatch(line):
            begun[match["pid"]] = match["begin"]
            continue
        if match := _RESUMED.fullmatch(line):
            line = f"{match['pid']} {begun.pop(match['pid'], '')}{match['rest']}"
        match = _LINE.fullmatch(line)
        if match and not match["result"].startswith("?"):
            yield _call(match)


def _call(match: re.Match[str]) -> Call:
    name, arguments, result = match["name"], match["arguments"], match["result"]
    writes = name.startswith(("write", "pwrite"))
    if name.startswith(("open", "creat")):
        own = _DESCRIPTOR.match(result)
    else:  # The calls that end in "at" begin with the folder to which a relative path belongs.
        own = None if name.endswith(("at", "at2")) else _DESCRIPTOR.search(arguments)
    bare = _QUOTED.sub("", _DESCRIPTOR.sub("", arguments))
    return Call(
        name=name,
        pid=int(match["pid"]),
        paths=() if writes else tuple(_paths(arguments)),
        descriptor=int(own["number"]) if own else None,
        at=_decode(own["path"]).decode(errors="replace") if own else None,
        data=b"".join(_decode(found["text"]) for found in _QUOTED.finditer(arguments)) if writes else b"",
        numbers=tuple(int(number) for number in re.findall(r"(?<![\w=])\d+\b", bare)),
        flags=frozenset(re.findall(r"\b[A-Z]+_[A-Z_]+\b", bare)),
        result=int(found[0]) if (found := re.match(r"-?\d+\b", result)) else None,
        error=found[1] if (found := re.match(r"-1 (E\w+)", result)) else None,
        deleted=bool(own and own["deleted"]),
    )


def _paths(arguments: str) -> Iterator[str]:
    """The paths that a call names; a relative one belongs to the folder before it."""
    folder = ""
    for found in re.finditer(rf"{_DESCRIPTOR.pattern}|{_QUOTED.pattern}", arguments):
        if found["text"] is None:
            folder = _decode(found["path"]).decode(errors="replace")
        else:
            yield posixpath.join(folder, _decode(found["text"]).decode(errors="replace"))


def _decode(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
