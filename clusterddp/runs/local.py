"""``submit --local`` and ``submit --here``: the loop that starts the supervisor, on this machine or in an allocation.

For a local run this loop has slurmctld's role: it starts the supervisor once per attempt. The supervisor gets its own
session, to keep Ctrl-C from it. To preempt, the loop writes the cause to a file and sends TERM to all
processes of that session.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from clusterddp.errors import INTERRUPTED, STOPPED, UNCONFIRMED
from clusterddp.jobdef.job import Job
from clusterddp.process import module_command, signal_ranks
from clusterddp.reporter import counted, show
from clusterddp.rundir.files import create_file, unlink
from clusterddp.rundir.growing_file import GrowingFile
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.progress_display import Progress
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.controller import give_notice

#: Seconds between two looks at a run's files while waiting to preempt.
MOMENT_CHECK_S = 0.05
INTERRUPTS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@dataclass(frozen=True)
class Moment:
    """When to preempt: after ``step`` steps, ``seconds`` after the attempt's start, or once a rank has printed a
    ``line`` that matches."""

    step: int | None = None
    seconds: float | None = None
    line: re.Pattern[str] | None = None

    @classmethod
    def parse(cls, given: int | float | str) -> Moment:
        """A whole number is a step, any other one seconds, and a text the pattern of a line."""
        if isinstance(given, str):
            return cls(line=re.compile(given))
        return cls(step=given) if isinstance(given, int) else cls(seconds=given)

    def reached(self, steps_done: int, elapsed_s: float, output: Output) -> bool:
        """Whether it is time to preempt. ``output``: of the attempt's ranks."""
        if self.line is not None:
            return output.has(self.line)
        if self.step is not None:
            return steps_done >= self.step
        return elapsed_s >= (self.seconds or 0.0)

    def __str__(self) -> str:
        if self.line is not None:
            return f"at a line that matches {self.line.pattern!r}"
        return f"after {f'{self.seconds:g} s' if self.step is None else counted(self.step, 'step')}"


class Output:
    """The lines that ranks print in attempts from now on. A carriage return, as in a progress bar, also ends a line."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._earlier = run, set(run.attempts())
        self._files: dict[Path, GrowingFile] = {}

    def has(self, pattern: re.Pattern[str]) -> bool:
        """Whether a line that was printed since the last call matches."""
        new = [self._run.attempt_logs(number) for number in self._run.attempts() if number not in self._earlier]
        return any(self._in_file(path, pattern) for folder in new for path in folder.glob("rank-*"))

    def _in_file(self, path: Path, pattern: re.Pattern[str]) -> bool:
        file = self._files.setdefault(path, GrowingFile(path, ends=rb"[\r\n]+"))
        return any(pattern.search(line) for line in file.lines() if line)


def without_clusterddp(job: Job) -> bool:
    """Whether the script's own text does not mention clusterddp. Modules that it imports may still use it."""
    try:
        return job.script is not None and b"clusterddp" not in Path(job.script).read_bytes()
    except OSError:  # a missing script is reported elsewhere
        return False


@dataclass
class LocalRun:
    """The loop of one local run. ``preemptions`` are carried out in order, at most one per attempt.

    Tests give them (``CLUSTERDDP_PREEMPT``), and rehearsals preempt by themselves.

    ``environment``: more variables for the supervisor and the ranks. ``folder``: where they start, in place of the
    current one.
    """

    run: RunDirectory
    job: Job
    preemptions: list[Moment] = field(default_factory=list)
    debug_rank: int | None = None
    interrupts: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    #: The preemptions that did not happen.
    missed: list[Moment] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    #: Seconds between two looks at the run's files, for the user.
    progress_s: float = 0.2

    def loop(self, progress: Progress) -> int:
        """Runs attempts until the run is over or interrupted. Returns the exit code."""
        with interrupts_counted(self._interrupted):
            while True:
                unlink(self.run.notice_file)  # of an earlier attempt
                if self.interrupts:
                    return INTERRUPTED
                code = self._attempt(progress)
                if (outcome := self.run.outcome()) is not None:  # even if the script itself exited with one of these
                    self.missed += self.preemptions
                    return UNCONFIRMED if outcome.unconfirmed else code
                if code != STOPPED and not self.interrupts:
                    return code

    def _attempt(self, progress: Progress) -> int:
        """Runs the supervisor of one attempt. Returns its exit code."""
        # Like the batch script: TERM is ignored before Python starts.
        shell = ["/bin/sh", "-c", "trap '' TERM; exec \"$@\"", "sh"]
        above = ["--output-above"] if progress.shows_output else []
        command = [*shell, *module_command("clusterddp.supervisor"), str(self.run), *self._options(), *above]
        environment = {**os.environ, **self.environment}
        # A debugged rank keeps the terminal, which it would lose in another session.
        debugging = self.debug_rank is not None
        stdout: IO[Any] | None = None if debugging else open(self.run.logs / "supervisor.log", "ab", opener=create_file)
        stderr = None if debugging else subprocess.PIPE
        self._process = process = subprocess.Popen(
            command, start_new_session=not debugging, stdout=stdout, stderr=stderr, env=environment, cwd=self.folder
        )
        progress.follow(process.stderr)
        try:
            return self._watch(process, progress)
        finally:
            if process.poll() is None:
                self._kill()
            self._process = None
            progress.follow(None)
            for file in filter(None, (stdout, process.stderr)):
                file.close()

    def _options(self) -> list[str]:
        return ["--local", *(["--debug", str(self.debug_rank)] if self.debug_rank is not None else [])]

    def _watch(self, process: subprocess.Popen[bytes], progress: Progress) -> int:
        started, starts_before = time.monotonic(), progress.starts
        moment = self.preemptions.pop(0) if self.preemptions else None
        output = Output(self.run)
        ended = threading.Event()

        def wait() -> None:
            process.wait()
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        while not ended.wait(MOMENT_CHECK_S if moment else self.progress_s):
            progress.update()
            # Before the ranks run, the signal would be lost or end the shell, which ignores it later.
            begun = progress.starts > starts_before
            if moment and begun and moment.reached(progress.steps_done, time.monotonic() - started, output):
                self._signal(Cause.PREEMPTED)
                moment = None
        progress.update()
        if moment and not self.interrupts:
            self.missed.append(moment)
        return process.wait()

    def _interrupted(self) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            show("\nSaving and stopping. Press Ctrl-C again to stop at once")
            self._signal(Cause.INTERRUPTED)
        else:
            self._kill()

    def _kill(self) -> None:
        """Kills the supervisor. Its ranks die with it."""
        if self._process is not None:
            self._process.kill()

    def _signal(self, cause: Cause) -> None:
        """Signals the ranks. The supervisor, which finds the notice, tells those that have not started yet."""
        give_notice(self.run, cause)
        if self._process is not None:
            signal_ranks(self._process.pid, self.stop_signal)


class AllocatedRun(LocalRun):
    """``submit --here`` in salloc's shell: one attempt in the allocation. The supervisor never requests a new one."""

    #: The supervisor ignores it, and srun forwards it to every rank.
    stop_signal: ClassVar[signal.Signals] = signal.SIGUSR2

    def _options(self) -> list[str]:
        return []

    def _interrupted(self) -> None:
        self.interrupts += 1
        show("\nSaving and stopping. To end the allocation at once, use scancel")
        self._signal(Cause.INTERRUPTED)


@contextmanager
def interrupts_counted(act: Callable[[], None]) -> Iterator[None]:
    """Calls ``act`` on Ctrl-C, TERM, and a hang-up, unless the hang-up follows one of them.

    A terminal that is closed sends HUP more than once, and the second interrupt would end the save. HUP under nohup,
    and INT in a shell's background job, are ignored from the start, and stay so.
    """
    interrupted = False

    def handle(signum: int, _: object) -> None:
        nonlocal interrupted
        if signum != signal.SIGHUP or not interrupted:
            interrupted = True
            act()

    ignored = {signum for signum in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(signum) is signal.SIG_IGN}
    before = {signum: signal.signal(signum, handle) for signum in INTERRUPTS if signum not in ignored}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
