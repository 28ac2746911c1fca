"""What the table of tested repositories is made from: entries, presets, results, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

from clusterddp.jobdef import kinds
from clusterddp.rundir.run_directory import RunDirectory
from tests.repositories import rehearsals, rehearsals_page
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


def test_the_page_of_rehearsals_shows_what_a_certificate_says() -> None:
    step = {"name": "step", "tried": True, "resumed_step": 8, "repeated_steps": 4, "result": "differs"}
    kill = {"name": "kill", "tried": True, "resumed_step": None, "repeated_steps": None, "result": "unfinished"}
    cause = {"rank": "loses_work", "cause": "new_folder", "detail": "a sentence", "file": "a.py", "line": 3}
    cause |= {"disturbances": ["kill"]}
    alone = {"repeatable": True, "steps": 24, "disturbances": [step, kill], "findings": [cause]}
    same = {"resumed_step": 9, "repeated_steps": 3, "result": "same"}
    supervised = alone | {"disturbances": [step | same, kill | same], "findings": []}
    certificates = {"some": {"slurm": alone, "clusterddp": supervised}, "half": {"slurm": alone}}
    shown = rehearsals_page.page([_entry(), _entry(name="half"), _entry(name="other")], certificates)
    rows = [line.strip("| ").split(" | ")[1:6] for line in shown.splitlines() if "owner/some" in line]
    assert rows[0] == ["24", "Slurm alone", "4 repeated, **wrong result**", "**does not start again**", "new folder"]
    assert rows[1][:4] == ["24", "clusterddp", "3 repeated", "3 repeated"]
    assert "| do not start again after one of the disturbances | 2 of 2 | 0 of 1 |" in shown
    assert "| lose nothing but time | 0 of 2 | 1 of 1 |" in shown
    assert "under clusterddp: half, other." in shown and "a sentence (a.py:3)" in shown


def test_certificates_are_kept_of_the_pinned_commits_and_hold_no_path_of_a_machine() -> None:
    entries = {entry.name: entry for entry in read_all()}
    for file in rehearsals.CERTIFICATES.glob("*.json"):
        certificate = json.loads(file.read_text())
        assert certificate["commit"] == entries[file.name.split(".")[0]].commit
        assert not re.search(r'"(/tmp|/home|/work|/root)/', file.read_text())


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
