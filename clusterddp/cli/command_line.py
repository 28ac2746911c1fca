"""The command line: its commands and their options, and which function carries out each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from clusterddp import __version__
from clusterddp.errors import UsageError


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    from clusterddp.cli.options import add_arguments

    top = argparse.ArgumentParser(prog="clusterddp", description="Trains PyTorch DDP models on Slurm.")
    top.add_argument("--version", action="version", version=f"clusterddp {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_arguments(
        commands.add_parser(
            "submit",
            help="start or continue a run",
            usage="clusterddp submit [SCRIPT.py | JOB.yaml | -m MODULE] [OPTIONS] [-- ARGS]",
        )
    )
    add_arguments(
        commands.add_parser(
            "bench",
            help="measure what training runs on: collectives",
            usage="clusterddp bench collectives [OPTIONS OF submit] [-- ARGS]",
        )
    )
    status = commands.add_parser("status", help="show what a run is doing and has done")
    status.add_argument("run")
    logs = commands.add_parser("logs", help="show a rank's output")
    logs.add_argument("run")
    logs.add_argument("-f", "--follow", action="store_true", help="follow the output until the run is over")
    logs.add_argument("--rank", type=int, default=0)
    logs.add_argument("--attempt", type=int, help="the newest by default")
    watch = commands.add_parser("watch", help="wait for runs, lift holds after a requeue, resubmit what lost its job")
    watch.add_argument("run", nargs="+")
    drill = commands.add_parser("drill", help="try what a preemption would do, with a tiny job")
    drill.add_argument("-p", "--partition")
    drill.add_argument("-q", "--qos")
    drill.add_argument("-N", "--nodes", type=int, default=1)
    drill.add_argument("--run", help="compare the notice with this run's last save")
    export = commands.add_parser("export", help="write a checkpoint's model to a file")
    export.add_argument("run")
    export.add_argument("step", nargs="?", type=int, help="the newest checkpoint's by default")
    export.add_argument("file", type=Path, help="a new .pt, .pth or .safetensors file")
    what = export.add_mutually_exclusive_group()
    what.add_argument("--part", default="model", help="the name it has in ctx.run(): model by default")
    what.add_argument("--all", action="store_true", help="all parts, with the optimizer's and the run's progress")
    cancel = commands.add_parser("cancel", help="end a run for good")
    cancel.add_argument("run")
    return top


def command(argv: Sequence[str]) -> int:
    """Runs one command; returns its exit code. Raises UsageError, and what the command raises."""
    own, script_arguments = split_at_dashes(argv)
    arguments, unknown = parser().parse_known_args(own)
    if unknown:
        raise UsageError(_not_known(arguments.command, unknown))
    return run_command(arguments, script_arguments)


def _not_known(command: str, unknown: Sequence[str]) -> str:
    for_script = "; the script's own arguments follow --" if command in ("submit", "bench") else ""
    return f"{command} does not know {' '.join(unknown)}: see `clusterddp {command} --help`{for_script}"


def run_command(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """The exit code of one command."""
    if arguments.command == "submit":
        from clusterddp.cli.submit import submit

        return submit(arguments, script_arguments)
    if arguments.command == "bench":
        from clusterddp.cli.submit import bench

        return bench(arguments, script_arguments)
    from clusterddp.cli import status

    if arguments.command == "status":
        return status.show(arguments.run)
    if arguments.command == "logs":
        return status.logs(arguments.run, arguments.rank, arguments.attempt, arguments.follow)
    if arguments.command == "watch":
        from clusterddp.cli.watch import watch

        return watch([status.open_run(path) for path in arguments.run])
    if arguments.command == "export":
        run = status.open_run(arguments.run)
        Path.cwd()  # torch's libraries end the process where that is gone
        from clusterddp.checkpoint.export import export

        print(export(run, arguments.step, arguments.file, arguments.part, arguments.all))
        return 0
    if arguments.command == "drill":
        from clusterddp.cli.drill import check, drill

        return drill(arguments.partition, arguments.qos, arguments.nodes, check(arguments.run))
    return status.cancel(arguments.run)


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The own arguments and the script's, which follow ``--``; None without one, an empty list for a bare one."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]
