"""Submits members of a sweep as Slurm job arrays.

Members that request the same resources share an array, as far as MaxArraySize and the user's submit limit allow.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from clusterddp.cli.recording import claim, recorded
from clusterddp.cli.submission import checkout_for, fit_to_cluster, warn_of_unseen
from clusterddp.cli.sweeps.plan import Plan, Sweep
from clusterddp.errors import RunDirectoryError, SlurmError, SlurmMissing, SlurmUnavailable
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.job import Job
from clusterddp.process import signals_blocked
from clusterddp.reporter import show
from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.arrays import jobs_by_script, largest_array, smaller_may_pass
from clusterddp.slurm.batch import array_script, batch_script
from clusterddp.supervisor import lease
from clusterddp.sweeps.folder import Array, SweepFolder

#: Threads that write members: each of their files is synced, which takes milliseconds on a shared disk.
_WRITERS = 16


@dataclass
class Submitted:
    """What Slurm has accepted: the ids of the arrays, and the members. ``refused``: why it took no more."""

    job_ids: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    refused: SlurmError | None = None


def settle(folder: SweepFolder) -> None:
    """Completes what a command that was killed left: an array that Slurm has is recorded, any other one is removed.

    SlurmUnavailable while that is unknown: nothing is to be submitted then.
    """
    left = folder.unfinished_arrays()
    jobs = slurm.patiently(jobs_by_script) if left else {}
    for array in left:
        if job_id := jobs.get(str(array.script)):
            show(f"job {job_id} of {folder} had been submitted, but was not recorded")
            _record(folder, array, job_id)
        else:
            array.remove()


def groups(sweep: Sweep, names: Sequence[str]) -> Iterator[dict[str, Job]]:
    """The members that can share an array: nothing but the run directory differs in their batch scripts."""
    found: dict[str, dict[str, Job]] = {}
    for name in names:
        text = array_script(sweep.jobs[name], sweep.folder.arrays / "0", 1, None, Path.cwd())
        found.setdefault(text, {})[name] = sweep.jobs[name]
    yield from found.values()


def fitted(group: Mapping[str, Job], required: bool = True) -> dict[str, Job]:
    """The same members with the CPUs and the memory that they request of the cluster, which is asked once."""
    fit = fit_to_cluster(next(iter(group.values())), required)
    return {name: replace(job, cpus_per_task=fit.cpus_per_task, mem=fit.mem) for name, job in group.items()}


def submit(sweep: Sweep, plan: Plan) -> Submitted:
    """Submits the members that the plan names; SlurmError if Slurm accepts none of them."""
    done = Submitted()
    if not plan.submit:
        return done
    most = largest_array()
    ready = [fitted(group) for group in groups(sweep, plan.submit)]  # all checks before anything is written
    warn_of_unseen(RunDirectory(sweep.folder.path))
    checkout = checkout_for(sweep.job, str(sweep.folder), batch=True, source=sweep.source)
    if text := code_snapshot.renew(RunDirectory(sweep.folder.path), checkout):
        show(text)
    for group in ready:
        _submit_group(sweep, group, most, len(plan.submit), done)
        if done.refused:
            break
    if done.refused and not done.members:
        raise done.refused
    return done


def _submit_group(sweep: Sweep, group: Mapping[str, Job], most: int, total: int, done: Submitted) -> None:
    """Submits members in arrays of equal size; halves it when the user's submit limit is reached."""
    left = list(group)
    size = array_size(len(left), most)
    while left:
        chunk = {name: group[name] for name in left[:size]}
        running = share(sweep.max_running, len(done.members), len(chunk), total)
        try:
            job_id = _submit_array(sweep, chunk, running)
        except SlurmError as error:
            if size > 1 and smaller_may_pass(error):
                size = min(size, len(left)) // 2
                continue
            done.refused = error
            return
        done.job_ids.append(job_id)
        done.members += chunk
        left = left[size:]


def array_size(members: int, most: int) -> int:
    """How many members each array gets: as few arrays as possible, of equal size."""
    return math.ceil(members / math.ceil(members / most))


def share(most: int | None, before: int, size: int, total: int) -> int | None:
    """How many of ``size`` members, of ``total`` in all arrays, may run at a time so that ``most`` do in all."""
    if most is None:
        return None
    return max(1, most * (before + size) // total - most * before // total)


def _submit_array(sweep: Sweep, jobs: Mapping[str, Job], running: int | None) -> str:
    """Records the members and submits them as one array; if Slurm refuses it, all is as before."""
    folder, names = sweep.folder, list(jobs)
    with ExitStack() as stack:
        with ThreadPoolExecutor(_WRITERS) as pool:
            for member in pool.map(partial(_member, sweep), jobs.items()):
                stack.push(member)
        array = folder.next_array()
        script = array_script(jobs[names[0]], array.path, len(names), running, Path.cwd())
        # On Ctrl-C between sbatch's answer and our record of it, the next command would have to ask for the job id.
        stack.enter_context(signals_blocked(signal.SIGINT))
        folder.prepare(array, names, script)
        job_id = _sbatch(array)
        _record(folder, array, job_id)
    return job_id


def _member(sweep: Sweep, named: tuple[str, Job]) -> AbstractContextManager[None]:
    """Records a member; the context, which is entered, restores its run directory if Slurm refuses the array."""
    name, job = named
    run, created = claim(str(sweep.folder.member(name)), sweep.jobs[name])
    context = recorded(run, sweep.jobs[name], created, partial(_plant, sweep))
    context.__enter__()
    write_atomically(run.batch_script, batch_script(job, run, Path.cwd()))
    return context


def _plant(sweep: Sweep, run: RunDirectory) -> None:
    """What is in a member's run directory beside the job: the code, of which all members share a copy, and more."""
    run.unmark_cancelled()
    if plant := sweep.plants.get(run.path.name):
        plant(run)
    code_snapshot.share(run, RunDirectory(sweep.folder.path))


def _sbatch(array: Array) -> str:
    try:
        return slurm.submit(array.script, timeout_s=None)
    except SlurmMissing:
        array.remove()
        raise
    except SlurmUnavailable as error:  # it may have the job, and what the job needs must stay
        again = "run the same command again, which asks Slurm first"
        raise RunDirectoryError(f"Slurm may or may not have accepted {array.script}: {error}; {again}") from error
    except SlurmError:
        array.remove()
        raise


def _record(folder: SweepFolder, array: Array, job_id: str) -> None:
    """Records who holds each member, and that the array is submitted."""
    names = array.members()
    with ThreadPoolExecutor(_WRITERS) as pool:
        tasks = (f"{job_id}_{task}" for task in range(len(names)))
        list(pool.map(_hold, map(folder.member, names), tasks))
    array.submitted(job_id)


def _hold(run: RunDirectory, task_id: str) -> None:
    if not lease.started(run, task_id):  # else it may have handed the run over to another job already
        lease.submitted(run, task_id)
    run.loop_file.unlink(missing_ok=True)


def scripts(sweep: Sweep, plan: Plan) -> Iterator[str]:
    """The batch scripts that would be submitted; without a Slurm that answers, nothing is checked."""
    most = len(plan.submit)
    with suppress(SlurmUnavailable):
        most = largest_array()
    done, number = 0, int(sweep.folder.next_array().path.name)
    for group in groups(sweep, plan.submit):
        ready = fitted(group, required=False)
        names, size = list(ready), array_size(len(ready), most)
        for first in range(0, len(names), size):
            chunk = names[first : first + size]
            running = share(sweep.max_running, done, len(chunk), len(plan.submit))
            path = sweep.folder.arrays / str(number)
            yield array_script(ready[chunk[0]], path, len(chunk), running, Path.cwd())
            done, number = done + len(chunk), number + 1
