"""``clusterddp submit``, also ``python -m clusterddp.submit``: from a script or a job definition to a run.

It answers at once and imports no torch: login nodes are shared. Everything is checked before anything is written.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from clusterddp import job_file as jobs
from clusterddp.environment import in_batch_step, in_step, scrub
from clusterddp.errors import RunDirectoryError, SlurmError, UsageError
from clusterddp.hostlist import tasks_per_node
from clusterddp.job import Job
from clusterddp.launch.fork import Fork
from clusterddp.launch.narration import at_step
from clusterddp.masking import secrets_file, without_secrets
from clusterddp.rundir import RunDirectory, make_folder, remove, write_atomically, write_json
from clusterddp.trust import check_run

#: Adds something to a run directory that is about to be recorded.
Plant = Callable[[RunDirectory], None]

PACKAGED_JOB = Path(__file__).parent / "digits" / "digits.yaml"
PACKAGED_JOB_TIME = "10"
BENCHMARKS = Path(__file__).parent / "bench"

#: Options that are job definition keys under sbatch's or torchrun's names: flags, key, help.
JOB_OPTIONS = (
    (("--nodes", "-N"), "nodes", "nodes, or a range such as 2-4 (1)"),
    (("--gpus", "--gpus-per-node"), "gpus_per_node", "GPUs, and so ranks, per node; TYPE:G too (1)"),
    (("--device",), "device", "cuda (NCCL, one GPU per rank) or cpu (gloo) (cuda)"),
    (("--account", "-A"), "account", "as in sbatch"),
    (("--partition", "-p"), "partition", "as in sbatch"),
    (("--qos", "-q"), "qos", "as in sbatch"),
    (("--time", "-t"), "time", "as in sbatch"),
    (("--job-name", "-J"), "job_name", "as in sbatch; names the run directory too"),
    (("--constraint", "-C"), "constraint", "as in sbatch"),
    (("--nodelist", "-w"), "nodelist", "as in sbatch"),
    (("--exclude", "-x"), "exclude", "as in sbatch"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``submit``. What follows ``--`` goes to the script."""
    parser.add_argument("target", nargs="?", metavar="SCRIPT.py | JOB.yaml", help="what to run")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    for flags, key, text in JOB_OPTIONS:
        parser.add_argument(*flags, dest=key, help=text)
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="any job definition key")
    parser.add_argument("--sbatch", action="append", default=[], metavar="KEY=VALUE", help="any other sbatch option")
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder; the same one again continues the run")
    parser.add_argument("--fork", metavar="RUN[@STEP]", help="begin a new run with another's checkpoint")
    parser.add_argument("--change", action="store_true", help="continue a run with other arguments than recorded")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, submit and write nothing")
    parser.add_argument("--wait", action="store_true", help="wait until the run is over, whatever its jobs do")
    parser.add_argument("-f", "--follow", action="store_true", help="wait, and show rank 0's output")
    parser.add_argument(
        "--here", action="store_true", help="run in the allocation that this shell is in (salloc, sbatch scripts)"
    )
    local = parser.add_argument_group("without Slurm")
    local.add_argument("--local", action="store_true", help="the same ranks as processes of this machine")
    local.add_argument(
        "--preempt-after", action="append", default=[], metavar="S",
        help="preempt the run once S steps are done (or Ss, seconds after the attempt's start); repeatable",
    )  # fmt: skip
    local.add_argument(
        "--debug", nargs="?", type=int, const=0, metavar="RANK", help="give a rank (0) the terminal, for breakpoint()"
    )


def submit(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Carries out ``submit``; ``script_arguments`` is None when there was no ``--``. Returns the exit code."""
    check_combinations(arguments)
    if not arguments.here:
        for name in set(os.environ) - set(scrub(os.environ)):
            del os.environ[name]  # what the surrounding job set does not belong to the new one
    job = job_or_code(arguments, resolve_job(arguments, script_arguments), script_arguments)
    if isinstance(job, int):
        return job
    if arguments.here:
        return submit_here(arguments, job)
    if arguments.local:
        return submit_local(arguments, job)
    return submit_slurm(arguments, job)


def job_or_code(arguments: argparse.Namespace, given: Job | None, script_arguments: Sequence[str] | None) -> Job | int:
    """The job to start or continue, or the exit code where the run in ``--run-dir`` is over."""
    if arguments.run_dir:
        check_folder(arguments.run_dir)
    continued = continue_run(arguments, given, script_arguments) if arguments.run_dir else None
    if isinstance(continued, int):
        return continued
    job = continued or given
    if job is None:
        raise RunDirectoryError(f"{arguments.run_dir} holds no run yet: name a script or a job definition to start one")
    check_nodes_fixed(arguments, job)
    check_tasks_are_ranks(arguments, job)
    say(f"{job.name}: {job.shape}")
    return job


def check_folder(path: str) -> None:
    """A name that a folder can have, and that stays on its line in a batch script."""
    if not path.isprintable():
        raise UsageError(f"--run-dir {path!r}: line breaks and control characters are not allowed in it")
    try:
        Path(path).stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"--run-dir {path[:200]}: {error.strerror}") from error


def bench(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Submits a packaged benchmark, and shows what it prints. Returns the exit code."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.yaml"))
    if arguments.target not in names:
        raise UsageError(f"bench {arguments.target or '(nothing)'}: expected {' or '.join(names)}")
    arguments.target = str(BENCHMARKS / f"{arguments.target}.yaml")
    arguments.follow = not (arguments.local or arguments.here or arguments.dry_run)
    return submit(arguments, script_arguments)


def check_combinations(arguments: argparse.Namespace) -> None:
    """Options that contradict each other."""
    if arguments.target and arguments.module:
        raise UsageError(f"both a target ({arguments.target}) and -m {arguments.module} were given: expected one")
    if not arguments.local and (arguments.preempt_after or arguments.debug is not None):
        raise UsageError("--preempt-after and --debug need --local: on a cluster, Slurm preempts")
    if arguments.here and (arguments.local or arguments.dry_run or arguments.wait or arguments.follow):
        raise UsageError("--here runs in this allocation and waits: expected without --local, --dry-run, --wait and -f")
    if arguments.fork and (arguments.here or arguments.change):
        raise UsageError(
            "--fork begins a new run, with whatever arguments are given: expected without --here, --change"
        )
    if arguments.fork and arguments.run_dir and RunDirectory(arguments.run_dir).exists():
        raise UsageError(f"{arguments.run_dir} holds a run already: --fork needs another --run-dir, or none")
    if arguments.local and (arguments.sbatch or arguments.dry_run):
        raise UsageError("--sbatch and --dry-run are about a batch job: expected without --local")


def check_nodes_fixed(arguments: argparse.Namespace, job: Job) -> None:
    """Only Slurm can choose from a range of nodes."""
    if job.min_nodes is not None and (arguments.local or arguments.here):
        where = "--local" if arguments.local else "--here"
        raise UsageError(
            f"nodes {job.nodes_text} is a range for Slurm to choose from: with {where} give one number, "
            f"such as --nodes {job.nodes} (and --change, if the run has begun)"
        )


def check_tasks_are_ranks(arguments: argparse.Namespace, job: Job) -> None:
    """An allocation's tasks are its ranks, however many GPUs each has."""
    if arguments.here and job.gpus_per_rank > 1:
        raise UsageError(
            f"gpus_per_rank {job.gpus_per_rank} with --here: there is a rank for each of the allocation's tasks. "
            "Leave it out (--set gpus_per_rank=1), and ask for more GPUs than tasks in the sbatch script"
        )


def resolve_job(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> Job | None:
    """The job definition that the command line describes; None when it only names a run directory that exists."""
    values = option_values(arguments, script_arguments)
    target = arguments.target
    if target is None and arguments.module is None and arguments.fork:
        job_file = Fork.parse(arguments.fork).run.job_file
        return jobs.load(job_file, set_values(arguments), values=values)
    if target is None and arguments.module is None:
        if arguments.run_dir and RunDirectory(arguments.run_dir).exists():
            return None
        target = default_target(values)
    values |= {"module": arguments.module} if arguments.module else {}
    return describe(target, values, set_values(arguments))


def describe(target: str | None, values: dict[str, Any], overrides: Mapping[str, str]) -> Job:
    """The job definition of a script, a YAML file, or of ``values`` alone, above the user's defaults."""
    defaults = jobs.user_defaults(cluster_name(os.environ))
    if target and Path(target).suffix in (".yaml", ".yml"):
        return jobs.load(target, overrides, values=values, defaults=defaults)
    values |= {"script": target} if target else {}
    return jobs.from_values(values, folder=Path.cwd(), overrides=overrides, defaults=defaults)


def cluster_name(environ: Mapping[str, str]) -> str | None:
    """The cluster that a submission goes to: SLURM_CLUSTERS, else ClusterName in slurm.conf where it can be read."""
    if "SLURM_CLUSTERS" in environ:
        return environ["SLURM_CLUSTERS"]
    try:
        text = Path(environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).read_text()
    except OSError:
        return None
    named = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return named[1] if named else None


def option_values(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> dict[str, Any]:
    """What the options say, by job definition key."""
    named = {key: getattr(arguments, key) for _, key, _ in JOB_OPTIONS}
    values: dict[str, Any] = allocation_shape(os.environ) if arguments.here else {}
    values |= {key: value for key, value in named.items() if value is not None}
    if script_arguments is not None:
        values["args"] = list(script_arguments)
    return values


def allocation_shape(environ: Mapping[str, str]) -> dict[str, Any]:
    """The nodes and tasks per node of the allocation around, for ``--here``."""
    if "SLURM_JOB_ID" not in environ:
        raise UsageError(
            "--here: this shell is in no allocation (SLURM_JOB_ID is not set): expected one of "
            "`salloc --nodes=2 --ntasks-per-node=8 --gpus-per-node=8`, or an sbatch script such as slurm/train.sbatch; "
            "without --here, submit asks Slurm for the nodes by itself"
        )
    if in_step(environ):
        raise UsageError(
            f"--here: this shell is itself a task of job {environ['SLURM_JOB_ID']} (srun --pty?) and holds what the "
            "ranks would need: expected the shell of salloc, or an sbatch script"
        )
    nodes, counts = environ.get("SLURM_JOB_NUM_NODES", ""), set(tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "")))
    tasks = environ.get("SLURM_NTASKS_PER_NODE") or (str(*counts) if len(counts) == 1 else "")
    if not (nodes and tasks):
        given = {name: environ.get(name) for name in ("SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE")}
        raise UsageError(
            f"--here: {given} give no number of ranks that is the same on every node: expected an allocation with "
            "--nodes and --ntasks-per-node, as slurm/train.sbatch has"
        )
    return {"nodes": int(nodes), "gpus_per_node": int(tasks)}


def set_values(arguments: argparse.Namespace) -> dict[str, str]:
    """What ``--set`` and ``--sbatch`` say, by dotted key."""
    values = dict(_split(pair, "--set") for pair in arguments.set)
    values |= {f"sbatch.{key}": value for key, value in (_split(pair, "--sbatch") for pair in arguments.sbatch)}
    return values


def _split(pair: str, option: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"{option} {pair}: expected KEY=VALUE")
    return key, value


def default_target(values: dict[str, Any]) -> str:
    """What runs when nothing is named: ./clusterddp.yaml, else the packaged digits job, for ten minutes at most."""
    if Path("clusterddp.yaml").exists():
        say("nothing named: taking ./clusterddp.yaml")
        return "clusterddp.yaml"
    values.setdefault("time", PACKAGED_JOB_TIME)
    values.setdefault("device", "cuda")
    say("nothing named and no ./clusterddp.yaml here: taking the packaged digits job, limited to ten minutes")
    return str(PACKAGED_JOB)


def continue_run(
    arguments: argparse.Namespace, given: Job | None, script_arguments: Sequence[str] | None
) -> Job | int | None:
    """The job to continue the run in ``--run-dir`` with, or an exit code when it is over; None when there is no run.

    The recorded job counts. Other arguments are an error that lists them, unless ``--change`` records them.
    """
    run = RunDirectory(arguments.run_dir)
    if not run.exists():
        if run.path.exists() and any(run.path.iterdir()):
            raise RunDirectoryError(f"{run} is not empty and holds no run (no job.yaml): name another --run-dir")
        return None
    check_run(run)
    recorded = jobs.load_resolved(run.job_file)
    if given is None:
        values = option_values(arguments, script_arguments)
        given = jobs.load(run.job_file, set_values(arguments), values=values)
    differences = recorded.differences(given)
    if differences and not arguments.change:
        raise RunDirectoryError(
            f"{run} was started with other arguments: {'; '.join(differences)}. "
            "Leave them as recorded, add --change to record and use the new ones, or name another --run-dir"
        )
    code = check_over(run, bool(differences))
    return given if code is None else code


def check_over(run: RunDirectory, changing: bool) -> int | None:
    """None when the run may go on. A failed run may, and so may a completed one whose arguments change."""
    outcome = run.outcome()
    if outcome is None or outcome["state"] == "failed" or (outcome["state"] == "completed" and changing):
        return None
    if outcome["state"] == "completed":
        say(f"{run} completed{at_step(outcome['step'])} already: nothing to do. --change --set ... extends it")
        return 0
    raise RunDirectoryError(f"{run} was cancelled{at_step(outcome['step'])}: it never runs again. Start another run")


@contextmanager
def recorded(run: RunDirectory, job: Job, created: bool, plant: Plant = lambda _: None) -> Iterator[None]:
    """Records the job in the run directory; undone when Slurm refuses it in the body, so that nothing is half-written.

    ``created``: whether this process made the folder, which is then its to remove. ``plant`` adds what belongs to the
    run besides. An outcome that the run goes on after (a failure, or an extended completion) is history from here on.
    Whatever else goes wrong in the body, the job may be there, and nothing is undone.
    """
    files = (secrets_file(run.job_file), run.job_file, run.batch_script, run.outcome_file)
    before = {path: path.read_bytes() for path in files if path.exists()}
    run.create(share=job.share)
    shown, secrets = without_secrets(job)
    try:
        plant(run)
    except BaseException:
        if created:  # a fork without its checkpoint would begin at step 0
            shutil.rmtree(run.path)
        raise
    write_json(secrets_file(run.job_file), secrets)
    write_atomically(run.job_file, shown.to_yaml())
    remove(run.outcome_file)
    try:
        yield
    except SlurmError:
        if created:
            shutil.rmtree(run.path)
            raise
        for path in files:
            path.unlink(missing_ok=True)
        for path, content in before.items():
            write_atomically(path, content)
        raise


def fork_of(arguments: argparse.Namespace) -> Plant:
    """Plants the checkpoint that ``--fork`` names, if it is given."""
    return lambda run: say(Fork.parse(arguments.fork).plant(run)) if arguments.fork else None


def choose_run_directory(arguments: argparse.Namespace, job: Job) -> RunDirectory:
    """``--run-dir``, else NAME-N under $CLUSTERDDP_RUNS or ./runs, with the first N that is free."""
    if arguments.run_dir:
        return RunDirectory(arguments.run_dir)
    parent = Path(os.environ.get("CLUSTERDDP_RUNS", "runs"))
    return RunDirectory(next(path for n in count() if not (path := parent / f"{job.name}-{n}").exists()))


def claim(arguments: argparse.Namespace, job: Job) -> tuple[RunDirectory, bool]:
    """The run directory, and whether this process made its folder just now; nobody else can have."""
    while True:
        run = choose_run_directory(arguments, job)
        try:
            make_folder(run.path, exist_ok=False)
            return run, True
        except FileExistsError:
            if arguments.run_dir:
                return run, False
        except OSError as error:
            raise UsageError(f"cannot make {run} ({error.strerror}): name another folder with --run-dir") from error


def check_not_held(run: RunDirectory) -> None:
    """A run has one job at a time."""
    from clusterddp.launch.holder import held_by_other

    held = held_by_other(run)
    if held:
        raise RunDirectoryError(f"{run} is {held}: wait for it, or `clusterddp cancel {run}`")


def record_local(arguments: argparse.Namespace, job: Job, plant: Plant) -> RunDirectory:
    """Records a job that is to run here."""
    run, created = claim(arguments, job)
    check_not_held(run)
    with recorded(run, job, created, plant):
        say(f"run directory: {run}")
    return run


def submit_local(arguments: argparse.Namespace, job: Job) -> int:
    """Runs the job here, and waits."""
    from clusterddp.launch import holder
    from clusterddp.launch.local import INTERRUPTED, LocalRun, Moment
    from clusterddp.launch.progress import Progress

    moments = [Moment.parse(text) for text in arguments.preempt_after]
    run = record_local(arguments, job, fork_of(arguments))
    write_json(run.loop_file, holder.of_this_process(), mode=0o600)
    with Progress(run, job.steps, bar=arguments.debug is None) as progress:
        code = LocalRun(run, job, moments, arguments.debug).loop(progress)
    if code == INTERRUPTED:
        say(f"stopped; continue with: clusterddp submit --local --run-dir {run}")
    return code


def submit_here(arguments: argparse.Namespace, job: Job) -> int:
    """Runs the job in the allocation around; the same run directory continues the run.

    In a batch step, as the supervisor, in this very process. In salloc's shell it shows progress, and waits.
    """
    from clusterddp.launch import plan
    from clusterddp.launch.allocated import AllocatedRun
    from clusterddp.launch.batch import RunExecutor
    from clusterddp.launch.local import INTERRUPTED
    from clusterddp.launch.progress import Progress
    from clusterddp.launch.supervisor import supervise_slurm

    run, created = claim(arguments, job)
    if not run.exists() or arguments.change:
        with recorded(run, job, created):
            script = RunExecutor(plan.as_allocated(job, os.environ), run, Path.cwd()).script()
            write_atomically(run.batch_script, script)
    if in_batch_step(os.environ):
        return supervise_slurm(str(run))
    say(f"run directory: {run}")
    with Progress(run, job.steps) as progress:
        code = AllocatedRun(run, job).loop(progress)
    if code == INTERRUPTED:
        say(f"stopped; continue with: clusterddp submit --here --run-dir {run}, or sbatch {run.batch_script}")
    return code


def submit_slurm(arguments: argparse.Namespace, job: Job) -> int:
    """Checks the request against the cluster, submits, and waits when asked to."""
    from clusterddp.launch.batch import RunExecutor
    from clusterddp.launch.watching import watch

    fitted = fit(job, required=not arguments.dry_run)
    if arguments.dry_run:
        print(RunExecutor(fitted, choose_run_directory(arguments, job), Path.cwd()).script())
        return 0
    run, job_id = submit_fitted(arguments, fitted, job, fork_of(arguments))
    if not sys.stdout.isatty():
        print(job_id, flush=True)
    say(f"submitted as job {job_id}; run directory: {run}\nlook with: clusterddp status {run}")
    if arguments.wait or arguments.follow:
        return watch([run], follow=arguments.follow)
    return 0


def fit(job: Job, required: bool) -> Job:
    """The job as the cluster can run it; see ``plan.fit_to_cluster``."""
    from clusterddp.launch import plan

    said = plan.check_micro(job)
    fitted, remarks = plan.fit_to_cluster(job, required=required)
    for remark in [*said, *remarks]:
        say(remark)
    return fitted


def submit_fitted(arguments: argparse.Namespace, fitted: Job, job: Job, plant: Plant) -> tuple[RunDirectory, str]:
    """Records ``job`` and submits it, as ``fitted`` to the cluster; returns the run and the job id."""
    from clusterddp.launch.batch import RunExecutor
    from clusterddp.launch.holder import submitted

    run, created = claim(arguments, job)
    check_not_held(run)
    with uninterrupted(), recorded(run, job, created, plant):
        job_id = RunExecutor(fitted, run, Path.cwd()).submit_run()
        submitted(run, job_id)
        run.loop_file.unlink(missing_ok=True)
    return run, job_id


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the body is done: between sbatch's answer and our record of it, nobody would know the job."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def say(text: str) -> None:
    """Talk goes to standard error."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    from clusterddp.__main__ import main

    main(["submit", *sys.argv[1:]])
