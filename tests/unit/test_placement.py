"""Which nodes of its job a run trains on, and where it continues without a node."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.failures.hangs import Hang
from clusterddp.failures.placement import Course, JobStart, Placement, choose, place
from clusterddp.history.codec import sentence
from clusterddp.jobdef.job import Job
from clusterddp.messages.reports import End
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.commands import JobInfo
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt_state import State, Stop
from clusterddp.supervisor.batch_host_guard import lost_batch_host
from clusterddp.supervisor.history import History
from clusterddp.supervisor.main import supervise
from clusterddp.supervisor.recovery import AttemptResult, Recovery, hung_node
from clusterddp.supervisor.retry_limits import exceeded
from clusterddp.supervisor.verdict import RankEnd
from tests.fake_slurm import FakeController, FakeRanks
from tests.histories import event_of, happened, view

FIXED = Job(name="x", module="x", nodes=3, gpus_per_node=8)
SPARE = replace(FIXED, spare_nodes=1)
RANGE = replace(FIXED, min_nodes=2)
LOST = {"n2": "is lost"}
ALL = ("n1", "n2", "n3", "n4", "n5")


def at(nodes: str, allocated: str, aside: str = "") -> Placement:
    return Placement(tuple(allocated.split()), tuple(nodes.split()), tuple(aside.split()))


@pytest.mark.parametrize(
    ("job", "placement", "leave", "answering", "course", "nodes", "why"),
    [
        pytest.param(SPARE, at("n1 n2 n3", "n1 n2 n3 n4"), {}, ALL, Course.SAME, "", "", id="nothing to leave"),
        pytest.param(
            SPARE, at("n1 n2 n3", "n1 n2 n3 n4"), {"n4": "is lost"}, ALL, Course.SAME, "", "", id="only a spare node"
        ),
        pytest.param(
            *(SPARE, at("n1 n2 n3", "n1 n2 n3 n4"), LOST, ALL, Course.SPARE, "n1 n3 n4"),
            "node n2 is lost, so the ranks continue on the spare node n4",
            id="a spare node",
        ),
        pytest.param(
            *(SPARE, at("n2 n3 n4", "n1 n2 n3 n4"), LOST, None, Course.SPARE, "n1 n3 n4"),
            "node n2 is lost, so the ranks continue on the spare node n1",
            id="nodes stay in Slurm's order; what answers is unknown",
        ),
        pytest.param(
            *(replace(SPARE, spare_nodes=2), at("n1 n2 n3", "n1 n2 n3 n4 n5"), LOST, ("n3", "n5"), Course.SPARE),
            "n1 n3 n5",
            "node n2 is lost and the spare node n4 cannot be used, so the ranks continue on the spare node n5",
            id="a dead spare node",
        ),
        pytest.param(
            *(SPARE, at("n1 n3 n4", "n1 n2 n3 n4", "n2"), {"n3": "hangs"}, ALL, Course.NEW_JOB, ""),
            "node n3 hangs, and the job has 2 nodes left, but the run needs 3",
            id="the spare node is used up",
        ),
        pytest.param(
            *(SPARE, at("n1 n2 n3", "n1 n2 n3 n4"), {**LOST, "n3": "is lost"}, ALL, Course.NEW_JOB, ""),
            "node n2 is lost and node n3 is lost, and the job has 2 nodes left, but the run needs 3",
            id="two nodes with one spare",
        ),
        pytest.param(
            *(RANGE, at("n1 n2 n3", "n1 n2 n3"), LOST, ALL, Course.SHRINK, "n1 n3"),
            "node n2 is lost, so the run continues on 2 nodes",
            id="a range shrinks",
        ),
        pytest.param(
            *(replace(RANGE, spare_nodes=1), at("n1 n2 n3", "n1 n2 n3 n4"), LOST, ALL, Course.SPARE, "n1 n3 n4"),
            "node n2 is lost, so the ranks continue on the spare node n4",
            id="a spare node before shrinking",
        ),
        pytest.param(
            *(replace(RANGE, nodes=2), at("n1 n2", "n1 n2 n3", "n3"), LOST, ALL, Course.NEW_JOB, ""),
            "node n2 is lost, and the job has 1 node left, but the run needs 2",
            id="a range at its least",
        ),
        pytest.param(
            *(FIXED, at("n1 n2 n3", "n1 n2 n3"), LOST, ALL, Course.NEW_JOB, ""),
            "node n2 is lost, and the job has no spare nodes",
            id="neither",
        ),
    ],
)
def test_a_run_moves_to_spare_nodes_then_shrinks_and_then_leaves_its_job(
    job: Job, placement: Placement, leave: dict[str, str], answering: Any, course: Course, nodes: str, why: str
) -> None:
    """With the reason as a sentence; the nodes that were left stay idle."""
    choice = choose(job, placement, leave, answering)
    assert (choice.course, choice.why) == (course, why)
    assert choice.placement.nodes == tuple(nodes.split())
    if nodes:
        assert {*leave, *placement.aside} <= {*choice.placement.aside}
        assert not {*choice.placement.aside} & {*choice.placement.nodes, *choice.placement.spares}


START, AGAIN = JobStart("n[1-4]", job="7"), JobStart("n[1-4]", job="7", restarts=1)
STARTED = {"event": "started", "attempt": 0, "time": 1.0, "job": "7"}
MOVED = {"event": "moved", "attempt": 0, "time": 2.0, "aside": ["n2"], "nodes": ["n1", "n3", "n4"], "why": ""}
FAILED = [
    {"event": "rank_failed", "attempt": attempt, "time": 3.0, "suspect": "n1", "host": "n1", "error": ""}
    for attempt in range(2)
]


def test_an_attempt_starts_where_the_one_before_has_moved_to() -> None:
    """In the same start of the same job; in another, all nodes are as good again, but those that failed twice."""
    allocated = ALL[:4]
    assert place(FIXED, allocated, view([]), START, 4.0) == Placement(allocated, allocated)
    assert place(SPARE, allocated, view([STARTED]), START, 4.0) == at("n1 n2 n3", "n1 n2 n3 n4")
    moved = place(SPARE, allocated, view([STARTED, MOVED]), START, 4.0)
    assert moved == at("n1 n3 n4", "n1 n2 n3 n4", "n2")
    assert (moved.spares, moved.aside) == ((), ("n2",))
    again = place(SPARE, allocated, view([STARTED, MOVED]), AGAIN, 4.0)
    assert (again.nodes, again.spares, again.aside) == (("n1", "n2", "n3"), ("n4",), ())
    assert place(SPARE, allocated, view([STARTED, *FAILED]), START, 4.0).nodes == ("n2", "n3", "n4")
    assert place(SPARE, allocated[:3], view([STARTED, *FAILED]), START, 4.0).nodes == ("n1", "n2", "n3")


def test_a_drained_node_that_slurm_gives_the_next_job_is_left_and_no_spare() -> None:
    """Unless the job has too few others."""
    drained = {"event": "requested", "attempt": 0, "time": 2.0, "request": "drain", "nodes": ["n2"]}
    moved = {**MOVED, "attempt": 1, "aside": ["n1"], "nodes": ["n3", "n4"]}
    assert place(SPARE, ALL[:4], view([STARTED, drained]), AGAIN, 4.0) == at("n1 n3 n4", "n1 n2 n3 n4", "n2")
    assert place(SPARE, ALL[:3], view([STARTED, drained]), AGAIN, 4.0) == at("n1 n2 n3", "n1 n2 n3")
    later = [STARTED, drained, {**STARTED, "restarts": 1, "attempt": 1}, moved]
    assert place(replace(RANGE, spare_nodes=1), ALL[:4], view(later), AGAIN, 4.0) == at("n3 n4", "n1 n2 n3 n4", "n1 n2")


def test_a_node_that_failed_is_used_rather_than_a_drained_one() -> None:
    """Without a spare or a new job, an attempt would otherwise return to the node that the last one has left."""
    drained = {"event": "requested", "attempt": 0, "time": 2.0, "request": "drain", "nodes": ["n1"]}
    later = [{**STARTED, "restarts": 1, "attempt": attempt} for attempt in (1, 2)]
    failed = [{**FAILED[0], "suspect": "n2", "host": "n2", "attempt": attempt} for attempt in (1, 2)]
    history = view([STARTED, drained, later[0], failed[0], later[1], failed[1]])
    assert place(SPARE, ALL[:4], history, AGAIN, 4.0) == at("n2 n3 n4", "n1 n2 n3 n4", "n1")


def test_a_node_that_was_left_stays_idle_after_the_next_move() -> None:
    """A further move would put ranks back on a bad node."""
    job, again = replace(RANGE, spare_nodes=1), {**MOVED, "attempt": 1, "aside": ["n1"], "nodes": ["n3", "n4"]}
    events = [STARTED, MOVED, {**STARTED, "attempt": 1}, again]
    assert place(job, ALL[:4], view(events), START, 4.0) == at("n3 n4", "n1 n2 n3 n4", "n1 n2")


def test_a_job_has_lost_its_batch_host_once_slurm_takes_it_out_of_the_job() -> None:
    """Not while the job is another start of it, or is ending."""
    info = JobInfo("7", "RUNNING", "None", "n[2-3]", 1, None, None, batch_host="n1")
    assert lost_batch_host(info, 1)
    assert not lost_batch_host(info, 0)
    assert not lost_batch_host(replace(info, nodes="n[1-3]"), 1)
    assert not lost_batch_host(replace(info, state="COMPLETING"), 1)
    assert not lost_batch_host(replace(info, state="PENDING", nodes="", batch_host=""), 1)
    assert not lost_batch_host(None, 1)


class Job41(FakeController):
    """A job with three nodes."""

    def describe(self) -> JobStart:
        return JobStart("n[1-3]", job="41")


class Ranks(FakeRanks):
    """A rank per node of its placement, whose ends are those of ``nodes``, by node, or done."""

    def __init__(self, run: RunDirectory, placement: Placement, nodes: dict[str, dict[str, Any]]) -> None:
        super().__init__(run, {"end": "done"})
        self.placement, self._nodes = placement, nodes

    def start(self, command: list[str], environment: Any, logs: Path) -> None:
        for rank, node in enumerate(self.placement.nodes):
            end = {"host": node, "used_clusterddp": True, "end": "done", **self._nodes.get(node, {})}
            write_json(self._run.rank_record(int(environment["CLUSTERDDP_ATTEMPT"]), rank), end)

    def wait(self) -> int:
        return int(any(node in self._nodes for node in self.placement.nodes))


@pytest.mark.parametrize(
    ("job", "nodes", "ranks"),
    [
        (replace(SPARE, nodes=2), [["n1", "n2"], ["n1", "n2"], ["n1", "n3"]], 2),
        (replace(RANGE, nodes=3), [["n1", "n2", "n3"], ["n1", "n2", "n3"], ["n1", "n3"]], 2),
    ],
    ids=["spare", "shrink"],
)
def test_after_two_failures_of_a_node_all_ranks_restart_without_it(
    tmp_path: Path, job: Job, nodes: list[list[str]], ranks: int
) -> None:
    """In the same job, whose next ones exclude the node."""
    run, placements = RunDirectory(tmp_path / "run"), []
    run.create()

    def launcher(_: Job, placement: Placement) -> Ranks:
        placements.append(placement)
        return Ranks(run, placement, {"n2": {"end": "died", "error": "killed by signal 9"}})

    controller = Job41(Cause.NONE)
    controller.nodes = ["n1", "n2", "n3", "n4"]
    assert supervise(run, replace(job, device="cpu", gpus_per_node=1), launcher, controller) == 0
    assert [list(placement.nodes) for placement in placements] == nodes
    assert placements[-1].aside == ("n2",)
    assert controller.asked == []
    events = {event["event"]: event for event in run.events()}
    assert (events["started"]["ranks"], events["started"]["aside"], events["moved"]["aside"]) == (ranks, ["n2"], ["n2"])
    assert events["excluded"]["nodes"] == ["n2"]
    words = "attempt 1: node n2 failed repeatedly in this run, so the r"
    assert (sentence(event_of(events["moved"])) or "").startswith(words)


def test_a_drained_node_is_excluded_from_the_next_job_if_the_spare_node_has_failed(tmp_path: Path) -> None:
    run, controller = RunDirectory(tmp_path / "run"), Job41(Cause.NONE)
    run.create()
    run.create_attempt()
    controller.nodes = ["n1", "n4", "n5"]
    happened(
        run,
        {"event": "requested", "attempt": 0, "time": time.time(), "request": "drain", "nodes": ["n2"]},
    )
    job = replace(SPARE, nodes=2, gpus_per_node=1, device="cpu")
    state = State(job, ("n1", "n2"), placement=at("n1 n2", "n1 n2 n3"), stops_sent=frozenset(("drain",)), exit_code=0)
    state = replace(state, wanted=Stop.DRAIN, drained="n2")
    ends = tuple(RankEnd(rank, f"n{rank + 1}", End.STOPPED, 0.0, used_clusterddp=True) for rank in (0, 1))
    Recovery(run, 0, controller, History(run, 0), AttemptResult(state, ends)).act()
    assert controller.asked == ["resubmit n2"]
    (end,) = (event for event in run.events() if event["event"] == "resubmitted")
    why = "Node n2 is drained and the spare node n3 cannot be used, and the job has 1 node left, but the run needs 2"
    assert end["reason"] == f"stopped by `clusterddp drain`. {why}"
    assert f"{why}. " in (sentence(event_of(end)) or "")


@pytest.mark.parametrize("starts_again", [True, False], ids=["new job", "own allocation"])
def test_the_end_of_an_attempt_says_why_its_job_has_too_few_nodes(tmp_path: Path, starts_again: bool) -> None:
    """Only for a job that outlives its nodes. Any other one ends because of the lost node itself."""
    reasons = []
    for job in (replace(RANGE, nodes=2), replace(FIXED, nodes=2)):
        run, controller = RunDirectory(tmp_path / f"run-{job.outlives_nodes}"), Job41(Cause.NONE)
        run.create()
        run.create_attempt()
        controller.nodes, controller.starts_again = ["n1", "n4", "n5"], starts_again
        state = State(
            replace(job, gpus_per_node=1, device="cpu"),
            ("n1", "n2"),
            placement=at("n1 n2", "n1 n2"),
            silent=frozenset({1}),
        )
        ends = (RankEnd(0, "n1", End.STOPPED, 0.0, used_clusterddp=True), RankEnd(1, "n2", End.DIED, 0.0, "lost"))
        Recovery(run, 0, controller, History(run, 0), AttemptResult(state, ends)).act()
        reasons.append(run.events()[-1]["reason"])
    assert reasons[0] == f"{reasons[1]}. Node n2 is lost, and the job has 1 node left, but the run needs 2"


@pytest.mark.parametrize(
    ("job", "unended", "policy", "end", "asked"),
    [
        pytest.param(SPARE, ["n2"], None, "restarted", [], id="a spare node"),
        pytest.param(SPARE, [], None, "requeued", ["requeue"], id="the busy node is unknown"),
        pytest.param(FIXED, ["n2"], None, "requeued", ["requeue"], id="no spare node"),
        pytest.param(FIXED, ["n2"], "resubmit", "resubmitted", ["resubmit"], id="no requeue"),
    ],
)
def test_a_run_whose_ranks_cannot_start_on_busy_nodes_moves_or_leaves_its_job(
    tmp_path: Path, job: Job, unended: list[str], policy: Any, end: str, asked: list[str]
) -> None:
    """No rank has failed, and no node is suspected."""
    run, controller = RunDirectory(tmp_path / "run"), Job41(Cause.NONE)
    run.create()
    for _ in range(2):
        run.create_attempt()
    controller.nodes = ["n1", "n2", "n3"]
    happened(run, {"event": "restarted", "attempt": 0, "time": time.time(), "unended": unended})
    job = replace(job, nodes=2, gpus_per_node=1, device="cpu", policy=policy)
    allocated = "n1 n2 n3" if job.spare_nodes else "n1 n2"
    state = State(job, ("n1", "n2"), placement=at("n1 n2", allocated), busy=True, exit_code=137)
    ends = tuple(RankEnd(rank, f"n{rank + 1}", End.DIED, math.inf) for rank in (0, 1))
    Recovery(run, 1, controller, History(run, 1), AttemptResult(state, ends)).act()
    (last,) = (event for event in run.events() if event["event"] == end and event["attempt"] == 1)
    assert (last["cause"], controller.asked) == (Cause.NODES_BUSY.value, asked)
    assert {"rank_failed", "excluded", "node_lost"}.isdisjoint(event["event"] for event in run.events())
    moved = [event["nodes"] for event in run.events() if event["event"] == "moved"]
    assert moved == ([["n1", "n3"]] if end == "restarted" else [])
    assert exceeded(job, view([{**last, "attempt": number} for number in range(3)]), 0.0) is not None


@pytest.mark.parametrize(
    ("late", "silent", "node"),
    [((2, 3), True, "n2"), ((2, 3), False, None), ((2,), True, None), ((1, 2, 3), True, None)],
    ids=["all of its ranks", "their scripts do", "one of its ranks", "ranks of another node, too"],
)
def test_a_node_hangs_if_all_of_its_ranks_and_no_others_send_no_heartbeat(
    late: tuple[int, ...], silent: bool, node: str | None
) -> None:
    job = replace(SPARE, nodes=2, gpus_per_node=2)
    hang = Hang(late, "n2", 7, 606.0, "", 605.0, silent=silent)
    assert hung_node(State(job, ("n1", "n2"), hang=hang)) == node
    assert hung_node(State(job, ("n1", "n2"))) is None
