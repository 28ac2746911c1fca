"""The settings of this process from its launcher and its job definition, read once into a frozen value."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp import environment, protocol
from clusterddp.distributed.process_group import AttemptStore, StoreAddress
from clusterddp.history.beginnings import NotUsed
from clusterddp.history.event import Reported
from clusterddp.jobdef.job import Checkpointing, Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.messages.reports import report_line
from clusterddp.reporter import say
from clusterddp.rundir.files import append_line, hold
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.rank_process import RankProcess

_NOTICES = {
    "signal TERM": protocol.TERM_NOTICE_S,
    "preemption": protocol.TERM_NOTICE_S,
    "end of the job": protocol.TERM_NOTICE_S,
    "signal USR2": protocol.USR2_NOTICE_S,
    "time limit": protocol.USR2_NOTICE_S,
}


@dataclass(frozen=True)
class Settings:
    """``attempt`` is None without a supervisor. ``run_dir`` is None if there is nowhere to save.

    ``job``: without a supervisor it has the defaults, and no watchdog.
    ``preflight``: whether the nodes are checked before training.
    ``seed``: of the job definition, else of the script, else 0.
    ``unused``: the arguments of ``init()`` that have no effect.
    ``device_memory``: bytes that an earlier attempt used on each GPU, if known.
    ``notices``: for each reason for a stop, the seconds until this process is killed, if known.
    """

    ranks: environment.RankEnvironment
    run_dir: RunDirectory | None
    attempt: int | None
    device: str | None
    backend: str | None
    job: Job
    seed: int
    store: StoreAddress
    notices: Mapping[str, float]
    preflight: bool = False
    device_memory: int | None = None
    unused: Sequence[NotUsed] = ()


def read(
    environ: Mapping[str, str],
    *,
    seed: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    checkpoint: Checkpointing | None = None,
) -> Settings:
    """The settings of this process. What a job definition sets takes precedence over the script's arguments."""
    ranks = environment.read(environ)
    supervised = environ.get(protocol.RUN_DIR)
    path = supervised or run_dir
    directory = RunDirectory(path) if path else None
    if directory and supervised:
        job = load_resolved(directory.job_file)
    else:
        job = Job("script", checkpoint=checkpoint or Checkpointing(), watchdog=None)
    of_job = environ.get(protocol.DEVICE)
    arguments: list[tuple[str, str | int | None, str | int | None]] = [
        ("seed", seed, job.seed),
        ("backend", backend, job.backend),
        ("device", device, of_job if of_job != (device or "").partition(":")[0] else None),
        ("checkpoint", str(checkpoint) if checkpoint else None, str(job.checkpoint) if supervised else None),
    ]
    if protocol.DEBUG_RANK in environ:
        job = job.debugged()
    if environ.get(protocol.WATCHDOG) == "off":
        job = replace(job, watchdog=None)
    return Settings(
        ranks=ranks,
        run_dir=directory,
        attempt=int(environ[protocol.ATTEMPT]) if supervised else None,
        device=of_job or device,
        backend=job.backend or backend,
        job=job,
        seed=job.seed if job.seed is not None else seed or 0,
        store=store_address(environ, ranks),
        preflight=environ.get(protocol.PREFLIGHT) == "on",
        device_memory=int(environ[protocol.DEVICE_MEMORY]) if protocol.DEVICE_MEMORY in environ else None,
        unused=[
            NotUsed(what=f"init({name}=...)", given=given, used=used, because="The job definition says")
            for name, given, used in arguments
            if given is not None and used is not None and given != used
        ],
        notices={name: float(environ[variable]) for name, variable in _NOTICES.items() if variable in environ},
    )


def of_rank(process: RankProcess) -> Settings:
    """The settings that this rank was started with, even if the script has overwritten environment variables since."""
    return read({**os.environ, **process.variables})


def store_address(environ: Mapping[str, str], ranks: environment.RankEnvironment) -> StoreAddress:
    """Where the attempt's store is, and what identifies it."""
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    names = (
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE"),
    )
    token = environ.get(protocol.TOKEN) or "/".join(environ.get(name, "") for name in names)
    return StoreAddress(ranks.master_addr or "127.0.0.1", ranks.master_port or 0, token, agent, _owner(environ))


def _owner(environ: Mapping[str, str]) -> str:
    """A description of the store's owner that any user of the node may read."""
    if protocol.ATTEMPT in environ:
        return f"attempt {environ[protocol.ATTEMPT]} of run {Path(environ[protocol.RUN_DIR]).name}"
    return f"job {environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environ else f"a run of user {os.geteuid()}"


class AttemptHistory:
    """Collective. ``number`` comes from the supervisor, or is claimed by rank 0 if there is none."""

    def __init__(self, process: RankProcess, settings: Settings, store: AttemptStore) -> None:
        self._process = process
        self._directory, self._rank = settings.run_dir, store.rank
        #: In a forked child: the run belongs to the parent.
        self.closed = False
        self.number = settings.attempt or 0
        if settings.attempt is None and self._directory is not None:
            if store.rank == 0:
                self._directory.create()
                hold(self._directory.path)
                store.store.set("attempt", str(self._directory.create_attempt()))
            self.number = int(store.store.get("attempt"))

    def report(self, event: Reported) -> None:
        """Adds an event: through the supervisor, or by rank 0 if there is none."""
        if self.closed:
            return
        self._process.report(event)
        if not self._process.supervised and self._rank == 0 and self._directory is not None:
            line = {"time": time.time(), "attempt": self.number, **report_line(event)}
            try:
                append_line(self._directory.events_file, line)
            except OSError as error:
                say(f"could not add {event.name!r} to the history: {error.strerror}")
