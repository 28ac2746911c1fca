"""The command line: its commands, and the modules with their options.

A module of one command has ``add_arguments()`` and ``run()``. A module of several has ``run_stop()`` and the like.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from clusterddp.errors import UsageError
from clusterddp.reporter import show
from clusterddp.runs.configured_folder import use_runs_dir
from clusterddp.version import __version__

COMMANDS = {
    "submit": "start a run or a sweep, or continue one",
    "list": "list runs: state, step, speed, metrics",
    "status": "show a run's state and history",
    "logs": "print what ranks wrote, or a run's first failure",
    "report": "write a page about runs: timeline, where the time went, metrics, failures",
    "wait": "wait for runs and report the outcome as the exit code",
    "stop": "save a run and stop it, until you submit it again",
    "save": "save a checkpoint of a running job",
    "drain": "move a run off a node of its job",
    "requeue": "checkpoint a run and requeue it",
    "cancel": "end runs permanently",
    "stacks": "show where the ranks are now, as Python stacks",
    "shell": "open a shell, or the debugger, on a rank's node",
    "export": "write a checkpoint's model to a file",
    "prune": "delete old checkpoints and logs of runs that are over",
    "rehearse": "disturb a script on purpose, and see whether it survives",
    "doctor": "check the cluster, or nodes, for what a run needs",
    "config": "show and check job definitions, sweeps and configuration files",
}
#: The modules of commands that share one. The others are named like their command.
_TOGETHER = {
    **dict.fromkeys(("stop", "save", "drain", "requeue", "cancel", "stacks", "shell"), "steering"),
    **dict.fromkeys(("export", "prune"), "checkpoints"),
}
USAGE = {
    "submit": "clusterddp submit [SCRIPT.py | JOB.yaml | SWEEP.yaml | -m MODULE] [OPTIONS] [-- ARGS]",
    "shell": "clusterddp shell RUN [--rank R] [--attach] [-- COMMAND]",
}
DESCRIPTIONS = {
    "submit": "Start a run, or continue the one in --run-dir. With --sweep or SWEEP.yaml, start a run for each "
    "combination of values, as Slurm job arrays. Repeat that command to submit only the missing members, also after "
    "adding values. The script's arguments follow --. If stdout is not a terminal, it gets only the job ids. Messages "
    "go to stderr.",
    "list": "List runs, including those that are over, with state and reason, steps, speed, time left, metrics, "
    "attempts, job and nodes.",
    "status": "Show a run's state, why it is waiting, its progress and its history.",
    "logs": (
        "Print what rank 0 wrote in the newest attempt: its stdout to stdout, its stderr to stderr. --rank and "
        "--attempt select others. The output of several ranks or attempts all goes to stdout, each file below a line "
        "with its name. For a failed run, show its first failure."
    ),
    "report": "Write a self-contained HTML file about a run: what happened when and why, where the time went, "
    "metrics, checkpoints, failures, and the commands to continue it. For several runs or a sweep, rank "
    "them and plot their metric against each parameter. Print the name of the file.",
    "wait": (
        "Wait until all runs are over, or stopped until you submit them again. Without --resubmit, this changes no "
        "run. Ctrl-C stops this command, not the runs. "
        "The exit code is 0 if all completed. Otherwise, the worst outcome decides: 10 failed, 11 cancelled, 12 "
        "stopped, 13 unknown, 14 unconfirmed. It is 124 after the timeout."
    ),
    "stop": "Save a run and stop it after its current step, and wait until it has stopped. It stays stopped until you "
    "submit it again.",
    "save": "Have a running job save a checkpoint after its current step, and wait until it is saved. Training "
    "continues.",
    "drain": "Save a run and stop it after its current step, and continue it in the same job without this node: on a "
    "spare node, or on fewer nodes.",
    "requeue": "Checkpoint a run after its current step and requeue its job, or continue it in a new job without some "
    "nodes. A local run restarts at once.",
    "cancel": "End runs permanently: cancel their jobs or processes, and wait until they have ended. They cannot be "
    "continued. For several runs, list them first and ask, unless --yes is given.",
    "stacks": "Show where the ranks are now, as Python stacks of their threads. Show equal stacks once.",
    "shell": "Open a shell in the run's job on the node of a rank, run the command that follows -- there, or attach to "
    "the rank's debugger.",
    "export": "Write a checkpoint's model, or other parts of it, to a file for other programs.",
    "prune": "Delete old checkpoints and unused snapshots of the code, and with --logs old logs, of runs that are "
    "over. Keep the newest checkpoint and the one with the best metric. Print first what would be deleted and ask, "
    "unless --yes is given.",
    "rehearse": "Find out whether a script survives preemptions, under clusterddp or by its own means. Start it "
    "several times on this machine, send it the notice of a preemption at bad moments, such as in a save, and compare "
    "the result with that of an undisturbed run. Each start has at most --steps steps. The script runs in a copy of "
    "its repository or folder, and needs no change. With -p, a small job also tests what a preemption does in a "
    "partition, for which no script is needed. The exit code is 0 if the script survives, 3 if the rehearsal found a "
    "fault, and 4 if it found none but two undisturbed runs differ.",
    "doctor": "Check what a run needs. On this host: Slurm, partitions, accounts, the folder for runs, Python, torch. "
    "If lost nodes ended jobs of the runs in that folder, also show what spare nodes would have saved. "
    "With --nodes, in a job: the devices, folder, clock and network of nodes. The exit code is 1 if a check failed. "
    "With --failed-nodes, list the nodes on which runs failed in the last week and whether new jobs avoid them, with a "
    "message that you can send to the cluster's administrator.",
    "config": "Show the job that submit would start and where each value comes from, check job definitions, sweeps "
    "and configuration files, or print the JSON Schema for editors.",
}
EPILOGS = {
    "submit": "JOB.yaml and --set take the keys that `clusterddp config schema` describes. To see their values, use "
    "`clusterddp config show`. SWEEP.yaml has the keys job (a job definition, or the path of one) and grid (the values "
    "to combine), or members (a list of combinations), such as {job: {script: train.py, device: cpu}, grid: {lr: "
    "[1e-3, 1e-4], seed: 0..4}}. A key of the job definition, such as seed or nodes, is set there. Any other, such as "
    "lr, becomes the script's --lr. To set the script's own --seed, write args.seed.",
}


def command(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code. Raises UsageError, and what the command raises."""
    own, script_arguments = split_at_dashes(argv)
    own = [_with_home(word) for word in own]
    if not own:
        show(parser(()).format_help())
        return UsageError.exit_code
    check_name(own[0])
    arguments, unknown = parser(own).parse_known_args(own)
    name = arguments.command
    if unknown:
        hint = ". Put the script's arguments after --" if name == "submit" else ""
        near = _near_option(unknown, name)
        raise UsageError(f"{name}: unknown arguments {' '.join(unknown)}. {near}See `clusterddp {name} --help`{hint}")
    if name != "config":  # which finds mistakes in configuration files
        use_runs_dir()
    code: int = _function(name, "run")(arguments, script_arguments)
    return code


def _with_home(word: str) -> str:
    """An argument such as ``--run-dir=~/x`` with the user's home in place of ``~``, which shells leave there."""
    option, _, value = word.partition("=")
    return f"{option}={Path(value).expanduser()}" if option.startswith("-") and value.startswith("~") else word


def _near_option(unknown: Sequence[str], name: str) -> str:
    """A question for an option that is nearly one of the command's, or nothing."""
    own = argparse.ArgumentParser()
    _function(name, "add_arguments")(own)
    options = re.findall(r"--([\w-]+)", own.format_help())  # without dashes, which make any two options similar
    given = (word[2:].partition("=")[0] for word in unknown if word.startswith("--"))
    similar = next((near for word in given if (near := _misspelt(word, options))), None)
    return f"Did you mean --{similar}? " if similar else ""


def _misspelt(word: str, known: Iterable[str]) -> str | None:
    """The known word that is probably meant. It has the same first letter, and most others."""
    alike = [one for one in known if one[:1] == word[:1]]
    return next(iter(get_close_matches(word, alike, 1, 0.75)), None)


def check_name(word: str) -> None:
    """Raises UsageError for a word that is not a command. The parser handles options."""
    if word in COMMANDS or word.startswith("-"):
        return
    similar = _misspelt(word, COMMANDS)
    if Path(word).suffix in (".py", ".yaml", ".yml"):
        hint = f"To run {word}, use `clusterddp submit {word}`"
    else:
        hint = f"Did you mean {similar}?" if similar else "See `clusterddp --help`"
    raise UsageError(f"unknown command {word!r}. Available: {', '.join(COMMANDS)}. {hint}")


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
            _function(name, "add_arguments")(own)
    return top


def _function(name: str, purpose: str) -> Any:
    """``run`` or ``add_arguments`` of a command's module or, of a module of several, ``run_stop`` or the like."""
    if name not in _TOGETHER:
        return getattr(import_module(f"clusterddp.cli.{name}"), purpose)
    verb, _, rest = purpose.partition("_")
    full = f"{verb}_{name}_{rest}" if rest else f"{verb}_{name}"
    return getattr(import_module(f"clusterddp.cli.{_TOGETHER[name]}"), full)


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The command's arguments and the script's, which follow ``--``. Without ``--``, the latter are None."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]
