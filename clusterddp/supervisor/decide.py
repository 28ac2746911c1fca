"""Decides what follows from each event of an attempt: ``step(state, event, now)``, a pure function.

``attempt.py`` queues the events, passes them to ``step`` one at a time and carries out the actions that it returns.
This module reads no clock, file or socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from clusterddp.failures.hangs import Hang, StillSlow, named
from clusterddp.history import stops
from clusterddp.history.beginnings import NotRead, Rejoined, Resumed, Training
from clusterddp.history.checkpoints import Checkpoint, CheckpointFailed
from clusterddp.history.event import Event as HistoryEvent
from clusterddp.history.event import name_of
from clusterddp.history.failures import (
    ControllerAway,
    ControllerBack,
    ControllerMissing,
    GpuFault,
    Hung,
    NodeLost,
    NotConnected,
    Slow,
    StragglerRecovered,
    Suspended,
    gpu_fault,
)
from clusterddp.history.steps import Progress
from clusterddp.history.stops import Finishing, LeftLoop, Notified, Overdue, Signal, Stopping
from clusterddp.messages import orders
from clusterddp.messages.reports import (
    Alive,
    Committing,
    Connected,
    Connecting,
    End,
    Gpu,
    Joined,
    Left,
    Made,
    Saving,
    Stacks,
)
from clusterddp.protocol import REQUESTED_STOPS
from clusterddp.supervisor import user_requests
from clusterddp.supervisor.attempt_state import (
    ASK_S,
    SIGNAL,
    Action,
    Broadcast,
    ConnectionLost,
    ControllerFailed,
    Do,
    Event,
    GpuFigures,
    Heartbeat,
    Notice,
    PerRank,
    Question,
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
    Step,
    StepWaits,
    Stop,
    Superseded,
    TermNotice,
    Timer,
)
from clusterddp.worker.control_channel import SILENCE_S

#: Grace period, in seconds, for the peers of a failed rank to fail with their own errors. Then they are asked to exit,
#: like hung ranks, and killed after the same time.
PEER_GRACE_S = HANG_GRACE_S = 3.0
#: Seconds before the end of the grace period in which the peers of a failed rank are ended and the job is requeued.
END_S = 8.0
#: A rank that still exists this many seconds after a KILL waits for a device or a file system that does not answer.
#: Slurm's UnkillableStepTimeout has the same default.
UNKILLABLE_S = 60.0
#: How often the time limit is compared with the clock, and a stop is sent again to ranks that have not confirmed it.
STOP_CHECK_S = 2.0
#: A signal gets this much time to reach the ranks before its meaning is sent to them.
SETTLE_S = 0.5
#: How often ranks that connect to each other are looked at, at most, and after how long those that have not connected
#: are named in the history.
CONNECT_CHECK_S, MISSING_S = 5.0, 60.0
#: How long ranks that wait for one that does not call `init()` may take to report that themselves.
OWN_ERROR_S = 10.0
#: How many events of one kind the history takes from ranks other than 0, in an attempt.
MOST_RECORDED = 64
#: For how long srun may wait for nodes of its own job, in seconds. It waits without bound while an earlier step holds
#: them, also if that step's processes are gone: slurmctld does not notice that a slurmstepd was killed, or that a node
#: was rebooted within SlurmdTimeout (seen on 22.05.8). An earlier srun has waited for KillWait already. What follows
#: the creation of the step, such as the import of a container, may take longer.
STEP_S = 60.0
_RANK_0 = frozenset((0,))


def step(state: State, event: Event, now: float) -> Step:
    """The next state, and the actions that follow from an event that came at ``now`` (unix seconds)."""
    if state.exit_code is not None:  # what ranks reported before they exited still counts, for the history
        if not isinstance(event, RankEvent | ConnectionLost):
            return state, []
        state, actions = _HANDLERS[type(event)](state, event, now)
        return state, [action for action in actions if isinstance(action, Record | Heartbeat | GpuFigures)]
    if state.superseded and not (isinstance(event, RanksExited) or event is Timer.ABANDON):
        return state, []
    before = state.stops_sent
    if isinstance(event, Timer):
        state, actions = _TIMERS[event](state, now)
    else:
        state, actions = _HANDLERS[type(event)](state, event, now)
    if state.stops_sent != before:
        state = replace(state, sent_at=now)
    return state, actions


# Reports of ranks


def _on_rank_event(state: State, event: RankEvent, now: float) -> Step:
    rank, report = event.rank, event.report
    match report:
        case Joined():
            return _on_joined(state, rank, report)
        case Alive():
            state, actions = _on_stood(state, rank, report.stood_s, now)
            return state, [*actions, Heartbeat(rank, state.hosts[rank], report)]
        case Connecting() | Connected():
            return _on_connecting(state, rank, isinstance(report, Connected))
        case Gpu():
            return state, [GpuFigures(rank, report.figures)]
        case Left():
            return _on_left(state, rank, report, now)
        case Committing() if rank == 0:
            return _on_committing(state, report, now)
        case Made():
            return _on_made(state, rank, report)
        case Stacks() | Saving():
            return user_requests.on_answer(state, rank, report)
        case HistoryEvent():
            return _on_reported(state, rank, report, now)
    return state, []


def _on_joined(state: State, rank: int, joined: Joined) -> Step:
    """The others may have stopped before it joined, and it would wait for them. No rank listens before rank 0 joins,
    which may have stopped, too: a signal ends the ranks that wait for it."""
    state = replace(state, hosts=state.hosts.put(rank, joined.host))
    late = sorted(state.stops_sent - {SIGNAL})
    if late and 0 not in state.hosts:
        return state, [Do.NOTIFY_RANKS]
    return state, [Broadcast(orders.Stop(why), frozenset((rank,))) for why in late]


def _on_reported(state: State, rank: int, event: HistoryEvent, now: float) -> Step:
    """An event of the history."""
    match event:
        case Training() | Resumed() if state.steps_before:
            event = replace(event, redone=max(0, state.steps_before - event.step))
        case NotRead() if state.made_before:
            event = replace(event, redone=state.made_before)
        case GpuFault(hardware=True) if rank not in state.gpu_faults:
            fault = gpu_fault(event.host, event.what, event.gpu, event.xid)
            state = replace(state, gpu_faults=state.gpu_faults.put(rank, (now, fault)))
    state, actions = _note(state, rank, event)
    state, more = _record(state, rank, event)
    return state, [*actions, *more]


def _on_stood(state: State, rank: int, stood_s: float, now: float) -> Step:
    """Records that a rank was stopped, if it was, unless another one was at the same time."""
    if not stood_s:
        return state, []
    known = now - stood_s < state.running_since
    state = replace(state, stood_s=max(state.stood_s, stood_s), running_since=now)
    record = Record(Suspended(rank=rank, host=state.hosts[rank], seconds=stood_s))
    return state, [] if known else [record]


def _record(state: State, rank: int, event: HistoryEvent) -> Step:
    """Adds a rank's event to the history, unless very many ranks report the same, such as a stop signal."""
    if rank == 0:
        return state, [Record(event)]
    name = name_of(event)
    before = state.reported.get(name, 0)
    state = replace(state, reported={**state.reported, name: before + 1})
    if before < MOST_RECORDED:
        return state, [Record(event)]
    text = f"ranks other than 0 reported {name!r} more than {MOST_RECORDED} times. Further reports are not recorded"
    return state, [Say(text)] if before == MOST_RECORDED else []


def _note(state: State, rank: int, event: HistoryEvent) -> Step:
    """Applies an event, apart from recording it."""
    match event:
        case Rejoined():
            return _on_rejoined(state, rank)
        case Stopping() | Finishing():
            return replace(state, saving=True), []
        case Overdue():
            return replace(state, rank_0_alone=rank == 0), []
        case Progress():
            return _abandon(replace(state, unfinished=event.step < event.steps, saving=False))
        case Signal():
            return _confirmed(state, SIGNAL)
        case LeftLoop():
            return replace(state, left_loop=state.left_loop.put(rank, event.step)), []
        case Notified():
            return _confirmed(state, event.reason)
        case Checkpoint():
            return user_requests.on_checkpoint(replace(state, last_save_s=event.durable_s), event)
        case CheckpointFailed():
            return user_requests.on_checkpoint(state, event)
    return state, []


def _confirmed(state: State, why: str) -> Step:
    """A rank stops for this reason. If it is a signal, asks the controller what it means."""
    if why in state.heard:
        return state, []
    state = replace(state, stops_sent=state.stops_sent | {why}, heard=state.heard | {why})
    return state, [Do.ASK_CONTROLLER] if why == SIGNAL else []


def _on_left(state: State, rank: int, left: Left, now: float) -> Step:
    """A rank's last report is the record of its end. A rank that is done may still be dismissed before it exits. If a
    rank that failed takes too long to exit and is dismissed, its record is still that of the failure."""
    before = state.ends.get(rank)
    if before is None or (before.end.well and left.end is End.DISMISSED):
        state = replace(state, ends=state.ends.put(rank, left))
    if left.end.well:
        return replace(state, rank_0_alone=state.rank_0_alone or left.alone), []
    # A rank that exits with code 0 in its loop, and its peers, may do so for a signal that the controller explains.
    more_s = ASK_S if left.end is End.UNFINISHED else 0.0
    state = _lose(state, rank, now)
    return _dismiss_peers(state, f"rank {rank} ({left.host}) failed", more_s, failed=True)


def _on_connection_lost(state: State, event: ConnectionLost, now: float) -> Step:
    state, actions = _lose_connection(replace(state, closed=state.closed.put(event.rank, True)), event, now)
    if state.leaving and len(state.closed) == state.job.world_size:  # the launcher only waits for lost nodes
        actions = [*actions, StartTimer(Timer.ABANDON, 0.0)]
    return state, actions


def _lose_connection(state: State, event: ConnectionLost, now: float) -> Step:
    rank = event.rank
    # A peer that waits for a silent rank may fail before the silence has lasted long enough.
    lost_at = now - SILENCE_S if event.silent else now
    state = _lose(state, rank, lost_at)
    if state.watched and not (rank in state.ends and state.ends[rank].end.well):
        state = replace(state, watched=False)
    state, actions = _abandon(replace(state, saving=False)) if rank == 0 else (state, [])
    if rank in state.ends:
        return state, actions
    if not event.silent:
        state, more = _dismiss_peers(state, _exited(state, rank))
        return state, [*actions, *more]
    # Its node is lost, or this one is cut off, and so is the controller. Or this one was, and the node answers by now.
    # srun would wait until Slurm gives a lost node up, and so would the ranks on other nodes.
    is_first = not state.silent
    state = replace(state, silent=state.silent | {rank})
    if not is_first:
        return state, actions
    return _confirm(state), [*actions, Do.ASK_CONTROLLER]


def _confirm(state: State) -> State:
    return state if state.confirming else replace(state, confirming=True, nodes_asked=False, unanswered=0)


def _ask_again(state: State, timer: Timer) -> Step:
    return replace(state, unanswered=state.unanswered + 1), [StartTimer(timer, state.ask_again_s)]


def _on_committing(state: State, asking: Committing, now: float) -> Step:
    """Rank 0 may commit its checkpoint of a step once every other rank has made the step, or has finished all of them.

    Rank 0 repeats its question until it has the answer. If a rank is lost that has not said so, rank 0's script may
    have caught the error of a collective and continued alone. It is then ended at once, because further steps do not
    count. During a stop, it keeps the rest of the grace period.
    """
    asked, number, step = state.question, asking.question, asking.step
    again = asked is not None and (asked.number, asked.step) == (number, step)
    waiting = set(asked.waiting if asked is not None and again else range(1, state.job.world_size))
    behind = [rank for rank in sorted(waiting & state.ended_well) if state.left_loop_at(rank, step) < step]
    waiting -= state.ended_well - {*behind}
    state = replace(state, question=Question(number, step, PerRank(dict.fromkeys(waiting, True))))
    if behind:
        why = f"rank {behind[0]} left its loop after step {state.left_loop_at(behind[0], step)} and exited"
        return state, [Broadcast(orders.Commit(number, why), _RANK_0)]
    if lost := waiting & state.lost_at.keys():
        why = _exited(state, min(lost, key=lambda rank: state.lost_at[rank]))
        leave = [] if _rest_s(state, now) > 0 else [Broadcast(orders.Leave(why), _RANK_0)]
        return state, [Broadcast(orders.Commit(number, why), _RANK_0), *leave]
    if waiting:
        return state, [Broadcast(orders.CountSteps(number), frozenset(waiting))]
    return state, [Broadcast(orders.Commit(number), _RANK_0)]


def _on_made(state: State, rank: int, made: Made) -> Step:
    """A rank that has made fewer steps is asked again when rank 0 asks again."""
    asked = state.question
    if asked is None or asked.number != made.question or rank not in asked.waiting or made.step < asked.step:
        return state, []
    asked = replace(asked, waiting=asked.waiting.without(rank))
    state = replace(state, question=asked)
    if asked.waiting:
        return state, []
    return state, [Broadcast(orders.Commit(asked.number), _RANK_0)]


def _lose(state: State, rank: int, at: float) -> State:
    """Records when a rank was lost, unless it already was."""
    return state if rank in state.lost_at else replace(state, lost_at=state.lost_at.put(rank, at))


def _on_rejoined(state: State, rank: int) -> Step:
    """Only its connection broke. Other ranks may be lost."""
    lost_at = state.lost_at.without(rank)
    state = replace(state, lost_at=lost_at, closed=state.closed.without(rank))
    if state.failed:  # the peers of a failed rank are ended in any case, also if that one had not joined
        return state, []
    state = replace(state, dismissal="")
    if not lost_at:
        return replace(state, watched=True), [Do.RESET_WATCHDOG]
    others = sorted(lost_at.keys() - state.silent)
    return _dismiss_peers(state, _exited(state, others[0])) if others else (state, [])


def _exited(state: State, rank: int) -> str:
    return f"rank {rank} ({state.hosts.get(rank, state.node_of(rank))}) exited"


def _dismiss_peers(state: State, why: str, more_s: float = 0.0, *, failed: bool = False) -> Step:
    """Ends the other ranks after a grace period. ``failed``: whether the rank failed, rather than exit with code 0.

    Asks the controller, because the rank may have been ended by a signal that only the controller can explain.
    """
    if state.dismissal and (state.failed or not failed):
        return state, []
    state = replace(state, dismissal=state.dismissal or why, failed=state.failed or failed)
    grace_s = 0.0 if state.given_up else PEER_GRACE_S + more_s
    return state, [StartTimer(Timer.DISMISS, grace_s), Do.ASK_CONTROLLER]


def _on_dismiss(state: State, now: float) -> Step:
    """Asks the other ranks to exit, and kills peers of a failed rank that do not, such as scripts without clusterddp.

    During a stop they may be saving, so they get the rest of the grace period.
    """
    if not state.dismissal:
        return state, []
    if (rest_s := _rest_s(state, now)) > 0:
        return state, [StartTimer(Timer.DISMISS, rest_s)]
    kill: list[Action] = [StartTimer(Timer.KILL, HANG_GRACE_S)] if state.failed else []
    return state, [Broadcast(orders.Leave(state.dismissal)), *kill]


def _rest_s(state: State, now: float) -> float:
    """How long the peers of a failed rank may still save."""
    if state.given_up:
        return 0.0
    notice_s = state.notice_ends - END_S - now if state.stops_sent else 0.0
    return max(notice_s, PEER_GRACE_S if state.saving else 0.0)


def _on_rank_failed(state: State, event: RankFailed, now: float) -> Step:
    """The rank may never have joined, or have crashed after its last report."""
    if event.rank in state.hosts:
        state = _lose(state, event.rank, now)
    return _dismiss_peers(state, f"rank {event.rank} ({state.node_of(event.rank)}) exited", failed=True)


def _on_kill(state: State, now: float) -> Step:
    """Waits longer if, by now, the peers of a failed rank are known to have a grace period."""
    if state.dismissal and not state.removed and (rest_s := _rest_s(state, now)) > 0:
        return state, [StartTimer(Timer.DISMISS, rest_s)]
    return state, [Do.KILL_RANKS, StartTimer(Timer.UNKILLABLE, UNKILLABLE_S)]


def _on_unkillable(state: State, _now: float) -> Step:
    """Abandons the ranks that are still connected. Their nodes count as lost, because they cannot release the ranks."""
    stuck = state.hosts.keys() - state.lost_at.keys() - state.ends.keys()
    nodes = dict.fromkeys(state.node_of(rank) for rank in sorted(stuck))
    lost = {node: tuple(rank for rank in sorted(stuck) if state.node_of(rank) == node) for node in nodes}
    records: list[Action] = [
        Record(NodeLost(node=node, suspect=node, unkillable=ranks)) for node, ranks in lost.items()
    ]
    return replace(state, silent=state.silent | stuck), [*records, Do.ABANDON_RANKS]


def _abandon(state: State) -> Step:
    """Ends an attempt that lost a node. Rank 0 may save first, which needs no other rank."""
    if not state.abandon or state.saving:
        return state, []
    actions: list[Action] = [Broadcast(orders.Leave(state.abandon)), StartTimer(Timer.ABANDON, state.abandon_s)]
    return replace(state, abandon="", leaving=True), actions


def _on_abandon(state: State, _now: float) -> Step:
    """Ranks that are still connected are killed first: the job and its nodes may be kept."""
    left = state.hosts.keys() - state.lost_at.keys() - state.ends.keys()
    if left and state.job.outlives_nodes and not state.superseded and not state.killed:
        return replace(state, killed=True), [Do.KILL_RANKS, StartTimer(Timer.ABANDON, HANG_GRACE_S)]
    return state, [Do.ABANDON_RANKS]


# The controller, the time limit, newer attempts


def _on_notice(state: State, notice: Notice, now: float) -> Step:
    back: list[Action] = [Record(ControllerBack())] if state.controller_away else []
    if notice.allocated is not None and not state.allocated:
        back.append(Record(notice.allocated))
        state = replace(state, allocated=True)
    preempted = state.preempted or notice.stop is Stop.PREEMPTION
    state = replace(state, notice=notice, preempted=preempted, controller_away=False)
    state = lose_unjoined(state, now)
    lost: list[Action] = []
    if state.confirming and not state.nodes_asked:
        state, lost = replace(state, nodes_asked=True), [Do.ASK_NODES]
    due = _due(state, now)
    if due is not None and due[0] is state.due:  # a stop that was already due is not sent any sooner
        return state, [*back, *lost]
    state, actions = _check_stop(state, now)
    return state, [*back, *lost, *actions]


def _on_controller_failed(state: State, event: ControllerFailed, _now: float) -> Step:
    actions: list[Action] = []
    if event.missing and not state.controller_missing:
        state, actions = replace(state, controller_missing=True), [Record(ControllerMissing(error=event.error))]
    elif not event.missing and not state.controller_away:
        state, actions = replace(state, controller_away=True), [Record(ControllerAway(error=event.error))]
    if not state.confirming:
        return state, actions
    if event.reachable and state.nodes_asked:
        return state, actions
    if event.reachable:
        return replace(state, nodes_asked=True), [*actions, Do.ASK_NODES]
    if not state.cut_off:
        node = state.node_of(min(state.silent))
        actions.append(
            Say(f"neither {node} nor Slurm's controller responds. Waiting for one of them. Check this node's network")
        )
    if state.nodes_asked:  # which will ask again
        return state, actions
    state, again = _ask_again(replace(state, cut_off=True), Timer.ASK)
    return state, [*actions, *again]


def lose_unjoined(state: State, now: float) -> State:
    """Ranks that have not joined have no connection that could break: Slurm has taken their node out of the job."""
    left, nodes = state.notice.nodes, state.nodes
    if left is None or all(node in left for node in nodes):
        return state
    known = state.hosts.keys() | state.ends.keys() | state.silent
    unjoined = [rank for rank in range(state.job.world_size) if rank not in known]
    gone = [rank for rank in unjoined if state.node_of(rank) in nodes and state.node_of(rank) not in left]
    state = lose(state, gone, now)
    return _confirm(state) if gone else state


def lose(state: State, ranks: Iterable[int], now: float) -> State:
    """These ranks were lost with their nodes, now or when their connections ended."""
    for rank in ranks:
        state = replace(_lose(state, rank, now), silent=state.silent | {rank})
    return state


def _on_silent_nodes(state: State, event: SilentNodes, _now: float) -> Step:
    """The controller answers, so this node is not cut off. It may have been: then the silent nodes answer by now.

    Their ranks cannot report any more, because they may have been declared lost, and all ranks restart. Ranks that have
    not joined are on nodes that Slurm has taken out of the job.
    """
    if not state.confirming:
        return state, []
    if event.dead is None:
        return _ask_again(state, Timer.ASK)
    if not event.dead and not set(state.lost_nodes) <= set(event.asked):
        return state, [Do.ASK_NODES]
    left = event.asked if state.notice.nodes is None else state.notice.nodes.intersection(event.asked)
    nodes = {rank: state.node_of(rank) for rank in state.silent if rank in state.hosts}
    answer = {rank for rank, node in nodes.items() if node in left and node not in event.dead}
    state = replace(state, silent=state.silent - answer, unreachable=state.unreachable | answer)
    if state.silent:
        return _lose_nodes(state)
    state = replace(state, confirming=False, cut_off=False)
    first = min(state.unreachable)
    why = f"rank {first} ({state.node_of(first)}) lost its connection"
    return _dismiss_peers(state, why, failed=True)


def _lose_nodes(state: State) -> Step:
    nodes = state.lost_nodes
    records: list[Action] = [Record(NodeLost(node=node, suspect=node)) for node in nodes]
    lost = f"node {nodes[0]} was lost" if len(nodes) == 1 else f"nodes {' and '.join(nodes)} were lost"
    state, actions = _abandon(replace(state, confirming=False, abandon=lost))
    return state, [*records, *actions]


def _check_stop(state: State, now: float) -> Step:
    """Asks the ranks to stop if it is time, and again until one of them confirms it.

    A stop that the user requested has no deadline, so a later stop with a deadline is sent, too.
    """
    due = _due(state, now)
    first = due is not None and due[0] is not state.due
    state = replace(state, due=None if due is None else due[0])
    check_again = StartTimer(Timer.STOP_CHECK, STOP_CHECK_S)
    if due is None:
        return state, [check_again]
    stop, why = due
    others = frozenset() if stop.value in REQUESTED_STOPS else REQUESTED_STOPS
    # Ranks that use clusterddp agree once one has got the stop. Scripts that expect a signal must all get it.
    unsent = state.job.stop.signal is not None and stop.value not in state.stops_sent
    if state.heard - others and not unsent:
        return state, [check_again]
    if first and state.notice.stop is not None:  # a signal is on its way
        return state, [StartTimer(Timer.STOP_CHECK, SETTLE_S)]
    sent = state.stops_sent - others
    # The stop goes over the connections first. The launcher signals ranks that may not read theirs: they have not
    # joined, or run a Python function with a ``checkpoint()``, which waits for a signal. Under proctrack/linuxproc the
    # signal goes to their children, too.
    actions: list[Action] = [Broadcast(orders.Stop(stop.value))]
    if (sent and not unsent) or len(state.hosts) < state.job.world_size:
        actions.append(Do.NOTIFY_RANKS)
    if why and not sent:
        actions.append(Record(stops.Notice(why=why)))
    return replace(state, stops_sent=state.stops_sent | {stop.value}), [*actions, check_again]


_WORDS = {
    Stop.PREEMPTION: "the job is being preempted",
    Stop.JOB_END: "the job is being ended",
    Stop.INTERRUPTION: "the run is being interrupted",
}


def _due(state: State, now: float) -> tuple[Stop, str] | None:
    """Why to stop now, and the same in words, which are empty for a user's request: the history already has it."""
    stop, end_time = state.notice.stop, state.notice.end_time
    if stop is not None:
        return stop, _WORDS[stop]
    if end_time is not None and now >= end_time - state.stop_margin_s:
        return Stop.TIME_LIMIT, f"the time limit is {max(0, round(end_time - now))} s away"
    if state.wanted is not None:
        return state.wanted, ""
    return (Stop.GPU_HOURS, "limits.gpu_hours is reached") if now >= state.gpu_hours_end else None


def _on_request(state: State, request: Request, now: float) -> Step:
    """A stop that the user requests is sent like any other, unless one is already due."""
    state, actions = user_requests.accept(state, request, now)
    if state.wanted is None or state.due:
        return state, actions
    state, more = _check_stop(state, now)
    return state, [*actions, *more]


def _on_exit(state: State, event: RanksExited, _now: float) -> Step:
    return user_requests.on_exit(replace(state, exit_code=event.exit_code, saving=False))


def _on_step_due(state: State, _now: float) -> Step:
    return state, [] if state.hosts else [Do.ASK_STEP]


def _on_step_waits(state: State, event: StepWaits, _now: float) -> Step:
    """Ends srun, which has started no rank. A stop that is due has its own reason, and is not delayed either."""
    if event.waits is None:
        return _ask_again(state, Timer.STEP)
    if not event.waits or state.hosts:
        return state, []
    return replace(state, busy=True), [Do.ABANDON_RANKS]


def _on_superseded(state: State, _event: Superseded, _now: float) -> Step:
    """The ``Monitor``, which looks every two seconds, has found the folder of a newer attempt.

    From now on, ``step`` ignores all events but the end of the ranks and ABANDON. FENCE closes the history and the
    connections to the ranks. These see the newer attempt when their connection breaks, and exit on their own. srun may
    wait forever for a node that it cannot reach, so it is abandoned. ``Recovery`` then neither writes nor requeues. A
    save that is under way is refused by ``checkpoint/store.Checkpoints.check_newest``.
    """
    return replace(state, superseded=True), [Do.FENCE, StartTimer(Timer.ABANDON, state.abandon_s)]


def _on_removed(state: State, event: RunRemoved, _now: float) -> Step:
    """Ends the ranks, whose work can no longer be saved."""
    actions: list[Action] = [Say(f"{event.why}. Terminating the ranks"), Broadcast(orders.Leave(event.why))]
    state = replace(state, removed=True, watched=False, dismissal=event.why, failed=True)
    return state, [*actions, StartTimer(Timer.KILL, HANG_GRACE_S)]


# Hangs


def _on_hang(state: State, hang: Hang, now: float) -> Step:
    """Ends all ranks: asks them to exit, and has the launcher kill those that do not."""
    if not state.watched:
        return state, []
    nodes = {state.node_of(rank) for rank in hang.late}
    if faulty := [rank for rank in hang.late if state.gpu_fault_of(rank, now)]:
        nodes = {state.node_of(faulty[0])}
        hang = replace(hang, what=f"{hang.what}. {state.gpu_fault_of(faulty[0], now)}", of_device=True)
    hung = Hung(
        rank=hang.late[0],
        late=hang.late,
        host=hang.host,
        step=hang.step,
        seconds=hang.seconds,
        what=hang.what,
        stalled_s=hang.stalled_s,
        suspect=nodes.pop() if hang.of_device and len(nodes) == 1 else None,
    )
    ends = [Broadcast(orders.RecordFlight(hang.what)), Broadcast(orders.Leave(hang.what))]
    actions: list[Action] = [Record(hung), *ends, StartTimer(Timer.KILL, HANG_GRACE_S)]
    return replace(state, hang=hang, hung_at=now, watched=False), actions


def _on_connecting(state: State, rank: int, connected: bool) -> Step:
    """A rank has called ``clusterddp.init()``, or has connected to the other ranks."""
    is_first = not state.connecting
    state = replace(state, connecting=state.connecting.put(rank, connected))
    if not is_first or state.job.world_size == 1:
        return state, []
    return state, [StartTimer(Timer.CONNECT, _connect_check_s(state))]


def _connect_check_s(state: State) -> float:
    return min(CONNECT_CHECK_S, state.job.timeouts.connect_s / 4)


def _on_connect(state: State, now: float) -> Step:
    """Ends the attempt if ranks do not connect, for which NCCL alone waits without a limit.

    Imports may take minutes, so that ``timeouts.connect_s`` counts from when all ranks have called
    ``clusterddp.init()``. Until then, and from when the first one called it, ``timeouts.start_s`` holds. It leaves the
    ranks time for their own errors.

    Looks are counted rather than seconds, because this process may be suspended with its job.
    """
    again, ended, timeouts = StartTimer(Timer.CONNECT, _connect_check_s(state)), state.ends.keys(), state.job.timeouts
    absent = [rank for rank in range(state.job.world_size) if rank not in state.connecting and rank not in ended]
    missing = [rank for rank, connected in sorted(state.connecting.items()) if not connected and rank not in ended]
    if not absent and not missing:
        return state, []
    if not state.watched:  # a rank was lost
        return state, [again]
    if not absent and not state.all_connecting:
        state = replace(state, all_connecting=True, connecting_s=0.0)
    before_s, waited_s = state.connecting_s, state.connecting_s + again.seconds
    state = replace(state, connecting_s=waited_s)
    if absent:
        if waited_s < timeouts.start_s + OWN_ERROR_S:
            return state, [again]
        what = (
            f"{_named(state, absent)} did not call clusterddp.init() within timeouts.start_s ({timeouts.start_s:g} s)"
        )
        return _end_connecting(state, absent, f"{what} after another rank", now)
    every = len(missing) == state.job.world_size
    have = "has" if len(missing) == 1 else "have"
    who = "the ranks have not connected to each other" if every else f"{_named(state, missing)} {have} not connected"
    what = f"{who} within {waited_s:.0f} s of the last call of clusterddp.init()"
    if left := sorted(ended - state.connecting.keys()):
        what = f"{what}, which {_named(state, left)} did not call"
    if waited_s >= timeouts.connect_s:
        return _end_connecting(state, missing, f"{what} (timeouts.connect_s)", now)
    if before_s < MISSING_S <= waited_s:
        return state, [Record(NotConnected(late=tuple(missing), seconds=waited_s, what=what)), again]
    return state, [again]


def _named(state: State, ranks: Iterable[int]) -> str:
    return named({rank: state.hosts.get(rank, state.node_of(rank)) for rank in ranks})


def _end_connecting(state: State, late: list[int], what: str, now: float) -> Step:
    """A hang whose ranks, which send no heartbeats yet, write their stacks only now."""
    seconds, first = state.connecting_s, late[0]
    hang = Hang(tuple(late), state.hosts.get(first, state.node_of(first)), None, seconds, what, seconds)
    state, actions = _on_hang(state, hang, now)
    return state, [Broadcast(orders.WriteStacks(seconds)), *actions]


def _on_watchdog(state: State, _now: float) -> Step:
    if state.job.watchdog is None:
        return state, []
    again = StartTimer(Timer.WATCHDOG, state.job.watchdog.period_s(state.job.world_size))
    return state, [Do.RUN_WATCHDOG, again] if state.watched else [again]


_HANDLERS: Mapping[type, Callable[[State, Any, float], Step]] = {
    RankEvent: _on_rank_event,
    ConnectionLost: _on_connection_lost,
    Notice: _on_notice,
    ControllerFailed: _on_controller_failed,
    SilentNodes: _on_silent_nodes,
    TermNotice: lambda state, event, _: (replace(state, term_notice_s=event.seconds), []),
    RankFailed: _on_rank_failed,
    StepWaits: _on_step_waits,
    Superseded: _on_superseded,
    RunRemoved: _on_removed,
    RanksExited: _on_exit,
    Request: _on_request,
    Hang: _on_hang,
    Slow: lambda state, slow, _: (state, [Record(slow)]),
    StillSlow: lambda state, slow, _: (
        state,
        [Broadcast(orders.Explain(slow.ratio, round(slow.seconds)), frozenset((slow.rank,)))],
    ),
    StragglerRecovered: lambda state, recovered, _: (state, [Record(recovered)]),
}
_TIMERS: Mapping[Timer, Callable[[State, float], Step]] = {
    Timer.STOP_CHECK: _check_stop,
    Timer.WATCHDOG: _on_watchdog,
    Timer.DISMISS: _on_dismiss,
    Timer.KILL: _on_kill,
    Timer.UNKILLABLE: _on_unkillable,
    Timer.ASK: lambda state, _: (replace(state, nodes_asked=False), [Do.ASK_AGAIN]),
    Timer.ABANDON: _on_abandon,
    Timer.CONNECT: _on_connect,
    Timer.STEP: _on_step_due,
    Timer.ANSWER: user_requests.on_timer,
}
