"""What the trackers of a run are configured for, have been sent, and lack.

``Sent`` is a record in a tracker's folder, from which the next attempt continues. ``Lines`` reads each line of a run
that counts once, while rank 0 appends more. ``wanted`` has the trackers of a job, and how its W&B and MLflow runs are
made. ``overview`` is for ``status``: how to look at the trackers, and what they lack.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.rundir.files import open_binary, write_json
from clusterddp.rundir.records import LOGGED, Schema, is_count, is_text, optional, parse, read_json, with_floats
from clusterddp.rundir.run_directory import RunDirectory

_SCHEMA: Schema = {
    "step": is_count,
    "attempt": is_count,
    **dict.fromkeys(("id", "mode", "closing", "problem"), optional(is_text)),
}


@dataclass(frozen=True)
class Sent:
    """The values of a run that a tracker has."""

    step: int = 0
    """It has all values below this step, durably."""
    attempt: int = 0
    """The attempt that recorded this."""
    problem: str | None = None
    """Why it does not get more."""
    id: str | None = None
    """W&B's or MLflow's name for the run."""
    mode: str | None = None
    """W&B's: online or offline."""
    closing: str | None = None
    """A folder that W&B has completed, and that is about to be moved beside the others."""

    def lacks_from(self, first_steps: Mapping[int, int]) -> int:
        """The first step that the tracker lacks, or has from an attempt that a later one has replaced."""
        return min([self.step, *(step for attempt, step in first_steps.items() if attempt > self.attempt)])


def read_sent(folder: Path) -> Sent | None:
    """The record of the tracker with this folder. None if there is none. Raises RunDirectoryError."""
    record = read_json(_file(folder), _SCHEMA)
    if record is None:
        return None
    names = {field.name for field in dataclasses.fields(Sent)}
    return Sent(**{name: value for name, value in record.items() if name in names})


def write_sent(folder: Path, sent: Sent) -> None:
    """Records it."""
    write_json(_file(folder), {name: value for name, value in dataclasses.asdict(sent).items() if value is not None})


def _file(folder: Path) -> Path:
    return folder / "sent.json"


#: Bytes that are read at a time; more than the longest line.
BLOCK = 1 << 23
Line = dict[str, Any]


class Lines:
    """The lines of a JSON lines file from step ``first`` on for which ``counts``, in the order of the file.

    That is the order of steps, because all lines below a checkpoint are in the file before an attempt resumes from it.
    """

    def __init__(self, path: Path, counts: Callable[[Mapping[str, Any]], bool], first: int) -> None:
        self._path, self._counts, self._first = path, counts, first
        self._read_to = 0
        self._unparsed: deque[bytes] = deque()
        self._next: Line | None = None

    def below(self, step: float) -> Iterator[Line]:
        """The lines below ``step`` that were not returned before."""
        while (line := self._peek()) is not None and line["step"] < step:
            self._next = None
            yield with_floats(line)

    def _peek(self) -> Line | None:
        while self._next is None and (self._unparsed or self._read()):
            line, _ = parse(self._unparsed.popleft(), LOGGED)
            if line is not None and line["step"] >= self._first and self._counts(line):
                self._next = line
        return self._next

    def _read(self) -> bool:
        """Reads more whole lines, because the last may still be incomplete. Opens the file each time, because rank 0
        replaces it by a copy after a failed write."""
        try:
            with open_binary(self._path) as file:
                file.seek(self._read_to)
                block = file.read(BLOCK)
        except FileNotFoundError:
            return False
        whole = block[: block.rfind(b"\n") + 1]
        self._read_to += len(whole)
        self._unparsed.extend(whole.split(b"\n")[:-1])
        return bool(whole)


NAMES = {"tensorboard": "TensorBoard", "wandb": "W&B", "mlflow": "MLflow"}


def wanted(job: Job, run_name: str, environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The trackers of a job, and how their runs are made."""
    found: dict[str, dict[str, Any]] = {"tensorboard": {}} if job.tensorboard else {}
    if job.wandb is not None and environ.get("WANDB_MODE") != "disabled":
        options: dict[str, Any] = {"name": run_name, "config": config(without_secrets(job)[0]), "mode": job.wandb.mode}
        options |= {"project": job.wandb.project or job.name, "entity": job.wandb.entity, "group": job.wandb.group}
        found["wandb"] = {name: value for name, value in options.items() if value is not None}
    if job.mlflow is not None:
        options = {"name": run_name, "config": config(without_secrets(job)[0])}
        options |= {"experiment": job.mlflow.experiment or job.name, "tracking_uri": job.mlflow.tracking_uri}
        found["mlflow"] = {name: value for name, value in options.items() if value is not None}
    return found


def config(job: Job) -> dict[str, Any]:
    """The fields by which W&B and MLflow can filter runs: the script's options, and the job's facts."""
    facts = {"seed": job.seed, "world_size": job.world_size, "global_batch": job.global_batch}
    return {name: value for name, value in facts.items() if value is not None} | options_in(job.args)


def options_in(words: Sequence[str]) -> dict[str, Any]:
    """The long options among a script's arguments: ``--lr 1e-3``, ``--lr=1e-3``, ``--amp``."""
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, assigned, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        found[name] = _value(value) if assigned else True if _is_option(following) else _value(following)
    return found


def _is_option(word: str) -> bool:
    """Whether argparse would read a word as an option: a negative number and a single dash are values."""
    try:
        float(word)
    except ValueError:
        return word.startswith("-") and word != "-"
    return False


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def overview(run: RunDirectory) -> list[tuple[str, str]]:
    """A name and words for each tracker that has values of the run."""
    found = []
    for name, described in _DESCRIBED.items():
        folder = run.path / name
        try:
            sent = read_sent(folder)
        except (OSError, RunDirectoryError):  # another user's, or changed by another program
            continue
        if sent is not None:
            found.append((name, described(folder, sent) + _lacking(sent)))
    return found


def _tensorboard(folder: Path, _: Sent) -> str:
    return f"view it with: tensorboard --logdir {shlex.quote(str(folder))}"


def _wandb(folder: Path, sent: Sent) -> str:
    if sent.mode == "offline":
        return f"offline. Upload it with: wandb sync {shlex.quote(str(folder))}/offline-run-*-{sent.id}"
    return f"run {sent.id}"


def _mlflow(_: Path, sent: Sent) -> str:
    return f"run {sent.id}"


def _lacking(sent: Sent) -> str:
    return f". It lacks steps from {sent.step} on: {sent.problem}" if sent.problem else ""


_DESCRIBED = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
