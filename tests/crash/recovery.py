"""Whether a run directory after a crash keeps every promise and can continue; with the product's own readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clusterddp.checkpoint.store import Checkpoints
from clusterddp.checkpoint.transfer import unpacked
from clusterddp.errors import ClusterddpError
from clusterddp.history.beginnings import Resumed
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.claims import waiting_claim
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor import lease
from clusterddp.supervisor.history import History
from clusterddp.training.logged_values import Logged
from tests.checkpoint_files import save
from tests.crash.disk import Tree
from tests.crash.subject import JOB, STEPS_PER_SAVE, content, saver_of, values
from tests.runs_on_disk import jobs_of, outcome_of


@dataclass(frozen=True)
class Promised:
    """What the process had been promised up to a moment. Two moments with the same promises are equal."""

    facts: tuple[tuple[str, Any], ...] = ()
    saved: int = 0
    events: int = 0
    resumed: int = -1

    def and_(self, what: Mapping[str, Any]) -> Promised:
        """With one more promise."""
        facts = dict(self.facts) | {key: json.dumps(value) for key, value in what.items() if key in _FACTS}
        return Promised(
            tuple(sorted(facts.items())),
            max(self.saved, what.get("saved", 0)),
            max(self.events, what.get("events", 0)),
            max(self.resumed, what.get("resumed", -1)),
        )

    @staticmethod
    def all(promises: Iterable[Mapping[str, Any]]) -> Promised:
        """All of them."""
        promised = Promised()
        for what in promises:
            promised = promised.and_(what)
        return promised

    def get(self, name: str, default: Any = None) -> Any:
        found = dict(self.facts).get(name)
        return default if found is None else json.loads(found)

    def __contains__(self, name: str) -> bool:
        return name in dict(self.facts)


_FACTS = {"created", "job", "pending", "attempt", "holder", "outcome", "cancelled"}


def problem(path: Path, promised: Promised) -> str | None:
    """What is wrong with the run directory, in a line; None when it keeps all promises and went on to the next save.

    The run directory is changed: a new attempt resumes from it.
    """
    try:
        _check(RunDirectory(path), promised)
    except (AssertionError, ClusterddpError, OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check(run: RunDirectory, promised: Promised) -> None:
    _check_files(run, promised)
    if "created" not in promised:
        run.create()
    number = run.create_attempt()
    assert number > promised.get("attempt", -1), f"attempt number {number} was used before"
    _check_that_it_continues(run, number, promised)


def _check_files(run: RunDirectory, promised: Promised) -> None:
    """Every file reads, and says what it was made to say."""
    for file in run.path.rglob("*.json"):
        assert isinstance(json.loads(file.read_text()), dict), file
    job = run.job_file.read_text() if run.job_file.exists() else None
    assert job == JOB or (job is None and "job" not in promised), f"job.yaml: {job!r}"
    events = run.events()
    assert len(events) >= promised.events, f"{len(events)} events of {promised.events}"
    outcome = outcome_of(run)
    _check_outcome(promised, outcome)
    assert run.cancelled or not promised.get("cancelled"), "the mark that it was cancelled is missing"
    held = jobs_of(lease.holders(run))
    taken = waiting_claim(run, run.attempts()) is None
    assert "holder" not in promised or taken, "the submission holds the run again"
    if promised.get("pending") is not None:
        assert promised.get("pending") in held, f"held by {held}"
    if "holder" in promised:
        assert promised.get("holder") in held or len(held) > 0, f"held by {held}"
        assert held[-1] >= promised.get("holder"), f"held by {held}"


def _check_outcome(promised: Promised, found: dict[str, Any] | None) -> None:
    """The outcome that was promised, or the next one of the scenario.

    If writing the outcome of attempt 0 failed, the file may exist all the same until attempt 1 has removed it.
    """
    state = found["state"] if found else None
    last = promised.get("outcome")
    following = {
        ("failed", 1): None,
        (None, 0): "failed",
        (None, 1): "completed" if "outcome" in promised else "failed",
    }
    expected = {last, following.get((last, promised.get("attempt")), last)}
    assert state in expected, f"the outcome is {state}, not one of {expected}"


def _check_that_it_continues(run: RunDirectory, number: int, promised: Promised) -> None:
    """A new attempt finds the newest checkpoint, whole, with all metrics before it, and saves the next."""
    damaged: list[str] = []
    saver = saver_of(run, number, lambda event: damaged.append(str(event)))
    try:
        found = saver.restore()
        assert not damaged, damaged
        parent = found[1] if found else None
        step = parent[1] if parent else 0
        assert step >= promised.saved, f"restored step {step}, saved was {promised.saved}"
        if found is not None:
            _check_content(found[0], step)
        saver.record_resume(parent)
        of = {"attempt": parent[0], "step": parent[1]} if parent else {}
        History(run, number).add(Resumed(step=step, parent=of))
        _check_metrics(run, step)
        following = step + STEPS_PER_SAVE
        for at in range(step, following):
            saver.log(at, Logged(values(at)))
    finally:
        saver.close()
    save(run, number, following, content(following))  # in this process: the writer makes the same calls
    _check_metrics(run, following)
    again = Checkpoints(run, run.create_attempt(), Keep()).candidates()[0]
    _check_content(unpacked(again.read()), following)
    leftovers = [file.name for file in run.checkpoints.iterdir() if file.name.startswith(".")]
    assert not leftovers, f"left over: {leftovers}"


def _check_content(found: Mapping[str, Any], step: int) -> None:
    expected = content(step)
    assert found["progress"] == expected["progress"], f"step {step}: {found['progress']}"
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), f"step {step}: {name}"


def _check_metrics(run: RunDirectory, step: int) -> None:
    """Each step below ``step`` has one line that counts, and its own values."""
    lines = [(line["step"], line["loss"]) for line in run.metrics()]
    assert lines == [(at, values(at)["loss"]) for at in range(step)], f"metrics before step {step}: {lines}"


def write_tree(tree: Tree, place: Path, root: Path) -> None:
    """Makes the folders and files of a state of a disk, in ``place`` instead of ``root``.

    The run is known by its path, which is in some of the files.
    """
    for path, data in sorted(tree.items()):
        if data is None:
            (place / path).mkdir(parents=True)
        else:
            (place / path).write_bytes(data.replace(bytes(root), bytes(place)))
