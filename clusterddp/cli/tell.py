"""``clusterddp tell RUN profile=20``: the commands for a running job, their ranks, and what is printed for each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from clusterddp.errors import FAILED, INTERRUPTED, RunDirectoryError, UsageError
from clusterddp.events import sentence
from clusterddp.hostlist import ranks_in
from clusterddp.jobdef.job import MOST_PROFILED_RANKS, MOST_PROFILED_STEPS, MOST_SKIPPED, ProfiledSteps
from clusterddp.jobdef.readers import did_you_mean
from clusterddp.reporter import put, show
from clusterddp.rundir.run_directory import ONE_RUN, RunDirectory, open_run
from clusterddp.runs.requests import await_end, backwards, request

HOW_TO_OPEN = "Open a trace at https://ui.perfetto.dev, or its folder with TensorBoard (pip install torch-tb-profiler)"


def check_profiled_ranks(text: str) -> None:
    """Raises UsageError unless the text names ranks, and not too many."""
    try:
        count = len(ranks_in(text))
    except ValueError as error:
        raise UsageError(f"--rank {text}: {error}") from error
    if count > MOST_PROFILED_RANKS:
        raise UsageError(f"--rank {text}: {count} ranks, but at most {MOST_PROFILED_RANKS} can record at a time")


def profile_line(run: RunDirectory, rank: int, values: Mapping[str, Any]) -> str:
    """Where the profile of a rank is, or why there is none. ``values``: those of its event."""
    if "file" not in values:
        return f"rank {rank} recorded no profile: {values.get('reason', 'it has exited')}"
    first, last = values["step"], values["step"] + values["steps"] - 1
    return f"rank {rank}, steps {first} to {last}: {run.path / values['file']}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``tell``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)
    meanings = {name: text for name, (_, text) in ORDERS.items()} | NUMBERED
    orders = ", ".join(f"{name}: {text}" for name, text in meanings.items())
    parser.add_argument("order", metavar="save|stop|skip|profile|drain", help=orders)
    parser.add_argument("--rank", metavar="R", help="for a profile: the ranks, such as 0,3-5 (default: 0)")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Sends the command and waits until it is done."""
    give = order(arguments.order, arguments.rank)
    run = open_run(arguments.run)
    try:
        return give(run)
    except KeyboardInterrupt:
        show(f"No longer waiting. The request may still take effect. Check with: clusterddp status {run.quoted}")
        return INTERRUPTED


def order(text: str, ranks: str | None) -> Callable[[RunDirectory], int]:
    """The function for a command. Raises UsageError for an unknown one."""
    if text == "profile" or text.startswith("profile="):
        given = text != "profile"
        steps = steps_in(text, MOST_PROFILED_STEPS, "profile=20") if given else ProfiledSteps.steps
        ranks = "0" if ranks is None else ranks
        check_profiled_ranks(ranks)
        return partial(record, steps=steps, ranks=ranks)
    if ranks is not None:
        raise UsageError(f"--rank: {text} applies to the whole run. Only {PROFILE} accepts --rank")
    if text.startswith("drain="):
        return partial(drain, node=text.partition("=")[2])
    if text.startswith("skip="):
        return partial(skip, batches=steps_in(text, MOST_SKIPPED, "skip=500"))
    if text not in ORDERS:
        known = [*ORDERS, *NUMBERED]
        raise UsageError(f"unknown command {text!r}{did_you_mean(text, known) or '.'} Expected {', '.join(known)}")
    return ORDERS[text][0]


def save(run: RunDirectory) -> int:
    """Waits until the checkpoint is committed."""
    attempt, answer = request(run, "save")
    if "checkpoint" in answer:
        put(f"Checkpoint {answer['checkpoint']} is saved")
        return 0
    end = await_end(run, attempt)  # a stop that came first has also saved
    put(sentence(end) or "")
    return 0 if end.get("checkpoint") is not None and end.get("checkpoint") == end.get("step") else FAILED


def record(run: RunDirectory, steps: int, ranks: str) -> int:
    """Waits until the profiles are stored. Returns 1 if a rank has none."""
    attempt, answer = request(run, "profile", steps=steps, ranks=ranks)
    if not answer:
        raise RunDirectoryError(
            f"the supervisor of {run} has exited. See the run's state with: clusterddp status {run.quoted}"
        )
    profiles: dict[str, Mapping[str, Any]] = answer["profiles"]
    if "ended" in answer:  # some may have been stored at the end of the attempt
        show(sentence(await_end(run, attempt)) or "")
        for event in backwards(run, attempt):
            if event["event"] in ("profiled", "not_profiled") and event.get("request") == str(answer["request"]):
                profiles[str(event["rank"])] = event
    wanted = ranks_in(ranks)
    for rank in wanted:
        put(profile_line(run, rank, profiles.get(str(rank), {})))
    stored = [rank for rank in wanted if "file" in profiles.get(str(rank), {})]
    if stored:
        show(HOW_TO_OPEN)
    return 0 if len(stored) == len(wanted) else FAILED


def steps_in(order: str, most: int, example: str) -> int:
    """The number in the command ``skip=500``. Raises UsageError for another form."""
    text = order.partition("=")[2]
    steps = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0
    if not 1 <= steps <= most:
        raise UsageError(f"{order}: expected a number of steps from 1 to {most:,}, such as {example}")
    return steps


def skip(run: RunDirectory, batches: int) -> int:
    """Waits until a checkpoint contains the skip. Returns 1 if there is none."""
    attempt, answer = request(run, "skip", batches=batches)
    if not answer:
        raise RunDirectoryError(
            f"the supervisor of {run} has exited. See the run's state with: clusterddp status {run.quoted}"
        )
    if "checkpoint" in answer:
        skipped = sentence({**answer["skipped"], "event": "skipped", "attempt": attempt})
        put(f"{skipped}. Checkpoint {answer['checkpoint']} is saved")
        return 0
    end = await_end(run, attempt)
    events = (event for event in backwards(run, attempt) if event["event"] == "skipped")
    made = next((event for event in events if event.get("request") == str(answer["request"])), None)
    put("No batch was skipped" if made is None else sentence(made) or "")
    put(sentence(end) or "")
    saved = end.get("checkpoint")
    return 0 if made is not None and saved is not None and saved >= made["step"] else FAILED


def drain(run: RunDirectory, node: str) -> int:
    """Returns once the run has stopped to continue without the node. 0 if all of its steps are saved."""
    attempt, _ = request(run, "drain", node=node)
    end = await_end(run, attempt)
    put(sentence(end) or "")
    return 0 if end["event"] == "completed" or end.get("checkpoint") == (end.get("step") or None) else FAILED


def stop(run: RunDirectory) -> int:
    """Waits until the run is stopped. Returns 0 if all of its steps are saved."""
    attempt, _ = request(run, "stop")
    end = await_end(run, attempt)
    put(sentence(end) or "")
    if end["event"] == "stopped":
        how = "--local --run-dir" if run.loop_file.exists() else "--run-dir"
        show(f"Continue it with: clusterddp submit {how} {run.quoted}")
        return 0 if end.get("checkpoint") == (end.get("step") or None) else FAILED
    return 0 if end["event"] == "completed" else FAILED


PROFILE = "profile=STEPS"
#: The commands with a value, and their meanings.
NUMBERED = {
    "skip=STEPS": "skip the data of this many steps, after a loss spike (the number of steps stays the same)",
    PROFILE: "record torch.profiler for this many steps, and print where the traces are",
    "drain=NODE": "save and stop after the current step, and continue in the same job without this node",
}
#: The other commands, with their functions and meanings.
ORDERS: Mapping[str, tuple[Callable[[RunDirectory], int], str]] = {
    "save": (save, "save after the current step"),
    "stop": (stop, "save and stop after the current step, until you submit the run again"),
}
