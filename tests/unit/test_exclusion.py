"""Which nodes a run's next jobs exclude: the decision alone, over histories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterddp.failures.exclusion import FOR_S, Choice, choose, excluded, letter, option, still_excluded
from clusterddp.jobdef.job import Job
from clusterddp.slurm.commands import parse_usable
from tests.histories import view

NOW = 1_000_000.0
ALL = ["n1", "n2", "n3", "n4"]
JOB = Job(name="x", module="x", nodes=2)


def failed(
    *nodes: str, kind: str = "rank_failed", age_s: float = 60.0, error: str = "killed by signal 9"
) -> list[dict[str, Any]]:
    """An attempt for each node, in which it failed; the newest last."""
    return [
        {"event": kind, "attempt": number, "time": NOW - age_s + number, "suspect": node, "error": error}
        for number, node in enumerate(nodes)
    ]


def left_out(*nodes: str, age_s: float = 30.0) -> dict[str, Any]:
    return {"event": "excluded", "attempt": 9, "time": NOW - age_s, "nodes": list(nodes), "failures": [2]}


@pytest.mark.parametrize(
    ("events", "lost", "usable", "choice"),
    [
        ([], [], ALL, Choice()),
        (failed("n2"), [], ALL, Choice()),
        (failed("n2", "n3"), [], ALL, Choice()),
        (failed("n2", "n2"), [], ALL, Choice(("n2",), ("n2",))),
        ([{**failed("n2")[0], "lacks_gpus": True}], [], ALL, Choice(("n2",), ("n2",))),
        (failed("n2", kind="node_lost") + failed("n1", "n2", "n2"), [], ALL, Choice(("n2",), ("n2",))),
        (failed("n2", "n2", "n1"), [], ALL, Choice()),
        (failed("n2", "n2", "n1", "n2"), [], ALL, Choice(("n2",), ("n2",))),
        (failed("n2", "n2") + failed("n1", error="ECC error"), [], ALL, Choice(("n2",), ("n2",))),
        ([{**event, "fault": "Xid 79"} for event in failed("n2", "n2", "n1", "n1")], [], ALL,
         Choice(("n2", "n1"), ("n2", "n1"))),
        (failed("n2", "n1", "n2", "n1", kind="hung"), [], ALL, Choice()),
        (failed("n2", "n2", kind="hung"), [], ALL, Choice(("n2",), ("n2",))),
        (failed("n2", "n2", age_s=FOR_S + 60), [], ALL, Choice()),
        ([*failed("n2", "n2"), left_out("n2")], [], ALL, Choice(("n2",))),
        ([left_out("n2", age_s=FOR_S + 1)], [], ALL, Choice()),
        ([*failed("n2", "n2"), *failed("n3", "n3", error="ECC error"), left_out("n2")], [], ALL,
         Choice(("n2", "n3"), ("n3",))),
        (failed("n2"), ["n2"], ALL, Choice(("n2",))),
        ([left_out("n1")], ["n2"], ALL, Choice(("n1", "n2"))),
        ([], ["n2", "n3"], ALL, Choice(("n2", "n3"))),
        (failed("n3", "n3"), ["n2", "n3"], ALL, Choice(("n2", "n3"), ("n3",))),
    ],
)  # fmt: skip
def test_a_node_is_excluded_after_two_failures_that_only_it_had_within_a_day_or_while_it_is_lost(
    events: list[dict[str, Any]], lost: list[str], usable: list[str], choice: Choice
) -> None:
    """Of a run that needs two nodes, on a partition of four. A fault that the driver reported is the node's own."""
    assert choose(view(events), lost, usable, JOB, NOW) == choice


def test_of_more_lost_nodes_than_may_be_excluded_some_are() -> None:
    """They come before a node that failed and answers."""
    words = "n4 and n1 failed, but at most 2 failed nodes are excluded at a time"
    assert choose(view(failed("n1", "n1")), ["n2", "n3", "n4"], ALL, JOB, NOW) == Choice(("n2", "n3"), (), words)


def test_nodes_that_the_user_drained_are_used_again_if_too_few_others_are_left() -> None:
    """The next job excluded them and waited forever, when another node was lost."""
    drained = {"event": "requested", "attempt": 1, "time": NOW - 60.0, "request": "drain", "nodes": ["n1", "n2"]}
    reason = "without n1 and n2 and n3 the partition has 1 usable node, but the run needs 3"
    refused = f"{reason}. The next job excludes no node"
    job = replace(JOB, nodes=3)
    assert choose(view([drained]), ["n3"], ALL, job, NOW) == Choice(refused=refused)
    assert choose(view([drained]), ["n3"], [*ALL, "n5"], job, NOW).nodes == ("n1", "n2")


def test_nodes_that_the_job_definition_requires_are_not_excluded() -> None:
    """Slurm would refuse the next job, which waits for the node instead."""
    job, refused = replace(JOB, nodelist="n[1-2]"), "nodelist requires n2"
    assert choose(view([]), ["n2"], ALL, job, NOW) == Choice(refused=refused)
    assert choose(view(failed("n2", "n2")), [], ALL, job, NOW) == Choice(refused=refused)
    assert choose(view([left_out("n2")]), ["n3"], ALL, job, NOW) == Choice(("n3",))
    assert choose(view([]), ["n3", "n2"], ALL, replace(job, nodes=3), NOW) == Choice(("n3",), refused=refused)
    assert still_excluded(view([left_out("n2", "n3")]), NOW, lambda: ALL, job) == ["n3"]
    assert still_excluded(view([left_out("n2")]), NOW, lambda: ALL, replace(job, nodelist="./hosts")) == ["n2"]


def test_two_events_of_one_attempt_are_one_failure() -> None:
    """A node that is lost takes its rank with it."""
    events = failed("n2", kind="node_lost") + failed("n2")
    assert choose(view(events), [], ALL, JOB, NOW) == Choice()


@pytest.mark.parametrize(
    ("events", "lost", "usable", "words"),
    [
        (failed("n2", "n2"), [], ["n1", "n2"], "without n2 the partition has 1 usable node, but the run needs 2"),
        ([left_out("n1", "n3")], ["n2"], ["n1", "n2", "n3", "n4", "n5"],
         "n2 failed, but at most 2 failed nodes are excluded at a time"),
    ],
)  # fmt: skip
def test_slurms_choice_is_kept_where_excluding_would_leave_too_few(
    events: list[dict[str, Any]], lost: list[str], usable: list[str], words: str
) -> None:
    """Excluded nodes stay excluded."""
    choice = choose(view(events), lost, usable, JOB, NOW)
    assert (choice.nodes, choice.new, choice.refused) == (tuple(excluded(view(events), NOW)), (), words)


def test_the_text_for_the_administrator_says_what_failed_and_when() -> None:
    """Ready to be sent."""
    started = [{"event": "started", "attempt": number, "time": NOW - 90, "job": "41"} for number in range(2)]
    text = letter(view([*started, *failed("n2", "n2")]), "n2", NOW)
    hung = {**failed("n2", kind="hung")[0], "error": None, "what": "rank 3 (n2) has been stuck at step 7 for 606 s"}
    assert "job 41: rank 3 (n2) has been stuck at step 7 for 606 s" in letter(view([*started, hung]), "n2", NOW)
    assert text.startswith("Node n2 caused 2 failures in one of our training runs:\n")
    assert text.count("job 41: killed by signal 9") == 2
    assert "sbatch --exclude=n2" in text


def test_what_the_job_definition_excludes_stays_excluded() -> None:
    """sbatch's option replaces the one in the script."""
    assert option("rack[1-2]", ["n2", "n3"]) == ["--exclude=rack[1-2],n2,n3"]
    assert option(None, ["n2"]) == ["--exclude=n2"]
    assert option("rack1", []) == []


def test_usable_nodes_are_those_that_answer_and_take_jobs() -> None:
    """As sinfo -N shows them; a busy node will be free."""
    states = [
        "n1|idle",
        "n2|completing*",
        "n3|mixed",
        "n4|down",
        "n5|drained",
        "n6|draining",
        "n7|allocated",
        "n8|idle~",
    ]
    lines = [f"low|low*|{state}" for state in states] + ["high|high|n9|idle"]
    assert parse_usable(lines, None) == parse_usable(lines, "low") == ["n1", "n3", "n7", "n8"]
    assert parse_usable(lines, None, routed=True) == parse_usable(lines, "low,high") == ["n1", "n3", "n7", "n8", "n9"]
    assert parse_usable(["high|high|n9|idle"], None) == ["n9"]  # no partition is default
