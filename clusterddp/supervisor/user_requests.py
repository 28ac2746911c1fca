"""Handles a user's requests while the ranks run: a part of ``decide.py``, and pure like it.

A request comes over its own connection (``control_server.py``) and ends with one last answer. A new kind of
request is a class in ``messages/requests.py`` and a function here (``accept``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from clusterddp.codec import name_of
from clusterddp.failures.exclusion import may_exclude
from clusterddp.failures.placement import Course, choose
from clusterddp.failures.stack_traces import grouped
from clusterddp.history.checkpoints import Checkpoint, CheckpointFailed
from clusterddp.history.steps import NoRank
from clusterddp.history.stops import Requested
from clusterddp.hostlist import ranks_in
from clusterddp.messages import orders, requests
from clusterddp.messages.reports import Saving, Stacks
from clusterddp.messages.requests import Committed, Ended, LastAnswer, News, RankStacks, Refused
from clusterddp.supervisor.attempt_state import (
    Action,
    Answer,
    Broadcast,
    Pending,
    Record,
    Request,
    StartTimer,
    State,
    Step,
    Stop,
    Timer,
)

#: How long ranks may take to answer, in seconds. They do so in a separate thread.
ANSWER_S = 5.0
#: Thousands of ranks' stacks take longer to arrive, on a node that also trains.
_STACKS_PER_S = 800


def accept(state: State, request: Request, now: float) -> Step:
    """A request has come. It is answered at once if it is refused."""
    match request.what:
        case requests.Stacks():
            return _stacks(state, request, now)
        case requests.Save():
            return _save(state, request, now)
        case requests.Stop():  # all ranks stop at their next common boundary, and the run is held
            return _end(state, request, Stop.HOLD, now)
        case requests.Requeue(nodes):
            return _requeue(state, request, nodes, now)
        case requests.Drain(node):
            return _drain(state, request, node, now)
        case requests.Child():
            return _child(state)


def on_answer(state: State, rank: int, answer: Stacks | Saving) -> Step:
    """A rank answers an order."""
    waiting = state.pending.get(answer.request)
    if waiting is None or rank not in waiting.ranks or rank in waiting.stacks or waiting.saving:  # too late, or again
        return state, []
    if isinstance(answer, Saving):
        return _on_saving(state, replace(waiting, saving=answer), answer)
    return _on_stacks(state, waiting, rank, answer)


def on_checkpoint(state: State, saved: Checkpoint | CheckpointFailed) -> Step:
    """A checkpoint was committed, or failed: answers the requests that wait for it."""
    actions: list[Action] = []
    answer: LastAnswer = Committed(saved.step)
    if isinstance(saved, CheckpointFailed):
        answer = Refused(f"checkpoint {saved.step} was not saved: {saved.reason}. Training continues")
    for waiting in _saves(state):
        if waiting.saving is not None and saved.step >= (waiting.saving.step or 0):
            state, more = _finish(state, waiting.request, answer)
            actions += more
    return state, actions


def on_timer(state: State, now: float) -> Step:
    """Handles the requests whose ranks have had enough time, and restarts the timer for the others."""
    actions: list[Action] = []
    for waiting in [each for each in state.pending.values() if each.until <= now]:
        state, more = _late(state, waiting)
        actions += more
    return state, [*actions, *_timer(state, now)]


def on_exit(state: State) -> Step:
    """All ranks have exited. Their last reports may be read later, so only the history has the outcome."""
    actions: list[Action] = []
    for waiting in list(state.pending.values()):
        what = waiting.request.what
        answer: LastAnswer = _stacks_answer(state, waiting) if isinstance(what, requests.Stacks) else Ended()
        state, more = _finish(state, waiting.request, answer)
        actions += more
    return state, actions


# --- each kind of request


def _stacks(state: State, request: Request, now: float) -> Step:
    """Asks ranks for the stacks of their threads."""
    try:
        asked = _there(state) & _wanted(state, request)
    except ValueError as error:
        return _refuse(state, request, str(error))
    waiting = Pending(request, asked, now + max(ANSWER_S, len(asked) / _STACKS_PER_S))
    if not asked:
        return _stacks_finish(state, waiting)
    state = _keep(state, waiting)
    return state, [Broadcast(orders.SendStacks(request.client), asked), *_timer(state, now)]


def _on_stacks(state: State, waiting: Pending, rank: int, stacks: Stacks) -> Step:
    """Equal stacks, which nearly all ranks have, are kept once: thousands of copies take gigabytes."""
    same = waiting.distinct.get(stacks)
    if same is None:
        same, waiting = stacks, replace(waiting, distinct={**waiting.distinct, stacks: stacks})
    waiting = replace(waiting, stacks=waiting.stacks.put(rank, same))
    if len(waiting.stacks) == len(waiting.ranks):
        return _stacks_finish(state, waiting)
    return _keep(state, waiting), []


def _stacks_finish(state: State, waiting: Pending) -> Step:
    """All ranks have answered, or have had enough time."""
    return _finish(state, waiting.request, _stacks_answer(state, waiting))


def _wanted(state: State, request: Request) -> frozenset[int]:
    """The ranks that the user named. ValueError if there are others."""
    every = frozenset(range(state.job.world_size))
    named = request.what.ranks if isinstance(request.what, requests.Stacks) else None
    wanted = every if named is None else frozenset(ranks_in(named))
    if more := wanted - every:
        raise ValueError(f"there is no rank {min(more)} in this run. Expected 0 to {max(every)}")
    return wanted


def _stacks_answer(state: State, waiting: Pending) -> RankStacks:
    absent = sorted(_wanted(state, waiting.request) - waiting.ranks)
    unanswered = sorted(waiting.ranks - waiting.stacks.keys())
    return RankStacks(
        stacks=grouped(waiting.stacks, state.hosts),
        unanswered=unanswered,
        starting=[rank for rank in absent if rank not in state.hosts],
        exited=[rank for rank in absent if rank in state.hosts],
        hosts={str(rank): state.node_of(rank) for rank in unanswered},
    )


def _save(state: State, request: Request, now: float) -> Step:
    """Asks rank 0, which alone saves, to do so at its next step boundary."""
    rank_0 = frozenset((0,))
    if not rank_0 <= _there(state):
        why = "rank 0 has exited" if 0 in state.hosts else "the ranks are still starting"
        return _refuse(state, request, f"not saved: {why}")
    state = _keep(state, Pending(request, rank_0, now + ANSWER_S))
    return state, [Broadcast(orders.Save(request.client), rank_0), *_timer(state, now)]


def _on_saving(state: State, waiting: Pending, answer: Saving) -> Step:
    """Rank 0 will save, unless its newest checkpoint has all steps, or there is no state to save (no ``step``)."""
    if answer.step is None:
        why = "there is no run to save. The script has not called ctx.run() yet, or writes its own checkpoints"
        return _finish(state, waiting.request, Refused(why))
    if answer.committed == answer.step:
        return _finish(state, waiting.request, Committed(answer.step))
    first = not any(other.saving for other in _saves(state))
    record: list[Action] = [Record(Requested(request="save"))] if first else []
    news = Answer(waiting.request.client, News("rank 0 saves at the next step boundary"))
    return _keep(state, replace(waiting, until=math.inf)), [*record, news]


def _saves(state: State) -> list[Pending]:
    return [waiting for waiting in state.pending.values() if isinstance(waiting.request.what, requests.Save)]


def _save_late(state: State, waiting: Pending) -> Step:
    why = f"rank 0 ({state.node_of(0)}) did not answer within {ANSWER_S:g} s. It is stopped, or holds Python's GIL"
    return _finish(state, waiting.request, Refused(f"not saved: {why}"))


def _requeue(state: State, request: Request, nodes: Sequence[str], now: float) -> Step:
    """All ranks stop, and the run is requeued, or continues in a new job without some nodes if they are given."""
    if not state.restartable:
        instead = "To save and stop the run, use `clusterddp stop RUN`"
        why = "Slurm cannot requeue your own allocation" if state.job.continues else "`continue: false` forbids it"
        return _refuse(state, request, f"not requeued: {why}. {instead}")
    if state.wanted is Stop.HOLD:
        return _refuse(state, request, "not requeued: the run is being stopped by `clusterddp stop`")
    return _end(state, request, Stop.REQUEUE, now, nodes)


def _drain(state: State, request: Request, node: str, now: float) -> Step:
    """All ranks stop, and the run continues in this job without a node: on a spare one, or on fewer nodes.

    Refused if no rank runs on the node, if the run already stops for another reason, or without a place to continue.
    ``decide._look`` sends the ranks the stop until one confirms it, and they stop as for a signal. Once they have
    exited, ``Recovery._why`` gives ``Cause.DRAIN_REQUESTED``, unless Slurm has a cause. ``Recovery._restart`` chooses
    the nodes again with ``placement.choose``, now among those that answer, records them as the event ``moved``, and
    returns RESTART. The loop in ``main.supervise`` then starts the next attempt: ``placement.place`` reads that event,
    and ``launcher.srun_command`` passes the nodes as ``--nodelist``. If too few nodes answer by then, a new job
    continues the run. ``clusterddp drain`` prints the event that ended the attempt.
    """
    if node not in state.placement.nodes:
        return _refuse(state, request, f"not drained: no rank runs on {node}, only on {', '.join(state.nodes)}")
    if state.wanted not in (None, Stop.DRAIN):
        return _refuse(state, request, f"not drained: the run is being stopped by `{state.wanted.value}`")
    if state.drained not in ("", node):
        return _refuse(state, request, f"not drained: the run is already leaving {state.drained}. Try again after that")
    choice = choose(state.job, state.placement, {node: "is drained"}, None)
    if choice.course is Course.NEW_JOB:
        why = f"not drained: {choice.lack}"
        if state.restartable and may_exclude(state.job, [node]):
            why += f". `clusterddp requeue RUN --exclude {node}` continues the run without {node} in a new job"
        return _refuse(state, request, why)
    return _end(replace(state, drained=node), request, Stop.DRAIN, now, [node])


def _end(state: State, request: Request, wanted: Stop, now: float, nodes: Sequence[str] = ()) -> Step:
    """``decide.py`` then asks the ranks to stop, unless they are already stopping for a different reason."""
    again = state.wanted is wanted and (not nodes or wanted is Stop.DRAIN)
    kind = name_of(type(request.what))
    record: list[Action] = [] if again else [Record(Requested(request=kind, nodes=tuple(nodes)))]
    news = Answer(request.client, News("all ranks stop after their current step"))
    state = _keep(replace(state, wanted=wanted), Pending(request, until=now + ANSWER_S))
    return state, [*record, news, *_timer(state, now)]


def _child(state: State) -> Step:
    """A process that a rank has started reports itself, without waiting for an answer. Only the first is recorded."""
    if "child" in state.reported:
        return state, []
    return replace(state, reported={**state.reported, "child": 1}), [Record(NoRank())]


def _stop_late(state: State, waiting: Pending) -> Step:
    state = _keep(state, replace(waiting, until=math.inf))
    if state.heard:
        return state, []
    text = (
        "no rank has confirmed the request yet. It stays in force, and the ranks get it as soon as they have connected "
        "to the supervisor"
    )
    return state, [Answer(waiting.request.client, News(text))]


def _late(state: State, waiting: Pending) -> Step:
    """Ranks did not answer in time."""
    match waiting.request.what:
        case requests.Stacks():
            return _stacks_finish(state, waiting)
        case requests.Save():
            return _save_late(state, waiting)
        case _:
            return _stop_late(state, waiting)


# --- what they share


def _there(state: State) -> frozenset[int]:
    """The ranks that have joined and, as far as is known, not exited."""
    return frozenset(state.hosts.keys() - state.ends.keys() - state.lost_at.keys())


def _keep(state: State, waiting: Pending) -> State:
    return replace(state, pending={**state.pending, waiting.request.client: waiting})


def _timer(state: State, now: float) -> list[Action]:
    """Until the next request has waited long enough."""
    left_s = min((waiting.until for waiting in state.pending.values()), default=math.inf) - now
    return [StartTimer(Timer.ANSWER, max(0.0, min(left_s, ANSWER_S)))] if left_s < math.inf else []


def _finish(state: State, request: Request, answer: LastAnswer) -> Step:
    pending = {client: waiting for client, waiting in state.pending.items() if client != request.client}
    return replace(state, pending=pending), [Answer(request.client, answer)]


def _refuse(state: State, request: Request, why: str) -> Step:
    return _finish(state, request, Refused(why))
