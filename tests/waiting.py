"""Waiting for what a test needs to have happened: conditions with a bound, never a sleep that hopes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.controller import give_notice
from tests.runs_on_disk import outcome_of

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, timeout: float = 120) -> T:
    """The condition's first true value; an AssertionError that says what was waited for."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.05)


def wait_for_step(run: RunDirectory, step: int, timeout: float = 120) -> None:
    """Until the metrics hold ``step``, and so training is beyond it."""
    try:
        wait_until(lambda: any(line["step"] >= step for line in read_lines(run.metrics_file)), f"step {step}", timeout)
    except AssertionError as error:
        raise AssertionError(f"{error} of {run}\n{story(run)}") from None


def wait_for_outcome(run: RunDirectory, timeout: float = 180) -> str:
    """Until the run is over; its state."""
    try:
        wait_until(lambda: outcome_of(run), f"{run} to be over", timeout)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{story(run)}") from None
    outcome = outcome_of(run)
    assert outcome is not None
    return str(outcome["state"])


def preempt_local(run: RunDirectory) -> None:
    """Preempts a local run's newest attempt, as the loop of ``submit --local`` does."""
    holder = read_json(run.holder_file(run.newest_attempt() or 0))
    assert holder is not None
    give_notice(run, Cause.PREEMPTED)
    os.killpg(holder["pid"], signal.SIGTERM)


def story(run: RunDirectory) -> str:
    """All that a run left behind, for a failure's message."""
    parts = [str(event) for event in run.events()]
    for log in sorted(run.logs.rglob("*")):
        if log.is_file() and log.stat().st_size:
            parts.append(f"--- {log.relative_to(run.path)}\n{log.read_text(errors='replace')[-3000:]}")
    return "\n".join(parts)


def final_state(run: RunDirectory) -> Mapping[str, Any]:
    """All parts in the last checkpoint, flat, and what it has of each rank."""
    # They import torch, which ranks that run a class of a test file can do without.
    from clusterddp.checkpoint.checkpoint import RESERVED
    from tests.checkpoint_files import content_of

    content = content_of(max(run.checkpoints.glob("step-*")))
    parts = {name: value for name, value in content.items() if name not in RESERVED}
    flat: dict[str, Any] = {}
    flatten("", parts | {"per_rank": content.get("progress", {}).get("per_rank", [])}, flat)
    return flat


def flatten(prefix: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            flatten(f"{prefix}.{key}", item, into)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            flatten(f"{prefix}.{index}", item, into)
    else:
        into[prefix] = value


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The entries that are not equal to the last bit."""
    import torch

    assert a.keys() == b.keys()
    return [
        key for key in a if not (torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key])
    ]
