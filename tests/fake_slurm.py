"""Controllers and launchers without a Slurm: what a supervisor asks of them, and answers that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.failures.exit_status import ExitStatus
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt_state import Notice


class FakeController:
    """Gives the answers in order and repeats the last one; exceptions are raised."""

    leave_code, again_code, resubmits, starts_again, busy = 3, 4, True, True, True
    nodes = ["n1"]
    #: Nodes whose slurmd does not answer.
    dead: Sequence[str] = ()

    def __init__(self, *causes: Cause | Exception, requeue: list[Exception | None] | None = None) -> None:
        self._causes, self._requeue = list(causes), requeue or [None]
        self.asked: list[str] = []
        self.connected_to: list[str] = []

    def holder(self) -> dict[str, Any]:
        return {"kind": "slurm", "job": "41"}

    def submitted_at(self) -> float | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"job": "41", "restarts": 0, "nodes": "n1"}

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
    pid: int | None = None
    failed: Callable[[int], object]

    def notify(self) -> None: ...

    def kill(self) -> None: ...

    def abandon(self) -> None: ...

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        return {}


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
