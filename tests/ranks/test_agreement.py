"""The agreement on a stop: every interleaving of its atomic actions, and real ranks at random moments."""

from __future__ import annotations

import os
import queue
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from clusterddp.training.stopping import Agreement, Vote
from tests import ddp
from tests.waiting import wait_until

MAIN, WATCHER = ("enter", "look", "decide"), ("raise", "publish", "send", "learn")


@dataclass(frozen=True)
class Rank:
    """One rank between two atomic actions: what each of its threads does next, and what they know."""

    #: How many boundaries it reaches, from 0 on.
    boundaries: int = 3
    entered: int = -1
    flagged: bool = False
    published: int | None = None
    last: int | None = None
    main: int = 0
    number: int = -1
    saw_flag: bool = False
    done: bool = False
    stopped: bool = False
    watcher: int = 0
    sent: int | None = None

    def vote(self) -> Vote:
        vote = Vote()
        vote.published, vote.last = self.published, self.last
        return vote


World = tuple[Rank, ...]


def main_move(rank: Rank, order: tuple[str, ...]) -> Rank | None:
    """The rank after its main thread's next action; None if it must wait, or is done."""
    if rank.done:
        return None
    vote, action, number = rank.vote(), order[rank.main], rank.number
    following = replace(rank, main=(rank.main + 1) % len(order))
    if action == "enter":
        return replace(following, entered=rank.entered + 1, number=rank.entered + 1)
    if action == "look":
        return replace(following, saw_flag=rank.flagged)
    passed = replace(following, done=number == rank.boundaries - 1)
    if not rank.saw_flag:
        return passed
    if rank.published is None:
        return None
    if vote.may_pass(number):
        return passed
    if rank.last is None:
        return None
    return replace(following, stopped=True, done=True) if vote.stops_at(number) else passed


def watcher_move(world: World, rank: Rank, order: tuple[str, ...]) -> Rank | None:
    """The rank after its watcher's next action; None if it must wait, or is done."""
    if rank.watcher == len(order):
        return None
    action, moved = order[rank.watcher], replace(rank, watcher=rank.watcher + 1)
    if action == "raise":
        return replace(moved, flagged=True)
    if action == "publish":
        return replace(moved, published=rank.vote().publish(rank.entered))
    if action == "send":
        return replace(moved, sent=rank.published)
    sent = [other.sent for other in world if other.sent is not None]
    return replace(moved, last=max(sent)) if len(sent) == len(world) else None


def successors(world: World, main: tuple[str, ...], watcher: tuple[str, ...]) -> Iterator[World]:
    for index, rank in enumerate(world):
        for moved in (main_move(rank, main), watcher_move(world, rank, watcher)):
            if moved is not None:
                yield (*world[:index], moved, *world[index + 1 :])


def agreed(world: World) -> bool:
    """Whether, in a final state, all ranks stopped at one boundary, or none as one had reached its last boundary."""
    if not all(rank.done for rank in world):
        return False
    if any(rank.stopped for rank in world):
        return all(rank.stopped for rank in world) and len({rank.number for rank in world}) == 1
    return max(rank.sent or 0 for rank in world) == world[0].boundaries - 1


def explore(
    ranks: int, main: tuple[str, ...] = MAIN, watcher: tuple[str, ...] = WATCHER, boundaries: int = 3
) -> tuple[int, int]:
    """Visits every state that any interleaving reaches; the numbers of final states, and of those without agreement."""
    start: World = (Rank(boundaries),) * ranks
    seen, pending = {start}, [start]
    final = broken = 0
    while pending:
        world = pending.pop()
        # The ranks are alike, so that worlds with the same ranks in another order are one.
        after = {tuple(sorted(state, key=hash)) for state in successors(world, main, watcher)}
        if not after:
            final += 1
            broken += not agreed(world)
        pending += after - seen
        seen |= after
    return final, broken


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_interleaving_stops_all_ranks_at_the_same_boundary(ranks: int) -> None:
    final, broken = explore(ranks)
    assert final > 1 and broken == 0


def test_every_interleaving_of_three_ranks_agrees() -> None:
    final, broken = explore(3, boundaries=2)
    assert final > 1 and broken == 0


@pytest.mark.parametrize(
    ("main", "watcher"),
    [
        (("look", "enter", "decide"), WATCHER),
        (MAIN, ("publish", "raise", "send", "learn")),
    ],
    ids=["main thread reads the flag first", "watcher publishes first"],
)
def test_the_other_order_breaks_the_agreement(main: Any, watcher: Any) -> None:
    assert explore(2, main, watcher)[1] > 0


def test_each_reason_of_a_stop_can_set_a_deadline() -> None:
    """A TERM, or a notice of the supervisor, comes while the ranks already stop because the user wants it."""
    store, found = HashStore(), queue.SimpleQueue[str]()
    agreement = Agreement(store, store, 0, 1, lambda *_, **__: None, found.put)
    agreement.on_notice("clusterddp stop")
    wait_until(lambda: agreement.reason is not None, "the stop")
    agreement._on_signal(signal.SIGTERM)
    agreement.on_notice("time limit")
    agreement.close()
    reasons = {found.get(timeout=10)}
    while "time limit" not in reasons:
        reasons.add(found.get(timeout=10))
    assert reasons == {"clusterddp stop", "signal TERM", "time limit"}
    assert agreement.reason == "clusterddp stop"


LIVE = """
import random, sys, time
import clusterddp
ctx = clusterddp.init()
calls = 0
print("begin", flush=True)
for _ in range(100_000):  # the test stops it long before
    time.sleep(random.random() * 0.004)
    calls += 1
    if clusterddp.stop_requested():
        print("stopped at", calls, ctx._agreement.reason, flush=True)
        clusterddp.requeue()
"""


def test_real_ranks_of_different_speed_agree_at_random_moments(tmp_path: Path) -> None:
    # No collective keeps these ranks in step: they are up to many boundaries apart when the signal comes.
    script = tmp_path / "live.py"
    script.write_text(LIVE)
    for _ in range(20 if "CLUSTERDDP_TEST_PRODUCT" in os.environ else 8):
        ranks = ddp.start(script, ranks=3, folder=tmp_path / "out")
        for rank in range(3):
            ranks.wait_for(rank, "begin")
        time.sleep(random.random() * 0.1)
        for rank in random.sample(range(3), random.choice([1, 1, 2, 3])):
            ranks.signal(rank)
        ranks.expect(75)
        agreed = [[line for line in ranks.output(r).splitlines() if line.startswith("stopped at")] for r in range(3)]
        assert agreed[0] == agreed[1] == agreed[2] != [], agreed


def test_a_signal_is_handled_while_the_main_thread_is_in_a_collective(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import sys, threading, time, torch, clusterddp\n"
        "import torch.distributed as dist\n"
        "main = threading.get_ident()\n"
        "def report():\n"
        "    while sys._current_frames()[main].f_code.co_name != 'all_reduce': time.sleep(0.001)\n"
        "    print('in the collective', flush=True)\n"
        "ctx = clusterddp.init()\n"
        "threading.Thread(target=report, daemon=True).start()\n"
        "if ctx.rank == 0: dist.all_reduce(torch.ones(1))\n"
        "else:\n"
        "    while ctx._agreement.reason is None: time.sleep(0.001)\n"
        "    print('heard of it', flush=True)\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "assert clusterddp.stop_requested()\n"
        "clusterddp.requeue()\n"
    )
    ranks = ddp.start(script, ranks=2, folder=tmp_path / "out")
    ranks.wait_for(0, "in the collective")
    ranks.signal(0)
    ranks.expect(75)
    assert "heard of it" in ranks.output(1)


def test_a_run_that_nobody_stops_costs_nothing_and_leaves_no_thread(tmp_path: Path) -> None:
    script = tmp_path / "free.py"
    script.write_text(
        "import threading, time, clusterddp\n"
        "with clusterddp.init() as ctx:\n"
        "    start = time.thread_time()\n"
        "    for _ in range(10000): assert not clusterddp.stop_requested()\n"
        "    print('microseconds', (time.thread_time() - start) * 100)\n"
        "print('threads', [t.name for t in threading.enumerate()])\n"
    )
    ranks = ddp.run(script, ranks=2, folder=tmp_path / "out")
    for rank in range(2):
        assert "threads ['MainThread']" in ranks.output(rank)
        assert float(ranks.output(rank).split("microseconds ")[1].split()[0]) < 20


def test_rank_0_dies_and_the_others_show_no_stack_of_the_store(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, sys, time, signal, clusterddp\n"
        "ctx = clusterddp.init()\n"
        "print('begin', flush=True)\n"
        "while ctx.rank == 0: time.sleep(1)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(0.3)  # in which a stack would be shown\n"
        "print('still here', flush=True)\n"
    )
    ranks = ddp.start(script, tmp_path / "dead", ranks=2, folder=tmp_path / "out")
    for rank in range(2):
        ranks.wait_for(rank, "begin")
    ranks.signal(0, signal.SIGKILL)
    wait_until(lambda: ranks.processes[0].poll() is not None, "rank 0 to be dead")
    (tmp_path / "dead").touch()
    ranks.wait()
    assert ranks.codes == [-9, 0]
    assert "still here" in ranks.output(1) and "Exception" not in ranks.text() and "frame #" not in ranks.text()
