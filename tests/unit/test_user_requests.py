"""What the supervisor does about a user's requests, and what follows once the ranks have exited."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from clusterddp.failures import exclusion
from clusterddp.failures.placement import Placement
from clusterddp.failures.stack_traces import described, grouped, summary
from clusterddp.history.codec import sentence
from clusterddp.history.stops import Requested
from clusterddp.hostlist import ranges, ranks_in
from clusterddp.messages import orders, requests
from clusterddp.messages.reports import Stacks
from clusterddp.rundir.claims import JobClaim
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt import Attempt
from clusterddp.supervisor.attempt_state import (
    Action,
    Answer,
    Broadcast,
    Event,
    Notice,
    RankEvent,
    RanksExited,
    Record,
    Request,
    StartTimer,
    State,
    Stop,
    Timer,
)
from clusterddp.supervisor.decide import step
from clusterddp.supervisor.main import supervise
from clusterddp.supervisor.retry_limits import stop_request
from clusterddp.supervisor.user_requests import ANSWER_S
from tests.fake_slurm import FakeController, FakeRanks
from tests.histories import event_of, happened, view
from tests.reports import reported
from tests.unit.test_attempt import JOB as TWO_RANKS
from tests.unit.test_decide import FAILED, NOW, after
from tests.wording import raises

PREEMPTED = Notice(None, Stop.PREEMPTION)
SAVE, STOP = Request(1, requests.Save()), Request(2, requests.Stop())
REQUEUE = Request(3, requests.Requeue())
NO_RUN = "there is no run to save. The script has not called ctx.run() yet, or writes its own checkpoints"
WAITING_FOR_TWO = [Request(7, requests.Stacks())]


def done(state: State, event: Event, now: float = NOW) -> list[Action]:
    return step(state, event, now)[1]


def answers(actions: Sequence[Action], client: int) -> list[Any]:
    """The last answers to a client."""
    found = [one.answer for one in actions if isinstance(one, Answer) and one.client == client]
    return [answer for answer in found if not isinstance(answer, requests.News)]


def stacks(rank: int, line: int = 8, request: int = 7) -> RankEvent:
    threads = [{"name": "MainThread", "frames": [f"/home/me/data.py:{line} (read)"]}]
    return reported(rank, "stacks", {"request": request, "place": f"data.py:{line} (read)", "threads": threads})


def said_by(rank: int, line: int) -> Stacks:
    report = stacks(rank, line).report
    assert isinstance(report, Stacks)
    return report


def saving(rank: int = 0, request: int = 1, **values: object) -> RankEvent:
    return reported(rank, "saving", {"request": request, **values})


def checkpoint(number: int) -> RankEvent:
    return reported(0, "checkpoint", {"step": number, "durable_s": 0.1})


# ---- stacks


def test_the_stacks_of_all_ranks_are_answered_together_once_the_last_has_come() -> None:
    state = after(*WAITING_FOR_TWO, stacks(1))
    [answer] = answers(done(state, stacks(0)), 7)
    assert [group.ranks for group in answer.stacks] == [[0, 1]]
    assert answer.unanswered == answer.starting == answer.exited == []


def test_only_the_named_ranks_are_asked() -> None:
    [order, timer] = done(after(), Request(7, requests.Stacks("1")))
    assert order == Broadcast(orders.SendStacks(7), frozenset((1,)))
    assert timer == StartTimer(Timer.ANSWER, ANSWER_S)


def test_a_rank_that_does_not_answer_in_time_is_named() -> None:
    state = after(*WAITING_FOR_TWO, stacks(1))
    assert done(state, Timer.ANSWER, NOW + ANSWER_S - 1) == [StartTimer(Timer.ANSWER, 1.0)]
    [answer] = answers(done(state, Timer.ANSWER, NOW + ANSWER_S), 7)
    assert (answer.unanswered, answer.hosts) == ([0], {"0": "n1"})
    assert [group.ranks for group in answer.stacks] == [[1]]


def test_ranks_that_have_exited_or_not_joined_are_not_waited_for() -> None:
    state = after(FAILED, *WAITING_FOR_TWO)
    [answer] = answers(done(state, stacks(0)), 7)
    assert (answer.exited, answer.starting) == ([1], [])
    starting = State(dataclasses.replace(TWO_RANKS), ("n1",))
    [answer] = answers(done(starting, WAITING_FOR_TWO[0]), 7)
    assert (answer.stacks, answer.starting) == ([], [0, 1])


def test_a_late_answer_changes_nothing() -> None:
    state = after()
    assert step(state, stacks(0), NOW) == (state, [])


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ("1-2", "there is no rank 2 in this run. Expected 0 to 1"),
        ("one", "'one' is neither a rank nor a range"),
    ],
)
def test_an_impossible_request_is_refused_at_once(ranks: str, why: str) -> None:
    [refusal] = answers(done(after(), Request(7, requests.Stacks(ranks))), 7)
    assert why in refusal.why


def test_many_ranks_with_few_stacks_are_described_in_a_few_lines() -> None:
    said = {rank: said_by(rank, 88 if rank in (7, 300) else 8) for rank in range(512)}
    groups = grouped(said, {rank: f"n{rank // 8}" for rank in said})
    assert summary(groups) == "510 ranks in data.py:8 (read), 2 in data.py:88 (read)"
    first, second = (list(described(group)) for group in groups)
    assert first[0] == "ranks 0-6,8-299,301-511 (64 nodes) in data.py:8 (read)"
    assert second == [
        "ranks 7,300 (n0, n37) in data.py:88 (read)",
        "  MainThread, most recent call first",
        "    /home/me/data.py:88 (read)",
    ]
    assert summary([]) == "no rank has answered"


def test_ranks_are_named_as_ranges() -> None:
    assert ranks_in("0,3-5, 5") == [0, 3, 4, 5]
    assert ranges(ranks_in("0,3-5")) == "0,3-5"
    for wrong in ("", "a", "5-3", "1-", "-1"):
        with raises(ValueError):
            ranks_in(wrong)


# ---- save


def test_a_save_is_ordered_from_rank_0_and_answered_by_the_checkpoint_that_has_all_steps() -> None:
    """One that was under way with fewer steps is not meant."""
    assert Broadcast(orders.Save(1), frozenset((0,))) in done(after(), SAVE)
    state = after(SAVE, saving(step=7, committed=5))
    assert answers(done(state, checkpoint(6)), 1) == []
    assert answers(done(state, checkpoint(8)), 1) == [requests.Committed(8)]


def test_repeated_saves_are_one_in_the_history_and_are_all_answered_by_one_checkpoint() -> None:
    second = dataclasses.replace(SAVE, client=9)
    state = after(SAVE, saving(step=7))
    assert Record(Requested(request="save")) in done(after(SAVE), saving(step=7))
    state = after(second, state=state)
    assert [type(one) for one in done(state, saving(request=9, step=7))] == [Answer]
    actions = done(after(saving(request=9, step=7), state=state), checkpoint(8))
    assert answers(actions, 1) == answers(actions, 9) == [requests.Committed(8)]


@pytest.mark.parametrize(
    ("events", "event", "answer"),
    [
        ([SAVE], saving(step=7, committed=7), requests.Committed(7)),
        ([SAVE], saving(), requests.Refused(NO_RUN)),
        (
            [SAVE, saving(step=7)],
            reported(0, "checkpoint_failed", {"step": 8, "reason": "No space left"}),
            requests.Refused("checkpoint 8 was not saved: No space left. Training continues"),
        ),
        ([SAVE, saving(step=7)], RanksExited(0), requests.Ended()),
    ],
)  # fmt: skip
def test_a_save_that_is_not_needed_or_not_possible_is_answered_too(
    events: Sequence[Event], event: Event, answer: requests.LastAnswer
) -> None:
    assert answers(done(after(*events), event), 1) == [answer]


def test_a_save_without_rank_0_is_refused() -> None:
    """It has not joined, or does not answer."""
    [refusal] = answers(done(State(TWO_RANKS), SAVE), 1)
    assert refusal.why == "not saved: the ranks are still starting"
    [refusal] = answers(done(after(SAVE), Timer.ANSWER, NOW + ANSWER_S), 1)
    assert "rank 0 (n1) did not answer within 5 s" in refusal.why


def test_a_later_request_does_not_postpone_the_time_of_an_earlier_one() -> None:
    _, actions = step(after(SAVE), WAITING_FOR_TWO[0], NOW + 4)
    assert StartTimer(Timer.ANSWER, 1.0) in actions


# ---- stop and requeue


def test_a_stop_tells_all_ranks_at_once_and_is_in_the_history_once() -> None:
    """In its own words, rather than as a notice of Slurm."""
    actions = done(after(), STOP)
    assert Broadcast(orders.Stop("clusterddp stop")) in actions
    assert [one for one in actions if isinstance(one, Record)] == [Record(Requested(request="stop"))]
    again = done(after(STOP), dataclasses.replace(STOP, client=9))
    assert not any(isinstance(one, Record | Broadcast) for one in again)
    exits = done(after(STOP, dataclasses.replace(STOP, client=9)), RanksExited(0))
    assert answers(exits, 2) == answers(exits, 9) == [requests.Ended()]


def test_a_stop_of_ranks_that_stop_already_only_changes_what_follows() -> None:
    state, actions = step(after(PREEMPTED, Timer.STOP_CHECK), STOP, NOW)
    assert state.wanted is Stop.HOLD
    assert not any(isinstance(one, Broadcast) for one in actions)


def test_a_stop_that_no_rank_confirms_stands_and_the_user_hears_of_it() -> None:
    late = done(after(STOP), Timer.ANSWER, NOW + ANSWER_S)
    assert [type(one.answer) for one in late if isinstance(one, Answer)] == [requests.News]
    heard = after(STOP, reported(0, "notified", {"reason": "clusterddp stop"}))
    assert done(heard, Timer.ANSWER, NOW + ANSWER_S) == []


def test_a_stop_takes_precedence_over_a_requeue() -> None:
    assert after(REQUEUE, STOP).wanted is Stop.HOLD
    [refusal] = answers(done(after(STOP), REQUEUE), 3)
    assert "is being stopped by `clusterddp stop`" in refusal.why


def test_a_run_in_the_users_own_allocation_is_not_requeued() -> None:
    [refusal] = answers(done(after(state=State(TWO_RANKS, restartable=False)), REQUEUE), 3)
    assert "Slurm cannot requeue your own allocation" in refusal.why


SPARES = dataclasses.replace(TWO_RANKS, nodes=2, gpus_per_node=1, spare_nodes=1)
PLACED = State(SPARES, ("n1", "n2"), placement=Placement(("n1", "n2", "n3"), ("n1", "n2")))


def drain(node: str) -> Request:
    return Request(3, requests.Drain(node))


def test_a_drain_tells_all_ranks_and_leaves_the_node_out_of_later_jobs() -> None:
    """It is one request, whoever repeats it."""
    state, actions = step(after(state=PLACED), drain("n2"), NOW)
    assert Broadcast(orders.Stop("clusterddp drain")) in actions
    assert Record(Requested(request="drain", nodes=("n2",))) in actions
    assert (state.wanted, state.drained) == (Stop.DRAIN, "n2")
    again = done(state, dataclasses.replace(drain("n2"), client=9))
    assert not any(isinstance(one, Record | Broadcast) for one in again)
    [refusal] = answers(done(state, dataclasses.replace(drain("n1"), client=9)), 9)
    assert refusal.why == "not drained: the run is already leaving n2. Try again after that"


@pytest.mark.parametrize(
    ("node", "events", "state", "why"),
    [
        ("n3", [], PLACED, "not drained: no rank runs on n3, only on n1, n2"),
        ("n2", [STOP], PLACED, "not drained: the run is being stopped by `clusterddp stop`"),
        (
            *("n2", [], dataclasses.replace(PLACED, placement=Placement(("n1", "n2"), ("n1", "n2")))),
            "not drained: the job has 1 node left, but the run needs 2. "
            "`clusterddp requeue RUN --exclude n2` continues the run without n2 in a new job",
        ),
        (
            "n2",
            [],
            dataclasses.replace(PLACED, placement=Placement(("n1", "n2"), ("n1", "n2")), restartable=False),
            "not drained: the job has 1 node left, but the run needs 2",
        ),
        (
            "n2",
            [],
            dataclasses.replace(
                PLACED,
                placement=Placement(("n1", "n2"), ("n1", "n2")),
                job=dataclasses.replace(PLACED.job, nodelist="n[1-2]"),
            ),
            "not drained: the job has 1 node left, but the run needs 2",
        ),
    ],
)
def test_a_drain_that_is_not_possible_is_refused(node: str, events: list[Event], state: State, why: str) -> None:
    [refusal] = answers(done(after(*events, state=state), drain(node)), 3)
    assert refusal.why == why


# ---- once the ranks have exited


STOPPED = {"end": "stopped", "step": 7}


def ended(
    run: RunDirectory, controller: FakeController, request: Request, end: dict[str, Any] = STOPPED
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the events of an attempt whose user made a request while it ran."""
    attempt = Attempt(run, TWO_RANKS, run.create_attempt(), FakeRanks(run, end), controller)
    attempt.post(request)
    return attempt.supervise(), [event for event in run.events() if event["event"] != "started"]


@pytest.mark.parametrize("cause", [Cause.NONE, Cause.PREEMPTED])
def test_a_run_that_its_user_stops_is_held_whatever_slurm_wants(run: RunDirectory, cause: Cause) -> None:
    controller = FakeController(cause)
    code, events = ended(run, controller, STOP)
    assert (code, controller.asked) == (controller.leave_code, ["hold"])
    assert [event["event"] for event in events] == ["requested", "stopped"]
    assert (sentence(event_of(events[-1])) or "").endswith("held until it is submitted again")
    assert stop_request(view(events)) and run.outcome() is None


def test_a_held_run_is_continued_by_its_user_and_by_no_requeue_of_its_job(run: RunDirectory) -> None:
    """Slurm may have requeued the job before it ended. Later attempts know nothing of it."""
    assert ended(run, FakeController(Cause.PREEMPTED), STOP)[0] == 3
    holder = run.holder_file(0)
    holder.write_text('{"kind": "slurm", "job": "41"}')
    ranks = FakeRanks(run, {"end": "done"})
    assert supervise(run, TWO_RANKS, lambda *_: ranks, FakeController(Cause.NONE)) == 3
    assert run.attempts() == [0]

    class NextJob(FakeController):
        def holder(self) -> JobClaim:
            return JobClaim("42")

    holder.write_text('{"kind": "slurm", "job": "41", "let_go": true}')
    assert supervise(run, TWO_RANKS, lambda *_: ranks, NextJob(Cause.NONE)) == 0
    assert not stop_request(run.history())


def test_a_failure_during_a_stop_does_not_restart_the_ranks(run: RunDirectory) -> None:
    _, events = ended(run, FakeController(Cause.NONE), STOP, {"end": "died", "error": "killed by signal 9"})
    assert [event["event"] for event in events] == ["requested", "stopped"]


def test_a_requeue_continues_the_run_though_nothing_preempted_it(run: RunDirectory) -> None:
    controller = FakeController(Cause.NONE)
    code, events = ended(run, controller, REQUEUE)
    assert (code, controller.asked) == (controller.again_code, ["requeue"])
    assert [event["event"] for event in events] == ["requested", "requeued"]
    assert not stop_request(view(events))


def test_a_requeue_after_scancel_is_none(run: RunDirectory) -> None:
    controller = FakeController(Cause.CANCELLED)
    assert ended(run, controller, REQUEUE)[1][-1]["event"] == "cancelled"
    assert controller.asked == []


def test_a_requeue_without_some_nodes_is_a_new_job(run: RunDirectory) -> None:
    """Later ones exclude them as well, and may still exclude nodes that fail."""
    controller = FakeController(Cause.NONE)
    controller.nodes = ["n1", "n2", "n3"]
    _, events = ended(run, controller, Request(3, requests.Requeue(("n2",))))
    assert controller.asked == ["resubmit n2"]
    assert "without n2" in (sentence(event_of(events[0])) or "")
    now = events[-1]["time"]
    assert (exclusion.left_out(view(events), now), exclusion.excluded(view(events), now)) == (["n2"], [])
    happened(run, {"time": now, "attempt": 1, "event": "node_lost", "node": "n1", "suspect": "n1"})
    choice = exclusion.choose(run.history(), ["n1"], controller.nodes, TWO_RANKS, now)
    assert choice.nodes == ("n2", "n1")
