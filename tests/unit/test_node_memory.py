"""What runs remember of failed nodes: the entries, the decision, and the commands that use them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterddp.cli.command_line import command
from clusterddp.errors import UsageError
from clusterddp.failures import node_memory
from clusterddp.failures.node_memory import (
    DAY_S,
    NodeFailure,
    avoided,
    choose,
    is_avoided,
    left_out,
    letter,
    memory_of,
    recall,
    remember,
    weight,
)
from clusterddp.jobdef.job import Job
from clusterddp.rundir.run_directory import RunDirectory
from tests.histories import event_of, happened
from tests.wording import raises, says

NOW = 1_900_000_000.0
MANY = [f"n{number}" for number in range(1, 21)]


def failure(node: str, run: str, age_days: float = 0.0) -> NodeFailure:
    return NodeFailure(NOW - age_days * DAY_S, node, run, "7", "killed by SIGKILL")


@pytest.mark.parametrize(
    ("failures", "nodes"),
    [
        ([failure("n2", "a")], []),
        ([failure("n2", "a"), failure("n2", "a")], []),  # the run itself excludes it
        ([failure("n2", "a"), failure("n2", "b")], ["n2"]),
        ([failure("n2", "a"), failure("n3", "b")], []),
        ([failure("n2", "a", 0.5), failure("n2", "b", 1.4)], ["n2"]),
        ([failure("n2", "a", 1.1), failure("n2", "b", 1.1)], []),  # both have lost more than half
        ([failure("n2", "a"), failure("n2", "b", 1.2)], []),  # more than a day apart
        ([failure("n2", "a"), failure("n2", "a", 0.5), failure("n2", "b", 1.3)], ["n2"]),  # one more makes it no better
        ([failure("n2", "a", 0.9), failure("n2", "b", 0.9), failure("n3", "a"), failure("n3", "b")], ["n3", "n2"]),
        ([failure("gone", "a"), failure("gone", "b")], []),
    ],
)
def test_a_node_is_avoided_after_failures_of_two_runs_within_a_day_which_fade(
    failures: list[NodeFailure], nodes: list[str]
) -> None:
    assert choose(failures, MANY, [], 2, NOW) == nodes


def test_at_most_a_tenth_of_the_nodes_is_avoided_and_the_job_keeps_as_many_as_it_needs() -> None:
    failures = [failure(node, run, number / 100) for number, node in enumerate(MANY[:5]) for run in "ab"]
    assert choose(failures, MANY, [], 2, NOW) == ["n1", "n2"]
    assert choose(failures, MANY[:9], [], 2, NOW) == []
    assert choose(failures, MANY, [], 19, NOW) == ["n1"]
    assert choose(failures, MANY, ["n20"], 19, NOW) == []
    assert choose(failures, MANY, ["n1"], 2, NOW) == ["n2", "n3"]


def test_an_entry_loses_half_of_its_weight_per_day() -> None:
    assert weight([failure("n2", "a"), failure("n2", "b")], NOW) == 2
    assert weight([failure("n2", "a"), failure("n2", "b")], NOW + DAY_S) == 1


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "train-0").mkdir()
    return RunDirectory(tmp_path / "train-0")


def lost(node: str, at: float = NOW) -> dict[str, Any]:
    return {"time": at, "attempt": 0, "event": "node_lost", "node": node, "suspect": node}


def test_a_failure_of_a_node_is_remembered_beside_the_run_and_others_are_not(run: RunDirectory) -> None:
    remember(run, "7", event_of(lost("n2")))
    remember(run, "7", event_of({"time": NOW, "attempt": 0, "event": "rank_failed", "rank": 0, "error": "ValueError"}))
    assert recall(memory_of(run), False, NOW) == [NodeFailure(NOW, "n2", str(run), "7", "the node stopped responding")]


def test_the_same_failure_of_a_run_on_several_nodes_counts_against_none(run: RunDirectory) -> None:
    """The script is more likely to blame. That a node was lost, or that a driver reported a fault, is the node's."""
    for number, node in enumerate(("n1", "n2")):
        failed = {
            "time": NOW,
            "attempt": number,
            "event": "rank_failed",
            "suspect": node,
            "error": f"CUDA error: {number}",
        }
        remember(run, "7", event_of(failed))
        remember(run, "7", event_of(lost(node)))
        remember(run, "7", event_of({**failed, "fault": "Xid 79"}))
    remember(run, "7", event_of({**failed, "error": "SIGBUS"}))
    found = [(failure.node, failure.what) for failure in recall(memory_of(run), False, NOW)]
    gone = "the node stopped responding"
    assert sorted(found) == [("n1", "Xid 79"), ("n1", gone), ("n2", "SIGBUS"), ("n2", "Xid 79"), ("n2", gone)]


def test_entries_of_more_than_a_week_are_deleted_with_the_next(run: RunDirectory) -> None:
    remember(run, "7", event_of(lost("n2", NOW - 8 * DAY_S)))
    remember(run, "7", event_of(lost("n3")))
    (left,) = memory_of(run).iterdir()
    assert "-n3-" in left.name


@pytest.mark.parametrize("as_link", [True, False])
def test_no_file_is_deleted_in_a_folder_that_another_user_has_put_there(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], as_link: bool
) -> None:
    """A link to a folder of this user, or that folder itself, which others may rename."""
    mine = tmp_path / "mine" if as_link else memory_of(run)
    mine.mkdir()
    names = {"1000-n1-0123abcd.json", "2024-notes.json", "1", "1000-n1-0123abcd.pt"}
    for name in names:
        (mine / name).write_text("mine")
    if as_link:
        memory_of(run).symlink_to(mine)
    else:  # nor what only has an entry's name
        (mine / "1000-n1-0123abcd.json").unlink()
        (mine / "1000-n1-0123abcd.json").symlink_to(mine / "1")
    remember(run, "7", event_of(lost("n2")))
    assert names <= set(os.listdir(mine))
    assert ("could not record the failure of n2" in capsys.readouterr().err) == as_link


def test_members_of_a_sweep_share_the_folder_beside_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "sweep" / "lr=1").mkdir(parents=True)
    (tmp_path / "sweep" / "sweep.yaml").touch()
    assert memory_of(RunDirectory(tmp_path / "sweep" / "lr=1")) == tmp_path / node_memory.FOLDER


def test_a_damaged_entry_and_a_name_that_is_no_node_are_skipped(run: RunDirectory) -> None:
    remember(run, "7", event_of(lost("n2")))
    folder = memory_of(run)
    (folder / "9999999999-n3-0.json").write_text("{")
    whole = next(folder.glob("*-n2-*")).read_text()
    (folder / "9999999999-n4-0.json").write_text(whole.replace('"n2"', '"n4,n[1-9]"'))
    assert [entry.node for entry in recall(folder, False, NOW)] == ["n2"]


def test_entries_of_other_users_count_only_for_a_shared_run_and_members_of_the_group(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(run, "7", event_of(lost("n2")))
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    group = memory_of(run).stat().st_gid
    users: Callable[[int], SimpleNamespace] = lambda uid: SimpleNamespace(pw_gid=group, pw_name="ann")  # noqa: E731
    monkeypatch.setattr(node_memory.pwd, "getpwuid", users)
    assert [entry.node for entry in recall(memory_of(run), True, NOW)] == ["n2"]
    assert recall(memory_of(run), False, NOW) == []
    monkeypatch.setattr(node_memory.pwd, "getpwuid", lambda _: SimpleNamespace(pw_gid=group + 1, pw_name="eve"))
    monkeypatch.setattr(node_memory.grp, "getgrgid", lambda _: SimpleNamespace(gr_mem=["ann"]))
    assert recall(memory_of(run), True, NOW) == []


def test_the_folder_is_open_to_those_who_may_create_runs_beside_it(run: RunDirectory) -> None:
    run.path.parent.chmod(0o2770)
    remember(run, "7", event_of(lost("n2")))
    assert memory_of(run).stat().st_mode & 0o7777 == 0o3770


def test_a_new_job_says_which_nodes_it_avoids_and_asks_slurm_only_then(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def usable() -> list[str]:
        asked.append(1)
        return MANY

    job = Job(name="train", script="train.py", nodes=2)
    assert avoided(run, job, (), usable, NOW) == [] and not asked
    remember(RunDirectory(run.path.with_name("a")), "7", event_of(lost("n2")))
    remember(RunDirectory(run.path.with_name("b")), "8", event_of(lost("n2")))
    assert avoided(run, job, (), usable, NOW) == ["n2"]
    says(capsys.readouterr().err)
    assert avoided(run, Job(name="train", script="train.py", nodes=2, node_memory=False), (), usable, NOW) == []


def test_a_job_that_a_command_submits_excludes_what_the_run_has_left_out_and_avoids_a_tenth_of_the_nodes_besides(
    run: RunDirectory,
) -> None:
    """n4 failed twice in this run, n2 in two others (seed 20052461)."""
    for name in "ab":
        remember(RunDirectory(run.path.with_name(name)), "7", event_of(lost("n2")))
    happened(run, {"event": "excluded", "attempt": 0, "time": NOW, "nodes": ["n4"]})
    asked = iter([MANY])
    job = Job(name="train", script="train.py", nodes=2)
    assert left_out(run, job, lambda: next(asked), NOW) == ["n4", "n2"]


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ({}, ["n2", "n3"]),
        ({"exclude": "n[4-20]"}, ["n2"]),
        ({"exclude": "n[3-20]"}, []),
        ({"exclude": "n2"}, ["n3"]),
        ({"nodelist": "n[1-2]"}, ["n3"]),
    ],
)
def test_nodes_that_the_job_definition_excludes_or_requires_are_not_avoided(
    run: RunDirectory, given: dict[str, Any], nodes: list[str]
) -> None:
    """n2 and n3 of 20 nodes failed. The job needs two, which those that it excludes cannot be."""
    for node, at in (("n2", NOW), ("n3", NOW - 60)):
        for name in "ab":
            remember(RunDirectory(run.path.with_name(name)), "7", event_of(lost(node, at)))
    job = Job(name="train", script="train.py", nodes=2, **given)
    assert avoided(run, job, (), lambda: MANY, NOW) == nodes


def test_the_failed_nodes_of_what_is_no_folder_are_refused(tmp_path: Path) -> None:
    with raises(UsageError):
        command(["doctor", "--failed-nodes", str(tmp_path / "missing")])


def test_doctor_lists_failed_nodes_and_writes_to_the_administrator(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(run.path.parent)
    assert command(["doctor", "--failed-nodes", folder]) == 0
    says(capsys.readouterr().err)
    now = time.time()
    remember(RunDirectory(run.path.with_name("a")), "7", event_of(lost("n2", now)))
    remember(RunDirectory(run.path.with_name("b")), "8", event_of(lost("n2", now)))
    remember(run, "9", event_of(lost("n3", now - 60)))
    assert command(["doctor", "--failed-nodes", folder]) == 0
    out = capsys.readouterr().out
    unless = "unless that would exclude more than a tenth of its partition's usable nodes"
    assert "n2: 2 failures in 2 runs" in out and f"new jobs avoid it, {unless}" in out
    assert "n3: 1 failure in 1 run" in out
    assert "Node n2 caused 2 failures in 2 of our training runs:" in out
    assert out.endswith(f"For now, our new jobs exclude this node, {unless}.\n")
    assert "Node n3" not in out


def test_the_message_of_a_node_that_new_jobs_use_again_does_not_say_that_they_exclude_it() -> None:
    failures = [failure("n2", "a", 2), failure("n2", "b", 2)]
    assert not is_avoided(failures, NOW)
    assert letter("n2", failures, NOW).endswith("(memory, GPUs, network, disk)?")
