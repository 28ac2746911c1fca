"""Starts the ranks of an attempt, signals them and waits for them: with srun, or as processes of this machine."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from clusterddp.environment import RankEnvironment
from clusterddp.errors import InterfaceMissing, JobDefinitionError
from clusterddp.failures import exit_status
from clusterddp.failures.exit_status import ExitStatus, LaunchFailure
from clusterddp.failures.placement import Placement
from clusterddp.history.event import Event
from clusterddp.jobdef.job import PYXIS, Job
from clusterddp.jobdef.program import expand_variables
from clusterddp.jobdef.secrets import without_secrets
from clusterddp.process import adopt_orphans, descendants, module_command, oom_kills, signals_blocked
from clusterddp.protocol import ATTEMPT, INTERFACE, RUN_DIR, SUPERVISOR, module_of_rank
from clusterddp.rundir.files import create_file, read_bytes
from clusterddp.supervisor.addresses import reached_at
from clusterddp.supervisor.batch_host_guard import guard_command, guard_environment
from clusterddp.supervisor.control_server import listen
from clusterddp.supervisor.node_setup import NodeSetup

#: The nodes are unknown: srun chooses.
ALL_NODES = Placement()


class Launcher(Protocol):
    """The ranks of one attempt."""

    #: The launcher's name in the ranks' environment, and the address that the supervisor listens at ('': all of this
    #: node's, one of which ``start`` tells the ranks).
    name: str
    supervisor_host: str
    #: Grace period, in seconds, for reachable ranks to exit before ``abandon``.
    abandon_s: float
    #: Called by ``wait`` when a rank has failed, with its number.
    failed: Callable[[int], object]
    #: Called by ``wait`` with an event for the history.
    record: Callable[[Event], object]
    #: srun's process. None without srun.
    pid: int | None
    #: Why no rank was started, if that is known before srun starts them.
    failure: LaunchFailure | None

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        """Starts all ranks, with their output in ``logs/rank-<r>.out`` and ``.err``."""

    def notify(self) -> None:
        """Signals all ranks to stop (USR2)."""

    def kill(self) -> None:
        """Kills all reachable ranks."""

    def abandon(self) -> None:
        """Stops waiting for ranks that may be unreachable."""

    def wait(self) -> int:
        """Waits until all ranks have exited, or are abandoned. The first exit code that is not 0, or 0.

        A failed rank does not end its peers: they may be saving.
        """

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        """How ranks failed, as far as known, once all have exited. The first failure comes first."""


class SlurmLauncher:
    """The ranks as one job step, a task per rank. ``placement``: which nodes of the job get ranks.

    ``setup``: what its nodes need before. ``start`` then begins that, and ``wait`` starts the ranks once it is done.
    """

    name = "slurm"
    supervisor_host = ""
    abandon_s = 5.0
    #: Seconds between two reads of srun's messages.
    read_interval_s = 2.0

    def __init__(self, job: Job, placement: Placement = ALL_NODES, setup: NodeSetup | None = None) -> None:
        self._job, self._placement, self._setup = job, placement, setup
        self.failed: Callable[[int], object] = lambda _: None
        self.record: Callable[[Event], object] = lambda _: None
        self.pid: int | None = None
        self.failure: LaunchFailure | None = None
        try:
            self._host = reached_at(os.environ, job.interface)
        except InterfaceMissing as error:  # no rank could reach the supervisor
            node = os.environ.get("SLURMD_NODENAME", "")
            self.failure = LaunchFailure(str(error), (), refused=True, node=node, lacks_interface=True)
        self._srun: subprocess.Popen[bytes] | None = None
        #: Starts the ranks, once the setup of the nodes is done. None if there is none.
        self._start_ranks: Callable[[], None] | None = None
        #: Whether a signal came before that.
        self._stopped = False
        self._lock = threading.Lock()
        self._guards: list[subprocess.Popen[bytes]] = []
        self._listener: socket.socket | None = None

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        """Starts srun, or the setup of the nodes. Messages of the ranks' srun go to ``logs/srun.err``."""
        self._messages = logs / "srun.err"
        if self.failure is not None:
            return
        if self._setup is not None and (nodes := self._setup.pending(self._placement)):
            self._start_ranks = partial(self._run_srun, command, environment, logs)
            self._srun = self._setup.start(nodes, logs / "nodes.err")
            self.pid = self._srun.pid
        else:
            self._run_srun(command, environment, logs)

    def _run_srun(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        if self._setup is not None:
            command = self._setup.command(command)
        environment = {
            **environment,
            SUPERVISOR: f"{self._host}{environment[SUPERVISOR]}",  # which has the port
            **({INTERFACE: ",".join(self._job.interface)} if self._job.interface else {}),
        }
        if self._job.share == "group":  # slurmd would create them with the umask's mode
            for rank in range(self._job.world_size):
                for name in ("out", "err"):
                    os.close(create_file(logs / f"rank-{rank}.{name}", os.O_WRONLY))
        # srun must inherit that TERM is ignored (the batch script's trap): else it would exit, and the ranks with it.
        # env reports there that there is no srun.
        with open(self._messages, "ab", opener=create_file) as messages:
            self._srun = subprocess.Popen(
                ["/usr/bin/env", *srun_command(self._job, logs, self._placement), *command],
                env={"OMP_NUM_THREADS": str(cpus_per_rank(self._job)), **environment},
                stdin=subprocess.DEVNULL,
                stderr=messages,
            )
        self.pid = self._srun.pid
        if self._job.outlives_nodes:
            self._start_guards(environment)

    def _start_guards(self, environment: Mapping[str, str]) -> None:
        """On the last node with ranks, whose loss ends the attempt, so that the next one has another guard, and on one
        in the middle, which may be lost together with neither: racks are neighbours in Slurm's order."""
        own = os.environ.get("SLURMD_NODENAME")
        others = [node for node in (*self._placement.spares, *self._placement.nodes) if node != own]
        if not others:
            return
        # The kernel completes the guard's connection, and answers its probes while this node and this process live.
        self._listener = listen()
        address, null = f"{self._host}:{self._listener.getsockname()[1]}", subprocess.DEVNULL
        for node in dict.fromkeys((others[-1], others[(len(others) - 1) // 2])):
            command = guard_command(environment[RUN_DIR], int(environment[ATTEMPT]), address, node)
            started = subprocess.Popen(command, env=guard_environment(), stdin=null, stdout=null, stderr=null)
            self._guards.append(started)

    def _end_guards(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for guard in self._guards:
            guard.send_signal(signal.SIGQUIT)

    def notify(self) -> None:
        """srun forwards the signal to every task. The setup of the nodes has nothing to save, and ends."""
        self._signal(signal.SIGUSR2 if self._start_ranks is None else signal.SIGQUIT)

    def kill(self) -> None:
        """Sends QUIT, on which srun terminates the step, including stopped tasks (22.05: at once). `scancel -s KILL`
        would end the batch step, too."""
        self._signal(signal.SIGQUIT)

    def abandon(self) -> None:
        """Kills srun, which would wait for a node that it cannot reach."""
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        """Signals srun. Ranks that have not been started are not started any more."""
        with self._lock:
            self._stopped = True
            if self._srun is not None:
                self._srun.send_signal(signum)

    def _set_up(self, start_ranks: Callable[[], None]) -> bool:
        """Waits for the setup of the nodes, and starts the ranks after it. Returns whether it did."""
        assert self._setup is not None and self._srun is not None
        self.failure = self._setup.finish(self._srun)
        with self._lock:
            if self.failure is None and not self._stopped:
                start_ranks()
                self._start_ranks = None
            return self._start_ranks is None

    def wait(self) -> int:
        """srun's exit code, which may be that of a rank that was killed after the first failure.

        If a task cannot be launched, the others are killed. srun reports such a task, but waits for the others, which
        wait for that task (seen on 22.05.8 when a cable was cut in that second).
        """
        if self.failure is not None:
            return 1
        if self._start_ranks is not None and not self._set_up(self._start_ranks):
            return 1
        if self._setup is not None:
            self._setup.record_stage(self.record)
        assert self._srun is not None
        known: set[int] = set()
        while True:
            try:
                code = self._srun.wait(timeout=self.read_interval_s)
                self._end_guards()
                return code
            except subprocess.TimeoutExpired:
                statuses = self.exit_statuses()
            new = [rank for rank in statuses if rank not in known]
            known.update(new)
            for rank in new:
                self.failed(rank)
            if any(statuses[rank].not_started for rank in new):
                self.kill()

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        """From srun's messages. Empty if they cannot be read."""
        try:
            return exit_status.of_tasks(read_bytes(self._messages).decode(errors="replace"))
        except OSError:
            return {}


def srun_command(job: Job, logs: Path, placement: Placement = ALL_NODES) -> list[str]:
    """srun's part of the ranks' command line.

    --cpus-per-task is always given: in 22.05 and 23.02 srun does not inherit the job's. --distribution: Slurm's default
    (block:cyclic) alternates the ranks of a node between its sockets, but their GPUs follow the local rank.
    --kill-on-bad-exit: a site's
    KillOnBadExit would end ranks that are saving. --export: with `sbatch --export=NONE`, or SLURM_EXPORT_ENV=NONE, the
    ranks would not get their environment. The supervisor ends the peers of a failed rank. --wait: after the
    first clean exit the other ranks may take as long as a collective. --nodelist: Slurm sorts the nodes in its own way,
    whatever is given. --overlap: a step with ranks on a lost node keeps its other nodes until that one answers (seen on
    22.05.8).
    """
    options = dict(job.srun)
    if job.env and any(map(job.srun.get, PYXIS)):  # otherwise, variables of the image take precedence
        given = str(job.srun.get("container-env", "")).split(",")
        options["container-env"] = ",".join(dict.fromkeys(filter(None, [*given, *job.env])))
    on = [f"--nodelist={','.join(placement.nodes)}"] if placement.spares or placement.aside else []
    on += ["--overlap"] if placement.aside else []
    return [
        "srun",
        f"--nodes={job.nodes}",
        *on,
        f"--ntasks={job.world_size}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--cpus-per-task={cpus_per_rank(job)}",
        *([] if "distribution" in job.srun or "SLURM_DISTRIBUTION" in os.environ else ["--distribution=block:block"]),
        "--kill-on-bad-exit=0",
        *([] if "export" in job.srun else ["--export=ALL"]),
        f"--wait={job.timeouts.step_s:.0f}",
        "--unbuffered",
        "--open-mode=append",
        f"--output={logs}/rank-%t.out",
        f"--error={logs}/rank-%t.err",
        *(f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items() if value is not False),
    ]


def cpus_per_rank(job: Job) -> int:
    """From the job definition, else from the job: the share that submit requested, or Slurm's default."""
    if job.cpus_per_task:
        return job.cpus_per_task
    cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", 1))
    one_per_node = job.min_nodes is not None and "SLURM_NTASKS_PER_NODE" not in os.environ  # slurm/batch.py
    return max(1, cpus // job.ranks_per_node) if one_per_node else cpus


class LocalLauncher:
    """The same N x G ranks as processes of this machine, with the environment that they would have on N nodes.

    ``stop_requested``: whether the loop has already requested a stop. It signals only ranks that exist.
    """

    name = "local"
    supervisor_host = "127.0.0.1"
    abandon_s = 0.0
    pid: int | None = None
    failure: LaunchFailure | None = None

    def __init__(
        self, job: Job, terminal_rank: int | None = None, stop_requested: Callable[[], bool] = lambda: False
    ) -> None:
        self._job, self._terminal_rank, self._stop_requested = job, terminal_rank, stop_requested
        self.failed: Callable[[int], object] = lambda _: None
        self.record: Callable[[Event], object] = lambda _: None
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        #: Ranks that have exited; None: the others are abandoned.
        self._exited: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._exit_statuses: dict[int, ExitStatus] = {}

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        """Starts one process per rank.

        The stop signals are blocked from the start: a rank inherits that TERM is ignored, and would lose one that
        arrives before its Python runs.
        """
        adopt_orphans()
        self._oom_kills = oom_kills()
        with signals_blocked(signal.SIGTERM, signal.SIGUSR2):
            for rank in range(self._job.world_size):
                own = {**environment, **local_variables(self._job, rank)}
                self._ranks[rank] = self._start_rank(rank, command, own, logs)
        if self._stop_requested():
            self._signal_all(signal.SIGTERM)

    def _start_rank(
        self, rank: int, command: list[str], environment: Mapping[str, str], logs: Path
    ) -> subprocess.Popen[bytes]:
        if rank == self._terminal_rank:
            return subprocess.Popen(command, env=environment)
        if self._terminal_rank is not None:  # breakpoint() would fail in a rank without a terminal
            environment = {**environment, "PYTHONBREAKPOINT": "0"}
        out_file, err_file = (logs / f"rank-{rank}.{name}" for name in ("out", "err"))
        with open(out_file, "ab", opener=create_file) as out, open(err_file, "ab", opener=create_file) as err:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def notify(self) -> None:
        """Signals every rank that still runs."""
        self._signal_all(signal.SIGUSR2)

    def kill(self) -> None:
        """KILL also ends stopped processes."""
        self._signal_all(signal.SIGKILL)

    def abandon(self) -> None:
        """Ends ``wait``: a rank in a driver or a file system that does not answer outlives a KILL."""
        self.kill()
        self._exited.put(None)

    def wait(self) -> int:
        """The first exit code that is not 0 (128 + signal for a killed rank).

        A thread waits for each rank, and for no other child of this process, such as a hook.
        """
        for rank in self._ranks:
            threading.Thread(target=self._wait_for, args=(rank,), daemon=True).start()
        first, left = 0, set(self._ranks)
        while left and (ended := self._exited.get()) is not None:
            left.remove(ended)
            if (code := self._ranks[ended].returncode) != 0:
                oom_kill = code == -signal.SIGKILL and oom_kills() > self._oom_kills
                self._exit_statuses[ended] = replace(ExitStatus.of_code(code), oom_kill=oom_kill)
                first = first or (code if code > 0 else 128 - code)
                self.failed(ended)
        self.end_orphans()
        return first or (1 if left else 0)

    def _wait_for(self, rank: int) -> None:
        self._ranks[rank].wait()
        self._exited.put(rank)

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        """From waitpid."""
        return self._exit_statuses

    def end_orphans(self) -> None:
        """Kills processes that killed ranks left running, as Slurm does at the end of a step: all that this process
        has started. A running save completes."""
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _signal_all(self, signum: int) -> None:
        for process in self._ranks.values():
            process.send_signal(signum)


def local_variables(job: Job, rank: int) -> dict[str, str]:
    """torchrun's variables for a rank of this machine, as srun's task environment gives them on a cluster.

    Each "node" gets its share of this machine's GPUs, or of CUDA_VISIBLE_DEVICES if that is set. With AMD GPUs of
    HIP_VISIBLE_DEVICES. Their numbers count from 0 among those of ROCR_VISIBLE_DEVICES.
    """
    node_rank, local_rank = divmod(rank, job.ranks_per_node)
    cores = len(os.sched_getaffinity(0))
    first = node_rank * job.gpus_per_node
    variable = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    named = os.environ.get(variable, ",".join(map(str, range(job.nodes * job.gpus_per_node))))
    gpus = ",".join(named.split(",")[first : first + job.gpus_per_node])
    place = (rank, local_rank, job.world_size, job.ranks_per_node, node_rank)
    ranks = RankEnvironment(*place, hosts=(), master_addr=None, master_port=None, launcher="local")
    return {
        **({variable: gpus} if job.device == "cuda" and job.nodes > 1 else {}),
        **ranks.exports(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // job.world_size)),
    }


def with_python(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with the variables in ``python:``, which ``setup`` may have set."""
    python, missing = expand_variables(job.python or "", environ)
    if missing:
        raise JobDefinitionError(
            f"python: {job.python}: the variable {missing[0]} is not set on {socket.gethostname()}. Export it in "
            "`setup`, or give the path without it"
        )
    return replace(job, python=python or None)


def module_of_ranks(module: str, job: Job, package: Path) -> list[str]:
    """The start of a command that runs a module of clusterddp with the ranks' interpreter.

    ``package``: clusterddp for an interpreter without it.
    """
    python = job.python_of_ranks
    return module_command(module, python, package) if python else module_command(module)


def rank_command(job: Job, resumes: bool, package: Path) -> list[str]:
    """The command of every rank, without the launcher's part. ``resumes``: from a checkpoint of the script's own.
    ``package``: as for ``module_of_ranks``.

    Placeholders stay: each rank fills in its own values.
    """
    job = without_secrets(job)[0]  # command lines are visible to everyone on the node; the rank restores them
    target = ["-m", job.module] if job.module else [str(job.script)]
    return [*module_of_ranks(module_of_rank(os.environ), job, package), *target, *job.arguments(resumes)]
