"""The command line: its commands, each a module of this package with ``add_arguments()`` and ``run()``."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from clusterddp import __version__
from clusterddp.errors import UsageError
from clusterddp.reporter import show

COMMANDS = {
    "submit": "start a run, or continue one",
    "sweep": "start a run for each combination of values",
    "list": "list runs: state, step, speed, metrics",
    "status": "show a run's state and history",
    "logs": "print what ranks wrote, or a run's first failure",
    "report": "write a page about runs: timeline, where the time went, metrics, failures",
    "resubmit": "wait for runs, release requeue holds and resubmit lost jobs",
    "wait": "wait for runs, and tell by the exit code how they ended",
    "cancel": "end runs for good",
    "prune": "delete old checkpoints and logs of runs that are over",
    "stacks": "show where the ranks are now, as Python stacks",
    "tell": "give a run an order: save, stop, skip data, profile",
    "requeue": "stop a run, saved, and have it continue in the queue",
    "shell": "open a shell, or the debugger, on a rank's node",
    "export": "write a checkpoint's model to a file",
    "drill": "test with a tiny job what a preemption would do to a run",
    "doctor": "check the cluster, or nodes, for what a run needs",
    "nodes": "list the nodes on which runs failed, and what to tell the administrator",
    "bench": "check and time collectives on the training nodes",
    "config": "show and check job definitions, sweeps and configuration files",
}
USAGE = {
    "submit": "clusterddp submit [SCRIPT.py | JOB.yaml | -m MODULE] [OPTIONS] [-- ARGS]",
    "sweep": "clusterddp sweep SWEEP.yaml [OPTIONS] [-- ARGS]",
    "shell": "clusterddp shell RUN [--rank R] [--attach] [-- COMMAND]",
    "bench": "clusterddp bench collectives [OPTIONS OF submit] [-- ARGS]",
}
DESCRIPTIONS = {
    "submit": "Start a run, or continue the one in --run-dir. The script's arguments follow --. If stdout is not a "
    "terminal, only the job id is printed there; messages go to stderr.",
    "sweep": "Start a run for each combination of values, as Slurm job arrays. The same command again submits only "
    "what is missing; with more values, the new members. Each member is a run that status, logs and cancel take.",
    "list": "List runs, also those that are over: state and reason, steps, speed, time left, metrics, attempts, job, "
    "nodes.",
    "status": "Show a run's state, why it waits, its progress and its history.",
    "logs": "Print what ranks wrote, by default rank 0: its stdout to stdout, its stderr to stderr. Several ranks or "
    "attempts are all printed to stdout, each file below a line that names it. A failed run shows its first failure.",
    "report": "Write one HTML file about a run that opens anywhere: what happened when and why, where the time went, "
    "metrics, checkpoints, failures, and the commands to continue it. Several runs, or a sweep, are laid over each "
    "other. Prints the name of the file.",
    "resubmit": "Wait until runs are over and show their events. Meanwhile lift the hold that Slurm puts on a requeued "
    "job, and resubmit a run whose job ended without continuing it. Ctrl-C ends this command, and the runs continue.",
    "wait": "Wait until all runs are over, or stopped so that only a submission continues them. Unlike resubmit, it "
    "changes nothing. The exit code is 0 if all completed, else that of the worst end: 10 failed, 11 cancelled, "
    "12 stopped, 13 unknown; 124 if the time is up.",
    "cancel": "End runs for good: cancel their jobs or processes, and wait until they have ended. They never run "
    "again. Several runs are listed first, and cancelled after a yes on the terminal or with --yes.",
    "prune": "Delete old checkpoints, and with --logs old logs, of runs that are over. The newest checkpoint and the "
    "one with the best metric are kept. What would be deleted is printed first, and deleted after a yes on the "
    "terminal or with --yes.",
    "stacks": "Show where the ranks are now, as Python stacks of their threads. Equal ones are shown once.",
    "tell": "Give a run an order while it trains, and wait until it is carried out.",
    "requeue": "Stop a run after its current step, saved, and have it continue in the queue: in the same job, or in a "
    "new one without some nodes. A local run restarts at once.",
    "shell": "Open a shell in the run's job, on the node of a rank, beside the ranks; or run the command that follows "
    "--, or attach to the rank's debugger.",
    "export": "Write a checkpoint's model, or more of it, to a file that other programs read.",
    "drill": "Test with a tiny job what a preemption would do to a run in a partition: whether the nodes have Slurm's "
    "commands, whether the signal reaches every rank, and whether a requeue restarts the job.",
    "doctor": "Check what a run needs: on this host Slurm, partitions, accounts, the folder for runs, Python, torch; "
    "with --nodes, in a job, the devices, folder, clock and network of nodes. Exit code 1 if a check failed.",
    "nodes": "List the nodes on which runs failed in the last week, and whether new jobs avoid them. Print a text that "
    "you can send to the cluster's administrator.",
    "bench": "Submit a packaged benchmark and show its output. The options are those of submit.",
    "config": "Show the job that submit would start and where each value comes from, check job definitions, sweeps "
    "and configuration files, or print the JSON Schema for editors.",
}
EPILOGS = {
    "submit": "JOB.yaml and --set take the keys that `clusterddp config schema` describes; `clusterddp config show` "
    "prints their values.",
    "sweep": "SWEEP.yaml has the keys job (a job definition, or the path of one) and grid (the values to combine), or "
    "members (a list of combinations), such as {job: {script: train.py, device: cpu}, grid: {lr: [1e-3, 1e-4], "
    "seed: 0..4}}. A key of the job definition, such as seed or nodes, is set there; any other, such as lr, is given "
    "to the script as --lr; args.seed means the script's own --seed.",
}


def command(argv: Sequence[str]) -> int:
    """Runs one command; returns its exit code. Raises UsageError, and what the command raises."""
    own, script_arguments = split_at_dashes(argv)
    if not own:
        show(parser(()).format_help())
        return UsageError.exit_code
    check_name(own[0])
    arguments, unknown = parser(own).parse_known_args(own)
    name = arguments.command
    if unknown:
        hint = "; put the script's arguments after --" if name in ("submit", "sweep", "bench") else ""
        raise UsageError(f"{name}: unknown arguments {' '.join(unknown)}; see `clusterddp {name} --help`{hint}")
    code: int = _module(name).run(arguments, script_arguments)
    return code


def check_name(word: str) -> None:
    """Raises UsageError for a word that is no command; options are the parser's."""
    if word in COMMANDS or word.startswith("-"):
        return
    similar = get_close_matches(word, COMMANDS, 1)
    if Path(word).suffix in (".py", ".yaml", ".yml"):
        hint = f"to run {word}, use `clusterddp submit {word}`"
    else:
        hint = f"did you mean {similar[0]}?" if similar else "see `clusterddp --help`"
    raise UsageError(f"no command {word!r}; available: {', '.join(COMMANDS)}; {hint}")


def parser(complete: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser, with the options of the commands in ``complete``, whose modules are imported."""
    top = argparse.ArgumentParser(
        prog="clusterddp",
        description="Train PyTorch DDP models on Slurm, through preemptions, time limits and failures.",
        epilog="Example: clusterddp submit train.py --nodes 2 --gpus 8. See also: clusterddp COMMAND --help",
    )
    top.add_argument("--version", action="version", version=f"clusterddp {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        own = commands.add_parser(
            name, help=text, usage=USAGE.get(name), description=DESCRIPTIONS[name], epilog=EPILOGS.get(name)
        )
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
