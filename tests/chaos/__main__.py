"""Habits of user code, each in a small training that is preempted once and loses a rank once, at random moments.

``python -m tests.chaos`` (``make chaos``). Each class in ``behaviours.py`` is trained with ``submit --local``, left
alone and then disturbed, and disturbed once more on the test cluster's two nodes. When a run is over its recorded
history has to show: every step that counts once (I1), the undisturbed training's weights (I3), no step repeated after a
notice and at most a checkpoint's interval after a kill (I4), a checkpoint that loads (I5), a cause for each attempt's
end (I6), one outcome, "completed" with all steps alone, within a bound, and no process left (I7), and no other training
after it (I10). A habit that the run has to refuse ends it as failed, with the reason.

All moments follow from --seed. STATE/results.jsonl has a line per run; the report, OUT/RESULTS.md, has the newest of
each. A run that fails any of it is kept in STATE/failed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.runs import cluster
from clusterddp.rundir.files import append_line
from clusterddp.rundir.records import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.chaos import runs
from tests.chaos.behaviours import ALL, behaviour
from tests.chaos.judging import problems
from tests.chaos.plan import Plan, draw_plan
from tests.chaos.runs import Made
from tests.cluster import Cluster, ClusterConfig


@dataclass
class Result:
    """One run; ``problems`` is empty when all invariants held."""

    name: str
    how: str
    """"alone", "disturbed", or "slurm": disturbed there."""
    ranks: int
    seed: int
    plan: str
    commit: str
    place: str
    problems: list[str] = field(default_factory=list)
    state: str = ""
    attempts: int = 0
    killed: bool = False
    seconds: float = 0.0
    time: float = field(default_factory=time.time)


class Chaos:
    """All runs, with their results in the state folder."""

    def __init__(self, state: Path, ranks: int, seed: int, limit_s: float) -> None:
        self._state, self._ranks, self._seed, self._limit_s = state.absolute(), ranks, seed, limit_s
        self._commit = described()
        state.mkdir(parents=True, exist_ok=True)
        self.results: list[Result] = []
        self._reference = self._make_reference()

    def _make_reference(self) -> RunDirectory:
        """The training itself, undisturbed, of this very code."""
        folder = self._state / f"reference-{self._ranks}"
        shutil.rmtree(folder, ignore_errors=True)
        made = runs.run_locally("plain", self._ranks, Plan(), folder, self._limit_s)
        if wrong := [*made.problems, *problems(made.run, behaviour("plain"), None)]:
            raise SystemExit(f"the undisturbed training is no reference: {'; '.join(wrong)}; see {folder}")
        return made.run

    def locally(self, name: str) -> None:
        """Left alone, then disturbed."""
        for how, plan in (("alone", Plan()), ("disturbed", draw_plan(self._seed, name, self._ranks))):
            folder = self._state / f"{name}-{how}"
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            made = runs.run_locally(name, self._ranks, plan, folder, self._limit_s)
            if how == "disturbed" and (made.run.outcome() or {}).get("state") == "completed":
                made.problems += runs.what_another_start_does(made.run)
            self._judge(name, how, plan, made, time.monotonic() - began)

    def on_slurm(self, up: Cluster, name: str) -> None:
        """Disturbed."""
        plan, began = draw_plan(self._seed, name, self._ranks), time.monotonic()
        made = runs.run_on_slurm(up, name, self._ranks, plan, self._limit_s)
        self._judge(name, "slurm", plan, made, time.monotonic() - began, f"Slurm {up.version}")

    def _judge(self, name: str, how: str, plan: Plan, made: Made, seconds: float, place: str = "local") -> None:
        killed = plan.kill.attempt if plan.kill and made.killed else None
        found = [*made.problems, *problems(made.run, behaviour(name), self._reference, killed)]
        result = Result(name, how, self._ranks, self._seed, str(plan), self._commit, place, found)
        result.state = (made.run.outcome() or {}).get("state") or "not over"
        result.attempts, result.killed, result.seconds = len(made.run.attempts()), made.killed, round(seconds, 1)
        append_line(self._state / "results.jsonl", asdict(result))
        self.results.append(result)
        folder = made.run.path.parent
        if found:
            kept = self._state / "failed" / f"{name}-{how}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept, symlinks=True)
        shutil.rmtree(folder)
        said = "; ".join(found) or "ok"
        print(f"{time.strftime('%H:%M:%S')} {name}, {plan} ({result.seconds} s): {said}", file=sys.stderr, flush=True)


def described() -> str:
    """The commit that is tried, and whether the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=runs.REPOSITORY, capture_output=True, text=True).stdout.strip()


# ---- the report


def newest(state: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest result of each behaviour and way."""
    return {(line["name"], line["how"]): line for line in read_lines(state / "results.jsonl") if line["name"] in ALL}


WAYS = {"alone": "undisturbed", "disturbed": "preempted and killed", "slurm": "the same on Slurm"}


def write(out: Path, results: dict[tuple[str, str], dict[str, Any]]) -> None:
    """The page."""
    lines = list(results.values())
    slurm = sorted({line["place"] for line in lines if line["how"] == "slurm"})
    rows = [
        [name, _first_line(kind), kind.ends, *(_verdict(results.get((name, how))) for how in WAYS)]
        for name, kind in ALL.items()
    ]
    failing = [
        [line["name"], WAYS[line["how"]], line["plan"], line["commit"], "; ".join(line["problems"])]
        for line in lines
        if line["problems"]
    ]
    seeds, ranks, commits = (
        ", ".join(sorted({str(line[key]) for line in lines})) for key in ("seed", "ranks", "commit")
    )
    counts = ", ".join(
        f"{words} {sum(not line['problems'] and _as_planned(line) for line in own)} of {len(own)} ok"
        for how, words in WAYS.items()
        if (own := [line for line in lines if line["how"] == how])
    )
    text = f"""# What user code does to its own process

Each habit is trained undisturbed, then preempted once and one rank killed at random moments, with {ranks} ranks.
Seconds are those of the whole run: {counts}."""
    tables = {"Behaviours": common.table(["behaviour", "what it does", "must end as", *WAYS.values()], rows)}
    if failing:
        tables["Failed"] = common.table(["behaviour", "how", "plan", "commit", "problems"], failing)
    where = ", ".join([f"runs of {commits}", f"seed {seeds}", *slurm])
    common.write(out, "RESULTS", text, common.Found({"runs": lines}, where=where, tables=tables))


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").split("\n")[0]


def _as_planned(line: dict[str, Any]) -> bool:
    """Whether both the preemption and the kill were made: each ends an attempt."""
    return bool(line["how"] == "alone" or (line["killed"] and line["attempts"] >= 3))


def _verdict(line: dict[str, Any] | None) -> str:
    if line is None:
        return "not run"
    word = (
        "**failed**" if line["problems"] else "ok" if _as_planned(line) else "no problem, but not disturbed as planned"
    )
    return f"{word} ({line['seconds']} s)"


@contextmanager
def test_cluster() -> Iterator[Cluster]:
    with cluster(ClusterConfig(nodes=3, cpus=2)) as up:
        up.set_grace(20)
        yield up


def main() -> None:
    """The command line; exit code 1 when any run was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=ALL, metavar="NAME", help="one behaviour; several times: these"
    )
    parser.add_argument("--local", action="store_true", help="local runs alone; the default is local and Slurm")
    parser.add_argument("--slurm", action="store_true", help="runs on the test cluster alone")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="default: by the clock")
    parser.add_argument("--jobs", type=int, default=1, help="local runs at once")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a run may take")
    parser.add_argument("--state", type=Path, default=Path("runs/chaos"), help="results, failed runs")
    parser.add_argument("--out", type=Path, help="the folder for RESULTS.md, such as tests/chaos; default: none")
    parser.add_argument("--report", action="store_true", help="run nothing; write the report of what was run")
    options = parser.parse_args()
    results = [] if options.report else make_runs(options)
    if options.out:
        found = newest(options.state)
        write(options.out, found)
    sys.exit(any(result.problems for result in results))


def make_runs(options: argparse.Namespace) -> list[Result]:
    """All runs that the options ask for."""
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    chaos = Chaos(options.state, options.ranks, options.seed, options.limit)
    names = options.only or list(ALL)
    if options.local or not options.slurm:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(chaos.locally, names))
    if options.slurm or not options.local:
        with test_cluster() as up:
            for name in names:
                chaos.on_slurm(up, name)
    return chaos.results


if __name__ == "__main__":
    main()
