"""Every command of the command line against a run in each state, on a real Slurm: exit code, text and JSON.

A new command gets its rows in LOOKING, CHANGING or WITHOUT_RUN, a new state a line in STATES and in ``make_runs``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from clusterddp.cli.command_line import COMMANDS
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.commands import HUNG, Result, run_commands
from tests.waiting import story, wait_until

#: The runs, by the names of their folders.
STATES = {
    "pending": "waits for a node that another job has",
    "user-held": "submitted with --hold",
    "held": "preempted and requeued, in Slurm's hold",
    "running": "in its first attempt",
    "resumed": "preempted, requeued, and running again",
    "member": "a member of a sweep, which runs as a task of a job array",
    "next-member": "another one, which waits for the first",
    "completed": "its script exited with 0",
    "failed": "its script raised an exception",
    "hung": "failed after hangs; its history is written by this test",
    "cancelled": "by clusterddp cancel",
    "forgotten": "its job was submitted, and Slurm does not know it any more",
}
ALL = " ".join(STATES)
#: The folders of those that are in a sweep.
MEMBERS = {"member": "swept/seed=0", "next-member": "swept/seed=1"}
WAITING = "pending user-held held next-member"
RUNNING = "running resumed member"
OVER = "completed failed hung cancelled"
STARTED = f"held {RUNNING} {OVER}"
NOT_STARTED = "pending user-held next-member forgotten"

#: A traceback of clusterddp's, and not one of a script that ``logs`` shows.
OWN_TRACEBACK = r"Traceback[^\n]*\n +File \"(?!.*stand_in\.py)"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/run.schema.json").read_text())

#: An exit code, and a regular expression that is found in what the command prints.
Cell = tuple[int, str]

#: Of a command that asks the ranks, for runs that have none now.
WITHOUT_RANKS: dict[str, Cell] = {
    WAITING: (1, r"is waiting in the queue \(job \d+(_1)?, \w+\) and has no ranks yet"),
    "completed": (1, "already completed at step 10, so it is not running"),
    "failed hung": (1, "already failed.*, so it is not running"),
    "cancelled": (1, "already cancelled.*, so it is not running"),
    "forgotten": (1, ".* is not running: stopped .not started.. Continue with: clusterddp submit"),
}
#: By command and states: exit code and words. These change nothing.
LOOKING: dict[str, dict[str, Cell | None]] = {
    "status RUN": {
        "pending": (0, r"state +job \d+ \(PENDING\)"),
        "user-held": (0, r"state +job \d+ \(PENDING\)\nwaits +held by its owner\nto do +release it"),
        "held": (0, r"state +job \d+ \(PENDING\)\nwaits +held by Slurm for a while(.|\n)*attempts +1"),
        "running": (0, r"state +job \d+ \(RUNNING on n2\)"),
        "resumed": (0, r"state +job \d+ \(RUNNING on n1\)(.|\n)*attempts +2"),
        "member": (0, r"state +job \d+_0 \(RUNNING on n1\)"),
        "next-member": (0, r"state +job \d+_1 \(PENDING\)\nwaits +its sweep has reached its limit"),
        "completed": (0, r"state +completed"),
        "failed": (0, r"state +failed.*ValueError: bad label"),
        "hung": (0, r"state +failed.*hung"),
        "cancelled": (0, r"state +cancelled\n"),
        "forgotten": (0, r"state +stopped \(not started\). Continue with: clusterddp submit --run-dir"),
    },
    "status --json RUN": {
        "pending next-member": (0, '"state": "pending"'),
        "user-held held": (0, '"state": "held"'),
        RUNNING: (0, '"state": "running"'),
        "completed": (0, '"state": "completed"'),
        "failed hung": (0, '"state": "failed"'),
        "cancelled": (0, '"state": "cancelled"'),
        "forgotten": (0, '"state": "stopped"'),
    },
    "list RUN": {
        "pending": (0, r"pending +pending"),
        "user-held": (0, r"user-held +held"),
        "held": (0, r"held +held"),
        "running": (0, r"running +running"),
        "resumed": (0, r"resumed +running"),
        "member": (0, r"swept/seed=0 +running"),
        "next-member": (0, r"swept/seed=1 +pending"),
        "completed": (0, r"completed +completed"),
        "failed": (0, r"failed +failed"),
        "hung": (0, r"hung +failed"),
        "cancelled": (0, r"cancelled +cancelled"),
        "forgotten": (0, r"forgotten +stopped"),
    },
    "list --json RUN": {ALL: (0, '"schema": 1')},
    "report --json RUN": {ALL: (0, '"schema": 1')},
    "logs RUN": {
        STARTED: (0, "attempt 0: ten steps done"),
        "resumed": (0, "attempt 1: ten steps done"),
        "failed hung": (0, "ValueError: bad label"),
        NOT_STARTED: (1, "has not started yet"),
    },
    "logs -f RUN ^C": {
        f"{WAITING} {RUNNING} forgotten": (130, ""),
        OVER: (0, "ten steps done"),
        "failed hung": (0, "ValueError: bad label"),
    },
    "wait --resubmit RUN ^C": {
        f"{WAITING} {RUNNING} forgotten": (130, "no longer waiting. The run continues"),
        "completed": (0, "completed"),
        "failed hung": (10, "failed"),
        "cancelled": (11, "cancelled"),
    },
    "wait --timeout 1s RUN": {
        f"{WAITING} {RUNNING} forgotten": (124, "timed out: 1 of 1 runs did not end \\("),
        "completed": (0, "completed"),
        "failed hung": (10, "failed"),
        "cancelled": (11, r": cancelled\n"),
    },
    "stacks RUN": {RUNNING: (0, r"1 rank in stand_in.py:\d+"), **WITHOUT_RANKS},
    "save RUN": {RUNNING: (1, "there is no run to save"), **WITHOUT_RANKS},
    "submit --run-dir RUN": {
        f"{WAITING} {RUNNING}": (1, r"held by job \d+(_\d)? \("),
        "completed": (0, "has already completed at step 10\\. For more steps"),
        "cancelled": (1, "was cancelled"),
        "failed hung forgotten": None,
    },
    "export RUN x.safetensors": {ALL: (1, "no checkpoint")},
    "prune RUN": {
        f"{WAITING} {RUNNING} forgotten": (1, "has not ended, so no file was deleted"),
        OVER: (0, "nothing to delete"),
    },
}
#: The same; only ``make test-product`` runs them.
MORE: dict[str, dict[str, Cell | None]] = {
    "list --csv RUN": {ALL: (0, "schema,run,name")},
    "logs --rank all --attempt all RUN": {
        STARTED: (0, "attempt 0: ten steps done"),
        "resumed": (0, "attempt 0: ten steps done(.|\n)*attempt 1: ten steps done"),
        NOT_STARTED: (1, "has not started yet"),
    },
    "logs --grep ten RUN": {
        STARTED: (0, "ten steps done"),
        NOT_STARTED: (1, "has not started yet"),
    },
    "stacks --json RUN": {RUNNING: (0, r'"place": "stand_in.py:\d+'), **WITHOUT_RANKS},
    "config validate RUN/job.yaml": {ALL: (0, "valid job definition")},
    "submit --dry-run --run-dir RUN": {
        ALL: (0, "#SBATCH --job-name=stand_in"),
        "completed": (0, "has already completed at step 10\\. For more steps"),
        "cancelled": (1, "was cancelled"),
    },
}
#: These change runs, in this order.
CHANGING: dict[str, dict[str, Cell | None]] = {
    "requeue RUN ^C": {
        **WITHOUT_RANKS,
        WAITING: (0, "is already waiting in the queue"),
        RUNNING: (130, "all ranks stop after their current step(.|\n)*No longer waiting"),
    },
    "stop RUN ^C": {
        RUNNING: (130, "all ranks stop after their current step(.|\n)*No longer waiting"),
        **WITHOUT_RANKS,
    },
    "cancel RUN": {
        ALL: (0, r"^\S+/(\S+): cancelled.*\. The run will not start again\n(To continue .* submit --fork \S+\n)?$"),
        "completed": (0, "already completed"),
        "failed hung": (0, "already failed"),
        "cancelled": (0, "already cancelled"),
    },
    "submit --run-dir ./RUN": {
        ALL: (1, "was cancelled"),
        "completed": (0, "has already completed at step 10\\. For more steps"),
        "failed hung": (0, "Submitted as job"),
    },
}
#: Commands that name no run, or no existing one.
WITHOUT_RUN: dict[str, Cell] = {
    "list": (0, "resumed +running"),
    "list swept": (0, r"seed=0 +running(.|\n)*seed=1 +pending"),
    "list --state runing": (2, "no such state"),
    "config show": (0, "nodes"),
    "config schema": (0, "schema"),
    "config sites": (0, "documentation"),
    "doctor": (0, r"partition +low"),
    "doctor --failed-nodes": (0, "No node failures from the last week"),
    "submit sweep.yaml": (2, "could not read sweep.yaml: No such file"),
    "": (2, "usage: clusterddp"),
    "frobnicate": (2, "unknown command"),
    "status runing": (1, "Did you mean running"),
    "wait forgotten": (12, "stopped \\(not started\\)"),
    "cancel running resumed": (2, "cannot ask whether to cancel 2 runs, because there is no terminal. Add --yes"),
}
#: Tested elsewhere alone, with the reason.
ELSEWHERE = {
    "drain": "needs a spare node: test_spares.py",
    "rehearse": "has no run: test_rehearse.py, test_preemption_job.py",
    "shell": "needs a terminal: test_shell.py",
}


@dataclass
class Transcript:
    """The results of all commands: by command and state, and of those without a run."""

    results: dict[tuple[str, str], Result]

    def problems(self, command: str, state: str, cell: Cell) -> Iterator[str]:
        """What is wrong with a command's result."""
        result = self.results[command, state]
        code, words = cell
        text = result.stdout + result.stderr
        if result.code != code:
            yield "it hangs" if result.code == HUNG else f"exit code {result.code}, expected {code}"
        if not re.search(words, text):
            yield f"does not say {words!r}"
        for never in (OWN_TRACEBACK, "internal error", "\x1b"):
            if re.search(never, text):
                yield f"says {never!r}"
        if "--json" in command and result.code == 0:
            value = json.loads(result.stdout)
            runs = value if isinstance(value, list) else [value]
            checked = runs if command.startswith(("status", "list")) else []  # what the schema describes
            yield from (str(error) for run in checked for error in schema_errors(run))

    def check(self, command: str, cells: Mapping[str, Cell]) -> None:
        """Fails with all that a command got wrong, and what it printed."""
        wrong = []
        for state, cell in cells.items():
            problems = list(self.problems(command, state, cell))
            if problems:
                result = self.results[command, state]
                wrong.append(f"{command}, {state}: {'; '.join(problems)}\n{result.stdout}--- stderr\n{result.stderr}")
        if wrong:
            pytest.fail("\n\n".join(wrong), pytrace=False)


def schema_errors(run: Any) -> Iterator[jsonschema.ValidationError]:
    yield from jsonschema.Draft202012Validator(SCHEMA).iter_errors(run)


def by_state(rows: Mapping[str, Cell | None]) -> dict[str, Cell]:
    """The cells that are not None; of two rows that name a state, the later one counts."""
    cells = {state: cell for states, cell in rows.items() for state in states.split()}
    assert cells.keys() == STATES.keys()
    return {state: cell for state, cell in cells.items() if cell is not None}


# ---- the runs


@dataclass
class Runs:
    """Runs of ``tests/scripts/stand_in.py`` on a cluster of three nodes with two CPUs each."""

    cluster: Cluster
    folder: Path

    def run(self, state: str) -> RunDirectory:
        return RunDirectory(self.folder / MEMBERS.get(state, state))

    def commands(self, commands: Sequence[Sequence[str]]) -> list[Result]:
        return run_commands(self.cluster, commands, self.folder)

    def submit(self, **runs: Sequence[str]) -> dict[str, str]:
        """Submits runs, each with what its script does and the options; returns the job ids."""
        script = str(self.cluster.source / "tests" / "scripts" / "stand_in.py")
        fixed = "--device cpu --partition low --set steps=100".split()
        commands = [
            ["submit", script, "--run-dir", name.replace("_", "-"), *fixed, *options, "--", how]
            for name, (how, *options) in runs.items()
        ]
        results = self.commands(commands)
        assert all(result.code == 0 for result in results), results
        return {name: result.stdout.strip() for name, result in zip(runs, results, strict=True)}

    def table(self, table: Mapping[str, Mapping[str, Cell | None]]) -> dict[tuple[str, str], Result]:
        """Runs the commands of a table."""
        keys = [(command, state) for command, rows in table.items() for state in by_state(rows)]
        commands = [
            [word.replace("RUN", MEMBERS.get(state, state)) for word in command.split()] for command, state in keys
        ]
        return dict(zip(keys, self.commands(commands), strict=True))

    def wait(self, condition: Any, what: str) -> None:
        wait_until(condition, f"{what}\n{self.cluster.root(['squeue', '--all']).stdout}", 60)

    def update(self, job_id: str, *values: str) -> None:
        self.cluster.root(["scontrol", "update", f"JobId={job_id}", *values])


def make_runs(runs: Runs) -> None:
    """A run in each of STATES. One job keeps n3 busy; those that are preempted are on n1."""
    cluster = runs.cluster
    blocker = ["sbatch", "--parsable", "--partition=high", "--exclusive", "--output=/dev/null"]
    cluster.run([*blocker, "--nodelist=n3", "--wrap=sleep 600"])
    jobs = runs.submit(
        completed=["finish", "-w", "n2"],
        failed=["fail", "-w", "n2"],
        held=["wait", "-w", "n1"],
        resumed=["wait", "-w", "n1"],
        running=["wait", "-w", "n2"],
        cancelled=["wait", "-w", "n2"],
        pending=["wait", "-w", "n3"],
        user_held=["wait", "--sbatch", "hold=true"],
        forgotten=["wait", "--sbatch", "hold=true"],
    )
    forget(runs.run("forgotten"), cluster, jobs["forgotten"])
    for name in ("held", "resumed", "running", "cancelled"):
        runs.wait(runs.run(name).newest_metrics, f"{name} to have started\n{story(runs.run(name))}")
    cluster.run([*blocker, "--nodelist=n1", "--wrap=sleep 0.1"])
    assert runs.commands([["cancel", "cancelled"]])[0].code == 0
    for name in ("held", "resumed"):
        in_hold = lambda job: (job["JobState"], job["Reason"]) == ("PENDING", "BeginTime")  # noqa: E731
        cluster.wait_for(jobs[name], in_hold, "to be requeued")
    runs.update(jobs["held"], "StartTime=now+1hour")
    runs.submit(swept=["wait", "-w", "n1", "--sweep", "seed=0,1", "--max-running", "1"])
    again = runs.run("resumed")
    runs.wait(lambda: (again.last_metrics() or {}).get("attempt") == 1, f"its second attempt\n{story(again)}")
    member = runs.run("member")
    runs.wait(member.newest_metrics, f"the member to have started\n{story(member)}")
    for name in ("completed", "failed"):
        runs.wait(runs.run(name).outcome, f"{name} to be over\n{story(runs.run(name))}")
    hang(runs)


def forget(run: RunDirectory, cluster: Cluster, job_id: str) -> None:
    """As Slurm does some minutes after a job has ended."""
    cluster.run(["scancel", job_id])
    claim = read_json(run.submitted_file)
    assert claim is not None
    run.submitted_file.write_text(json.dumps({**claim, "job": "999999"}))


def hang(runs: Runs) -> None:
    """A copy of the failed run, with a history of hangs."""
    run, reason = runs.run("hung"), "rank 0 (n2) hung"
    runs.cluster.run(["cp", "-r", runs.run("failed").path, run.path])
    events = run.events()
    began, ended = events[0]["time"], {"reason": reason, "step": None}
    hung = {"event": "hung", "rank": 0, "late": [0], "host": "n2", "step": 9, "seconds": 600.0, "what": "no step"}
    written = [event for event in events if event["event"] in ("submitted", "started")]
    written += [
        {"time": began + 700, "attempt": 0, **event} for event in (hung, {"event": "failed", "attempts": 1, **ended})
    ]
    run.events_file.write_text("".join(json.dumps(event) + "\n" for event in written))
    run.outcome_file.write_text(json.dumps({"state": "failed", "attempts": 1, **ended}))


@pytest.fixture(scope="module")
def transcript(clusters: Any) -> Iterator[Transcript]:
    """All commands against all runs."""
    cluster = clusters.get(clusters.standard)
    cluster.set_grace(20)
    folder = Path(cluster.run(["mktemp", "-d", "-p", cluster.scratch]).stdout.strip())
    runs = Runs(cluster, folder)
    make_runs(runs)
    results: dict[tuple[str, str], Result] = {}
    results |= runs.table({**LOOKING, **(MORE if "CLUSTERDDP_TEST_PRODUCT" in os.environ else {})})
    others = runs.commands([command.split() for command in WITHOUT_RUN])
    results |= {(command, ""): result for command, result in zip(WITHOUT_RUN, others, strict=True)}
    for command, rows in CHANGING.items():
        results |= runs.table({command: rows})
    yield Transcript(results)
    cluster.drain_jobs()


@pytest.mark.parametrize(
    "command", [*LOOKING, *(pytest.param(command, marks=pytest.mark.product) for command in MORE), *CHANGING]
)
def test_a_command_answers_for_a_run_in_each_state(transcript: Transcript, command: str) -> None:
    """Exit code and words; no traceback, no colours in a pipe, and it ends."""
    transcript.check(command, by_state({**LOOKING, **MORE, **CHANGING}[command]))


@pytest.mark.parametrize("command", WITHOUT_RUN)
def test_a_command_without_a_run_answers(transcript: Transcript, command: str) -> None:
    """The same, also for a run that is not there."""
    transcript.check(command, {"": WITHOUT_RUN[command]})


def test_every_command_has_its_rows() -> None:
    """Or another test."""
    here = {command.split()[0] for command in (*LOOKING, *CHANGING, *WITHOUT_RUN) if command}
    assert here & COMMANDS.keys() | ELSEWHERE.keys() == COMMANDS.keys()
