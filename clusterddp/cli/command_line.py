"""The command line: its commands, each a module of this package with ``add_arguments()`` and ``run()``."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

from clusterddp import __version__
from clusterddp.errors import UsageError

COMMANDS = {
    "submit": "start a run, or continue one",
    "status": "show a run's state and history",
    "logs": "show a rank's output",
    "watch": "wait for runs: release holds after a requeue, resubmit runs that lost their job",
    "cancel": "end a run for good",
    "export": "write a checkpoint's model to a file",
    "drill": "test with a tiny job what a preemption would do",
    "bench": "measure collectives on the nodes that train",
}
USAGE = {
    "submit": "clusterddp submit [SCRIPT.py | JOB.yaml | -m MODULE] [OPTIONS] [-- ARGS]",
    "bench": "clusterddp bench collectives [OPTIONS OF submit] [-- ARGS]",
}


def command(argv: Sequence[str]) -> int:
    """Runs one command; returns its exit code. Raises UsageError, and what the command raises."""
    own, script_arguments = split_at_dashes(argv)
    arguments, unknown = parser(own).parse_known_args(own)
    name = arguments.command
    if unknown:
        hint = "; put the script's arguments after --" if name in ("submit", "bench") else ""
        raise UsageError(f"{name}: unknown arguments {' '.join(unknown)}: see `clusterddp {name} --help`{hint}")
    code: int = _module(name).run(arguments, script_arguments)
    return code


def parser(complete: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser, with the options of the commands in ``complete``, whose modules are imported."""
    top = argparse.ArgumentParser(prog="clusterddp", description="Trains PyTorch DDP models on Slurm.")
    top.add_argument("--version", action="version", version=f"clusterddp {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        own = commands.add_parser(name, help=text, usage=USAGE.get(name))
        if name in complete:
            _module(name).add_arguments(own)
    return top


def _module(name: str) -> Any:
    return import_module(f"clusterddp.cli.{name}")


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The own arguments and the script's, which follow ``--``; None without one, an empty list for a bare one."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]
