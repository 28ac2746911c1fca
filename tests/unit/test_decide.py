"""What the supervisor decides about each event of an attempt: no thread, no socket, no clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from clusterddp.failures.hangs import Hang, Watch
from clusterddp.history import stops
from clusterddp.history.beginnings import Allocated
from clusterddp.history.codec import encode, sentence
from clusterddp.history.failures import (
    ControllerAway,
    ControllerBack,
    Hung,
    NodeLost,
    NotConnected,
    Slow,
    SlowNode,
    Suspended,
)
from clusterddp.jobdef.job import Job, StopSignal, Timeouts, Watchdog
from clusterddp.messages import orders, requests
from clusterddp.messages.reports import End
from clusterddp.supervisor.attempt_state import (
    ASK_AGAIN_S,
    Action,
    Broadcast,
    ConnectionLost,
    ControllerFailed,
    Do,
    Event,
    Heartbeat,
    NodeNames,
    Notice,
    PerRank,
    RankEvent,
    RankFailed,
    RanksExited,
    Record,
    Request,
    RunRemoved,
    Say,
    SilentNodes,
    StartTimer,
    State,
    StepWaits,
    Stop,
    Superseded,
    TermNotice,
    Timer,
)
from clusterddp.supervisor.decide import (
    CONNECT_CHECK_S,
    END_S,
    HANG_GRACE_S,
    OWN_ERROR_S,
    PEER_GRACE_S,
    SETTLE_S,
    STOP_CHECK_S,
    UNKILLABLE_S,
    step,
)
from clusterddp.worker.control_channel import SILENCE_S
from tests.reports import beat_of, reported

JOB = Job(name="x", module="x", nodes=2, gpus_per_node=1, device="cpu", watchdog=Watchdog())
NOW = 1000.0
FAILED = reported(1, "left", {"host": "n2", "end": "exception", "error": "ValueError: no"})
STOPPED = reported(0, "left", {"host": "n1", "end": "stopped"})
GRACE = StartTimer(Timer.DISMISS, PEER_GRACE_S)
LET_GO = [GRACE, Do.ASK_CONTROLLER]
KILL = StartTimer(Timer.KILL, HANG_GRACE_S)
FINE = Notice(None)
DEAD, ALIVE = SilentNodes(("n2",), ("n2",)), SilentNodes(("n2",), ())
AWAY = ControllerFailed("Unable to contact slurm controller")
PREEMPTED = Notice(None, Stop.PREEMPTION)
TOLD = reported(0, "signal", {"signal": "TERM"})
HANG = Hang((1,), "n2", 7, 606.0, "rank 1 (n2) has been stuck at step 7 for 606 s", 605.0)
AGAIN = StartTimer(Timer.STOP_CHECK, STOP_CHECK_S)


#: Rank 0's question before it commits a checkpoint, that to rank 1, its answer, and what rank 0 gets.
ASKING = reported(0, "committing", {"question": 3, "step": 7})
COUNT, MADE = Broadcast(orders.CountSteps(3), frozenset((1,))), reported(1, "made", {"question": 3, "step": 7})
LEFT_LOOP = reported(1, "left_loop", {"step": 6, "steps": 9, "by": "break"})
DONE_EARLY = reported(1, "left", {"host": "n2", "end": "done", "left_loop": True})
BEHIND = "rank 1 left its loop after step 6 and exited"
NOT_RANK_0 = reported(1, "committing", {"question": 3, "step": 0})
MAY = Broadcast(orders.Commit(3), frozenset((0,)))
MAY_NOT = Broadcast(orders.Commit(3, "rank 1 (n2) exited"), frozenset((0,)))
GOES_ON_ALONE = [MAY_NOT, Broadcast(orders.Leave("rank 1 (n2) exited"), frozenset((0,)))]


def after(*events: Event, state: State | None = None) -> State:
    """The state of an attempt with two joined ranks after some events."""
    state = state or State(JOB, ("n1", "n2"), abandon_s=5.0)
    for event in (reported(0, "joined", {"host": "n1"}), reported(1, "joined", {"host": "n2"}), *events):
        state, _ = step(state, event, NOW)
    return state


def actions(state: State, event: Event, now: float = NOW) -> list[Action]:
    """What is done about an event."""
    return step(state, event, now)[1]


def recorded(state: State, event: Event) -> list[str]:
    """The events that are added to the history."""
    return [action.event.name for action in actions(state, event) if isinstance(action, Record)]


# ---- a rank fails


def test_a_connection_that_breaks_before_its_rank_has_named_its_host_is_that_of_its_node() -> None:
    """The host of a batch step that stood still may find the connection broken first. The supervisor had crashed."""
    state = State(JOB, NodeNames(("n1", "n2")), abandon_s=5.0)
    assert "(n2) exited" in step(state, ConnectionLost(1), NOW)[0].dismissal


@pytest.mark.parametrize(
    ("events", "event", "expected"),
    [
        ([], FAILED, LET_GO),
        ([], ConnectionLost(1), LET_GO),
        ([ConnectionLost(0)], ConnectionLost(1), []),
        ([FAILED], ConnectionLost(1), []),
        ([FAILED], ConnectionLost(0), []),
        ([], reported(1, "left", {"host": "n2", "end": "stopped"}), []),
        ([], reported(1, "left", {"host": "n2", "end": "done"}), []),
        ([], RankFailed(1), LET_GO),
        ([FAILED], RankFailed(1), []),
        ([ConnectionLost(1)], RankFailed(1), LET_GO),
        ([TOLD], FAILED, LET_GO),
        ([], ASKING, [COUNT]),
        ([ASKING], MADE, [MAY]),
        ([ASKING], reported(1, "made", {"question": 3, "step": 6}), []),
        ([ASKING, NOT_RANK_0], reported(1, "made", {"question": 3, "step": 6}), []),
        ([], NOT_RANK_0, []),
        ([LEFT_LOOP, DONE_EARLY], ASKING, [Broadcast(orders.Commit(3, BEHIND), frozenset((0,)))]),
        ([ASKING, LEFT_LOOP, DONE_EARLY], ASKING, [Broadcast(orders.Commit(3, BEHIND), frozenset((0,)))]),
        ([LEFT_LOOP, DONE_EARLY], reported(0, "committing", {"question": 3, "step": 6}), [MAY]),
        ([LEFT_LOOP, reported(1, "left", {"host": "n2", "end": "done"})], ASKING, [MAY]),  # after another loop
        ([ASKING], reported(1, "made", {"question": 2, "step": 7}), []),
        ([ASKING, reported(1, "made", {"question": 3, "step": 6})], ASKING, [COUNT]),
        ([ASKING, MADE], MADE, []),
        ([ASKING, MADE], ASKING, [MAY]),
        ([ASKING, MADE, ConnectionLost(1)], ASKING, [MAY]),
        ([ASKING, MADE], reported(0, "committing", {"question": 4, "step": 8}), [
            Broadcast(orders.CountSteps(4), frozenset((1,)))
        ]),
        ([ASKING, ConnectionLost(1)], ASKING, GOES_ON_ALONE),
        ([ASKING], reported(1, "left", {"host": "n2", "end": "done"}), []),
        ([reported(1, "left", {"host": "n2", "end": "done"}), ConnectionLost(1)], ASKING, [MAY]),
        ([ConnectionLost(1)], ASKING, GOES_ON_ALONE),
        ([FAILED], ASKING, GOES_ON_ALONE),
        ([reported(0, "stopping", {}), ConnectionLost(1)], ASKING, [MAY_NOT]),
        ([ConnectionLost(1), reported(1, "rejoined", {})], ASKING, [COUNT]),
        ([FAILED], Timer.DISMISS, [Broadcast(orders.Leave("rank 1 (n2) failed")), KILL]),
        ([ConnectionLost(1)], Timer.DISMISS, [Broadcast(orders.Leave("rank 1 (n2) exited"))]),
        ([ConnectionLost(1), RankFailed(1)], Timer.DISMISS, [Broadcast(orders.Leave("rank 1 (n2) exited")), KILL]),
        ([FAILED, reported(0, "stopping", {"step": 7})], Timer.DISMISS, [GRACE]),
        ([reported(0, "stopping", {"step": 7}), FAILED, ConnectionLost(0)], Timer.DISMISS, [
            Broadcast(orders.Leave("rank 1 (n2) failed")), KILL
        ]),
    ],
)  # fmt: skip
def test_the_peers_of_a_failed_rank_get_a_grace_period_and_are_then_ended(
    events: Sequence[Event], event: Event, expected: list[Action]
) -> None:
    """Once, and not while rank 0 saves. Those of a rank that exited, perhaps with code 0, are not killed."""
    assert actions(after(*events), event) == expected


@pytest.mark.parametrize(
    ("events", "notice_s"),
    [
        ([TermNotice(30), PREEMPTED], 30),
        ([TermNotice(30), Notice(NOW + 90)], 90),
        ([Notice(None, Stop.INTERRUPTION)], 120),
        ([TermNotice(30), Notice(NOW + 20, Stop.PREEMPTION)], 20),
    ],
)
def test_after_a_notice_the_peers_of_a_failed_rank_have_the_rest_of_it(events: Sequence[Event], notice_s: int) -> None:
    """They may be saving; what is left at the end serves the requeue."""
    state = after(TOLD, *events, FAILED)
    for timer in (Timer.DISMISS, Timer.KILL):
        assert actions(state, timer, NOW + 3) == [StartTimer(Timer.DISMISS, notice_s - END_S - 3)]
    ended = [Broadcast(orders.Leave("rank 1 (n2) failed")), KILL]
    assert actions(state, Timer.DISMISS, NOW + notice_s - END_S) == ended


def test_when_rank_0_stops_alone_its_peers_are_ended_at_once() -> None:
    """It has called a callable's checkpoint(): the others have nothing to save, however long the notice is."""
    end = {"rank": 0, "host": "n1", "end": "stopped", "alone": True}
    state = after(TermNotice(600), PREEMPTED, TOLD, reported(0, "left", end), ConnectionLost(0), RankFailed(0))
    assert actions(state, Timer.DISMISS, NOW) == [Broadcast(orders.Leave("rank 0 (n1) exited")), KILL]


@pytest.mark.parametrize("exits", [(ConnectionLost(0), RankFailed(0)), (RankFailed(0), ConnectionLost(0))])
def test_when_rank_0_exits_as_no_step_ended_its_peers_are_ended_at_once(exits: Sequence[Event]) -> None:
    """The notice has few seconds left for the requeue, and only rank 0 saves."""
    state = after(TermNotice(60), PREEMPTED, TOLD, reported(0, "overdue", {"seconds": 40.0}), *exits)
    at_once = StartTimer(Timer.DISMISS, 0.0)
    assert at_once in actions(after(TOLD, reported(0, "overdue", {"seconds": 40.0})), exits[0])
    assert actions(state, Timer.DISMISS, NOW + 41) == [Broadcast(orders.Leave("rank 0 (n1) exited")), KILL]
    assert Do.KILL_RANKS in actions(state, Timer.KILL, NOW + 44)


def test_ranks_that_outlive_a_kill_are_abandoned_and_their_nodes_are_lost() -> None:
    """A rank in a driver that does not answer, for example; the other one has exited."""
    state, todo = step(after(FAILED), Timer.KILL, NOW)
    assert todo == [Do.KILL_RANKS, StartTimer(Timer.UNKILLABLE, UNKILLABLE_S)]
    state, todo = step(state, Timer.UNKILLABLE, NOW)
    assert todo == [Record(NodeLost(node="n1", suspect="n1", unkillable=(0,))), Do.ABANDON_RANKS]
    assert state.lost_nodes == ("n1",)
    assert actions(after(FAILED, ConnectionLost(0)), Timer.UNKILLABLE) == [Do.ABANDON_RANKS]


def test_the_peers_of_a_rank_that_exits_unfinished_get_time_until_the_controller_has_answered() -> None:
    """It may have exited for a signal that only the controller knows of, which is asked at once."""
    timer, ask = actions(after(), reported(1, "left", {"host": "n2", "end": "unfinished"}))
    assert isinstance(timer, StartTimer) and timer.seconds > PEER_GRACE_S and ask is Do.ASK_CONTROLLER


def test_the_first_record_of_a_ranks_end_counts() -> None:
    """The second one comes from its exit handlers."""
    state = after(FAILED, reported(1, "left", {"host": "n2", "end": "done"}))
    assert state.ends[1].end is End.EXCEPTION


def test_peers_are_not_told_to_exit_when_the_rank_reconnects() -> None:
    """Only its connection broke."""
    state = after(ConnectionLost(1), reported(1, "rejoined", {"host": "n2"}))
    assert actions(state, Timer.DISMISS) == []
    assert state.lost_at == {}


def test_a_rank_that_reconnects_does_not_hide_that_another_is_lost() -> None:
    """The grace period begins again, for the other one; heartbeats count again once all are back."""
    lost = after(ConnectionLost(0), ConnectionLost(1))
    back, todo = step(lost, reported(0, "rejoined", {"host": "n1"}), NOW)
    assert todo[:2] == LET_GO and recorded(lost, reported(0, "rejoined")) == ["rejoined"]
    assert not back.watched
    assert actions(back, Timer.DISMISS) == [Broadcast(orders.Leave("rank 1 (n2) exited"))]
    again, todo = step(back, reported(1, "rejoined", {"host": "n2"}), NOW)
    assert todo[0] is Do.RESET_WATCHDOG and again.watched


def test_a_rank_that_reconnects_is_still_ended_after_another_failed_that_had_not_joined() -> None:
    """It held its node, as the only connected rank, until it gave up waiting for the others to join."""
    state = State(JOB, ("n1", "n2"), abandon_s=5.0)
    for event in (reported(1, "joined", {"host": "n2"}), RankFailed(0), reported(1, "rejoined", {"host": "n2"})):
        state, _ = step(state, event, NOW)
    leave, kill = actions(state, Timer.DISMISS)
    assert isinstance(leave, Broadcast) and isinstance(leave.order, orders.Leave) and kill == KILL


def test_that_ranks_were_stopped_is_recorded_once() -> None:
    """All ranks of a suspended job report it, with heartbeats that come one after the other."""
    beat = {"count": 5, "step": 4, "age_s": 0.0, "allowed_s": 600.0, "stood_s": 40.0}
    state, todo = step(after(), reported(1, "alive", beat), NOW)
    assert todo[0] == Record(Suspended(rank=1, host="n2", seconds=40.0))
    state, todo = step(state, reported(0, "alive", beat), NOW + 2)
    assert [type(action) for action in todo] == [Heartbeat]
    assert recorded(state, reported(0, "alive", beat)) == []
    assert [action for action in actions(state, reported(1, "alive", beat), NOW + 50) if isinstance(action, Record)]


# ---- no rank starts


def test_an_srun_that_waits_for_busy_nodes_is_ended() -> None:
    """It would wait until the time limit. Once its step exists, a container may take minutes to start."""
    launched = State(JOB, ("n1", "n2"), abandon_s=5.0)
    assert actions(launched, Timer.STEP) == [Do.ASK_STEP]
    state, todo = step(launched, StepWaits(True), NOW)
    assert (state.busy, todo) == (True, [Do.ABANDON_RANKS])
    assert step(launched, StepWaits(False), NOW) == (launched, [])
    assert actions(launched, StepWaits(None)) == [StartTimer(Timer.STEP, ASK_AGAIN_S[0])]
    for joined in (after(), step(launched, reported(1, "joined", {"host": "n2"}), NOW)[0]):
        assert actions(joined, Timer.STEP) == [] == actions(joined, StepWaits(True))


# ---- a node stops answering


def test_a_silent_node_is_lost_when_the_controller_answers_and_its_slurmd_does_not() -> None:
    """The ranks are told to exit, and the launcher is given up after a grace period."""
    state, todo = step(after(), ConnectionLost(1, silent=True), NOW)
    assert todo == [Do.ASK_CONTROLLER]
    for answer in (FINE, ControllerFailed("Invalid job id", reachable=True)):
        asked, todo = step(state, answer, NOW)
        assert Do.ASK_NODES in todo
        lost, todo = step(asked, DEAD, NOW)
        node = Record(NodeLost(node="n2", suspect="n2"))
        leave = [Broadcast(orders.Leave("node n2 was lost")), StartTimer(Timer.ABANDON, 5.0)]
        assert [action for action in todo if action in [node, *leave]] == [node, *leave]
        assert actions(lost, Timer.ABANDON) == [Do.ABANDON_RANKS]
        assert actions(lost, ConnectionLost(0))[-1] == StartTimer(
            Timer.ABANDON, 0.0
        )  # it waits for the lost node alone
        assert recorded(lost, FINE) in ([], ["controller_back"])


def test_a_silent_node_whose_slurmd_answers_is_not_lost() -> None:
    """This node was cut off for a while: all ranks restart, and no node is suspected."""
    asked = after(ConnectionLost(1, silent=True), FINE)
    state, todo = step(asked, ALIVE, NOW)
    assert todo == LET_GO
    assert (state.lost_nodes, sorted(state.unreachable)) == ((), [1])
    assert actions(state, Timer.DISMISS) == [Broadcast(orders.Leave("rank 1 (n2) lost its connection")), KILL]
    assert actions(asked, SilentNodes(("n2",), None)) == [StartTimer(Timer.ASK, ASK_AGAIN_S[0])]
    taken, _ = step(asked, Notice(None, nodes=frozenset(("n1", "n3"))), NOW)  # Slurm has taken it out of the job
    assert recorded(taken, ALIVE) == ["node_lost"]


def test_only_those_of_several_silent_nodes_are_lost_whose_slurmds_do_not_answer() -> None:
    """One that falls silent in the meantime is asked, too."""
    state = State(dataclasses.replace(JOB, nodes=3), ("n1", "n2", "n3"), abandon_s=5.0)
    joined = reported(2, "joined", {"host": "n3"})
    state = after(joined, ConnectionLost(2, silent=True), ConnectionLost(1, silent=True), FINE, state=state)
    assert actions(state, SilentNodes(("n3",), ())) == [Do.ASK_NODES]
    state, todo = step(state, SilentNodes(("n2", "n3"), ("n3",)), NOW)
    assert Record(NodeLost(node="n3", suspect="n3")) in todo
    assert (state.lost_nodes, sorted(state.unreachable)) == (("n3",), [1])


def test_a_rank_that_has_connected_again_has_the_whole_grace_period_when_a_node_is_lost() -> None:
    """The launcher waits for the lost node alone once all other ranks have gone."""
    state = State(dataclasses.replace(JOB, nodes=3), ("n1", "n2", "n3"), abandon_s=5.0)
    joined, back = reported(2, "joined", {"host": "n3"}), reported(0, "rejoined", {"host": "n1"})
    lost = SilentNodes(("n3",), ("n3",))
    state = after(joined, ConnectionLost(0), back, ConnectionLost(2, silent=True), FINE, lost, state=state)
    at_once = StartTimer(Timer.ABANDON, 0.0)
    state, todo = step(state, ConnectionLost(1), NOW)
    assert at_once not in todo
    assert actions(state, ConnectionLost(0))[-1] == at_once


def test_a_node_that_slurm_takes_out_of_the_job_before_its_rank_has_joined_is_lost() -> None:
    """That rank has no connection that could break, and a job with spare nodes outlives the node: the others waited for
    half an hour, the process group's timeout."""
    starting, _ = step(State(JOB, NodeNames(("n1", "n2")), abandon_s=5.0), reported(0, "joined", {"host": "n1"}), NOW)
    assert recorded(starting, Notice(None, nodes=frozenset(("n1", "n2", "n3")))) == []
    state, todo = step(starting, Notice(None, nodes=frozenset(("n1", "n3"))), NOW)
    assert todo[0] is Do.ASK_NODES
    state, todo = step(state, ALIVE, NOW)
    assert todo[:2] == [
        Record(NodeLost(node="n2", suspect="n2")),
        Broadcast(orders.Leave("node n2 was lost")),
    ]
    assert recorded(state, Notice(None, nodes=frozenset(("n1", "n3")))) == []
    assert recorded(after(), Notice(None, nodes=frozenset(("n1", "n3")))) == []  # the connection tells


def test_a_failed_rank_that_is_dismissed_while_it_exits_stays_the_one_that_failed() -> None:
    """Its exit handlers may take longer than its peers have. The history then named one of the peers."""
    failed = reported(1, "left", {"host": "n2", "end": "exception", "error": "ValueError"})
    dismissed = reported(1, "left", {"host": "n2", "end": "dismissed", "error": "rank 1 (n2) failed"})
    assert after(failed, dismissed).ends[1].end is End.EXCEPTION
    done = reported(1, "left", {"host": "n2", "end": "done"})
    assert after(done, dismissed).ends[1].end is End.DISMISSED


def test_a_rank_that_joins_late_gets_a_signal_if_rank_0_stopped_before_it_joined() -> None:
    """It waits for rank 0's address, and the job held its nodes until the time limit."""
    state, _ = step(State(JOB, NodeNames(("n1", "n2")), abandon_s=5.0), Request(1, requests.Requeue()), NOW)
    assert actions(state, reported(1, "joined", {"host": "n2"})) == [Do.NOTIFY_RANKS]


def test_ranks_that_stay_on_nodes_of_a_job_that_goes_on_are_killed_first() -> None:
    """The next attempt starts on these nodes, too."""
    job = dataclasses.replace(JOB, spare_nodes=1)
    lost = after(ConnectionLost(1, silent=True), FINE, DEAD, state=State(job, ("n1", "n2"), abandon_s=5.0))
    killed, todo = step(lost, Timer.ABANDON, NOW)
    assert todo == [Do.KILL_RANKS, StartTimer(Timer.ABANDON, HANG_GRACE_S)]
    assert actions(killed, Timer.ABANDON) == [Do.ABANDON_RANKS]


def test_a_slow_node_is_named_with_its_facts_and_left_alone() -> None:
    """Whether to drain it is for the user to decide."""
    slow = SlowNode(rank=1, host="n2", ratio=1.3, seconds=600.0, facts=("The load is 9 on 8 CPUs",))
    state, todo = step(State(JOB, ("n1", "n2")), RankEvent(1, slow), NOW)
    assert todo == [Record(slow)]
    assert sentence(slow) == (
        "attempt 0: rank 1 (n2) has been slow for 10 min. It computes 1.3 times as long as the others. "
        "The load is 9 on 8 CPUs"
    )
    assert state.wanted is None


def test_a_silent_node_is_not_called_lost_while_the_controller_is_silent_too() -> None:
    """It may be this node that was cut off: it asks until it is superseded, or gets an answer."""
    silent = after(ConnectionLost(1, silent=True))
    state, todo = step(silent, AWAY, NOW)
    words = "neither n2 nor Slurm's controller responds. Waiting for one of them. Check this node's network"
    again = StartTimer(Timer.ASK, ASK_AGAIN_S[0])
    assert todo == [Record(ControllerAway(error=AWAY.error)), Say(words), again]
    assert actions(state, Timer.ASK) == [Do.ASK_AGAIN]
    assert actions(state, AWAY) == [StartTimer(Timer.ASK, 2 * ASK_AGAIN_S[0])]
    back, todo = step(state, FINE, NOW)
    assert todo[:2] == [Record(ControllerBack()), Do.ASK_NODES]
    assert recorded(back, DEAD) == ["node_lost"]


def test_a_controller_that_loses_answers_is_asked_about_a_silent_node_less_and_less_often() -> None:
    """Other answers of it, which come as often as the job is asked about, start no question of their own."""
    state, pauses = after(ConnectionLost(1, silent=True), FINE), list[float]()
    for _ in range(6):
        assert Do.ASK_NODES not in actions(state, FINE)
        assert not [action for action in actions(state, AWAY) if isinstance(action, StartTimer)]
        state, todo = step(state, SilentNodes(("n2",), None), NOW)
        pauses += [action.seconds for action in todo if isinstance(action, StartTimer)]
        state, todo = step(state, Timer.ASK, NOW)
        assert todo == [Do.ASK_AGAIN]
        state, todo = step(state, FINE, NOW)
        assert Do.ASK_NODES in todo
    assert pauses == [2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    assert recorded(state, DEAD) == ["node_lost"]


def test_a_rank_that_joins_after_a_stop_is_told_of_it() -> None:
    """Its node was cut off while the user stopped the run: it waited for the others, which had stopped, for hours."""
    late = reported(1, "joined", {"host": "n2"})
    state = State(JOB, ("n1", "n2"), abandon_s=5.0)
    for event in (reported(0, "joined", {"host": "n1"}), PREEMPTED, Timer.STOP_CHECK):
        assert not actions(state, late)
        state, _ = step(state, event, NOW)
    assert actions(state, late) == [Broadcast(orders.Stop(Stop.PREEMPTION.value), frozenset((1,)))]


def test_a_rank_that_is_told_to_exit_when_it_is_done_counts_as_told() -> None:
    """Its exit code is that of the order: the run had failed, "all ranks finished, but the launcher returned 1"."""
    done, told = ({"rank": 0, "host": "n1", "end": end} for end in ("done", "dismissed"))
    state = after(reported(0, "left", done), reported(0, "left", told))
    assert state.ends[0].end is End.DISMISSED


def test_nodes_that_fall_silent_while_the_controller_is_queried_are_lost_together() -> None:
    """It is asked once."""
    state = State(dataclasses.replace(JOB, nodes=3), ("n1", "n2", "n3"), abandon_s=5.0)
    state = after(reported(2, "joined", {"host": "n3"}), ConnectionLost(2, silent=True), state=state)
    state, todo = step(state, ConnectionLost(1, silent=True), NOW)
    assert todo == []
    state, _ = step(state, FINE, NOW)
    both = ("n2", "n3")
    assert Broadcast(orders.Leave("nodes n2 and n3 were lost")) in actions(state, SilentNodes(both, both))
    assert state.lost_nodes == ("n2", "n3")


@pytest.mark.parametrize(
    ("saving", "saved"),
    [
        (reported(0, "stopping", {"step": 7}), [STOPPED, ConnectionLost(0)]),
        (reported(0, "finishing", {"step": 7}), [reported(0, "progress", {"step": 7, "steps": 7})]),
    ],
)  # fmt: skip
def test_rank_0_is_left_to_save_when_a_node_is_lost_meanwhile(saving: Event, saved: Sequence[Event]) -> None:
    """The others are told to exit once it has exited, or, with all steps done, once it has saved."""
    state, todo = step(after(saving, ConnectionLost(1, silent=True), FINE), DEAD, NOW)
    assert todo == [Record(NodeLost(node="n2", suspect="n2"))]
    for event in saved[:-1]:
        state, todo = step(state, event, NOW)
        assert todo == []
    assert actions(state, saved[-1])[:2] == [
        Broadcast(orders.Leave("node n2 was lost")),
        StartTimer(Timer.ABANDON, 5.0),
    ]


def test_a_peer_that_fails_for_a_silent_node_is_not_the_first_that_was_lost() -> None:
    """Its network says so at once; the kernel calls a node silent after a while."""
    state, _ = step(after(FAILED), ConnectionLost(0, silent=True), NOW + SILENCE_S - 1)
    assert state.lost_at[0] < state.lost_at[1] == NOW


# ---- time to stop


def test_a_preemption_that_reached_no_rank_is_forwarded_until_one_confirms() -> None:
    """A signal gets a moment to arrive; the second time the launcher signals the ranks, too."""
    stop = Broadcast(orders.Stop("preemption"))
    state, todo = step(after(), PREEMPTED, NOW)
    assert todo == [StartTimer(Timer.STOP_CHECK, SETTLE_S)]
    assert actions(state, PREEMPTED) == []
    state, todo = step(state, Timer.STOP_CHECK, NOW)
    assert todo == [stop, Record(stops.Notice(why="the job is being preempted")), AGAIN]
    state, todo = step(state, Timer.STOP_CHECK, NOW)
    assert todo == [stop, Do.NOTIFY_RANKS, AGAIN]
    assert actions(after(TOLD, state=state), Timer.STOP_CHECK) == [AGAIN]


@pytest.mark.parametrize(
    ("notice", "word", "waits"), [(PREEMPTED, "preemption", True), (Notice(NOW + 30), "time limit", False)]
)
def test_a_stop_with_a_deadline_is_told_to_ranks_that_are_stopping_already(
    notice: Notice, word: str, waits: bool
) -> None:
    """They have no deadline yet: a long step would run into the KILL."""
    held = after(Request(1, requests.Stop()), reported(0, "notified", {"reason": "clusterddp stop"}))
    state, todo = step(held, notice, NOW)
    if waits:  # its TERM may be on its way
        state, todo = step(state, Timer.STOP_CHECK, NOW)
    assert Broadcast(orders.Stop(word)) in todo and Do.NOTIFY_RANKS not in todo
    assert [action.event.name for action in todo if isinstance(action, Record)] == ["notice"]
    heard = reported(0, "notified", {"reason": word})
    assert actions(after(heard, state=state), Timer.STOP_CHECK) == [AGAIN]
    assert actions(after(TOLD, notice, state=held), Timer.STOP_CHECK) == [AGAIN]


def test_the_controller_is_asked_at_the_first_signal_also_of_ranks_that_are_stopping_already() -> None:
    """Only it can tell a preemption from a signal of somebody else."""
    held = after(Request(1, requests.Stop()), reported(0, "notified", {"reason": "clusterddp stop"}))
    for state in (after(), held):
        told, todo = step(state, TOLD, NOW)
        assert Do.ASK_CONTROLLER in todo
        assert Do.ASK_CONTROLLER not in actions(told, reported(1, "signal", {"signal": "TERM"}))


def test_ranks_that_have_not_joined_are_signalled_by_the_launcher() -> None:
    """They cannot receive it yet."""
    state, _ = step(State(JOB), PREEMPTED, NOW)
    assert actions(state, Timer.STOP_CHECK)[:2] == [Broadcast(orders.Stop("preemption")), Do.NOTIFY_RANKS]


@pytest.mark.parametrize(
    ("end_time", "why"),
    [
        (None, None),
        (NOW + 9000, None),
        (NOW + 30, "the time limit is 30 s away"),
        (NOW - 5, "the time limit is 0 s away"),
    ],
)
def test_the_ranks_are_told_in_time_for_the_time_limit(end_time: float | None, why: str | None) -> None:
    """Also when an administrator has lowered it meanwhile."""
    state = after(Notice(NOW + 9000))
    todo = actions(state, Notice(end_time))
    assert todo == [*([Broadcast(orders.Stop("time limit")), Record(stops.Notice(why=why))] if why else []), AGAIN]


def test_the_time_limit_is_watched_while_the_controller_does_not_answer() -> None:
    """As far as it was known."""
    state = after(Notice(NOW + 9000), AWAY)
    assert actions(state, Timer.STOP_CHECK) == [AGAIN]
    assert Broadcast(orders.Stop("time limit")) in actions(state, Timer.STOP_CHECK, NOW + 8990)


def test_the_ranks_are_told_as_soon_as_the_gpu_hours_are_used_up() -> None:
    """A preemption, a time limit or the user's own request goes before."""
    state = dataclasses.replace(after(Notice(NOW + 9000)), gpu_hours_end=NOW + 50)
    assert actions(state, Timer.STOP_CHECK, NOW + 49) == [AGAIN]
    assert Broadcast(orders.Stop(Stop.GPU_HOURS.value)) in actions(state, Timer.STOP_CHECK, NOW + 50)
    told, _ = step(state, Timer.STOP_CHECK, NOW + 50)
    assert Broadcast(orders.Stop("time limit")) in actions(told, Timer.STOP_CHECK, NOW + 8995)
    held = dataclasses.replace(state, wanted=Stop.HOLD)
    assert Broadcast(orders.Stop(Stop.HOLD.value)) in actions(held, Timer.STOP_CHECK, NOW + 50)


@pytest.mark.parametrize(
    ("time_s", "given_s", "last_save_s", "margin"),
    [
        (None, None, 0.0, 120),
        (86400, None, 100.0, 310),
        (120, None, 0.0, 30),
        (120, None, 100.0, 30),
        (86400, 120, 0.0, 30),  # time_min
    ],
)
def test_slow_saves_get_more_notice_and_short_limits_keep_most_of_their_time(
    time_s: int | None, given_s: int | None, last_save_s: float, margin: float
) -> None:
    """Three times the last save and ten seconds, at least as asked for, at most a quarter of the limit."""
    job = Job(name="x", module="x", time_s=time_s, timeouts=Timeouts(notice_s=120))
    begun = Allocated(time=NOW, attempt=0, begun=NOW)
    notice = Notice(None) if given_s is None else Notice(NOW + given_s, allocated=begun)
    assert State(job, last_save_s=last_save_s, notice=notice).stop_margin_s == margin


# ---- the controller, newer attempts


@pytest.mark.parametrize(
    ("events", "event", "expected"),
    [
        ([], AWAY, ["controller_away"]),
        ([AWAY], AWAY, []),
        ([AWAY], FINE, ["controller_back"]),
        ([AWAY, FINE], AWAY, ["controller_away"]),
        ([AWAY, FINE], FINE, []),
        ([], ControllerFailed("scontrol: not found", missing=True), ["controller_missing"]),
        ([ControllerFailed("scontrol: not found", missing=True)], ControllerFailed("same", missing=True), []),
    ],
)
def test_an_unreachable_controller_is_recorded_once_each_time(
    events: Sequence[Event], event: Event, expected: list[str]
) -> None:
    """The ranks continue to train."""
    assert recorded(after(*events), event) == expected


def test_a_superseded_attempt_writes_nothing_sends_nothing_and_exits() -> None:
    """The ranks see the newer attempt when their connection breaks."""
    state, todo = step(after(), Superseded(), NOW)
    assert todo == [Do.FENCE, StartTimer(Timer.ABANDON, 5.0)]
    for event in (
        FAILED,
        PREEMPTED,
        AWAY,
        Timer.STOP_CHECK,
        HANG,
        reported(0, "checkpoint", {"step": 7, "durable_s": 0.1}),
    ):
        assert step(state, event, NOW) == (state, [])
    assert actions(state, Timer.ABANDON) == [Do.ABANDON_RANKS]
    assert step(state, RanksExited(137), NOW)[0].exit_code == 137


def test_a_removed_run_directory_ends_all_ranks() -> None:
    """Told first, then killed; what else happens to them does not count."""
    state, todo = step(after(), RunRemoved("gone"), NOW)
    assert todo == [
        Say("gone. Terminating the ranks"),
        Broadcast(orders.Leave("gone")),
        StartTimer(Timer.KILL, HANG_GRACE_S),
    ]
    assert Do.KILL_RANKS in actions(state, Timer.KILL)
    assert actions(state, HANG) == actions(state, FAILED) == []


def test_a_hang_ends_all_ranks_with_a_grace_period_first() -> None:
    """Those that can exit on their own do."""
    state, todo = step(after(), HANG, NOW)
    values = dataclasses.asdict(HANG)
    assert values.pop("of_device") is values.pop("silent") is False
    record = Record(Hung(rank=1, **values))
    ends = [Broadcast(orders.RecordFlight(HANG.what)), Broadcast(orders.Leave(HANG.what))]
    assert todo == [record, *ends, KILL]
    assert Do.KILL_RANKS in actions(state, Timer.KILL)
    assert (state.hang, state.hung_at) == (HANG, NOW)
    assert actions(state, HANG) == []


def connecting(rank: int) -> RankEvent:
    return reported(rank, "connecting")


def looks(state: State, seconds: float) -> tuple[State, list[Action]]:
    """What follows when ranks that connect are looked at for this long, and nothing else happens."""
    found: list[Action] = []
    for _ in range(round(seconds / CONNECT_CHECK_S)):
        state, more = step(state, Timer.CONNECT, NOW)
        found += [action for action in more if action != LOOK_AGAIN]
    return state, found


LOOK_AGAIN = StartTimer(Timer.CONNECT, CONNECT_CHECK_S)


def test_ranks_that_do_not_connect_are_named_after_a_minute_and_end_the_attempt_with_their_stacks() -> None:
    """The limit counts from when all have called ``init()``, however late that is."""
    state, begun = step(after(), connecting(0), NOW)
    assert begun == [LOOK_AGAIN]
    state, found = looks(state, 1000.0)
    assert found == []
    state, found = looks(after(connecting(1), reported(0, "connected"), state=state), 295.0)
    (named,) = (action.event for action in found if isinstance(action, Record))
    assert isinstance(named, NotConnected) and named.late == (1,)
    state, (stacks, record, _, leave, kill) = looks(state, CONNECT_CHECK_S)
    assert isinstance(record, Record) and isinstance(record.event, Hung) and record.event.late == (1,)
    assert (stacks, kill) == (Broadcast(orders.WriteStacks(300)), KILL)
    assert isinstance(leave, Broadcast) and isinstance(leave.order, orders.Leave)
    assert state.hang is not None and state.hang.late == (1,) and record.event.suspect is None
    assert looks(state, 1000.0)[1] == []


def test_a_rank_that_never_calls_init_ends_the_attempt_after_the_ranks_had_time_for_their_own_error() -> None:
    """NCCL's rank 0 would wait for it without a limit."""
    state, found = looks(after(connecting(0)), JOB.timeouts.start_s + OWN_ERROR_S - CONNECT_CHECK_S)
    assert found == []
    state, _ = looks(state, CONNECT_CHECK_S)
    assert state.hang is not None and state.hang.late == (1,)


@pytest.mark.parametrize(
    "events",
    [
        (reported(0, "connected"), reported(1, "connected")),
        (FAILED, ConnectionLost(1)),
        (ConnectionLost(1, silent=True),),
    ],
    ids=["connected", "failed", "silent"],
)
def test_there_is_no_hang_once_all_have_connected_or_one_is_lost(events: Sequence[Event]) -> None:
    """The peers of a lost rank are ended for that reason."""
    assert looks(after(connecting(0), connecting(1), *events), 3000.0)[1] == []


def test_ranks_that_wait_for_one_that_has_exited_without_init_have_the_same_limit() -> None:
    """It is done, and will not call it."""
    done = reported(1, "left", {"host": "n2", "end": "done"})
    state, _ = looks(after(connecting(0), done), 300.0)
    assert state.hang is not None and state.hang.late == (0,)


@pytest.mark.parametrize(("late", "suspect"), [((1,), "n2"), ((2, 3), "n2"), ((0, 1), None), ((0, 1, 2, 3), None)])
def test_the_node_of_a_device_that_hangs_is_suspect(late: tuple[int, ...], suspect: str | None) -> None:
    """Unless there are several such nodes: then it is rather the network, or the script."""
    state = dataclasses.replace(after(), hosts=PerRank({0: "n1", 1: "n2", 2: "n2", 3: "n2"}))
    found = dataclasses.replace(HANG, late=late, of_device=True)
    record = next(action for action in step(state, found, NOW)[1] if isinstance(action, Record))
    assert isinstance(record.event, Hung) and record.event.suspect == suspect


def test_a_lost_rank_is_no_hang() -> None:
    """Its peers wait for it."""
    state = after(ConnectionLost(1))
    assert actions(state, HANG) == []
    assert Do.RUN_WATCHDOG not in actions(state, Timer.WATCHDOG)
    assert Do.RUN_WATCHDOG in actions(after(), Timer.WATCHDOG)


def test_ranks_that_outlive_others_are_watched() -> None:
    """They may work alone, for any time, but a rank that sends no heartbeats does not work."""
    done = reported(1, "left", {"host": "n2", "end": "done"})
    assert Do.RUN_WATCHDOG in actions(after(done, ConnectionLost(1)), Timer.WATCHDOG)
    watch = Watch(beat_s=2.0)
    beat = {"count": 9, "step": 8, "age_s": 0.0}
    watch.update(1, "n1", beat_of({**beat, "allowed_s": math.inf}))  # its last one
    for rank in (0, 2):
        watch.update(rank, f"n{rank}", beat_of({**beat, "allowed_s": 600.0}))
    for now, late in ((500.0, []), (700.0, [(2,)])):
        watch._clock.now = now
        watch.update(0, "n0", beat_of({**beat, "age_s": now, "allowed_s": 600.0}))
        assert [found.late for found in watch.look(gone={1}) if isinstance(found, Hang)] == late


def test_a_slow_rank_is_recorded() -> None:
    """It is not ended."""
    assert recorded(after(), Slow(rank=1, host="n2", own_s=0.5, ratio=2.0)) == ["slow"]


def test_a_slow_rank_that_keeps_up_again_is_recorded_once() -> None:
    """With every heartbeat its compute time is compared with that of the others."""
    watch = Watch(beat_s=2.0)

    def look(own_s: float) -> list[str]:
        for rank, seconds in enumerate((0.1, own_s, 0.1)):
            beat = {"count": 9, "step": 8, "age_s": 0.0, "allowed_s": 60.0, "own_s": seconds, "step_s": 1.0}
            watch.update(rank, f"n{rank}", beat_of(beat))
        return [name for found in watch.look() for name in recorded(after(), found)]

    assert [look(own_s) for own_s in (0.1, 0.9, 0.9, 0.1, 0.1)] == [[], ["slow"], [], ["straggler_recovered"], []]


def test_when_the_job_was_allocated_is_recorded_once() -> None:
    """The controller says it with each answer."""
    notice = Notice(NOW + 9000, allocated=Allocated(submitted=1.0, eligible=2.0, begun=3.0))
    assert recorded(after(), notice) == ["allocated"]
    assert recorded(after(notice), notice) == []
    assert recorded(after(), Notice(NOW + 9000)) == []


# ---- reports


@pytest.mark.parametrize(
    ("event", "values"),
    [
        (reported(1, "finishing", {"step": 7}), {"rank": 1, "step": 7}),
        (reported(0, "training", {"step": 7}), {"rank": 0, "step": 7, "redone": 3}),
        (reported(0, "training", {"step": 12, "new": 1}), {"rank": 0, "step": 12, "new": 1, "redone": 0}),
    ],
)
def test_what_a_rank_reports_is_recorded_with_its_rank(event: RankEvent, values: dict[str, Any]) -> None:
    """And how many steps are repeated after a resume. The fields keep their order."""
    (record,) = actions(State(JOB, steps_before=10), event)
    assert isinstance(record, Record)
    assert [*encode(record.event).items()][3:] == [*values.items()]


def test_a_heartbeat_goes_to_the_watchdog_alone() -> None:
    """It comes every two seconds."""
    assert actions(after(), reported(1, "alive", {"count": 5})) == [Heartbeat(1, "n2", beat_of({"count": 5}))]


def test_reports_that_arrive_after_the_ranks_have_exited_are_recorded_and_cause_nothing_else() -> None:
    """The launcher may return before the last report was read."""
    state = after(RanksExited(1))
    assert state.exit_code == 1
    assert recorded(state, reported(0, "checkpoint", {"step": 7, "durable_s": 0.1})) == ["checkpoint"]
    failed, todo = step(state, FAILED, NOW)
    assert (failed.ends[1].end, todo) == (End.EXCEPTION, [])
    for event in (HANG, PREEMPTED, Timer.KILL, Timer.ABANDON, Superseded()):
        assert step(state, event, NOW) == (state, [])
    assert actions(state, ConnectionLost(1, silent=True)) == []


def test_ranks_that_expect_a_signal_are_all_told_of_each_reason_once() -> None:
    """They do not agree on a stop as those that use clusterddp: one that has heard of it tells no other."""
    job = dataclasses.replace(JOB, stop=StopSignal("USR1"))
    told = [Broadcast(orders.Stop(Stop.PREEMPTION.value)), AGAIN]
    state = after(TOLD, PREEMPTED, state=State(job, ("n1", "n2")))
    assert actions(state, Timer.STOP_CHECK) == told
    assert actions(after(TOLD, PREEMPTED), Timer.STOP_CHECK) == [AGAIN]
    state, _ = step(state, Timer.STOP_CHECK, NOW)
    assert actions(state, Timer.STOP_CHECK) == [AGAIN]
    assert Broadcast(orders.Stop(Stop.TIME_LIMIT.value)) in actions(state, Notice(NOW + 10))
