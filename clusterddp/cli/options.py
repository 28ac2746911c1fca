"""The options of ``clusterddp submit``, and the job definition that they describe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.environment import in_step
from clusterddp.errors import RunDirectoryError, UsageError
from clusterddp.hostlist import tasks_per_node
from clusterddp.jobdef import load as jobs
from clusterddp.jobdef.configuration_paths import find_configuration_files
from clusterddp.jobdef.job import KEYS, Job
from clusterddp.jobdef.kinds import Sbatch
from clusterddp.keys.table import Option
from clusterddp.reporter import show
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.run_directory import RunDirectory, as_typed, open_run
from clusterddp.runs import recording
from clusterddp.runs.submission import describe
from clusterddp.runs.sweep_members import Definition, is_sweep, read_definition

PACKAGED_JOB = Path(__file__).parents[1] / "digits" / "digits.yaml"
#: Keys of a job definition that ``submit`` has an option for.
JOB_OPTIONS: dict[str, Option] = {key: option for key, entry in KEYS.items() if (option := entry.mark(Option))}

#: Those that say which nodes a job needs, and how Slurm queues it.
OF_NODES = {"nodes", "spare_nodes", "gpus_per_node", "device", "constraint", "exclude", "nodelist", "mem"}
OF_NODES |= {"cpus_per_task", "node_memory"}
OF_QUEUE = {"time", "partition", "account", "qos"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``submit``. What follows ``--`` goes to the script."""
    parser.add_argument(
        "target", nargs="?", metavar="SCRIPT.py | JOB.yaml | SWEEP.yaml",
        help="what to run (default: ./clusterddp.yaml, else the bundled digits example)",
    )  # fmt: skip
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, like python -m")
    add_job_arguments(parser)
    run = parser.add_argument_group("which run")
    run.add_argument(
        "--run-dir", metavar="DIR",
        help="the run directory. An existing one continues its run (default: a new one, $CLUSTERDDP_RUNS/NAME-N or "
        "./runs/NAME-N)",
    )  # fmt: skip
    run.add_argument(
        "--change", action="store_true", help="continue a run with arguments that differ from the recorded ones"
    )
    run.add_argument(
        "--fork",
        metavar="RUN[@STEP]",
        help="start a new run from a checkpoint of another run, or with @best from its best one",
    )
    run.add_argument(
        "--take-over", action="store_true",
        help="continue a run whose last job or process ended on a machine or cluster that is unreachable from here",
    )  # fmt: skip
    sweep = parser.add_argument_group("many runs")
    sweep.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=V1,V2|KEY=0..4",
        help="start a run for each value of a key of the job definition or of an argument of the script. Repeat it to "
        "start a run for each combination. --run-dir then names the parent folder, as with SWEEP.yaml (default: "
        "$CLUSTERDDP_RUNS or ./runs, and there NAME-by-KEYS, or the name of the file)",
    )  # fmt: skip
    sweep.add_argument(
        "--max-running", type=int, metavar="N", help="maximum number of members of a sweep that run at a time"
    )
    sweep.add_argument(
        "--retry", action="append", default=[], choices=("failed", "cancelled"),
        help="also submit the members of a sweep that failed, or that were cancelled (repeatable)",
    )  # fmt: skip
    submission = parser.add_argument_group("print, wait or follow")
    submission.add_argument(
        "--dry-run", action="store_true", help="print the batch script without submitting or writing anything"
    )
    submission.add_argument(
        "--when", action="store_true", help="print when Slurm expects to start the job, without submitting it"
    )
    submission.add_argument("--wait", action="store_true", help="wait until the run is over, across requeues")
    submission.add_argument("-f", "--follow", action="store_true", help="like --wait, and print rank 0's output")
    submission.add_argument(
        "--here", action="store_true", help="run in this shell's allocation (salloc, or an sbatch script)"
    )
    submission.add_argument(
        "--debug", nargs="?", type=int, const=0, metavar="RANK",
        help="connect a rank to this terminal for breakpoint(), while the others wait (default: 0)",
    )  # fmt: skip
    local = parser.add_argument_group("on this machine")
    local.add_argument("--local", action="store_true", help="start the ranks as processes on this machine, and wait")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that set keys of the job definition."""
    job, nodes, queue = map(parser.add_argument_group, ("settings", "which nodes", "how long, and in which queue"))
    for key, option in JOB_OPTIONS.items():
        group = nodes if key in OF_NODES else queue if key in OF_QUEUE else job
        if option.sets is None:
            group.add_argument(*option.flags, dest=key, metavar=option.metavar, help=option.help)
        else:
            group.add_argument(*option.flags, dest=key, action="store_const", const=option.sets, help=option.help)
    nodes.add_argument(
        "--on", metavar="TARGET", help="use the values of a target, such as a kind of nodes, of the configuration files"
    )
    job.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE",
        help="set any key of the job definition, such as seed=1 (repeatable)",
    )  # fmt: skip
    job.add_argument(
        "--sbatch", action="append", default=[], metavar="KEY=VALUE", help="any other sbatch option (repeatable)"
    )


def read_sweep(arguments: argparse.Namespace) -> Definition | None:
    """The sweep that the target's file describes, or None."""
    path = Path(arguments.target or "")
    return read_definition(path) if path.suffix in (".yaml", ".yml") and is_sweep(path) else None


def check_combinations(arguments: argparse.Namespace, definition: Definition | None = None) -> None:
    """Refuses options that contradict each other. ``definition``: of the sweep that the target names."""
    if arguments.target and arguments.module:
        raise UsageError(f"{arguments.target} and -m {arguments.module} were given. Expected only one of them")
    if arguments.sweep or definition:
        _check_sweep(arguments, definition)
    elif arguments.max_running is not None or arguments.retry:
        raise UsageError("--max-running and --retry require --sweep, or the file of a sweep")
    debugs = arguments.debug is not None
    if arguments.when:
        others = {
            "--local": arguments.local, "--here": arguments.here, "--dry-run": arguments.dry_run, "--debug": debugs,
            "--wait": arguments.wait, "-f": arguments.follow, "a sweep": arguments.sweep or definition,
        }  # fmt: skip
        if given := [option for option, value in others.items() if value]:
            raise UsageError(f"{', '.join(given)} cannot be combined with --when, which submits no job")
    if arguments.here and (arguments.local or arguments.dry_run or arguments.wait or arguments.follow or debugs):
        raise UsageError(
            "--here cannot be combined with --local, --dry-run, --wait, -f or --debug, because it runs in this "
            "allocation and waits for the end of the run"
        )
    requests = [key for key in JOB_OPTIONS if KEYS[key].mark(Sbatch) or key == "time"]
    if arguments.here and (given := [key for key in [*requests, "sbatch"] if getattr(arguments, key)]):
        raise UsageError(
            f"--{', --'.join(given)} cannot be combined with --here, because the run's next job requests what this "
            "allocation has. Give the options to salloc or sbatch"
        )
    if debugs and (arguments.wait or arguments.follow or arguments.dry_run):
        raise UsageError(
            "--debug cannot be combined with --wait, -f or --dry-run, because it connects this terminal to a rank"
        )
    if arguments.fork and (arguments.here or arguments.change):
        raise UsageError(
            "--fork cannot be combined with --here or --change, because it starts a new run, which may have other "
            "arguments"
        )
    if arguments.take_over and not arguments.run_dir:
        raise UsageError("--take-over requires --run-dir. Name the run to continue")
    if arguments.fork and arguments.run_dir and RunDirectory(arguments.run_dir).exists():
        raise UsageError(
            f"{arguments.run_dir} already holds a run. With --fork, choose a different --run-dir or omit it"
        )
    if arguments.local and (arguments.dry_run or arguments.sbatch):
        option = "--dry-run" if arguments.dry_run else "--sbatch"
        raise UsageError(f"{option} cannot be combined with --local, which submits no batch job")


def _check_sweep(arguments: argparse.Namespace, definition: Definition | None) -> None:
    """Refuses options for a single run with a sweep, and values that cannot be."""
    if arguments.sweep and definition:
        raise UsageError(f"--sweep cannot be combined with {arguments.target}. Add the values to that file")
    single = {
        "--here": arguments.here, "--fork": arguments.fork, "--take-over": arguments.take_over,
        "--wait": arguments.wait, "-f": arguments.follow,
        "--debug": arguments.debug is not None,
    }  # fmt: skip
    if given := [option for option, value in single.items() if value]:
        raise UsageError(f"{', '.join(given)} cannot be combined with a sweep, which starts several runs")
    most = arguments.max_running
    if most is not None and most < 1:
        raise UsageError(f"--max-running {most}: expected a number of at least 1")
    if most is not None and arguments.local:
        raise UsageError("--max-running cannot be combined with --local, which runs one member at a time")


def resolve_job(
    arguments: argparse.Namespace, script_arguments: Sequence[str] | None, definition: Definition | None = None
) -> Job:
    """The job that the command line describes, or without a script or module that of --run-dir or --fork.

    ``definition``: of the sweep that the target names, whose members vary the job.
    """
    values = allocation_shape(os.environ) if arguments.here else {}
    values |= option_values(arguments, script_arguments)
    target = str(definition.job) if definition else arguments.target
    if target is None and arguments.module is None:
        if run := named_run(arguments):
            return jobs.load(run.job_file, set_values(arguments), values=values, on=arguments.on)
        target = default_target(values, arguments.run_dir)
    values |= {"module": arguments.module} if arguments.module else {}
    if files := find_configuration_files(os.environ, Path.cwd()):
        show(f"configuration files: {', '.join(map(str, files))}")
    section = definition.section if definition else None
    return describe(target, values, set_values(arguments), section=section, on=arguments.on)


def named_run(arguments: argparse.Namespace) -> RunDirectory | None:
    """The existing run that ``--fork`` or ``--run-dir`` names, or None."""
    if arguments.fork:
        return recording.parse(arguments.fork)[0]
    if arguments.run_dir and (run := RunDirectory(arguments.run_dir)).exists():
        check_run(run)
        return run
    return None


def option_values(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> dict[str, Any]:
    """The values of the options, by key of the job definition."""
    named = {key: getattr(arguments, key) for key in JOB_OPTIONS}
    values: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    if script_arguments is not None:
        values["args"] = list(script_arguments)
    return values


def allocation_shape(environ: Mapping[str, str]) -> dict[str, Any]:
    """Nodes and tasks per node of the surrounding allocation, for ``--here``."""
    if "SLURM_JOB_ID" not in environ:
        raise UsageError(
            "--here: this shell is not in an allocation (SLURM_JOB_ID is not set). Use it in the shell that "
            "`salloc --nodes=2 --ntasks-per-node=8 --gpus-per-node=8` opens, or in a batch script such as "
            "slurm/train.sbatch. Without --here, submit requests the nodes from Slurm"
        )
    if in_step(environ):
        raise UsageError(
            f"--here: this shell is a task of job {environ['SLURM_JOB_ID']} (srun --pty?) and occupies resources that "
            "the ranks need. Use the shell of salloc, or a batch script"
        )
    nodes, counts = environ.get("SLURM_JOB_NUM_NODES", ""), set(tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "")))
    tasks = environ.get("SLURM_NTASKS_PER_NODE") or (str(*counts) if len(counts) == 1 else "")
    if not (nodes and tasks):
        names = ("SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE")
        given = " and ".join(f"{name}={environ.get(name, '')}" for name in names)
        raise UsageError(
            f"--here: expected the same number of tasks on every node, but this allocation has {given}. Request it "
            "with --nodes and --ntasks-per-node, as in slurm/train.sbatch"
        )
    return {"nodes": int(nodes), "gpus_per_node": int(tasks)}


def set_values(arguments: argparse.Namespace) -> dict[str, str]:
    """The values of ``--set`` and ``--sbatch``, by dotted key."""
    values = dict(_split(pair, "--set") for pair in arguments.set)
    values |= {f"sbatch.{key}": value for key, value in (_split(pair, "--sbatch") for pair in arguments.sbatch)}
    return values


def _split(pair: str, option: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"{option} {pair}: expected KEY=VALUE")
    return key, value


def default_target(values: dict[str, Any], run_dir: str | None) -> str:
    """What runs without a script or module: ./clusterddp.yaml, else the bundled digits example, for ten minutes.

    The example does not run in a folder that the user names, because a mistyped --run-dir would start it.
    """
    if Path("clusterddp.yaml").exists():
        show("No script given. Running ./clusterddp.yaml")
        return "clusterddp.yaml"
    if run_dir:
        try:
            found = open_run(run_dir)
        except RunDirectoryError as error:
            raise UsageError(f"{error}. To start a new run, name SCRIPT.py or JOB.yaml") from error
        raise UsageError(f"--run-dir {run_dir}: no run there. Did you mean {as_typed(found.path)}?")
    values.setdefault("time", "10")
    values.setdefault("device", "cuda")
    show("No script given and no ./clusterddp.yaml. Running the bundled digits example (10 minutes at most)")
    return str(PACKAGED_JOB)
