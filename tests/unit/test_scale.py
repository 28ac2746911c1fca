"""What the supervisor does per message takes the same time for any number of ranks, and what it does once per attempt
grows with their number, not its square. Counted in Python instructions, of which each run executes the same number.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from clusterddp.failures.exit_status import ExitStatus
from clusterddp.failures.hangs import RankStatus, find_hang, find_slow
from clusterddp.jobdef.job import MOST_BEATS, Job, Watchdog
from clusterddp.messages import requests
from clusterddp.messages.reports import End
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor import decide
from clusterddp.supervisor.attempt_state import (
    ConnectionLost,
    Event,
    NodeNames,
    PerRank,
    RankEvent,
    Record,
    Request,
    Say,
    State,
)
from clusterddp.supervisor.verdict import RankEnd, judge
from clusterddp.training import log_reduction
from clusterddp.training.exactness import Divergence
from clusterddp.training.heartbeat import phase
from clusterddp.training.log_reduction import Receiver
from clusterddp.training.stopping import Agreement
from tests.counting_store import CountingStore, wait_for_watcher
from tests.instructions import Instructions
from tests.reports import reported

FEW, MANY = 64, 256
NOW = 1000.0
THREADS = [{"name": "MainThread", "frames": ["train.py:7 (step)"]}]


def instructions(work: Callable[[], object]) -> int:
    with Instructions() as counted:
        counted.counting = True
        work()
    return counted.by_module.total()


def exponent(work: Callable[[int], Callable[[], object]]) -> float:
    """By which power of the number of ranks the instructions of ``work(ranks)()`` grow."""
    few, many = (instructions(work(ranks)) for ranks in (FEW, MANY))
    assert few > 0

    return math.log(many / few, MANY / FEW)


def state(ranks: int) -> State:
    """All ranks have joined."""
    job = Job(name="x", module="x", nodes=ranks // 8, gpus_per_node=8, device="cpu", watchdog=Watchdog())
    hosts = PerRank({rank: f"n{rank // 8}" for rank in range(ranks)})
    return State(job, NodeNames(f"n{node}" for node in range(ranks // 8)), hosts=hosts)


def handled(state: State, events: Iterable[Event]) -> tuple[State, list[Any]]:
    done: list[Any] = []
    for event in events:
        state, actions = decide.step(state, event, NOW)
        done += actions
    return state, done


def stacks(rank: int, place: str = "all_reduce") -> RankEvent:
    return reported(rank, "stacks", {"request": 1, "place": place, "threads": THREADS})


END = {"host": "n1", "end": "stopped", "step": 7}
BEAT = {"count": 7, "step": 6, "age_s": 0.0}
ASK = Request(1, requests.Stacks())
PER_RANK: dict[str, tuple[list[Event], Callable[[int], Event]]] = {
    "hello": ([], lambda rank: reported(rank, "joined", {"host": "n1"})),
    "heartbeat": ([], lambda rank: reported(rank, "alive", BEAT)),
    "signal": ([], lambda rank: reported(rank, "signal", {"signal": "TERM"})),
    "end": ([], lambda rank: reported(rank, "left", END)),
    "loss": ([], ConnectionLost),
    "rejoin": ([], lambda rank: reported(rank, "rejoined", {"host": "n1"})),
    "stacks": ([ASK], stacks),
}


@pytest.mark.parametrize("kind", PER_RANK)
def test_one_message_of_each_rank_takes_time_in_proportion_to_their_number(kind: str) -> None:
    before, event = PER_RANK[kind]

    def work(ranks: int) -> Callable[[], object]:
        begun, _ = handled(state(ranks), before)
        return lambda: handled(begun, map(event, range(ranks)))

    handled(handled(state(FEW), before)[0], [event(0)])  # what a process does once, such as a codec, does not count
    assert 0.8 < exponent(work) < 1.1


def status(rank: int, **values: Any) -> RankStatus:
    given = {"count": 9, "step": 8, "allowed_s": 60.0, "moved": 0.0, "heard": NOW, "waits": True, "place": "all_reduce"}
    return RankStatus(rank, f"n{rank}", **{**given, **values})


def ends(ranks: int) -> list[RankEnd]:
    """One rank was killed, and its peers by the launcher."""
    killed, first = ExitStatus(signal=9), ExitStatus(signal=9, first=True)
    return [RankEnd(rank, "n1", End.DIED, 5.0, death=first if rank == 3 else killed) for rank in range(ranks)]


def waiting(ranks: int) -> list[RankStatus]:
    return [status(rank, waits=rank != 3) for rank in range(ranks)]


def timed(ranks: int) -> list[RankStatus]:
    return [status(rank, own_s=0.1 + rank / 1e4, step_s=1.0) for rank in range(ranks)]


def gone(ranks: int) -> list[RankEnd]:
    """All exited without a record, and the launcher knows of no failure."""
    return [RankEnd(rank, "n1", End.DIED, 5.0) for rank in range(ranks)]


def nodes_of(of: State) -> list[str]:
    return [of.node_of(rank) for rank in range(of.job.world_size)]


ONCE: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "hang": (waiting, lambda statuses: find_hang(statuses, NOW, 2.0)),
    "stragglers": (timed, find_slow),
    "verdict": (ends, lambda ended: judge(ended, 137, False, lambda: Cause.NONE)),
    "verdict on lost peers": (gone, lambda ended: judge(ended, 1, False, lambda: Cause.NONE)),
    "hosts of all ranks": (state, nodes_of),
}


@pytest.mark.parametrize("what", ONCE)
def test_what_is_done_about_all_ranks_takes_time_in_proportion_to_their_number(what: str) -> None:
    made, act = ONCE[what]

    def work(ranks: int) -> Callable[[], object]:
        given = made(ranks)
        return lambda: act(given)

    assert exponent(work) < 1.1


def test_a_change_of_one_ranks_value_copies_only_a_part() -> None:
    before = PerRank(dict.fromkeys(range(16384), "x"))
    after = before.put(5, "y")
    assert (before[5], after[5], after[6], len(after)) == ("x", "y", "x", 16384)
    assert sum(after._parts[number] is not part for number, part in before._parts.items()) == 1
    assert len(before._parts) + max(map(len, before._parts.values())) <= 256
    gone = after.without(5).without(5)
    assert (5 in gone, gone.get(5), len(gone), gone == {**before}) == (False, None, 16383, False)
    assert gone.put(5, "x") == {**before} and list(PerRank({9: 1, 3: 1})) == [9, 3]


def test_the_history_has_an_event_of_each_of_a_few_ranks_only() -> None:
    """A stop's signal reaches all ranks: thousands of synced lines would delay its end, and each later start."""
    _, actions = handled(state(256), (reported(rank, "signal", {"signal": "TERM"}) for rank in range(255, -1, -1)))
    recorded = [action.event.rank for action in actions if isinstance(action, Record)]
    assert recorded == [*range(255, 255 - decide.MOST_RECORDED, -1), 0]
    (said,) = (action.text for action in actions if isinstance(action, Say))
    assert said == "ranks other than 0 reported 'signal' more than 64 times. Further reports are not recorded"


def test_equal_stacks_are_kept_once() -> None:
    asked, _ = handled(state(64), [ASK])
    some, _ = handled(asked, [stacks(rank, "read" if rank == 5 else "all_reduce") for rank in range(63)])
    assert len({id(values) for values in some.pending[1].stacks.values()}) == 2


def test_the_median_of_the_others_is_that_of_statistics() -> None:
    generator = random.Random(0)
    for ranks in range(2, 12):
        times = [generator.choice([0.1, 0.2, 0.3, 0.9]) for _ in range(ranks)]
        statuses = [status(rank, own_s=times[rank], step_s=1.0) for rank in range(ranks)]
        usual = {rank: statistics.median(times[:rank] + times[rank + 1 :]) for rank in range(ranks)}
        slow = {slow.rank for slow in find_slow(statuses)}
        assert slow == {r for r, own in enumerate(times) if own > 1.5 * usual[r] and own - usual[r] > 0.1}


def test_heartbeats_of_many_ranks_are_rarer_and_spread_evenly() -> None:
    watchdog = Watchdog()
    assert [watchdog.period_s(ranks) for ranks in (1, 2048, 4096, 16384)] == [2.0, 2.0, 4.0, 16.0]
    assert max(ranks / watchdog.period_s(ranks) for ranks in range(1, 20000, 7)) <= MOST_BEATS
    for ranks in (8, 1000, 16384):
        moments = sorted(map(phase, range(ranks)))
        assert max(later - earlier for earlier, later in itertools.pairwise(moments)) < 3 / ranks


def test_a_rank_may_open_as_many_connections_as_there_are_ranks() -> None:
    """Slurm may give ranks a limit of 1,024 open files, which 512 ranks exceed on rank 0."""
    code = """
import resource
from clusterddp.distributed.process_group import allow_connections
limit = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
found = []
for ranks in (16, 500, 1500):
    allow_connections(0, ranks)
    found.append(limit())
print(found)
allow_connections(1, 2000)
try:
    allow_connections(0, 2000)
except Exception as error:
    print(type(error).__name__, error)
"""
    first, second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()
    assert first == "[1024, 2256, 4096]"
    assert second.startswith("LauncherEnvironmentError rank 0 needs 4,256 open files for the store of 2,000 ranks")


def test_ranks_pass_on_logged_values_less_often_if_there_are_very_many() -> None:
    assert [log_reduction.period_s(ranks) for ranks in (2, 256, 1024, 4096, 16384)] == [0.25, 0.25, 1.0, 4.0, 5.0]


#: Steps without a request, in which nothing may be sent.
STEPS = 50


def fitted(counts: Mapping[int, float]) -> float:
    """The power of the number of ranks with which a count grows: the slope of a line through the logarithms."""
    points = [(math.log(ranks), math.log(max(count, 1e-9))) for ranks, count in counts.items()]
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return float(slope)


def store_operations(ranks: int) -> tuple[Counter[str], Counter[str]]:
    """What an agreement of so many ranks asks of rank 0's store: before a stop, in STEPS steps, and for the stop."""
    store = HashStore()
    mains = [CountingStore(store) for _ in range(ranks)]
    watched = [CountingStore(store) for _ in range(ranks)]
    made = [
        Agreement(mains[rank], watched[rank], rank, ranks, lambda *_, **__: None, lambda _: None)
        for rank in range(ranks)
    ]
    for each in watched:
        wait_for_watcher(each)
    for _ in range(STEPS):
        assert not any(agreement.boundary() for agreement in made)
    before = _calls(mains, watched)
    made[-1].request("enough")
    going = list(made)
    while going:  # the ranks' main threads, one after the other: a boundary waits for the watchers alone
        going = [agreement for agreement in going if not agreement.boundary()]
    after = _calls(mains, watched)
    after.subtract(before)
    return before, Counter({name: number for name, number in after.items() if number})


def _calls(*stores: list[CountingStore]) -> Counter[str]:
    total: Counter[str] = Counter()
    for group in stores:
        for store in group:
            total.update(store.calls)
    return total


def test_a_stop_takes_a_number_of_store_operations_in_proportion_to_the_ranks_and_a_step_none() -> None:
    counts = {ranks: store_operations(ranks) for ranks in (4, 8, 16)}
    for ranks, (before, stop) in counts.items():
        assert before == {"get": ranks}  # each rank's watcher waits for a request
        assert stop.total() <= 4 * ranks + 4, stop
    assert 0.8 < fitted({ranks: stop.total() for ranks, (_, stop) in counts.items()}) < 1.05


def test_the_agreement_sends_nothing_while_no_stop_is_requested() -> None:
    """A hundred boundaries, and no call on either of its store connections."""
    tcp = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30))
    client = TCPStore("127.0.0.1", tcp.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    store, watched = CountingStore(tcp), CountingStore(client)
    agreed = Agreement(store, watched, 0, 1, lambda *_, **__: None, lambda _: None)
    wait_for_watcher(watched)
    assert not any(agreed.boundary() for _ in range(100))
    assert (store.calls.total(), dict(watched.calls)) == (0, {"get": 1})
    agreed.request("enough")
    assert store.calls["compare_set"] == 1
    agreed.close()


def test_rank_0_finds_few_missing_values_with_few_messages() -> None:
    """While a save waits for them it looks a hundred times per second."""
    store, ranks = CountingStore(HashStore()), range(1, 1025)
    receiver = Receiver(store, 1025, lambda: None)
    receiver._waiting = 1
    for rank in set(ranks) - {700}:
        store.set(f"log/{rank}/0", "")
    assert set(receiver._arrived(ranks)) == set(ranks) - {700}
    assert store.calls["check"] <= 2 * math.log2(1024) + 1
    before = store.calls["check"]
    assert not receiver._arrived(ranks)
    assert store.calls["check"] == before + 1


@pytest.mark.parametrize("ranks", [2, 4, 1500])
def test_rank_0_gets_the_states_of_many_ranks_with_one_message(ranks: int) -> None:
    """They are compared in the first steps of each attempt."""
    store = CountingStore(HashStore())
    parts = {"progress": Progress(7)}
    group = lambda rank: SimpleNamespace(rank=rank, world_size=ranks, store=store)  # noqa: E731
    for rank in range(1, ranks):
        state = {"progress": Progress(8)} if rank == ranks - 1 else parts
        assert Divergence(state, group(rank)).compare(10) == []  # type: ignore[arg-type]
    store.calls.clear()
    assert Divergence(parts, group(0)).compare(10) == ["progress"]  # type: ignore[arg-type]
    assert store.calls == {"multi_get": math.ceil((ranks - 1) / 512)}


class Progress:
    """A part of a run's state."""

    def __init__(self, value: int) -> None:
        self._value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self._value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._value = state["value"]


def test_very_many_ranks_get_longer_to_answer_with_their_stacks() -> None:
    waits = [handled(state(ranks), [ASK])[0].pending[1].until - NOW for ranks in (64, 4000, 16384)]
    assert waits == pytest.approx([5.0, 5.0, 20.48])
