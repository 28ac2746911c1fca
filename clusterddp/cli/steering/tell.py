"""``clusterddp tell RUN save|stop``: an order to a run while it trains."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from clusterddp.cli.steering.asking import await_end, request
from clusterddp.errors import FAILED, INTERRUPTED
from clusterddp.reporter import show
from clusterddp.rundir.find import open_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.messages import sentence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``tell``."""
    parser.add_argument("run", metavar="RUN", help="a run directory")
    orders = "; ".join(f"{name}: {text}" for name, (_, text) in ORDERS.items())
    parser.add_argument("order", choices=tuple(ORDERS), metavar="ORDER", help=orders)


def run(arguments: argparse.Namespace, _: object) -> int:
    """Gives the order and waits until it is carried out."""
    run, (give, _text) = open_run(arguments.run), ORDERS[arguments.order]
    try:
        return give(run)
    except KeyboardInterrupt:
        show(f"no longer waiting; the order may still be carried out, which clusterddp status {run} will show")
        return INTERRUPTED


def save(run: RunDirectory) -> int:
    """Returns once the checkpoint is committed."""
    attempt, answer = request(run, "save")
    if "checkpoint" in answer:
        print(f"checkpoint {answer['checkpoint']} committed")
        return 0
    end = await_end(run, attempt)  # a stop that came first has saved, too
    print(sentence(end))
    return 0 if end.get("checkpoint") is not None and end.get("checkpoint") == end.get("step") else FAILED


def stop(run: RunDirectory) -> int:
    """Returns once the run is stopped; 0 if all of its steps are saved."""
    attempt, _ = request(run, "stop")
    end = await_end(run, attempt)
    print(sentence(end))
    if end["event"] == "stopped":
        how = "--local --run-dir" if run.loop_file.exists() else "--run-dir"
        show(f"continue it with: clusterddp submit {how} {run}")
        return 0 if end.get("checkpoint") == (end.get("step") or None) else FAILED
    return 0 if end["event"] == "completed" else FAILED


#: Each order with its function and its meaning.
ORDERS: Mapping[str, tuple[Callable[[RunDirectory], int], str]] = {
    "save": (save, "save after the current step"),
    "stop": (stop, "stop after the current step, saved; nothing continues the run until you submit it again"),
}
