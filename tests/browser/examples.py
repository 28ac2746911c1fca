"""The reports that the browser opens: runs of all kinds, simulated on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.report import collected
from clusterddp.jobdef.job import Job
from clusterddp.report.page import page
from clusterddp.rundir.claims import write_claim
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.runs.sweep_members import Record
from clusterddp.slurm import commands as slurm
from tests.long_run import long_run
from tests.runs_on_disk import BEGAN, event, of_job, recorded_run, started, steps, write_lines

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/project/train.py", line 31, in main
    loss = F.cross_entropy(model(images), labels)  # a comment that makes this line longer than the screen of a phone
RuntimeError: <script>alert(1)</script>
"""
RUNNING = "41|RUNNING|n[1-8]|2026-11-18T11:06:40|0:30:00|gpu|None\n"


def reports(folder: Path) -> dict[str, Path]:
    """A file for each: one run, two, a sweep of 8, of 30 members, one that trains, one that failed, damaged ones."""
    runs = {
        "run": [long_run(folder / "run", attempts=6, steps=3000, ranks=16)],
        "troubled": [troubled(folder / "troubled")],
        "two": [long_run(folder / name, attempts, steps=3000) for name, attempts in (("baseline", 1), ("wider", 4))],
        "sweep": sweep(folder / "lr", 8),
        "runs": sweep(folder / "large", 30),
        "live": [live(folder / "live")],
        "failed": [failed(folder / "failed")],
        "damaged": [damaged(folder / "damaged")],
    }
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, own in runs.items():
            patch.setattr(slurm, "run", lambda *_, answer=RUNNING if name == "live" else "", **__: answer)
            found[name] = folder / f"{name}.html"
            made = BEGAN + (2000 if name == "live" else 1e6)
            found[name].write_text(page(collected(own, made)))
    return found


def troubled(path: Path) -> RunDirectory:
    """A run that was preempted, hung, and failed; and was slow in between."""
    run = long_run(path, attempts=4, steps=2400, ranks=16, ends=False)
    last = max(line["time"] for line in run.events())
    events = [line for line in run.events() if not (line["event"] == "requeued" and line["attempt"] in (1, 2))]
    ended = {number: max(line["time"] for line in events if line["attempt"] == number) for number in (1, 2)}
    again = {"reason": "rank 9 (n2) hung", "cause": "hung", "step": 1190, "checkpoint": 1000}
    hung = {"rank": 9, "late": [9], "host": "n2", "step": 1190, "seconds": 90.0, "what": "hung in forward()"}
    slow = {"rank": 1, "host": "n1", "own_s": 0.4, "ratio": 2.0}
    lost = "rank 3 (n1) failed: RuntimeError: <script>alert(1)</script>"
    events += [
        event("hung", 1, time=ended[1] + 90, **hung),
        event("restarted", 1, time=ended[1] + 91, **again),
        event("slow", 2, time=ended[2] - 60, **slow),
        event("node_lost", 2, time=ended[2] + 15, node="n2"),
        event("requeued", 2, time=ended[2] + 16, reason="node n2 lost", cause="node lost", step=1800, checkpoint=1800),
        event("rank_failed", 3, time=last + 1, rank=3, host="n1", error="RuntimeError: <script>", step=2400),
        event("failed", 3, time=last + 2, step=2400, attempts=4, reason=lost),
    ]
    write_lines(run.events_file, sorted(events, key=lambda line: float(line["time"])))
    (run.attempt_logs(3) / "rank-3.err").write_text(TRACEBACK)
    outcome = '{"state": "failed", "step": 2400, "attempts": 4, "reason": "' + lost + '"}'
    run.outcome_file.write_text(outcome)
    return run


def sweep(folder: Path, members: int) -> list[RunDirectory]:
    """Runs that differ in their learning rate; some failed."""
    values = {f"lr={1e-4 * (index + 1):.4g}": {"lr": f"{1e-4 * (index + 1):.4g}"} for index in range(members)}
    found = []
    for index, name in enumerate(values):
        run = long_run(folder / name, attempts=1 + index % 3, steps=600)
        lines = [line | {"loss": line["loss"] * (1 + 0.05 * index)} for line in run.metrics()]
        write_lines(run.metrics_file, lines)
        if index % 7 == 3:
            end = event("rank_failed", index % 3, time=BEGAN + 900, rank=1, host="n1", error="CUDA out of memory")
            write_lines(run.events_file, [*run.events(), end])
            run.outcome_file.write_text('{"state": "failed", "step": 600, "attempts": 1, "reason": "rank 1 failed"}')
        found.append(run)
    (folder / SWEEP_FILE).write_text(Record(Job(name="net", module="net", device="cpu"), values).to_yaml())
    return found


def live(path: Path) -> RunDirectory:
    """A run in its third attempt."""
    run = long_run(path, attempts=3, steps=1800, ranks=16, ends=False)
    write_claim(run.holder_file(2), run, of_job())
    return run


def failed(path: Path) -> RunDirectory:
    """A run of three steps, with metrics of odd names."""
    failure = event("rank_failed", rank=0, host="n1", error="RuntimeError: <script>alert(1)</script>", step=3)
    values: dict[str, Any] = {"<script>": 0.5, "a very long name of a metric " * 5: 1.0}
    return recorded_run(path, [started(), event("training", step=0), failure], metrics=steps(range(3), **values))


def damaged(path: Path) -> RunDirectory:
    """Nothing but metrics can be read."""
    run = long_run(path, steps=60)
    run.events_file.write_bytes(b"\xff\n{}\n")
    run.timing_file.write_text("[]\n")
    run.job_file.write_text("nodes: [several\n")
    run.outcome_file.write_text("{}")
    return run
