"""Slurm's commands and what they printed, as in a terminal: recorded by ``tests.record``, replayed by unit tests.

A file has any number of commands, each on a line after ``$``, followed by its output; after a failure that is its
standard error and a line ``[exit code 1]``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = {"squeue", "sacct", "scontrol", "sinfo", "sacctmgr", "sprio", "sdiag", "sshare"}
_EXIT_CODE = re.compile(rb"^\[exit code (\d+)\]\n\Z", re.MULTILINE)

Run = Callable[..., subprocess.CompletedProcess[Any]]


class Transcript:
    """What Slurm's commands printed, by command line."""

    def __init__(self) -> None:
        self._outputs: dict[str, tuple[int, bytes]] = {}

    def record(self, run: Run) -> Run:
        """``subprocess.run`` that also adds each command of Slurm's to the transcript."""

        def recording(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
            if command[0] not in PROGRAMS:
                return run(command, **options)
            done = run(command, **{**options, "encoding": None, "errors": None, "text": None})
            output = done.stderr if done.returncode else done.stdout
            self._outputs[shlex.join(command)] = (done.returncode, output)
            return _completed(command, done.returncode, output, options)

        return recording

    def replay(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """In place of ``subprocess.run``."""
        line = shlex.join(command)
        assert line in self._outputs, f"not recorded: `{line}`; `python -m tests.record` records it"
        return _completed(command, *self._outputs[line], options)

    def write(self, folder: Path, neutral: Callable[[bytes], bytes]) -> None:
        """Writes one file per program; ``neutral`` replaces the names of this machine."""
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, list[bytes]] = {}
        for line, (code, output) in self._outputs.items():
            end = b"[exit code %d]\n" % code if code else b""
            files.setdefault(shlex.split(line)[0], []).append(b"$ %s\n%s%s" % (line.encode(), output, end))
        for program, parts in files.items():
            (folder / f"{program}.txt").write_bytes(neutral(b"".join(parts)))

    @classmethod
    def read(cls, folder: Path) -> Transcript:
        """What ``write`` wrote."""
        transcript = cls()
        for path in sorted(folder.glob("*.txt")):
            for part in re.split(rb"^\$ ", path.read_bytes(), flags=re.MULTILINE)[1:]:
                line, _, output = part.partition(b"\n")
                code = _EXIT_CODE.search(output)
                output = output[: code.start()] if code else output
                transcript._outputs[line.decode()] = (int(code[1]) if code else 0, output)
        return transcript


def _completed(
    command: Sequence[str], code: int, output: bytes, options: dict[str, Any]
) -> subprocess.CompletedProcess[Any]:
    """As ``subprocess.run`` returns it with these options."""
    text = options.get("text") or options.get("encoding")
    said = output.decode(options.get("encoding") or "utf-8", options.get("errors") or "strict") if text else output
    nothing = "" if text else b""
    return subprocess.CompletedProcess(command, code, nothing if code else said, said if code else nothing)
