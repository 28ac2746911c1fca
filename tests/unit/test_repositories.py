"""What the table of tested repositories is made from: entries, presets, results, and the page."""

from __future__ import annotations

import json
from pathlib import Path

from clusterddp.jobdef import kinds
from clusterddp.rundir.run_directory import RunDirectory
from tests.repositories.disturbances import Result, outcome_of
from tests.repositories.entries import Copy, Repository, read_all

WHOLE = Result("undisturbed", "completed", True, 1, 8, 0, "4 2", "0.5", 9.0, True, "all ranks finished")


def test_every_entry_reads_and_names_a_preset_that_exists() -> None:
    entries = read_all()
    assert len(entries) >= 10
    assert {entry.preset for entry in entries if entry.preset} <= set(kinds.preset_names())
    assert all(len(entry.commit) == 40 and entry.url.startswith("https://github.com/") for entry in entries)


def test_steps_that_two_attempts_made_are_repeated(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for attempt, steps in enumerate(([0, 1, 2], [1, 2, 3])):
        folder = run.logs / f"attempt-{attempt}"
        folder.mkdir(parents=True)
        (folder / "rank-0.out").write_text("".join(f"iter {step}: loss 0.{step}\n" for step in steps))
    run.outcome_file.write_text(json.dumps({"state": "completed", "step": None, "attempts": 2, "reason": "done"}))
    entry = _entry()
    found = outcome_of(Copy(entry, tmp_path), run, "middle", 1.0)
    assert (found["steps"], found["repeated"], found["last"], found["metric"]) == (4, 2, "3", "0.3")


def test_a_run_that_lacks_steps_or_confirmation_is_not_complete() -> None:
    made = WHOLE.record() | {"disturbance": "end", "attempts": 2}
    assert Result(**made).complete(WHOLE)
    for change in ({"confirmed": False}, {"steps": 7}, {"state": "failed"}, {"disturbed": False}):
        assert not Result(**made | change).complete(WHOLE)


def _entry(**changes: object) -> Repository:
    known = {
        "name": "some",
        "url": "https://github.com/owner/some",
        "commit": "0" * 40,
        "checkout": "some",
        "readme": "python train.py",
        "differences": (),
        "packages": (),
        "data": "nothing",
        "device": "cpu",
        "job": {"script": "train.py"},
        "resume": {"resume": "nanogpt"},
        "changed_lines": 0,
        "moments": None,
        "step": r"^iter (\d+):",
        "metric": r"loss (\S+)",
    }
    return Repository(**{**known, **changes})  # type: ignore[arg-type]
