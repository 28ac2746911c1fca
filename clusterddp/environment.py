"""This process's rank, world size and so on, read once from the variables of any launcher.

``read`` takes a mapping and changes nothing. Slurm's variables of the step precede those of the job, which describe
other tasks if the step is smaller than its job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.hostlist import expand, tasks_per_node
from clusterddp.process import this_process
from clusterddp.protocol import FOR_RANKS, LAUNCHER, RANK_PROCESS

Environ = Mapping[str, str]
Launcher = Literal["slurm", "torchrun", "local", "openmpi", "single"]

#: Step ids of slurm.h without ranks: interactive, batch, extern and pending steps. Slurm 26.05 sets SLURM_STEP_ID in
#: the batch step, too, as a signed number (-5).
_BATCH_STEP = {"batch", str(0xFFFFFFFB), "-5"}
_PSEUDO_STEPS = (
    _BATCH_STEP
    | {"interactive", "extern", "pending"}
    | {text for number in (0xFFFFFFFA, 0xFFFFFFFC, 0xFFFFFFFD) for text in (str(number), str(number - 2**32))}
)


@dataclass(frozen=True)
class RankEnvironment:
    """Where a rank is, under torchrun's names.

    Example: ``print(ranks.rank, ranks.world_size, ranks.launcher)``
    """

    rank: int
    """From 0 to world_size - 1."""
    local_rank: int
    """The rank on its node, from 0 to local_world_size - 1."""
    world_size: int
    """The number of ranks."""
    local_world_size: int
    """The number of ranks on this node."""
    node_rank: int
    """The number of this node, from 0 (torchrun's GROUP_RANK)."""
    hosts: tuple[str, ...]
    """The host of every node, by node_rank, or empty if the launcher does not set them."""
    master_addr: str | None
    """The host of rank 0's store, or None if the launcher does not set it."""
    master_port: int | None
    """The port of rank 0's store, or None if the launcher does not set it."""
    launcher: Launcher
    """Which launcher's variables were read."""

    def exports(self) -> dict[str, str]:
        """torchrun's environment variables for this rank, as far as they are known.

        Example: ``os.environ.update(ranks.exports())``
        """
        values: dict[str, str | int | None] = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def read(environ: Mapping[str, str]) -> RankEnvironment:
    """Reads this process's rank from the variables that a launcher has set.

    Launchers are tried in this order: torchrun (also inside a Slurm task) and ``clusterddp submit --local``, Open MPI's
    mpirun, a Slurm step, RANK and WORLD_SIZE set by other means, the shell of a Slurm job, and a single process. The
    shell of a job is an error, because it is not a rank.

    Args:
        environ: such as ``os.environ``. It is not changed.

    Raises LauncherEnvironmentError for variables that are missing or contradict each other.

    Example: ``ranks = read(os.environ)``
    """
    if environ.get(LAUNCHER) == "local":
        return _from_torchrun(environ, "local")
    if environ.get(LAUNCHER) == "torchrun" or "TORCHELASTIC_RUN_ID" in environ:
        return _from_torchrun(environ, "torchrun")
    if "OMPI_COMM_WORLD_RANK" in environ:  # before Slurm: mpirun's daemons run in a step
        return _from_openmpi(environ)
    if in_step(environ):
        return _from_slurm(environ)
    if "RANK" in environ:
        return _from_torchrun(environ, "torchrun")
    # Before the checks below, because this message is more helpful if a job script exports WORLD_SIZE, as many do.
    if "SLURM_JOB_ID" in environ:
        shell = "the batch shell" if in_batch_step(environ) else "a shell"
        raise LauncherEnvironmentError(
            f"this is {shell} of job {environ['SLURM_JOB_ID']}, not a rank. Start the script with srun (srun -N1 -n1 "
            "for a single process) or `clusterddp submit`"
        )
    if "WORLD_SIZE" in environ or "LOCAL_RANK" in environ:
        return _from_torchrun(environ, "torchrun")
    return RankEnvironment(0, 0, 1, 1, 0, (), *_master(environ), "single")


# --- torchrun's names


def _from_torchrun(environ: Environ, launcher: Launcher) -> RankEnvironment:
    if missing := [name for name in ("RANK", "WORLD_SIZE") if name not in environ]:
        known = _shown(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or "none"
        raise LauncherEnvironmentError(
            f"launcher {launcher}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set (found: "
            f"{known}). Set RANK and WORLD_SIZE (and LOCAL_RANK, LOCAL_WORLD_SIZE) as torchrun does, or unset all of "
            "them for a single process"
        )
    rank, world_size = _number(environ, "RANK", launcher), _number(environ, "WORLD_SIZE", launcher)
    _check_below(environ, rank, "RANK", world_size, "WORLD_SIZE", launcher)
    local_rank, local_world_size = _local_place(environ, rank, world_size, launcher)
    node_rank = _node_rank(environ, rank, local_rank, world_size, local_world_size, launcher)
    place = (rank, local_rank, world_size, local_world_size, node_rank)
    return RankEnvironment(*place, (), *_master(environ), launcher)


def _local_place(environ: Environ, rank: int, world_size: int, launcher: Launcher) -> tuple[int, int]:
    """The local rank and the local world size, which custom launchers often do not set on a single node."""
    one_node = world_size == 1 or _is_loopback(environ.get("MASTER_ADDR"))
    if "LOCAL_WORLD_SIZE" in environ:
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE", launcher)
        one_node = one_node or local_world_size == world_size
    elif one_node:
        local_world_size = world_size
    else:
        _refuse_guess(environ, launcher, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "LOCAL_RANK" in environ:
        local_rank = _number(environ, "LOCAL_RANK", launcher)
    elif one_node:
        local_rank = rank
    else:
        _refuse_guess(environ, launcher, "LOCAL_RANK")
    size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "WORLD_SIZE"
    _check_below(environ, local_rank, "LOCAL_RANK", local_world_size, size_name, launcher)
    if local_world_size > world_size:
        _contradiction(
            environ, launcher, "there are more ranks on this node than in total", "LOCAL_WORLD_SIZE", "WORLD_SIZE"
        )
    if local_world_size == world_size and local_rank != rank:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        _contradiction(environ, launcher, "on a single node, rank and local rank must be equal", *names)
    return local_rank, local_world_size


def _node_rank(
    environ: Environ, rank: int, local_rank: int, world_size: int, local_world_size: int, launcher: Launcher
) -> int:
    if "GROUP_RANK" in environ:
        return _number(environ, "GROUP_RANK", launcher)
    if world_size % local_world_size or (rank - local_rank) % local_world_size:
        _refuse_guess(environ, launcher, "GROUP_RANK")
    return (rank - local_rank) // local_world_size


def _is_loopback(address: str | None) -> bool:
    return not address or address in ("localhost", "::1") or address.startswith("127.")


def _refuse_guess(environ: Environ, launcher: Launcher, *names: str) -> NoReturn:
    missing = " and ".join(name for name in names if name not in environ)
    known = _shown(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    raise LauncherEnvironmentError(
        f"launcher {launcher}: could not infer {missing} from {known}. Set {missing} as torchrun does"
    )


# --- Open MPI


_OPENMPI_NAMES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def _from_openmpi(environ: Environ) -> RankEnvironment:
    """mpirun does not set the address of rank 0's store. On one node, it is this host and a port from the job's id."""
    named = {name: environ[theirs] for name, theirs in _OPENMPI_NAMES.items() if theirs in environ}
    kept = {name: environ[name] for name in ("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT") if name in environ}
    found = _from_torchrun({**kept, **named}, "openmpi")
    if found.master_addr is None and found.world_size > found.local_world_size:
        raise LauncherEnvironmentError(
            f"launcher openmpi: the {found.world_size} ranks are on several nodes, but MASTER_ADDR is not set. "
            "Use mpirun -x MASTER_ADDR=HOST, with the name or address of rank 0's node"
        )
    job = environ.get("PMIX_NAMESPACE")
    if found.master_port is None and found.world_size > 1 and job is None:
        raise LauncherEnvironmentError(
            "launcher openmpi: neither PMIX_NAMESPACE nor MASTER_PORT is set. Use mpirun -x MASTER_PORT=NUMBER"
        )
    port = default_port(zlib.crc32((job or "").encode()), 0, 0) if found.master_port is None else found.master_port
    return dataclasses.replace(found, master_port=port)


# --- Slurm


def in_batch_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a job's batch step, the only shell outside srun with SLURM_PROCID.

    salloc's shell has none, or is an interactive step.
    """
    return "SLURM_PROCID" in environ and environ.get("SLURM_STEP_ID", "batch") in _BATCH_STEP


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process. The batch shell has SLURM_PROCID=0, too, but is not a rank."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    return "SLURM_PROCID" in environ and step is not None and step not in _PSEUDO_STEPS


def _from_slurm(environ: Environ) -> RankEnvironment:
    rank_name, local_name, node_name = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"
    size_name = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    nodes_name = _first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    tasks_name = _first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    hosts_name = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")

    rank, world_size = _number(environ, rank_name, "slurm"), _number(environ, size_name, "slurm")
    local_rank, node_rank = _number(environ, local_name, "slurm"), _number(environ, node_name, "slurm")
    nodes, counts = _number(environ, nodes_name, "slurm"), tasks_per_node(environ[tasks_name])
    hosts = expand(environ[hosts_name])

    _check_below(environ, rank, rank_name, world_size, size_name, "slurm")
    _check_below(environ, node_rank, node_name, nodes, nodes_name, "slurm")
    if len(hosts) != nodes:
        _contradiction(environ, "slurm", f"{len(hosts)} hosts for {nodes} nodes", hosts_name, nodes_name)
    if len(counts) != nodes or sum(counts) != world_size:
        _contradiction(
            environ,
            "slurm",
            "the tasks per node do not match the numbers of tasks and nodes",
            tasks_name,
            size_name,
            nodes_name,
        )
    if local_rank >= counts[node_rank]:
        _contradiction(environ, "slurm", "this node has no task with that number", local_name, node_name, tasks_name)
    torchruns = (environ.get("RANK"), environ.get("WORLD_SIZE"))
    if None not in torchruns and torchruns != (str(rank), str(world_size)):  # would merge two ranks, or isolate one
        raise LauncherEnvironmentError(
            f"launcher slurm: {_shown(environ, 'RANK', 'WORLD_SIZE')} contradict "
            f"{_shown(environ, rank_name, size_name)}. Unset RANK and WORLD_SIZE if srun starts the ranks, or set "
            f"{LAUNCHER}=torchrun if another launcher starts them inside the tasks"
        )

    master_addr, master_port = _master(environ)
    place = (rank, local_rank, world_size, counts[node_rank], node_rank)
    port = _step_port(environ) if master_port is None else master_port
    return RankEnvironment(*place, tuple(hosts), master_addr or hosts[0], port, "slurm")


def _first_set(environ: Environ, *names: str) -> str:
    """The first of ``names`` that is set: the step's variable, then the one that a job script also has."""
    for name in names:
        if name in environ:
            return name
    raise LauncherEnvironmentError(
        f"launcher slurm: none of {', '.join(names)} is set, though this is step {environ.get('SLURM_STEP_ID')} of job "
        f"{environ.get('SLURM_JOB_ID')}. Start the ranks with srun and do not change its variables"
    )


def _step_port(environ: Environ) -> int:
    job, step = _number(environ, "SLURM_JOB_ID", "slurm"), _first_set(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    # Slurm does not set SLURM_RESTART_COUNT at a job's first start.
    restart = _number(environ, "SLURM_RESTART_COUNT", "slurm") if "SLURM_RESTART_COUNT" in environ else 0
    return default_port(job, _number(environ, step, "slurm"), restart)


def default_port(job_id: int, step_id: int, restart: int) -> int:
    """A port for rank 0's store, 10000 to 29999, that all ranks of a step compute without communication.

    That is below Linux's ephemeral ports (32768 to 60999), which any process may hold by chance. Two steps of a job,
    two restarts and two neighbouring jobs get different ports. Below 198 steps and 101 restarts, a job repeats none.
    """
    return 10000 + (job_id * 7919 + step_id * 101 + restart) % 20000


# --- shared by both


def _master(environ: Environ) -> tuple[str | None, int | None]:
    """MASTER_ADDR and MASTER_PORT. An empty value counts as unset."""
    port = environ.get("MASTER_PORT")
    if port and not (re.fullmatch(r"[0-9]{1,5}", port) and int(port) < 65536):
        raise LauncherEnvironmentError(f"MASTER_PORT={port} is not a port. Expected a number from 0 to 65535")
    return environ.get("MASTER_ADDR") or None, int(port) if port else None


def _number(environ: Environ, name: str, launcher: Launcher) -> int:
    if name not in environ:
        raise LauncherEnvironmentError(
            f"launcher {launcher}: {name} is not set, but this launcher sets it for every rank"
        )
    if not re.fullmatch(r"[0-9]{1,18}", environ[name]):
        raise LauncherEnvironmentError(f"launcher {launcher}: {name}={environ[name]!r} is not a whole number")
    return int(environ[name])


def _check_below(environ: Environ, index: int, index_name: str, size: int, size_name: str, launcher: Launcher) -> None:
    if index >= size:
        _contradiction(environ, launcher, f"{index} is not below {size}", index_name, size_name)


def _contradiction(environ: Environ, launcher: Launcher, reason: str, *names: str) -> NoReturn:
    raise LauncherEnvironmentError(f"launcher {launcher}: {_shown(environ, *names)} contradict each other: {reason}")


def _shown(environ: Environ, *names: str) -> str:
    """``NAME=value`` of the names that are set."""
    return ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(names) if name in environ)


# --- processes that a rank starts inherit its variables

#: srun chooses it for each step.
_STEP_PORT = "SLURM_STEP_LAUNCHER_PORT"
#: The variables that make a process a rank, except Slurm's, which each step sets again.
_OF_A_RANK = (
    _STEP_PORT,
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMIX_NAMESPACE", "PMIX_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)


@dataclass(frozen=True)
class _RankProcess:
    """Which process a rank's variables are for: a value of RANK_PROCESS.

    ``step``: its job and step. ``values``: its ``_OF_A_RANK``. ``joined``: whether it has taken its place, so that no
    process that it starts can.
    """

    process: str
    step: str
    values: Mapping[str, str]
    joined: bool

    @classmethod
    def this(cls, environ: Environ, *, joined: bool) -> _RankProcess:
        values = {name: environ[name] for name in _OF_A_RANK if name in environ}
        return cls(this_process(), _step(environ), values, joined)

    @classmethod
    def inherited(cls, environ: Environ) -> _RankProcess | None:
        return cls(**json.loads(environ[RANK_PROCESS])) if RANK_PROCESS in environ else None


def _step(environ: Environ) -> str:
    return f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"


def mark(environ: MutableMapping[str, str], *, joined: bool = False) -> None:
    """Records that the variables of a rank are for this process, also after an ``exec`` in it."""
    environ[RANK_PROCESS] = json.dumps(dataclasses.asdict(_RankProcess.this(environ, joined=joined)))


def drop_inherited(environ: MutableMapping[str, str]) -> None:
    """Removes a rank's variables if that rank has another job or step: one in which it submitted or started this one.

    Variables that a launcher has set since are kept.
    """
    rank = _RankProcess.inherited(environ)
    if rank is None or rank.step == _step(environ):
        return
    if _STEP_PORT in rank.values and environ.get(_STEP_PORT) == rank.values[_STEP_PORT]:
        # The batch step of 22.05 sets neither these variables nor removes those that sbatch got from the rank's step.
        for name in [name for name in environ if re.match("SLURM_(STEP_|STEPID|SRUN_|LAUNCH_)", name)]:
            del environ[name]
    for name in FOR_RANKS:
        environ.pop(name, None)
    for inherited, value in rank.values.items():
        if environ.get(inherited) == value:
            del environ[inherited]


def check_is_rank(environ: Mapping[str, str]) -> None:
    """Raises LauncherEnvironmentError if the rank's variables are those of the process that started this one.

    A launcher in a rank's script may start ranks before the rank itself has joined the others, or set other variables.
    """
    rank, this = _RankProcess.inherited(environ), _RankProcess.this(environ, joined=True)
    if rank is not None and rank.joined and rank.process != this.process and rank.values == this.values:
        raise LauncherEnvironmentError(
            f"process {os.getpid()} was started by rank {environ.get('RANK', environ.get('SLURM_PROCID'))} "
            f"and has its variables, but it is not a rank. Evaluate in the rank "
            "itself (ctx.eval_loader), or submit this script as a separate job"
        )
