"""Run directories as a run leaves them, for tests of the commands that read them; no job is started."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clusterddp.jobdef.job import Job
from clusterddp.rundir.claims import Claim, JobClaim, write_claim
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.histories import whole

#: When the runs began.
BEGAN = 1_795_000_000.0


def recorded_run(path: Path, events: Iterable[Mapping[str, Any]] = (), **files: Any) -> RunDirectory:
    """A run with a history: ``event("started", 1, ...)`` and so on, a second apart.

    ``files``: ``outcome``, ``holder`` (the newest attempt's claim), ``submitted``, ``loop``; ``metrics``: its lines.
    """
    run = RunDirectory(path)
    run.create()
    run.job_file.write_text(Job(name=path.name, module="net", device="cpu").to_yaml())
    lines = [{"time": BEGAN + index, **line} for index, line in enumerate(events)]
    for attempt in sorted({line["attempt"] for line in lines}):
        while run.newest_attempt() != attempt:
            run.create_attempt()
    write_lines(run.events_file, lines)
    write_lines(run.metrics_file, files.get("metrics", []))
    if "outcome" in files:
        run.outcome_file.write_text(json.dumps({"attempts": 1, "step": None, "reason": "", **files["outcome"]}))
    places = {"submitted": run.submitted_file, "loop": run.loop_file}
    if "holder" in files:
        places["holder"] = run.holder_file(run.newest_attempt() or 0)
    for name, place in places.items():
        if name in files:
            write_claim(place, run, files[name])
    return run


def outcome_of(run: RunDirectory) -> dict[str, Any] | None:
    """What outcome.json holds. None if the run is not over."""
    return read_json(run.outcome_file)


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes a JSON lines file, unless there are no lines. Those of a history are made ``whole``."""
    lines = map(whole, lines) if path.name == "events.jsonl" else lines
    if text := "".join(json.dumps(line) + "\n" for line in lines):
        path.write_text(text)


def event(name: str, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    """A line of a history, without its time."""
    return {"attempt": attempt, "event": name, **fields}


def started(attempt: int = 0, job: str = "41", nodes: str = "n[1-2]") -> dict[str, Any]:
    """An attempt's beginning, by a Slurm job."""
    return event("started", attempt, job=job, restarts=attempt, nodes=nodes, ranks=2, code={}, changed=[])


def steps(numbers: Iterable[int], attempt: int = 0, pace_s: float = 0.5, **values: Any) -> list[dict[str, Any]]:
    """Metrics lines, ``pace_s`` seconds apart."""
    return [{"step": step, "time": BEGAN + pace_s * step, "attempt": attempt, **values} for step in numbers]


def of_job(job: str = "41") -> JobClaim:
    """The claim of a Slurm job."""
    return JobClaim(job)


def jobs_of(claims: Iterable[Claim | None]) -> list[str]:
    """The jobs that these claims name."""
    return [claim.job for claim in claims if isinstance(claim, JobClaim)]
