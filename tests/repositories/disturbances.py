"""Runs a repository's command undisturbed, preempted at three moments or with a rank killed, and says what came out."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from clusterddp import protocol
from clusterddp.protocol import PREEMPT
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.ddp import REPOSITORY
from tests.gpu import build
from tests.repositories.entries import Copy

#: Preempted by a job of higher priority, on the test cluster's Slurm.
ON_SLURM = ("slurm-before", "slurm-middle", "slurm-end")
#: The cells of a row, in the order in which they are measured: the last one changes the code.
CELLS = ("undisturbed", "before", "middle", "end", "killed", *ON_SLURM, "lines")
LIMIT_S = 900


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    disturbance: str
    state: str | None
    confirmed: bool
    attempts: int
    #: Different steps that were made, and steps made again.
    steps: int
    repeated: int
    #: The last step made, and the metric that the log ends with.
    last: str | None
    metric: str | None
    seconds: float
    #: Whether the disturbance happened.
    disturbed: bool
    reason: str
    #: The commit of clusterddp.
    version: str = ""
    #: With lines for no lost step: how many they are.
    lines: int = 0

    def complete(self, whole: Result) -> bool:
        """Whether it was disturbed as meant, and is completed with each of the undisturbed run's steps."""
        over = self.state == "completed" and self.confirmed and self.disturbed
        return over and (self.steps, self.last) == (whole.steps, whole.last)

    def against(self, whole: Result) -> Result:
        """This result with the steps beyond the undisturbed run's as repeated ones, where steps are only counted."""
        more = max(0, self.steps - whole.steps) if self.repeated == 0 else 0
        last = whole.last if more else self.last
        return replace(self, steps=self.steps - more, repeated=self.repeated + more, last=last)

    def record(self) -> dict[str, Any]:
        return asdict(self)


def run(copy: Copy, disturbance: str, python: Path) -> Result:
    """One run with local processes, in a fresh copy of what it writes."""
    folder = copy.root / disturbance
    shutil.rmtree(folder, ignore_errors=True)
    definition = write_job(copy, python)
    directory = folder / "run"
    command = [str(python), "-m", "clusterddp", "submit", str(definition), "--local", "--run-dir", str(directory)]
    moments = copy.repository.moments
    at = [] if disturbance in ("undisturbed", "killed") else [getattr(moments, disturbance, moments.middle)]
    began = time.monotonic()
    folder.mkdir(parents=True)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=working_folder(copy, folder),
            env={**environment(copy), PREEMPT: json.dumps(at)},
            stdout=output,
            stderr=output,
        )
        killed = disturbance == "killed" and _kill_a_rank(process, RunDirectory(directory), moments.middle)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
    output_text = (folder / "output").read_text(errors="replace")
    found = outcome_of(copy, RunDirectory(directory), disturbance, time.monotonic() - began)
    happened = killed or "preempt" in output_text or disturbance == "undisturbed"
    return Result(**{**found, "disturbed": happened and "without the preemption" not in output_text})


def working_folder(copy: Copy, folder: Path) -> Path:
    """The current folder of the run."""
    if not copy.repository.own_folder:
        return copy.code
    (folder / "here").mkdir()
    return folder / "here"


def write_job(copy: Copy, python: Path, more: Mapping[str, Any] | None = None) -> Path:
    """The job definition of the table's row, as a file beside the copy."""
    own = copy.repository
    job = {**own.job, **own.resume, "python": str(python), **(more or {})}
    if own.device == "cpu":
        job["device"] = "cpu"
    if "script" in job:
        job["script"] = str(copy.code / job["script"])
    text = yaml.safe_dump(job).replace("{data}", str(copy.data))
    path = copy.root / "job.yaml"
    path.write_text(text)
    return path


def environment(copy: Copy) -> dict[str, str]:
    """The ranks' environment: one thread each, nothing from a hub, the stand-in GPUs where they are needed."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    devices = build.environment(2) if copy.repository.device == "stand-in" else {}
    path = [str(REPOSITORY), str(copy.code), str(copy.root / "code")]
    if "PYTHONPATH" in devices:
        path.insert(0, devices["PYTHONPATH"])
    return {**os.environ, **quiet, **devices, "PYTHONPATH": os.pathsep.join(path), "HF_HOME": str(copy.root / "hub")}


def outcome_of(copy: Copy, directory: RunDirectory, disturbance: str, seconds: float) -> dict[str, Any]:
    """The fields of a Result, from the run's records and rank 0's logs."""
    outcome = read_json(directory.outcome_file) or {}
    logs = [log_of(directory, attempt) for attempt in sorted(directory.attempts())]
    made = [match.groups() for log in logs for match in re.finditer(copy.repository.step, log, re.MULTILINE)]
    metrics = re.findall(copy.repository.metric, "\n".join(logs), re.MULTILINE)
    if not re.compile(copy.repository.step).groups:  # the lines are only counted
        made = [(str(number),) for number in range(1, len(made) + 1)]
    keys = [tuple(float(group) for group in groups) for groups in made]
    return {
        "disturbance": disturbance,
        "state": outcome.get("state"),
        "confirmed": outcome.get("confirmed", True),
        "attempts": len(logs),
        "steps": len(set(keys)),
        "repeated": -(-len(keys) // copy.repository.lines_per_step) - len(set(keys)),
        "last": " ".join(f"{number:g}" for number in max(keys)) if keys else None,
        "metric": metrics[-1] if metrics else None,
        "seconds": round(seconds, 1),
        "disturbed": False,
        "reason": str(outcome.get("reason", "no outcome")),
    }


def log_of(directory: RunDirectory, attempt: int) -> str:
    """Rank 0's output and error output of an attempt, with carriage returns as ends of lines."""
    folder = directory.logs / f"attempt-{attempt}"
    paths = [path for path in (folder / "rank-0.out", folder / "rank-0.err") if path.exists()]
    return "\n".join(path.read_text(errors="replace").replace("\r", "\n") for path in paths)


def _kill_a_rank(process: subprocess.Popen[bytes], directory: RunDirectory, moment: str) -> bool:
    """Kills the last rank once attempt 0's log has the moment; False if the run ended before."""
    while process.poll() is None:
        if re.search(moment, log_of(directory, 0), re.MULTILINE) and (ranks := ranks_of(directory)):
            os.kill(ranks[-1], signal.SIGKILL)
            return True
        time.sleep(0.05)
    return False


def ranks_of(directory: RunDirectory) -> list[int]:
    """The processes that are the run's ranks on this machine, in order."""
    found: list[tuple[int, int]] = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        rank = _variable(pid, "RANK") or _variable(pid, "SLURM_PROCID")
        if rank and _is_rank(pid) and _variable(pid, protocol.RUN_DIR) == str(directory):
            found.append((int(rank), pid))
    return [pid for _, pid in sorted(found)]


def _is_rank(pid: int) -> bool:
    try:
        return b"clusterddp.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _variable(pid: int, name: str) -> str | None:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((pair.split(b"=", 1)[1].decode() for pair in pairs if pair.startswith(name.encode() + b"=")), None)
