"""Hundreds of preemptions and other faults at random moments, and what became of every step, sample and bit.

``python -m benchmarks.soak`` (``make soak``). On the test cluster, tests/scripts/train.py is trained again and again on
two nodes, and each run is preempted four to eight times by jobs in `high`, 0 to 6 s after an attempt's start, so that
imports, rendezvous, restores, steps and saves are all hit; now and then before there are ranks, by two jobs at once, or
with a second TERM on top. A preemption counts when a new attempt followed. Between them ranks are killed and stopped,
slurmctld and slurmd restarted, cables pulled and nodes switched off (``faults.py``; none with --no-faults).
When a run is over its recorded history is compared with an uninterrupted run's: each step counts once, each sample once
per epoch, none redone after a preemption and few after the rest, the same losses, the same weights and optimizer to the
last bit, one outcome, no process left. A run that fails any of it is kept in STATE/failed, with its run directory and
Slurm's logs.

The report is OUT/soak.md, that of preemptions alone OUT/soak-preemptions.md.

All cases follow from --seed. STATE/progress.jsonl has a line per finished run: an interrupted soak continues after it,
and one that is finished writes its report again; --minutes bounds it. 200 preemptions take about 25 minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import common
from benchmarks.runs import (
    HighJob,
    TooLong,
    cluster,
    empty_ddp_start,
    folder_for,
    lift_hold,
    lifting,
    stamps,
    submit_training,
    term_sent,
    until,
)
from benchmarks.soak import faults
from benchmarks.soak.faults import Fault, Maker
from benchmarks.soak.judging import EVERY, STEPS, Result, judge, resume_times
from clusterddp.rundir.files import append_line
from clusterddp.rundir.records import read_json, read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.cluster.system import Process
from tests.trainings import Training

T = TypeVar("T")

PAUSE_S = 0.03
LATEST_S = 6.0
EMPTY_EVERY = 5
"""Runs from one empty DDP script, for comparison, to the next."""
WAIT_S = 180.0


@dataclass(frozen=True)
class Preemption:
    """One to be made: ``delay`` seconds after an attempt's start; by jobs of so many nodes each, all at once."""

    delay: float
    nodes: tuple[int, ...] = (3,)
    second_term: float | None = None
    """Seconds after which the ranks get another TERM."""
    early: bool = False
    """The delay begins when Slurm says that the job runs: there may be no supervisor and no rank yet."""


@dataclass(frozen=True)
class Case:
    """One run to be made."""

    number: int
    proctrack: str
    grace: int
    ranks_per_node: int
    preemptions: tuple[Preemption | Fault, ...]
    """And other faults, in order."""
    watched: bool = False
    """Whether ``clusterddp wait --resubmit`` lifts the hold after each requeue, as for a user; else the soak does."""

    @property
    def name(self) -> str:
        return f"{self.proctrack}-{self.number:03}"


# ---- the cases: functions of the seed


def make_case(seed: int, proctrack: str, number: int, graces: Sequence[int], mixed: bool = False) -> Case:
    """The run ``number`` of one proctrack. One in four has two ranks per node, one in four a watcher."""
    draw = random.Random(f"{seed}/{proctrack}/{number}")
    preemptions = tuple(_make_fault(draw, mixed) for _ in range(draw.randint(4, 8)))
    ranks_per_node = 2 if draw.random() < 0.25 else 1
    watched = draw.random() < 0.25
    return Case(number, proctrack, graces[number % len(graces)], ranks_per_node, preemptions, watched)


def _make_fault(draw: random.Random, mixed: bool) -> Preemption | Fault:
    return (faults.draw_fault(draw, LATEST_S) if mixed else None) or _make_preemption(draw)


def _make_preemption(draw: random.Random) -> Preemption:
    delay, kind = round(draw.uniform(0, LATEST_S), 3), draw.random()
    if kind < 0.1:
        return Preemption(delay, draw.choice([(3, 3), (2, 2), (1, 3), (2, 1)]))
    if kind < 0.2:
        return Preemption(delay, second_term=round(draw.uniform(0, 0.5), 3))
    if kind < 0.3:
        return Preemption(round(draw.uniform(0, 0.5), 3), early=True)
    return Preemption(delay)


# ---- making a run


class Preempter:
    """Preempts one run as its case says."""

    def __init__(self, up: Cluster, folder: Path, case: Case) -> None:
        self._up, self._folder, self._case = up, folder, case
        self._attempt, self._look_at = -1, 0.0
        self.handovers: list[float] = []
        self.takings: list[float] = []
        self.made: list[dict[str, Any]] = []
        options = ("--steps", str(STEPS), "--pause", str(PAUSE_S))
        self.training = submit_training(up, folder, *options, ranks_per_node=case.ranks_per_node)
        self._maker = Maker(up, self.training)
        self._watcher = self._watch() if case.watched else None

    def _watch(self) -> subprocess.Popen[str]:
        with open(self._folder / "watch.log", "w") as log:
            command = [str(self._up.python), "-m", "clusterddp", "wait", "--resubmit", str(self.training.run.path)]
            return self._up.popen(command, stdout=log, stderr=log)

    def make_all(self) -> None:
        """Until all preemptions and other faults are made, or the run is over."""
        for number, fault in enumerate(self._case.preemptions):
            self._await(self._job_runs if isinstance(fault, Preemption) and fault.early else self._attempt_made)
            time.sleep(fault.delay)
            if self.training.run.outcome() is not None:
                return
            if isinstance(fault, Preemption):
                self._make(number, fault)
                # The high job has the nodes: whatever is newer than this attempt comes after it.
                self._attempt = max(self.training.run.attempts(), default=-1)
            else:
                self._make_other(fault)

    def _make_other(self, fault: Fault) -> None:
        """After a fault that ends the attempt the next one waits for another; else for nothing."""
        self._follow()
        if fault.kind in faults.ENDING:
            self._maker.spare()
        attempt, asked = max(self.training.run.attempts(), default=-1), time.time()
        if self._maker.make(fault):
            self.made.append({"asked": asked, **asdict(fault)})
            self._attempt = attempt if fault.kind in faults.ENDING else attempt - 1

    def _follow(self) -> None:
        """The run may continue in another job."""
        jobs = [event["job"] for event in self.training.run.events() if "job" in event]
        if jobs:
            self.training.job_id = str(jobs[-1])

    def _await(self, begun: Callable[[], bool]) -> None:
        """Until the run continues, or is over."""
        self.until(lambda: begun() or self.training.run.outcome() is not None, f"what follows attempt {self._attempt}")

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Waits; the hold after a requeue is lifted, here or by the watcher."""

        def helped() -> T | None:
            if not self._watcher and time.monotonic() >= self._look_at:
                self._follow()
                lift_hold(self._up, self.training.job_id)
                self._look_at = time.monotonic() + 0.2
            return condition()

        return until(helped, what, WAIT_S)

    def close(self) -> str | None:
        """Ends the watcher; what is wrong with how it ended, if it had a finished run to watch."""
        if self._watcher is None:
            return None
        try:
            code = self._watcher.wait(timeout=15)
            return f"the watcher ended with {code}" if code else None
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()
            return "the watcher did not end"

    def _attempt_made(self) -> bool:
        newest = self.training.run.newest_attempt()
        return newest is not None and newest > self._attempt

    def _job_runs(self) -> bool:
        return self._up.job(self.training.job_id).get("JobState") == "RUNNING"

    def _make(self, number: int, preemption: Preemption) -> None:
        self._follow()
        asked = time.time()
        files = [self._folder / f"high-{number}-{index}" for index in range(len(preemption.nodes))]
        highs = [HighJob.submit(self._up, file, nodes=n) for file, n in zip(files, preemption.nodes, strict=True)]
        if preemption.second_term is not None:
            self._signal_again(preemption.second_term, asked)
        started = [until(high.started, f"job {high.job_id} in high to start", WAIT_S) for high in highs]
        self.takings.append(max(started) - asked)
        sent = term_sent(self._up, self.training.job_id, asked - 0.001)
        # Of two jobs, the first may have had nodes that were idle: that would be no handover.
        if sent is not None and len(highs) == 1:
            self.handovers.append(started[0] - sent)
        self.made.append(
            {"kind": "preemption", "asked": asked, "term_sent": sent, "high_started": started, **asdict(preemption)}
        )

    def _signal_again(self, delay: float, asked: float) -> None:
        """Another TERM to the ranks that have got the first, and to no later attempt's."""
        # Not srun, which has their command line behind its own: a TERM, ignored or not, makes it kill them.
        ranks = [p for p in job_processes(self._up) if "clusterddp.worker" in p.command() and not srun(p)]
        try:
            until(lambda: term_sent(self._up, self.training.job_id, asked - 0.001), "the first TERM", 5)
        except TooLong:
            return  # It came before there were ranks.
        time.sleep(delay)
        for rank in ranks:
            rank.kill(15)


def job_processes(up: Cluster) -> list[Process]:
    """Ranks, batch steps and their helpers on all nodes."""
    return [p for node in up.nodes for p in up.processes(node) if "clusterddp." in p.command()]


def srun(process: Process) -> bool:
    return Path(process.command().partition(" ")[0]).name == "srun"


def none_left(up: Cluster) -> bool | None:
    """Whether no process of the run is left on any node; None, for ``until``, if one is."""
    return True if not job_processes(up) else None


def make_run(up: Cluster, case: Case, reference: RunDirectory, state: Path) -> Result:
    """Makes one run, and judges it. Only a broken cluster or harness raises."""
    began = time.monotonic()
    up.set_grace(case.grace)
    folder = folder_for(up, f"{case.name}-{time.monotonic_ns()}")
    result = Result(case.name, case.grace, case.proctrack, 2 * case.ranks_per_node, up.version, case.watched)
    preempter = Preempter(up, folder, case)
    training = preempter.training
    try:
        preempter.make_all()
        preempter.until(training.run.outcome, f"{training.run} to be over")
        until(lambda: none_left(up), "no process to be left", 60)
        _check_job_is_over(up, preempter, result)
    except TooLong as error:
        result.problems.append(str(error))
    finally:
        watching = preempter.close()
    result.problems += [watching] if watching else []
    judge(result, training.run, reference, preempter.made)
    result.handovers, result.takings = preempter.handovers, preempter.takings
    result.resumes = resume_times(
        stamps(folder / "starts"), training.run.events(), list(read_lines(training.run.metrics_file))
    )
    result.seconds = time.monotonic() - began
    if result.problems:
        keep(up, training, preempter.made, state / "failed" / case.name)
    up.drain_jobs()
    shutil.rmtree(folder)
    return result


def _check_job_is_over(up: Cluster, preempter: Preempter, result: Result) -> None:
    """It is COMPLETED. A job preempted in the moment of its end is started once more, and finds the run over."""
    training, ended = preempter.training, {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"}
    attempts = training.run.attempts()
    lifted = lifting(up, training.job_id, lambda: up.job(training.job_id).get("JobState") in ended)
    until(lifted, f"job {training.job_id} to be over", 60)
    job = up.job(training.job_id)
    if job["JobState"] != "COMPLETED":
        result.problems.append(f"the run is over and its job is {job['JobState']} ({job.get('Reason')})")
    if training.run.attempts() != attempts:
        result.problems.append("a run that was over was trained again")


def keep(up: Cluster, training: Training, made: Sequence[dict[str, Any]], folder: Path) -> None:
    """All that a post-mortem needs."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(training.folder, folder, symlinks=True)
    (folder / "preemptions.json").write_text(json.dumps(made, indent=1))
    (folder / "job.txt").write_text("\n".join(f"{k}={v}" for k, v in up.job(training.job_id).items()))
    (folder / "processes.txt").write_text("\n".join(f"{p.pid} {p.command()}" for p in job_processes(up)))
    shutil.copytree(up.conf.parents[1] / "log", folder / "slurm-log", dirs_exist_ok=True)


def make_reference(up: Cluster, ranks_per_node: int, state: Path) -> RunDirectory:
    """The uninterrupted run, made once per state folder and number of ranks."""
    kept = state / f"reference-{2 * ranks_per_node}"
    if not (kept / "outcome.json").exists():
        folder = folder_for(up, f"reference-{time.monotonic_ns()}")
        training = submit_training(up, folder, "--steps", str(STEPS), ranks_per_node=ranks_per_node)
        until(training.run.outcome, "the uninterrupted run", WAIT_S)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(training.run.path, kept)
    outcome = read_json(kept / "outcome.json") or {}
    if outcome.get("state") != "completed" or outcome.get("attempts") != 1:
        raise SystemExit(f"the uninterrupted run is no reference: {outcome}; see {kept}")
    return RunDirectory(kept)


def empty_ddp(up: Cluster) -> float:
    """Seconds that an empty DDP script takes from its batch script's first line to its first step."""
    folder = folder_for(up, f"empty-{time.monotonic_ns()}")
    seconds = empty_ddp_start(up, folder)
    shutil.rmtree(folder)
    return round(seconds, 3)


# ---- the soak


class Soak:
    """All runs, with their results in the state folder."""

    def __init__(self, state: Path, settings: dict[str, Any], minutes: float = float("inf")) -> None:
        self._deadline = time.monotonic() + 60 * minutes
        self._state, self._file = state, state / "progress.jsonl"
        state.mkdir(parents=True, exist_ok=True)
        lines = list(read_lines(self._file))
        if lines and lines[0] != settings:
            raise SystemExit(f"{self._file} is of another soak: {lines[0]}, not {settings}; give another --state")
        if not lines:
            append_line(self._file, settings)
        self.settings = settings
        self.results = [Result(**line) for line in lines[1:] if "case" in line]
        self.empty = [line["empty_ddp_s"] for line in lines[1:] if "empty_ddp_s" in line]

    def run(self) -> None:
        """Every proctrack gets its share of the preemptions."""
        proctracks = self.settings["proctracks"]
        share = -(-(self.settings.get("faults") or self.settings["preemptions"]) // len(proctracks))
        for proctrack in proctracks:
            if self._made(proctrack) < share and time.monotonic() < self._deadline:
                with cluster(ClusterConfig(nodes=3, cpus=2, proctrack=proctrack)) as up:
                    self._run_share(up, proctrack, share)

    def _made(self, proctrack: str) -> int:
        """Faults that were made, or preemptions that took effect where there are no others."""
        own = [result for result in self.results if result.proctrack == proctrack]
        mixed = self.settings.get("faults")
        return sum(len(result.faults) if mixed else result.preemptions for result in own)

    def _run_share(self, up: Cluster, proctrack: str, share: int) -> None:
        mixed = bool(self.settings.get("faults"))
        while self._made(proctrack) < share and time.monotonic() < self._deadline:
            number = sum(result.proctrack == proctrack for result in self.results)
            case = make_case(self.settings["seed"], proctrack, number, self.settings["graces"], mixed)
            reference = make_reference(up, case.ranks_per_node, self._state)
            if mixed and number % EMPTY_EVERY == 0:
                self.empty.append(empty_ddp(up))
                append_line(self._file, {"empty_ddp_s": self.empty[-1]})
            result = make_run(up, case, reference, self._state)
            append_line(self._file, asdict(result))
            self.results.append(result)
            said = "; ".join(result.problems) or "as the uninterrupted run"
            count = f"{self._made(proctrack)} of {share} {'faults' if mixed else 'preemptions'}"
            common.say(f"{case.name}: {count}; {said}")


def summary(results: Sequence[Result]) -> list[Any]:
    """One line of the table."""
    sums = ("preemptions", "before_first_step", "lost", "doubled", "steps_redone", "samples_wrong", "weights_differ")
    attempts, before, *rest = (sum(getattr(result, name) for result in results) for name in sums)
    times = ("handovers", "takings", "resumes")
    spreads = [common.spread([one for result in results for one in getattr(result, name)]) for name in times]
    return [attempts, before, len(results), *rest, sum(bool(result.problems) for result in results), *spreads]


def write(out: Path, soak: Soak) -> bool:
    """The page; whether no run had a problem."""
    results, settings = soak.results, soak.settings
    mixed = bool(settings.get("faults"))
    groups = {
        f"{proctrack}, grace {grace} s": [r for r in results if (r.proctrack, r.grace) == (proctrack, grace)]
        for proctrack in settings["proctracks"]
        for grace in settings["graces"]
    }
    attempts = ["", "new attempts", "before the attempt's first step", "runs", "lost", "doubled", "steps repeated"]
    times = ["handover: median / worst", "taking: median / worst", "resume: median / worst"]
    lines = [[name, *summary(own)] for name, own in {**groups, "all": results}.items()]
    tables = {"Runs": common.table([*attempts, "samples wrong", "weights differ", "any fault", *times], lines)}
    tables |= {"Faults": faults.table(results)} if mixed else {}
    problems = [[result.case, "; ".join(result.problems)] for result in results if result.problems]
    tables |= {"Problems": common.table(["run", "what is wrong"], problems)} if problems else {}
    empty = f" An empty DDP script takes {common.median(soak.empty):.1f} s to its first step." if mixed else ""
    text = f"""# Preemptions {"and other faults " if mixed else ""}at random moments

Runs of {STEPS} steps with a checkpoint every {EVERY}, compared with an uninterrupted run. Times are seconds.{empty}"""
    figures = {**settings, "empty_ddp_s": soak.empty, "runs": [asdict(result) for result in results]}
    where = f"Slurm {', '.join(sorted({result.slurm for result in results}))}, seed {settings['seed']}"
    name = "soak" if mixed else "soak-preemptions"
    common.write(out, name, text, common.Found(figures, where=where, tables=tables))
    return not problems


def main() -> None:
    """The command line; exit code 1 when any run was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preemptions", type=int, default=200, help="how many, with --no-faults")
    parser.add_argument("--faults", type=int, default=300, help="how many, preemptions included")
    parser.add_argument("--no-faults", action="store_const", dest="faults", const=0, help="preemptions alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="make no new run after so long")
    parser.add_argument("--graces", default="0,20", help="seconds, separated by commas")
    parser.add_argument("--proctracks", default="cgroup,linuxproc")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, default=Path("runs/soak"), help="progress, references, failed runs")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    settings = {
        "preemptions": options.preemptions,
        "graces": [int(grace) for grace in options.graces.split(",")],
        "proctracks": options.proctracks.split(","),
        "seed": options.seed,
        "faults": options.faults,
    }
    soak = Soak(options.state, settings, options.minutes)
    try:
        soak.run()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues")
    except Exception:
        traceback.print_exc()
        sys.exit("the soak itself failed; the same command continues")
    sys.exit(0 if write(options.out, soak) else 1)


if __name__ == "__main__":
    main()
