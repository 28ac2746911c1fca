"""What the command and the job of a check tell each other, in files of the job's folder."""

from __future__ import annotations

from pathlib import Path

from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import Schema, is_count, is_text, read_json

#: How many steps to check; the exit code of the check, and what it says.
STEPS_FILE, RESULT_FILE = "check.json", "result.json"
_STEPS: Schema = {"steps": is_count}
_RESULT: Schema = {"code": is_count, "words": is_text}


def write_steps(folder: Path, steps: int) -> None:
    """By the command."""
    write_json(folder / STEPS_FILE, {"steps": steps}, mode=0o600)


def read_steps(folder: Path) -> int:
    """In the job. RunDirectoryError if the file is damaged."""
    found = read_json(folder / STEPS_FILE, _STEPS)
    if found is None:
        raise FileNotFoundError(2, "no such file", str(folder / STEPS_FILE))
    return int(found["steps"])


def write_result(folder: Path, code: int, words: str) -> None:
    """By the job."""
    write_json(folder / RESULT_FILE, {"code": code, "words": words}, mode=0o600)


def read_result(folder: Path) -> tuple[int, str] | None:
    """The exit code and the words; None if there is no result yet."""
    found = read_json(folder / RESULT_FILE, _RESULT)
    return None if found is None else (found["code"], found["words"])
