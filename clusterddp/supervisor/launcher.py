"""How the ranks of an attempt are started, told to stop, and waited for: with srun, or as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from clusterddp.failures import exit_status
from clusterddp.failures.exit_status import ExitStatus
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.process import END_BY_THEMSELVES, adopt_orphans, descendants, module_command
from clusterddp.rundir.files import create_file

#: How often srun's messages are looked at, in seconds.
LOOK_S = 2.0


class Launcher(Protocol):
    """The ranks of one attempt."""

    #: The name of the launcher in the rank's environment, and the address that ranks reach the supervisor under (''
    #: when srun tells them).
    name: str
    supervisor_host: str
    #: Grace period, in seconds, for reachable ranks to exit before ``abandon``.
    abandon_s: float

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        """Starts all ranks; their output goes to ``logs/rank-<r>.out`` and ``.err``."""

    def notify(self) -> None:
        """Tells all ranks to stop (USR2)."""

    def kill(self) -> None:
        """Ends all ranks that are within reach, whatever they are at."""

    def abandon(self) -> None:
        """Gives up waiting for ranks that may be out of reach."""

    def wait(self) -> int:
        """Waits until every rank is gone; the first exit code that is not 0, or 0. A failed rank ends its peers."""

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        """How ranks ended that did not end well, as far as it is known, when all are gone; the first one in front."""


class SlurmLauncher:
    """The ranks as one job step, a task per rank."""

    name = "slurm"
    supervisor_host = ""
    abandon_s = 5.0

    def __init__(self, job: Job) -> None:
        self._job = job

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        """Starts srun. Its own messages go to ``logs/srun.err``."""
        self._messages = logs / "srun.err"
        if self._job.share == "group":  # slurmd would make them by the umask
            for rank in range(self._job.world_size):
                for name in ("out", "err"):
                    os.close(create_file(logs / f"rank-{rank}.{name}", os.O_WRONLY))
        # srun inherits that TERM is ignored (the batch script's trap), and must: it would end, and the ranks with it.
        with open(self._messages, "ab", opener=create_file) as messages:
            self._srun = subprocess.Popen(
                [*srun_command(self._job, logs), *command],
                env={"OMP_NUM_THREADS": str(cpus_per_rank(self._job)), **environment},
                stdin=subprocess.DEVNULL,
                stderr=messages,
            )

    def notify(self) -> None:
        """srun hands the signal on to every task."""
        self._srun.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        """srun forces the step to end on a QUIT, also tasks that are stopped (22.05: at once); `scancel -s KILL` of the
        job would end the batch step, too."""
        self._srun.send_signal(signal.SIGQUIT)

    def abandon(self) -> None:
        """Kills srun, which would wait for a node that it cannot reach."""
        self._srun.kill()

    def wait(self) -> int:
        """srun's exit code. It is 137 for a peer killed by --kill-on-bad-exit, whatever the first failure was.

        Where a task cannot be launched, srun says so and waits for the others, which wait for it (seen on 22.05.8 when
        a cable was cut in that second): they are ended.
        """
        ended = False
        while True:
            try:
                return self._srun.wait(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                if not ended and any(death.not_started for death in self.exit_statuses().values()):
                    ended = True
                    self.kill()

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        """From srun's messages; nothing where they cannot be read."""
        try:
            return exit_status.of_tasks(self._messages.read_text(errors="replace"))
        except OSError:
            return {}


def srun_command(job: Job, logs: Path) -> list[str]:
    """srun's part of the ranks' command line.

    --cpus-per-task is always given: 22.05 and 23.02 ignore the one of the job. --wait: after a first clean exit the
    others may take as long as a collective may.
    """
    return [
        "srun",
        f"--nodes={job.nodes}",
        f"--ntasks={job.world_size}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--cpus-per-task={cpus_per_rank(job)}",
        "--kill-on-bad-exit=1",
        f"--wait={job.timeouts.step_s:.0f}",
        "--unbuffered",
        "--open-mode=append",
        f"--output={logs}/rank-%t.out",
        f"--error={logs}/rank-%t.err",
        *(f"--{key}" if value is True else f"--{key}={value}" for key, value in job.srun.items() if value is not False),
    ]


def cpus_per_rank(job: Job) -> int:
    """What the job definition asks for, else what the job got: the share that submit asked for, or Slurm's default."""
    return job.cpus_per_task or int(os.environ.get("SLURM_CPUS_PER_TASK", 1))


class LocalLauncher:
    """The same N x G ranks as processes of this machine, each with the numbers it would have on N nodes.

    ``told``: whether the loop has said that they are to stop. It signals those that are there.
    """

    name = "local"
    supervisor_host = "127.0.0.1"
    abandon_s = 0.0

    def __init__(self, job: Job, terminal_rank: int | None = None, told: Callable[[], bool] = lambda: False) -> None:
        self._job, self._terminal_rank, self._told = job, terminal_rank, told
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._numbers: dict[int, int] = {}
        self._exit_statuses: dict[int, ExitStatus] = {}

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        """Starts one process per rank.

        The stop signals are blocked in it from its beginning: it inherits that TERM is ignored, and would lose one that
        arrives before the rank's Python runs.
        """
        adopt_orphans()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
        try:
            for rank in range(self._job.world_size):
                process = self._start_rank(rank, command, {**environment, **local_variables(self._job, rank)}, logs)
                self._ranks[process.pid], self._numbers[process.pid] = process, rank
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._told():
            self._signal_all(signal.SIGTERM)

    def _start_rank(
        self, rank: int, command: list[str], environment: Mapping[str, str], logs: Path
    ) -> subprocess.Popen[bytes]:
        if rank == self._terminal_rank:
            return subprocess.Popen(command, env=environment)
        if self._terminal_rank is not None:  # breakpoint() would fail in a rank without a terminal, and end all of them
            environment = {**environment, "PYTHONBREAKPOINT": "0"}
        out_file, err_file = (logs / f"rank-{rank}.{name}" for name in ("out", "err"))
        with open(out_file, "ab", opener=create_file) as out, open(err_file, "ab", opener=create_file) as err:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def notify(self) -> None:
        """Signals every rank that still runs."""
        self._signal_all(signal.SIGUSR2)

    def kill(self) -> None:
        """Even one that is stopped dies of a KILL."""
        self._signal_all(signal.SIGKILL)

    def abandon(self) -> None:
        """Kills them: they are within reach."""
        self.kill()

    def wait(self) -> int:
        """The first exit code that is not 0 (128 + signal for a killed rank); its peers are then killed, as by srun."""
        first = 0
        while self._ranks:
            pid, status = os.wait()
            process = self._ranks.pop(pid, None)
            if process is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            process.returncode = code
            if code != 0:
                self._exit_statuses[self._numbers[pid]] = ExitStatus.of_code(code)
            if code != 0 and first == 0:
                first = code if code > 0 else 128 - code
                self._signal_all(signal.SIGKILL)
        _end_orphans()
        return first

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        """From waitpid."""
        return self._exit_statuses

    def _signal_all(self, signum: int) -> None:
        for pid in list(self._ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)  # Popen.send_signal would reap the rank, whose end only wait() may see


def _end_orphans() -> None:
    """Ends what killed ranks have left running, as Slurm does at the end of a step. A save in progress is completed."""
    for pid, command in descendants(os.getpid()).items():
        if not any(name in command for name in END_BY_THEMSELVES):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def local_variables(job: Job, rank: int) -> dict[str, str]:
    """What srun's task environment says on a cluster, for a rank of this machine, in torchrun's names.

    Each "node" has its own part of this machine's GPUs: of those in CUDA_VISIBLE_DEVICES, if that is set.
    """
    node_rank, local_rank = divmod(rank, job.ranks_per_node)
    cores = len(os.sched_getaffinity(0))
    first = node_rank * job.gpus_per_node
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(job.nodes * job.gpus_per_node)))
    gpus = ",".join(named.split(",")[first : first + job.gpus_per_node])
    return {
        **({"CUDA_VISIBLE_DEVICES": gpus} if job.device == "cuda" and job.nodes > 1 else {}),
        "RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.ranks_per_node),
        "GROUP_RANK": str(node_rank),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // job.world_size)),
    }


def rank_command(job: Job, attempt: int) -> list[str]:
    """The command of every rank, without the launcher's part."""
    job = without_secrets(job)[0]  # anyone on the node may see a command line: the shim puts them back
    target = ["-m", job.module] if job.module else [str(job.script)]
    resume = job.args_on_resume if attempt > 0 else ()
    return [*module_command("clusterddp.worker", job.python), *target, *job.args, *resume]
