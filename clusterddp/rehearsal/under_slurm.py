"""Carries out the runs of a rehearsal under plain Slurm's rules: starts the ranks, disturbs them, starts them again.

As Slurm does at a preemption with a grace period, TERM goes to all processes of the ranks, and KILL to those that are
left at its end. A job whose ranks have all exited with 0 by then is completed. Any other is requeued. The ranks find
commands in place of scontrol and sbatch that only note the call.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from clusterddp.environment import RankEnvironment
from clusterddp.process import descendants, module_command, process_start
from clusterddp.rehearsal.conductor import BETWEEN_S, LOOK_S, MORE_STARTS, Conductor, Plan, end_of, stacks_of
from clusterddp.rehearsal.disturbances import TOGETHER, Disturbance, Script
from clusterddp.rehearsal.facts import Orders, Reached, read_facts
from clusterddp.rehearsal.trial import Start, Stimulus, Trial
from clusterddp.rehearsal.workspace import files_in
from clusterddp.worker.rank import reserve_port

#: Seconds for the other ranks to end after one has failed by itself.
_PEERS_S = 5.0
#: Seconds for the processes that ranks have started, such as loader workers, to end by a notice.
_CHILDREN_S = 1.0
#: What the script finds under these names only notes that it was called.
_NOTED = ("scontrol", "sbatch", "scancel")
_NOTE = '#!/bin/sh\necho "$(basename "$0") $*" >> "{calls}"\n'


@dataclass
class SlurmConductor(Conductor):
    """Carries out runs of one script as Slurm alone would. ``variables``: those of the job definition."""

    variables: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    is_supervised: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._commands = self.folder / "bin"
        self._commands.mkdir()
        for name in _NOTED:
            (self._commands / name).write_text(_NOTE.format(calls=self.calls))
            (self._commands / name).chmod(0o755)

    def together(
        self, script: Script, wanted: Sequence[Disturbance], notice_s: float
    ) -> Mapping[Disturbance, Stimulus]:
        """Those whose notice may come at any time of a run."""
        if self.notice not in script.signals:  # the notice ends the script at once, so that no result can be right
            return {}
        return script.together([one for one in TOGETHER if one in wanted], notice_s)

    def _carry_out(self, plan: Plan, work: Path, here: Path) -> Sequence[Start]:
        starts: list[Start] = []
        known = dict(plan.baseline.known)
        job = (1, 0)
        while True:
            stimulus = plan.stimulus(len(starts))
            count = plan.later_ranks if plan.later_ranks and starts else plan.ranks
            orders = self.orders(plan, stimulus, known, f"{self._runs}-{len(starts)}")
            start = _Attempt(self, here, orders, stimulus, count, job).carry_out(work)
            starts.append(start)
            known = Trial(starts).weights() | known
            # After the time limit its user submits a new job, unless the script has requeued the one that it is.
            job = (job[0] + 1, 0) if stimulus.time_limit and not start.requeued else (job[0], job[1] + 1)
            if self._is_over(start, stimulus, len(starts) - len(plan.stimuli)):
                return starts

    def _is_over(self, start: Start, stimulus: Stimulus, more: int) -> bool:
        """Whether the job is not started again."""
        if start.timed_out or start.is_cut:
            return True
        if stimulus.time_limit and start.disturbed:  # its user submits it again
            return False
        if start.is_done and not start.requeued:
            return True
        interrupted = start.disturbed or start.requeued or stimulus.full_disk
        return more > MORE_STARTS or not interrupted

    def rank_command(self, work: Path) -> list[str]:
        """The command of a rank, with the script of the working folder."""
        first, *others = self.command
        return [*module_command("clusterddp.rehearsal.rank"), first if first == "-m" else str(work / first), *others]

    @property
    def calls(self) -> Path:
        """Where calls of Slurm's commands are noted."""
        return self.folder / "calls"

    def environment(self, ranks: RankEnvironment, job: int, restart: int) -> dict[str, str]:
        """The environment of one rank, as srun and a wrapper that sets torchrun's variables would make it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CLUSTERDDP"))}
        kept |= self.variables
        restarts = {"SLURM_RESTART_COUNT": str(restart)} if restart else {}
        return {
            **kept,
            **ranks.exports(),
            **restarts,
            "PATH": f"{self._commands}:{kept.get('PATH', os.defpath)}",
            "SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_JOB_NAME": "rehearsal",
            "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "localhost",
            "SLURM_PROCID": str(ranks.rank), "SLURM_LOCALID": str(ranks.local_rank),
            "SLURM_NTASKS": str(ranks.world_size), "SLURM_NTASKS_PER_NODE": str(ranks.world_size),
            "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1",
            "PYTHONHASHSEED": kept.get("PYTHONHASHSEED", "0"),
            **self.confined(),
        }  # fmt: skip


class _Attempt:
    """One start of all ranks."""

    def __init__(
        self,
        conductor: SlurmConductor,
        here: Path,
        orders: Orders,
        stimulus: Stimulus,
        ranks: int,
        job: tuple[int, int],
    ) -> None:
        self._conductor, self._here, self._orders, self._stimulus = conductor, here, orders, stimulus
        self._ranks, self._job = ranks, job
        self._processes: list[subprocess.Popen[bytes]] = []
        self._noticed_at: float | None = None
        self._killed: list[int] = []
        self._stacks: dict[int, str] = {}

    def carry_out(self, work: Path) -> Start:
        """Starts the ranks, disturbs them, and waits until they have ended."""
        conductor, orders = self._conductor, self._orders
        conductor.orders_file.write_text(orders.to_json())
        conductor.calls.unlink(missing_ok=True)
        Path(orders.socket).unlink(missing_ok=True)
        began = time.monotonic()
        with reserve_port(None) as self._held_port, socket.socket(socket.AF_UNIX) as server:
            server.bind(orders.socket)
            server.listen()
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
            try:
                self._begin(work)
                timed_out = self._wait(began)
            finally:
                leftover = self._end()
                with suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)
        ended = time.monotonic()
        facts = {rank: read_facts(Path(orders.facts.format(rank=rank))) for rank in range(self._ranks)}
        calls = conductor.calls.read_text() if conductor.calls.exists() else ""
        return Start(
            facts=facts,
            codes={rank: process.returncode for rank, process in enumerate(self._processes)},
            duration_s=ended - began,
            disturbed=self._noticed_at is not None
            or any(isinstance(one, Reached) for some in facts.values() for one in some),
            exit_s=None if self._noticed_at is None else ended - self._noticed_at,
            killed=tuple(self._killed),
            stacks=self._stacks,
            output={rank: end_of(self._log(rank)) for rank in range(self._ranks)},
            printed=end_of(self._log(0, "out")),
            requeued="scontrol requeue" in calls or "sbatch" in calls,
            files=files_in(work),
            timed_out=timed_out,
            leftover=leftover,
        )

    def _begin(self, work: Path) -> None:
        port = self._held_port.getsockname()[1]
        for rank in range(self._ranks):
            ranks = RankEnvironment(rank, rank, self._ranks, self._ranks, 0, (), "127.0.0.1", port, "slurm")
            with open(self._log(rank), "wb") as errors, open(self._log(rank, "out"), "wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        self._conductor.rank_command(work),
                        cwd=self._here,
                        env=self._conductor.environment(ranks, *self._job),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=errors,
                        start_new_session=True,
                    )
                )

    def _log(self, rank: int, kind: str = "err") -> Path:
        return self._conductor.folder / f"rank-{rank}.{kind}"

    def _serve(self, server: socket.socket) -> None:
        """Disturbs the ranks when rank 0 is at its place, and then lets it continue."""
        with suppress(OSError):
            link, _ = server.accept()
            with link:
                self._disturb()
                link.sendall(b"1")

    def _disturb(self) -> None:
        if self._noticed_at is not None:
            return
        self._noticed_at = time.monotonic()
        if self._stimulus.kill:
            self._processes[0].kill()
            return
        for count in range(self._stimulus.notices):
            if count:
                time.sleep(BETWEEN_S)
            children = [pid for process in self._processes for pid in descendants(process.pid)]
            for process in self._processes:
                _signal_all(process, self._conductor.notice)
            # Rank 0 waits at its place, so that what the signal does to its loader workers comes first, as in a step of
            # usual length.
            deadline = time.monotonic() + _CHILDREN_S
            while any(map(_is_running, children)) and time.monotonic() < deadline:
                time.sleep(LOOK_S)

    def _wait(self, began: float) -> bool:
        """Waits until all ranks have ended, or kills them when their time is up. Returns whether they did not end."""
        failed_at: float | None = None
        while any(process.poll() is None for process in self._processes):
            now = time.monotonic()
            self._look_for_moment(now - began)
            codes = [process.returncode for process in self._processes]
            if any(code not in (None, 0) for code in codes) and failed_at is None:
                failed_at = now
            if self._noticed_at is not None and not self._stimulus.kill:
                if now > self._noticed_at + self._stimulus.notice_s:
                    self._killed = self._kill()
                    return False
                if self._requeued():
                    self._kill()
                    return False
            elif failed_at is not None and now > failed_at + _PEERS_S:
                self._kill()
                return False
            if now > began + self._conductor.limit_s:
                self._killed = self._kill()
                return True
            time.sleep(LOOK_S)
        return False

    def _look_for_moment(self, elapsed_s: float) -> None:
        if self._noticed_at is None and self._stimulus.is_due(elapsed_s, self._printed):
            self._disturb()

    def _printed(self, pattern: re.Pattern[str]) -> bool:
        files = [self._log(rank, kind) for rank in range(self._ranks) for kind in ("out", "err")]
        return any(pattern.search(file.read_text(errors="replace")) for file in files)

    def _requeued(self) -> bool:
        """Whether the script has asked for a requeue, at which Slurm ends the ranks."""
        calls = self._conductor.calls
        return calls.exists() and "scontrol requeue" in calls.read_text()

    def _kill(self) -> list[int]:
        """Kills the ranks that are still running, once they have printed their stacks. Returns those ranks."""
        alive = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
        pids = {rank: self._processes[rank].pid for rank in alive}
        self._stacks |= stacks_of(pids, {rank: self._log(rank) for rank in alive})
        for rank in alive:
            _signal_all(self._processes[rank], signal.SIGKILL)
        for process in self._processes:
            process.wait()
        return alive

    def _end(self) -> bool:
        """Kills what is left of all ranks' processes. Returns whether any outlived their rank."""
        leftover = False
        for process in self._processes:
            if process.poll() is None:
                _signal_all(process, signal.SIGKILL)
                process.wait()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
                leftover = True
        return leftover


def _is_running(pid: int) -> bool:
    return process_start(pid) is not None


def _signal_all(process: subprocess.Popen[bytes], signum: int) -> None:
    """Signals a rank and the processes that it has started, as Slurm signals all processes of a step."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signum)
