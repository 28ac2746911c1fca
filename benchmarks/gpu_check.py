"""``python -m benchmarks.gpu_check``: everything that needs a GPU, in one go of less than ten minutes.

Each check is a run, or several, of benchmarks/scripts/gpu_training.py under ``submit --local``: as a user's, with
supervisor, watchdog and writer. ``costs`` is one of benchmarks/scripts/gpu_costs.py, and has rows of the common table:
the loop beside DDP alone, the stall of a save and its copies beside torch's own into pinned memory. ``--device cpu`` is
the dry run: the same with gloo, which says nothing about GPUs.
A check passes, fails, or is not run, with the reason. The exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, rows
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import content_of
from tests.waiting import flatten

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("scripts") / "gpu_training.py"
COSTS = SCRIPT.with_name("gpu_costs.py")
#: What a step in the loop, and a save, may take of the time of the least that does the same.
STEP_BAR, STALL_BAR, STALL_MORE_MS, COPY_BAR = 1.02, 1.15, 0.5, 1.05
#: All checks together; a lease of a GPU is ten minutes.
BUDGET_S = 540.0
PRECISIONS = (None, "float16", "bfloat16")


class NotRun(Exception):
    """Why a check makes no sense here."""


@dataclass
class Lab:
    """Where the checks run, on ``device`` with up to ``ranks`` ranks, and until when."""

    device: str
    ranks: int
    folder: Path
    deadline: float
    runs: int = 0

    def train(
        self, *script: object, ranks: int | None = None, options: Sequence[str] = (), program: Path = SCRIPT
    ) -> RunDirectory:
        """One whole run; AssertionError with the end of what it said if it does not complete."""
        self.runs += 1
        run = RunDirectory(self.folder / f"run-{self.runs}")
        command = [sys.executable, "-m", "clusterddp", "submit", str(program), "--local", "--run-dir", str(run)]
        command += ["--device", self.device, "--gpus", str(ranks or self.ranks), *options, "--", *map(str, script)]
        # cuBLAS is deterministic with this alone.
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        left_s = self.deadline - time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=max(left_s, 1)
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError("not done when the time for all checks was over") from error
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}"
        return run

    def need(self, what: str, present: bool) -> None:
        if not present:
            raise NotRun(what)


@dataclass
class Result:
    """``words`` is the finding in one sentence, ``figures`` what it rests on."""

    name: str
    state: str
    words: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


Check = Callable[[Lab], tuple[str, dict[str, Any]]]


def start(lab: Lab, ranks: int) -> tuple[str, dict[str, Any]]:
    """The process group stands, and a sum over all ranks is right (the script's own assertion)."""
    run = lab.train("--steps", 2, ranks=ranks)
    said = (run.attempt_logs(0) / "rank-0.out").read_text().splitlines()[0]
    wanted = "nccl" if lab.device == "cuda" else "gloo"
    assert said == f"backend {wanted}, {ranks} ranks on {lab.device}", said
    (ready,) = (event["time"] for event in run.events() if event["event"] == "started")
    return said, {"first_step_s": run.metrics()[0]["time"] - ready}


def exact(lab: Lab, amp: str | None, backend: str | None) -> tuple[str, dict[str, Any]]:
    """A run that is preempted twice ends with the bits of one that is not."""
    script = [*(["--amp", amp] if amp else []), *(["--compile", backend] if backend else [])]
    whole = lab.train(*script)
    again = lab.train(*script)
    repeatable = differing(whole, again) == []
    stopped = lab.train(*script, options=["--preempt-after", "60", "--preempt-after", "180"])
    resumed = [event for event in stopped.events() if event["event"] == "resumed"]
    assert len(resumed) == 2, f"{len(resumed)} resumes instead of 2"
    different = differing(whole, stopped)
    if not repeatable:
        raise AssertionError(f"two runs without a preemption differ already; with one differ: {different[:5]}")
    assert not different, f"these differ from the uninterrupted run's: {different[:5]}"
    return "bit-exact after two preemptions", {"resumed_at": [event["step"] for event in resumed]}


def differing(one: RunDirectory, other: RunDirectory) -> list[str]:
    """The values of the last checkpoint, and the steps' losses and scales, that differ."""
    states = [_state(run) for run in (one, other)]
    names = [name for name in sorted(states[0].keys() | states[1].keys()) if not _same(name, *states)]
    kept = [[(line["loss"], line["scale"], line["digest"]) for line in run.metrics()] for run in (one, other)]
    return names + [f"step {step}" for step, pair in enumerate(zip(*kept, strict=True)) if pair[0] != pair[1]]


def _state(run: RunDirectory) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    content = content_of(max(run.checkpoints.glob("step-*")))
    flatten("", {name: part for name, part in content.items() if name != "parent"}, flat)  # a resume adds a parent
    return flat


def _same(name: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    if isinstance(one.get(name), torch.Tensor):
        return isinstance(other.get(name), torch.Tensor) and torch.equal(one[name], other[name])
    return bool(one.get(name) == other.get(name))


def snapshot(lab: Lab, megabytes: int) -> tuple[str, dict[str, Any]]:
    """Checkpoints hold what the parameters were at their step, though each next step changes all of them at once."""
    every, steps = 6, 30
    keep = ["--set", f"checkpoint.every={every} steps", "--set", f"checkpoint.keep={steps}"]
    run = lab.train("--steps", steps, "--megabytes", megabytes, options=keep)
    lines = run.metrics()
    saved = {int(path.name[5:17]): path for path in run.checkpoints.glob("step-*")}
    for step, path in saved.items():
        parameters = [value for name, value in _parameters(path).items() if value.dtype == torch.float32]
        found = sum(int(value.view(torch.int32).sum(dtype=torch.int64)) for value in parameters)
        assert found == lines[step - 1]["digest"], f"checkpoint {step} is not the state after {step} steps"
    assert len(saved) > 2, f"only checkpoints {sorted(saved)}"
    cycles = {line["step"]: line["cycle_s"] for line in lines}
    after = report.median([cycles[step] for step in saved if step in cycles])
    usual = report.median([seconds for step, seconds in cycles.items() if step > 2 and step not in saved])
    figures = {"megabytes": megabytes, "step_s": usual, "step_after_a_save_s": after, "checkpoints": len(saved)}
    return f"{len(saved)} checkpoints are right; a save costs {(after - usual) * 1000:.1f} ms of a step", figures


def _parameters(path: Path) -> dict[str, torch.Tensor]:
    """Without batch norm's running statistics, which are no parameters."""
    return {name: value for name, value in content_of(path)["model"].items() if "running" not in name}


def costs(lab: Lab, megabytes: int) -> tuple[str, dict[str, Any]]:
    """Rows of what a step and a save cost; a missed bar is a result, and no failure."""
    file = lab.folder / "costs.json"
    often = ["--pairs", 20, "--block", 20] if lab.device == "cuda" else ["--pairs", 4, "--block", 3]
    lab.train(file, "--megabytes", megabytes, *often, program=COSTS)
    found = json.loads(file.read_text())
    if lab.device == "cuda":
        assert found["pinned"], "the memory of the snapshot is not pinned"
    made = [row.as_json() for row in cost_rows(found, f"{lab.device}, {lab.ranks} ranks", megabytes)]
    missed = [row["row"] for row in made if row["met"] is False]
    return f"{len(made)} rows; missed: {', '.join(missed) or 'none'}", {"rows": made, "megabytes": megabytes}


def cost_rows(found: Mapping[str, Any], where: str, megabytes: int) -> list[rows.Row]:
    """The rows of one run of ``gpu_costs.py``, in milliseconds."""
    times = {what: {name: [1000 * one for one in values] for name, values in found[what].items()} for what in _TIMES}
    step, stall, copies = (times[what] for what in _TIMES)
    state, pinned = f"{where}, {megabytes} MB", "torch's copies into pinned memory"
    relative = report.median(stall["pinned"]) * (STALL_BAR - 1) > STALL_MORE_MS
    bar = {"allowed": STALL_BAR} if relative else {"more": STALL_MORE_MS}
    return [
        rows.paired(f"step ({where}): loop", "ms", step["ours"], step["DDP"], "DDP alone", allowed=STEP_BAR),
        rows.paired(f"step ({where}): DDP", "ms", step["DDP"], step["bare"], "the model without DDP"),
        rows.paired(f"save ({state}): stall", "ms", stall["ours"], stall["pinned"], f"queueing {pinned}", **bar),
        rows.paired(f"save ({state}): copies", "ms", copies["ours"], copies["pinned"], pinned, allowed=COPY_BAR),
    ]


_TIMES = ("step", "stall", "copies")


def hang(lab: Lab, where: str) -> tuple[str, dict[str, Any]]:
    """The last rank is named, its attempt is ended, and the run completes in the next."""
    lab.need("needs a GPU", where == "host" or lab.device == "cuda")
    quick = ["--set", "watchdog.step_s=4", "--set", "checkpoint.every=10 steps"]
    run = lab.train("--hang", where, options=quick)
    hung = [event for event in run.events() if event["event"] == "hung"]
    assert len(hung) == 1, f"{len(hung)} hangs were noticed instead of 1"
    assert hung[0]["late"] == [lab.ranks - 1], f"rank {hung[0]['late']} was named instead of {lab.ranks - 1}"
    records = sorted(run.attempt_logs(0).glob("rank-*.collectives.json"))
    kinds = {entry["profiling_name"].split(":")[0] for path in records for entry in (read_json(path) or {})["entries"]}
    return f"rank {lab.ranks - 1} was named, the run completed", {"flight_records_of": sorted(kinds)}


def checks(lab: Lab, backend: str, megabytes: int) -> Iterator[tuple[str, Check]]:
    """By name, the most important first: the time may not suffice for all."""
    sizes = sorted({1, lab.ranks, *(2**power for power in range(10) if 2**power < lab.ranks)})
    for ranks in sizes:
        yield f"start-{ranks}", partial(start, ranks=ranks)
    yield "exact", lambda lab: exact(lab, None, None)
    yield "snapshot", lambda lab: snapshot(lab, megabytes)
    yield "costs", lambda lab: costs(lab, megabytes)
    yield "hang-host", lambda lab: hang(lab, "host")
    yield "hang-device", lambda lab: hang(lab, "device")
    for amp in PRECISIONS[1:]:
        yield f"exact-{amp}", partial(exact, amp=amp, backend=None)
    yield "exact-compile", lambda lab: exact(lab, None, backend)
    yield "exact-compile-bfloat16", lambda lab: exact(lab, "bfloat16", backend)


def perform(name: str, check: Check, lab: Lab) -> Result:
    """One check's result, whatever it raises."""
    if time.monotonic() > lab.deadline:
        return Result(name, "not run", "the time for all checks was over")
    began = time.monotonic()
    try:
        words, figures = check(lab)
    except NotRun as reason:
        return Result(name, "not run", str(reason))
    except Exception as error:
        words = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        return Result(name, "failed", words, time.monotonic() - began)
    return Result(name, "passed", words, time.monotonic() - began, figures)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    gpus = torch.cuda.device_count()
    if options.device == "cuda" and not gpus:
        print("no GPU is visible; the dry run is --device cpu", file=sys.stderr)
        return 2
    ranks = options.ranks or (gpus if options.device == "cuda" else 2)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        lab = Lab(options.device, ranks, Path(folder), time.monotonic() + BUDGET_S)
        results = []
        for name, check in checks(lab, options.backend, options.megabytes or (256 if options.device == "cuda" else 16)):
            wanted = not options.only or name in options.only
            results.append(perform(name, check, lab) if wanted else Result(name, "not run", "not asked for"))
            print(f"{name}: {results[-1].state}: {results[-1].words}", flush=True)
    write(options.out, options.device, ranks, results)
    return int(any(result.state == "failed" for result in results))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    top.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the dry run")
    top.add_argument("--ranks", type=int, help="default: the number of GPUs; 2 in the dry run")
    top.add_argument("--only", nargs="*", metavar="CHECK")
    top.add_argument("--backend", default="inductor", help="torch.compile's")
    top.add_argument("--megabytes", type=int, help="of the state that is saved; default: 256, in the dry run 16")
    top.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "measurements", metavar="FOLDER")
    return top


def write(folder: Path, device: str, ranks: int, results: Sequence[Result]) -> None:
    if device == "cuda":
        name, what = "gpu-check", f"{ranks} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        name, what = "gpu-check-dry-run", f"{ranks} gloo ranks on CPUs: **this says nothing about GPUs**"
    table = [[result.name, result.state, result.words.replace("\n", " "), result.seconds] for result in results]
    head = f"# What needs a GPU\n\n`make gpu-check` on {what}, {time.strftime('%Y-%m-%d')}. {report.place()}\n\n"
    made = [row for result in results for row in result.figures.get("rows", [])]
    text = head + report.table(["check", "result", "finding", "seconds"], table)
    if made:
        text += "\n\n" + rows.table(made)
    figures = {"device": device, "what": what, "rows": made, "checks": [vars(result) for result in results]}
    report.write(folder, name, text, figures)


if __name__ == "__main__":
    sys.exit(main())
