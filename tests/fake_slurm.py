"""Slurm's commands, controllers and launchers without a Slurm: what is asked of them, and answers a test chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import SlurmError
from clusterddp.failures.exit_status import ExitStatus, LaunchFailure
from clusterddp.failures.placement import JobStart
from clusterddp.rundir.claims import JobClaim
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands
from clusterddp.slurm.commands import JobInfo
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt_state import Notice
from clusterddp.supervisor.launcher import LocalLauncher

#: What a submission asks about a cluster of one node without GPUs.
SMALL_CLUSTER = {
    "sinfo -h -o %P": "low*\n",
    "sinfo -h -N": "low|low*|n1|(null)\n",
    "scontrol show node": "NodeName=n1 CPUEfctv=8 RealMemory=1000 ThreadsPerCore=1\n",
    "scontrol show config": "KillWait                = 30 sec\n",
    "scontrol show partition": "PartitionName=low PreemptMode=REQUEUE GraceTime=20",
}


class FakeSlurm(dict[str, Any]):
    """What each of Slurm's commands answers, by the beginning of its line. The longest that fits counts.

    An answer is a text, a job as scontrol prints it (None: there is none), an exception, which is raised, a function
    of the command's words, or a list of answers: they are given in order, and the last one again and again.
    """

    def __init__(self, answers: Mapping[str, Any] | None = None) -> None:
        super().__init__(answers or {})
        #: The lines of the commands, in order.
        self.asked: list[str] = []
        #: The pauses before a command was repeated, in seconds. Each is over at once.
        self.pauses: list[float] = []

    def run(self, *command: str, timeout_s: float | None = None) -> str:
        """In place of ``run`` of slurm/commands.py."""
        line = " ".join(command)
        self.asked.append(line)
        fitting = [begin for begin in self if line.startswith(begin)]
        assert fitting, f"no answer to `{line}`"
        answer = self[max(fitting, key=len)]
        if callable(answer):
            answer = answer(*command)
        if isinstance(answer, list):
            answer = next_answer(answer)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            raise SlurmError(f"`{line}` failed: slurm_load_jobs error: Invalid job id specified")
        return described(answer) if isinstance(answer, JobInfo) else str(answer)

    def count(self, begin: str) -> int:
        """How many commands began like this."""
        return sum(line.startswith(begin) for line in self.asked)


class _Time:
    """The module ``time`` of slurm/commands.py. Pauses are noted."""

    def __init__(self, pauses: list[float]) -> None:
        self._pauses, self.sleep = pauses, pauses.append

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + sum(self._pauses)


@pytest.fixture
def fake_slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Answers in place of Slurm's commands."""
    fake = FakeSlurm()
    monkeypatch.setattr(commands, "run", fake.run)
    monkeypatch.setattr(commands, "errors_of", fake.run)
    monkeypatch.setattr(commands, "time", _Time(fake.pauses))
    monkeypatch.setattr(commands, "require", lambda *_: None)
    return fake


def described(job: JobInfo) -> str:
    """The job as ``scontrol show job -o`` prints it."""
    array, _, task = job.job_id.partition("_")
    throttle = f"ArrayTaskThrottle={job.task_limit} " if job.task_limit else ""
    of_array = f"ArrayJobId={array} ArrayTaskId={task} {throttle}" if task else ""
    times = {
        "PreemptTime": job.preempt_time,
        "EndTime": job.end_time,
        "SubmitTime": job.submit_time,
        "EligibleTime": job.eligible_time,
        "StartTime": job.start_time,
    }
    fields = {
        "JobState": job.state,
        "Reason": job.reason,
        "Restarts": job.restarts,
        "RunTime": f"00:00:{job.run_time_s:.0f}",
        "TimeLimit": f"00:00:{job.time_limit_s:.0f}" if job.time_limit_s else "UNLIMITED",
        **{name: "Unknown" if at is None else f"{at:.0f}" for name, at in times.items()},
        "NodeList": job.nodes or "(null)",
        "BatchHost": job.batch_host,
    }
    words = " ".join(f"{name}={value}" for name, value in fields.items())
    return f"JobId={array} {of_array}JobName=x UserId=u(1) GroupId=g(1) {words} Command=x\n"


class FakeController:
    """Gives the answers in order and repeats the last one; exceptions are raised."""

    leave_code, again_code, resubmits, starts_again, busy, output_above = 3, 4, True, True, True, False
    nodes = ["n1"]
    #: Nodes whose slurmd does not answer.
    dead: Sequence[str] = ()

    def __init__(self, *causes: Cause | Exception, requeue: list[Exception | None] | None = None) -> None:
        self._causes, self._requeue = list(causes), requeue or [None]
        self.asked: list[str] = []
        self.connected_to: list[str] = []

    def holder(self) -> JobClaim:
        return JobClaim("41")

    def submitted_at(self) -> float | None:
        return None

    def describe(self) -> JobStart:
        return JobStart("n1", job="41")

    def notice(self) -> Notice:
        return Notice(None)

    def why(self, notice_s: float) -> Cause:
        return Cause(next_answer(self._causes))

    def term_notice_s(self) -> float | None:
        return None

    def ends_what_it_preempts(self) -> bool:
        return False

    def hold(self) -> None:
        self.asked.append("hold")

    def before_exit(self) -> None:
        """For ``expedite_requeue``."""

    def unanswering(self, nodes: Sequence[str]) -> Sequence[str]:
        self.connected_to += nodes
        return [node for node in nodes if node in self.dead]

    def waits_for_nodes(self, launcher: int | None) -> bool | None:
        return False

    def requeue(self) -> None:
        self.asked.append("requeue")
        next_answer(self._requeue)

    def usable_nodes(self) -> list[str]:
        return self.nodes

    def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
        self.asked.append(" ".join(["resubmit", *without]))
        return "42"

    def successor(self) -> str | None:
        return None


def next_answer(answers: list[Any]) -> Any:
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


class NoRanks:
    """A launcher on this machine that starts and ends nothing."""

    name, supervisor_host, abandon_s = "slurm", "127.0.0.1", 0.0
    failure: LaunchFailure | None = None
    pid: int | None = None
    failed: Callable[[int], object]
    record: Callable[..., object]

    def notify(self) -> None: ...

    def kill(self) -> None: ...

    def abandon(self) -> None: ...

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        return {}


class RanksHere(LocalLauncher):
    """Ranks of a launcher in the tests' process, of which other tests may have children."""

    def end_orphans(self) -> None: ...


class FakeRanks(NoRanks):
    """Two ranks that write records instead of running."""

    def __init__(self, run: RunDirectory, end: Mapping[str, Any]) -> None:
        self._run, self._end = run, end

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        number = int(environment["CLUSTERDDP_ATTEMPT"])
        for rank in range(2):
            end = {"host": "n1", "used_clusterddp": True, **self._end}
            write_json(self._run.rank_record(number, rank), end)

    def wait(self) -> int:
        return 0 if self._end["end"] in ("done", "stopped") else 1
