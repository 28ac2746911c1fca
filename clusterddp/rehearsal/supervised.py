"""Carries out the runs of a rehearsal under clusterddp: each is a local run, as ``submit --local`` makes it.

Its supervisor decides what follows a preemption, a kill or a failure. An attempt is a start. Each
attempt has its own orders, also one that the supervisor starts by itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, ClassVar

from clusterddp.errors import STOPPED
from clusterddp.history.beginnings import NotRestored, Resumed
from clusterddp.jobdef.job import Checkpointing, Job, Limits
from clusterddp.messages.reports import End
from clusterddp.rehearsal import disturbances
from clusterddp.rehearsal.conductor import BETWEEN_S, LOOK_S, MORE_STARTS, Conductor, Plan, end_of, stacks_of
from clusterddp.rehearsal.disturbances import Disturbance, Script
from clusterddp.rehearsal.facts import CUT_OFF, Began, Fact, Reached, file_of_attempt, read_facts
from clusterddp.rehearsal.trial import Start, Stimulus, Trial
from clusterddp.rehearsal.workspace import files_in
from clusterddp.runs.local import LocalRun, Output
from clusterddp.runs.progress_display import Progress, Shown
from clusterddp.runs.submission import record_local
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.verdict import RankEnd

#: Seconds that the other ranks get to end a step after which rank 0 is cut off.
_CUT_S = 5.0
#: The share of a start's steps between two checkpoints, if the job saves less often.
_SAVES = 12


def rehearsed(job: Job, steps: int) -> Job:
    """The job without effects outside its run, and with several checkpoints in ``steps`` steps."""
    every = max(1, steps // _SAVES)
    own = job.checkpoint.every_steps
    checkpoint = replace(
        Checkpointing(keep=job.checkpoint.keep), every_steps=min(every, own) if own else every, every_s=None
    )
    job = replace(job, trackers={}, checkpoint=checkpoint)
    return replace(job, hook=(), preflight=False, limits=Limits(), snapshot=False)


#: What one run tries. Those that do not fit into its steps are tried alone.
TOGETHER = (
    Disturbance.START,
    Disturbance.FIRST_STEPS,
    *disturbances.TOGETHER,
    Disturbance.SHORT_NOTICE,
    Disturbance.KILL,
    Disturbance.FULL_DISK,
)


@dataclass
class SupervisedConductor(Conductor):
    """Carries out runs of one job under clusterddp."""

    job: Job = field(kw_only=True)
    is_supervised: ClassVar[bool] = True
    not_tried: ClassVar[Mapping[Disturbance, str]] = {
        Disturbance.TIME_LIMIT: "clusterddp continues the run in a new job, as after a preemption"
    }

    def __post_init__(self) -> None:
        if self.job.stop.signal:
            self.notice = signal.Signals[f"SIG{self.job.stop.signal}"]
        self.job = rehearsed(self.job, self.steps)

    def together(
        self, script: Script, wanted: Sequence[Disturbance], notice_s: float
    ) -> Mapping[Disturbance, Stimulus]:
        """Those that fit into the steps of one run, in the order of their places."""
        return script.in_order([one for one in TOGETHER if one in wanted], notice_s)

    def _carry_out(self, plan: Plan, work: Path, here: Path) -> Sequence[Start]:
        script = None if self.job.script is None else str(work / self.command[0])
        job = replace(self.job, script=script, gpus_per_node=plan.ranks)
        directory = self.folder / f"runs-{self._runs}" / job.name
        directory.parent.mkdir()
        run = record_local(job, str(directory), prints=False, loop=False)
        name = f"{self._runs}-{{attempt}}"
        local = _Rehearsed(run, job, environment=self.confined(), folder=here, conductor=self, plan=plan, name=name)
        with local.served():
            while local.attempt_again(work):
                if plan.later_ranks:
                    record_local(replace(job, gpus_per_node=plan.later_ranks), str(directory), prints=False, loop=False)
        return local.starts


class _Quiet(Progress):
    """Shows nothing, and keeps what the supervisor prints."""

    words: IO[bytes] | None = None
    said = b""

    def follow(self, supervisor: IO[bytes] | None) -> None:
        """Reads this from now on."""
        self.words = supervisor
        if supervisor is not None:
            os.set_blocking(supervisor.fileno(), False)

    def update(self) -> None:
        """Reads what there is, so that the supervisor need not wait."""
        if self.words is not None and (more := self.words.read()):
            self.said += more


@dataclass
class _Rehearsed(LocalRun):
    """A local run whose attempts are disturbed as planned. ``name``: of its facts, with ``{attempt}``."""

    conductor: Conductor = field(kw_only=True)
    plan: Plan = field(kw_only=True)
    name: str = field(kw_only=True)
    starts: list[Start] = field(default_factory=list)
    #: When an attempt was disturbed, and the ranks that were killed at the end of its notice, with their stacks.
    _disturbed: dict[int, float] = field(default_factory=dict)
    _killed: dict[int, list[int]] = field(default_factory=dict)
    _stacks: dict[int, str] = field(default_factory=dict)
    _cut: list[float] = field(default_factory=list)
    _timed_out: bool = False

    # --- orders

    def _write_orders(self) -> None:
        """For each attempt with a stimulus, and for all others. Also the supervisor starts attempts by itself."""
        known = Trial(self.starts).weights() | dict(self.plan.baseline.known)
        for attempt in (*range(len(self.plan.stimuli)), None):
            stimulus = Stimulus() if attempt is None else self.plan.stimulus(attempt)
            orders = self.conductor.orders(self.plan, stimulus, known, self.name)
            all_others = self.conductor.orders_file
            file = all_others if attempt is None else file_of_attempt(all_others, attempt)
            file.write_text(orders.to_json())

    def _facts(self, attempt: int, rank: int) -> Sequence[Fact]:
        return read_facts(Path(self.conductor.facts_file(self.name).format(rank=rank, attempt=attempt)))

    # --- the ranks' messages

    @contextmanager
    def served(self) -> Iterator[None]:
        """Serves the ranks that say that they are at their place."""
        path = self.conductor.folder / "socket"
        path.unlink(missing_ok=True)
        for old in self.conductor.folder.glob("orders*.json"):
            old.unlink()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
            try:
                yield
            finally:
                with suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)

    def _serve(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                link, _ = server.accept()
                threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            attempt, what = link.makefile().readline().split()
            if what == CUT_OFF:
                self._cut.append(time.monotonic())
                link.recv(1)  # until the end of the rank
                return
            self._disturb(int(attempt))
            link.sendall(b"1")

    def _disturb(self, attempt: int) -> None:
        if attempt in self._disturbed:
            return
        stimulus = self.plan.stimulus(attempt)
        self._disturbed[attempt] = time.monotonic()
        if stimulus.kill:
            for pid in self._pids(attempt, ranks=1).values():
                os.kill(pid, signal.SIGKILL)
        for count in range(stimulus.notices):
            if count:
                time.sleep(BETWEEN_S)
            self._signal(Cause.PREEMPTED)

    def _pids(self, attempt: int, ranks: int | None = None) -> dict[int, int]:
        found = {}
        for rank in range(ranks or self.job.world_size):
            for fact in self._facts(attempt, rank):
                if isinstance(fact, Began):
                    found[rank] = fact.pid
        return found

    # --- the attempts

    def attempt_again(self, work: Path) -> bool:
        """Starts the supervisor once, and waits for its end. Returns whether it is started again, as by Slurm after a
        preemption."""
        before = set(self.run.attempts())
        self._write_orders()
        began = time.monotonic()
        with suppress(FileNotFoundError):
            self.run.notice_file.unlink()
        progress = _Quiet(self.run, None, shown=Shown(progress=False, output=False, events=()))
        code = self._attempt(progress)
        outcome, ended = self.run.outcome(), time.monotonic()
        new = sorted(set(self.run.attempts()) - before)
        files = files_in(work) | files_in(self.run.checkpoints)
        for attempt in new:
            is_last = attempt == new[-1]
            self.starts.append(
                self._start(
                    attempt,
                    duration_s=ended - began,
                    ended=ended,
                    files=files,
                    completed=is_last and outcome is not None and outcome.completed,
                    timed_out=is_last and self._timed_out,
                    said=progress.said.decode(errors="replace"),
                )
            )
        if outcome is not None or self._cut or self._timed_out or not new:
            return False
        interrupted = code == STOPPED or new[-1] in self._killed
        return interrupted and len(self.starts) - len(self.plan.stimuli) <= MORE_STARTS

    def _start(
        self,
        attempt: int,
        *,
        duration_s: float,
        ended: float,
        files: Mapping[str, int],
        completed: bool,
        timed_out: bool,
        said: str,
    ) -> Start:
        """An attempt, once it has ended."""
        logs = self.run.attempt_logs(attempt)
        ranks = [int(path.stem.removeprefix("rank-")) for path in logs.glob("rank-*.err")]
        facts = {rank: self._facts(attempt, rank) for rank in sorted(ranks)}
        noticed_at = self._disturbed.get(attempt)
        output = {rank: end_of(logs / f"rank-{rank}.err") for rank in facts}
        if not any(text.strip() for text in output.values()):
            output = {0: said}
        return Start(
            facts=facts or {0: ()},
            codes={rank: self._code(attempt, rank) for rank in facts or (0,)},
            duration_s=duration_s,
            disturbed=noticed_at is not None
            or any(isinstance(fact, Reached) for some in facts.values() for fact in some),
            exit_s=None if noticed_at is None or self.plan.stimulus(attempt).kill else ended - noticed_at,
            killed=tuple(self._killed.get(attempt, ())),
            stacks=self._stacks if attempt in self._killed or timed_out else {},
            output=output,
            printed=end_of(log) if (log := logs / "rank-0.out").exists() else "",
            files=files,
            timed_out=timed_out,
            completed=completed,
            inexact=self._inexact(attempt),
        )

    def _inexact(self, attempt: int) -> list[str]:
        events = self.run.history().attempt(attempt)
        return [why for event in events if isinstance(event, (Resumed, NotRestored)) for why in event.inexact]

    def _code(self, attempt: int, rank: int) -> int:
        """The exit code that the rank's record stands for. A killed rank leaves none."""
        end = RankEnd.read(rank, "", 0.0, self.run.rank_record(attempt, rank))
        if end.end.well:
            return 0
        return -signal.SIGKILL if end.end is End.DIED else end.exit_code or 1

    def _watch(self, process: subprocess.Popen[bytes], progress: Progress) -> int:
        """Waits for the supervisor, and ends it when the time of a notice or of the start is up."""
        began, output, earlier = time.monotonic(), Output(self.run), set(self.run.attempts())
        while process.poll() is None:
            progress.update()
            now = time.monotonic()
            attempt = max(set(self.run.attempts()) - earlier, default=-1)
            self._look_for_moment(attempt, now - began, output)
            noticed_at, stimulus = self._disturbed.get(attempt), self.plan.stimulus(attempt)
            if noticed_at is not None and stimulus.notices and now > noticed_at + stimulus.notice_s:
                self._killed[attempt] = self._kill_ranks(attempt)
            elif now > began + self.conductor.limit_s:
                self._timed_out = True
                self._kill_ranks(attempt)
            elif self._cut and (len(self._cut) >= self.job.world_size or now > self._cut[0] + _CUT_S):
                self._kill()
            time.sleep(LOOK_S)
        progress.update()
        return process.wait()

    def _look_for_moment(self, attempt: int, elapsed_s: float, output: Output) -> None:
        """Whether it is the user's own moment, of ``--at``."""
        if attempt in self._disturbed or not self._pids(attempt, ranks=1):
            return
        if self.plan.stimulus(attempt).is_due(elapsed_s, output.has):
            self._disturb(attempt)

    def _kill_ranks(self, attempt: int) -> list[int]:
        """Kills the supervisor, and all ranks with it, once they have printed their stacks. Returns the ranks."""
        pids = self._pids(attempt)
        stacks = stacks_of(pids, {rank: self.run.attempt_logs(attempt) / f"rank-{rank}.err" for rank in pids})
        self._stacks |= stacks
        self._kill()
        return list(stacks)
