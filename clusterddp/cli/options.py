"""The options of ``clusterddp submit``, and the job definition that they describe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.cli.fork import Fork
from clusterddp.environment import in_step
from clusterddp.errors import UsageError
from clusterddp.hostlist import tasks_per_node
from clusterddp.jobdef import load as jobs
from clusterddp.jobdef.job import Job
from clusterddp.reporter import show
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm

PACKAGED_JOB = Path(__file__).parents[1] / "digits" / "digits.yaml"
PACKAGED_JOB_TIME = "10"

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
    (("--mem",), "mem", "as in sbatch: memory per node, such as 64G"),
    (("--cpus-per-task", "-c"), "cpus_per_task", "as in sbatch: CPUs per rank"),
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
    parser.add_argument(
        "--take-over", action="store_true", help="continue a run that was trained where it cannot be reached from here"
    )
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
    if arguments.take_over and not arguments.run_dir:
        raise UsageError("--take-over needs the --run-dir of the run to continue")
    if arguments.fork and arguments.run_dir and RunDirectory(arguments.run_dir).exists():
        raise UsageError(f"{arguments.run_dir} holds a run already: --fork needs another --run-dir, or none")
    if arguments.local and (arguments.sbatch or arguments.dry_run):
        raise UsageError("--sbatch and --dry-run are about a batch job: expected without --local")


def resolve_job(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> Job:
    """The job definition that the command line describes; where it names no program, that of the run it names."""
    values = option_values(arguments, script_arguments)
    target = arguments.target
    if target is None and arguments.module is None:
        if run := named_run(arguments):
            return jobs.load(run.job_file, set_values(arguments), values=values)
        target = default_target(values)
    values |= {"module": arguments.module} if arguments.module else {}
    return describe(target, values, set_values(arguments))


def named_run(arguments: argparse.Namespace) -> RunDirectory | None:
    """The run that ``--fork`` or ``--run-dir`` names, if there is one yet."""
    if arguments.fork:
        return Fork.parse(arguments.fork).run
    if arguments.run_dir and (run := RunDirectory(arguments.run_dir)).exists():
        check_run(run)
        return run
    return None


def describe(target: str | None, values: dict[str, Any], overrides: Mapping[str, str]) -> Job:
    """The job definition of a script, a YAML file, or of ``values`` alone, above the user's defaults."""
    defaults = jobs.user_defaults(slurm.submission_cluster(os.environ))
    if target and Path(target).suffix in (".yaml", ".yml"):
        return jobs.load(target, overrides, values=values, defaults=defaults)
    values |= {"script": target} if target else {}
    return jobs.from_values(values, folder=Path.cwd(), overrides=overrides, defaults=defaults)


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
        show("nothing named: taking ./clusterddp.yaml")
        return "clusterddp.yaml"
    values.setdefault("time", PACKAGED_JOB_TIME)
    values.setdefault("device", "cuda")
    show("nothing named and no ./clusterddp.yaml here: taking the packaged digits job, limited to ten minutes")
    return str(PACKAGED_JOB)
