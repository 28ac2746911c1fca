"""What a rank reports: its timeout, where it is, and its compute time in a step."""

from __future__ import annotations

import json
import math
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clusterddp import process
from clusterddp.failures.stack_traces import place_of, sleeping
from clusterddp.jobdef.job import Watchdog
from clusterddp.messages.reports import Alive
from clusterddp.process import RunningClock
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training.heartbeat import RECORDED, Heartbeat, Pace, WatchedSteps, flight_record, positions_of
from tests import ddp
from tests.waiting import wait_until

WATCHDOG = Watchdog(step_s=600, start_s=1800)
#: Collects garbage at every allocation, some of which ends a ``threading.local``, while the stacks are taken.
COLLECTING = """
import gc, threading
from clusterddp.process import current_frames
class Node: pass
ended = threading.Event()
for _ in range(20):
    threading.Thread(target=ended.wait, daemon=True).start()
gc.set_threshold(1)
for _ in range(300):
    node = Node()
    node.itself, node.local = node, threading.local()
    node.local.value = 1
    del node
    assert threading.get_ident() in current_frames()
assert gc.isenabled()
"""


def test_looking_where_threads_are_does_not_stop_the_process_during_a_garbage_collection() -> None:
    """As Python before 3.11.5 does: the whole rank, by a heartbeat."""
    subprocess.run([sys.executable, "-c", COLLECTING], cwd=ddp.REPOSITORY, check=True, timeout=60)


def test_the_timeout_of_a_step_follows_the_longest_step_so_far() -> None:
    """start_s until the first step is done; then as set, or four times the longest step so far; none when suspended."""
    pace = Pace(WATCHDOG)
    assert (pace.look(5, 0, None, False), pace.allowed_s) == (0.0, None)
    assert (pace.look(9, 0, None, False), pace.allowed_s) == (4.0, None)
    assert (pace.look(10, 0, 0, False), pace.allowed_s) == (0.0, 1800)  # begun
    assert (pace.look(12, 1, 0, False), pace.allowed_s) == (0.0, 1800)  # the boundary before the first step
    assert (pace.look(900, 2, 0, False), pace.allowed_s) == (0.0, 600)  # compilation was no step's time
    assert (pace.look(1100, 3, 0, False), pace.allowed_s) == (0.0, 800)
    assert (pace.look(1150, 3, 0, False), pace.allowed_s) == (50.0, 800)
    assert (pace.look(1160, 3, 0, True), pace.allowed_s) == (0.0, math.inf)  # paused
    assert (pace.look(9000, 3, 0, False), pace.allowed_s) == (0.0, 800)  # which was no step's time either
    assert (pace.look(9001, 4, 0, False), pace.allowed_s) == (0.0, 800)
    assert (pace.look(9002, 4, None, False), pace.allowed_s) == (0.0, math.inf)  # done


def test_between_steps_of_an_unknown_script_the_longer_timeout_counts() -> None:
    """An evaluation or a save of the usual length may come anywhere, and is not announced."""
    for patient, allowed_s in ((False, WATCHDOG.step_s), (True, WATCHDOG.start_s)):
        pace = Pace(WATCHDOG, patient)
        for count in range(4):
            pace.look(float(count), count, 0, False)
        assert pace.allowed_s == allowed_s


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ticks at most pass between two looks."""
    now = 100.0
    monkeypatch.setattr(process.time, "monotonic", lambda: now)
    clock = RunningClock(2.0)
    for passed, counted, forgiven in [(2.0, 2.0, 0.0), (5.0, 5.0, 0.0), (3606.0, 6.0, 3600.0)]:
        before, now = clock.now, now + passed
        assert clock.look() == forgiven
        assert clock.now - before == counted
    now += 3.0
    assert (clock.look(counts=False), clock.now) == (3.0, 13.0)


def test_a_rank_tells_for_how_long_it_was_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In its next heartbeat alone."""
    stood, beats = iter([0.0, 700.0, 0.0]), queue.Queue[Alive]()
    monkeypatch.setattr(RunningClock, "look", lambda _: next(stood, 0.0))
    heartbeat = Heartbeat(
        Watchdog(step_s=0.1),
        WatchedSteps(lambda: 3, lambda: 2),
        beats.put,
        tmp_path / "collectives.json",
    )
    found = [beats.get(timeout=10).stood_s for _ in range(3)]
    heartbeat.close()
    assert found == [0.0, 700.0, 0.0]


def test_an_evaluation_in_one_line_makes_progress_and_a_waiting_rank_does_not() -> None:
    """Most of it happens in torch; a tight loop is seen at few places only."""
    model, ended = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(9))), threading.Event()

    def evaluate() -> None:
        while not ended.is_set():
            model(torch.ones(9))

    works, waits = threading.Thread(target=evaluate), threading.Thread(target=ended.wait)
    works.start()
    waits.start()
    assert works.ident is not None
    assert waits.ident is not None
    try:
        wait_until(
            lambda: at_rest(waits) and len(positions_of(waits.ident or 0)) == 1, "the one that waits to stand still"
        )
        seen: set[object] = set()
        wait_until(lambda: seen.update(positions_of(works.ident or 0)) or len(seen) > 1, "the other one to move")
    finally:
        ended.set()
        works.join()
        waits.join()


def seen_in(work: Callable[[], object]) -> tuple[str, bool]:
    """Where ``work``, which waits forever, is reported to be."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert thread.ident is not None
    wait_until(lambda: at_rest(thread), "it to wait")
    return place_of(sys._current_frames()[thread.ident], sleeping=True)


def at_rest(thread: threading.Thread) -> bool:
    """Whether a thread waits for an event; one that waits for Python's lock sleeps, too."""
    assert thread.ident is not None
    assert thread.native_id is not None
    waiting = sys._current_frames()[thread.ident].f_code is threading.Condition.wait.__code__
    return waiting and sleeping(thread.native_id)


def test_the_users_line_is_named_not_what_it_calls() -> None:
    """With what it has called, where that is not in the same place."""
    place, waits = seen_in(lambda: threading.Event().wait())
    assert place.startswith("test_heartbeat.py:")
    assert place.endswith("(<lambda>), wait")
    assert not waits


LEFT = """
import torch
from torch.utils.data import TensorDataset
import clusterddp
from clusterddp.training.heartbeat import Heartbeat, WatchedSteps

calls = []
Heartbeat.begin = lambda self: calls.append("begin")
Heartbeat.rest = lambda self: calls.append("rest")
ctx = clusterddp.init(device="cpu")
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(TensorDataset(torch.ones(8, 1)), batch_size=1))

def say(where):
    print(where, "watched" if calls[-1] == "begin" else "left alone", flush=True)

for number, _ in enumerate(run.steps(8)):
    say("inside")
    break
say("after")
steps = run.steps(8)
for _ in steps:
    break
say("held")
steps.close()
say("closed")
"""


def test_code_after_a_loop_left_by_break_is_not_watched(tmp_path: Path) -> None:
    """Unless the script holds the iterator: then the end of the loop cannot be detected."""
    script = tmp_path / "left.py"
    script.write_text(LEFT)
    said = ddp.run(script, ranks=1, folder=tmp_path / "out").output(0).splitlines()
    said = [
        line for line in said if not line.startswith(("[Gloo]", "clusterddp: this run has no run directory"))
    ]  # torch 2.9's prints its connections
    assert said == ["inside watched", "after left alone", "held watched", "closed left alone"]


WAITING = """
import os
import threading
import time
import torch.distributed as dist
import clusterddp
from clusterddp.training import heartbeat

ctx = clusterddp.init(device="cpu")
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

def look():
    while heartbeat.main_thread_place() != ("all_reduce", True):
        time.sleep(0.01)
    print("seen in all_reduce", flush=True)
    store.set("seen", "")

if ctx.rank == 0:
    threading.Thread(target=look).start()
else:
    store.wait(["seen"])
ctx.all_reduce_sum(1.0)
"""


def test_a_rank_that_waits_for_others_names_the_collective(tmp_path: Path) -> None:
    """It is not the one that they wait for."""
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    assert "seen in all_reduce" in ddp.run(script, ranks=2, folder=tmp_path / "out").output(0)


DISMISSED = """
import sys
import threading
import torch
import torch.distributed as dist
import clusterddp
from clusterddp.failures.hangs import Hang
from clusterddp.jobdef.job import Job
from clusterddp.supervisor.control_server import ControlServer, Handlers
from clusterddp.supervisor.decide import step
from clusterddp.messages.reports import Joined
from clusterddp.supervisor.attempt_state import Broadcast, RankEvent, State
from clusterddp.worker import rank, rank_process
from clusterddp.worker.control_channel import ControlChannel

server = ControlServer("token", Handlers(lambda *_: None), host="127.0.0.1")
process = rank_process.begin()
process.channel = ControlChannel.join(f"127.0.0.1:{server.port}", "token", 0, 1, timeout=10)
process.channel.listen(lambda: None, lambda order: rank.obey(process, order))
ctx = clusterddp.init(device="cpu", run_dir=sys.argv[1])
dist.all_reduce(torch.ones(1))
state, _ = step(State(Job(name="x", module="x"), ("n1",), abandon_s=5.0), RankEvent(0, Joined("n1")), 0.0)
for action in step(state, Hang((1,), "n1", 7, 606.0, "rank 1 hangs", 605.0), 0.0)[1]:
    if isinstance(action, Broadcast):
        server.broadcast(action.order)
threading.Event().wait()
"""


def test_a_rank_that_is_told_to_exit_after_a_hang_writes_its_flight_record_first(tmp_path: Path) -> None:
    """Also if its own timeout is not over: another rank's was shorter."""
    script = tmp_path / "dismissed.py"
    script.write_text(DISMISSED)
    run = RunDirectory(tmp_path / "run")
    said = ddp.start(script, run, ranks=1, folder=tmp_path / "out").expect(1).output(0)
    assert "exiting, because rank 1 hangs" in said
    record = read_json(run.attempt_logs(0) / "rank-0.collectives.json")
    if record is None:  # not every torch keeps it for gloo
        assert "has no Flight Recorder trace of the last collectives" in said
    else:
        assert record["entries"][-1]["profiling_name"] == "gloo:all_reduce"


@pytest.mark.parametrize("nccl", [[], [{"profiling_name": "nccl:all_reduce"}] * (RECORDED + 1)])
def test_the_flight_records_of_all_backends_are_read(nccl: list[object]) -> None:
    """A group of cpu:gloo,cuda:nccl has one for each; the last entries of both tell."""
    gloo = [{"profiling_name": "gloo:all_reduce"}]
    bound = SimpleNamespace(
        _dump_nccl_trace_json=lambda: json.dumps({"version": "2.10", **({"entries": nccl} if nccl else {})}),
        _dump_fr_trace_json=lambda: json.dumps({"version": "2.10", "entries": gloo}),
    )
    assert flight_record(bound) == {"version": "2.10", "entries": [*nccl[1:], *gloo]}


def test_the_flight_record_of_nccl_is_found_in_torch_2_15() -> None:
    """Its ProcessGroupNCCL2 keeps one under a name of its own, and the usual function returns an empty one."""

    def dump(backend: str = "gloo") -> str:
        entries = [{"profiling_name": f"{backend}:all_reduce"}]
        return json.dumps({"version": "2.10", **({} if backend == "gloo" else {"entries": entries})})

    empty = '{"version": "2.10"}'
    bound = SimpleNamespace(
        _dump_nccl_trace_json=lambda: empty, _dump_fr_trace_json=dump, _dump_fr_trace_file=lambda rank: None
    )
    assert flight_record(bound) == {"version": "2.10", "entries": [{"profiling_name": "nccl2:all_reduce"}]}


def test_the_flight_record_of_torch_2_4_is_read_although_it_is_pickled() -> None:
    """Without the stacks, which would be most of it."""
    entries = [{"profiling_name": "nccl:all_reduce"}] * (RECORDED + 1)

    def dump(includeCollectives: bool = True, includeStackTraces: bool = True) -> bytes:
        assert not includeStackTraces
        return pickle.dumps({"version": "2.1", "entries": entries})

    assert flight_record(SimpleNamespace(_dump_nccl_trace=dump)) == {"version": "2.1", "entries": entries[1:]}


@pytest.mark.parametrize("dump", [{}, {"_dump_fr_trace_json": lambda: '{"version": "2.10"}'}])
def test_a_torch_without_a_flight_record_is_reported(
    dump: dict[str, Callable[[], str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A CPU build of torch 2.4 has no such function; torch 2.9 records nothing for gloo."""
    monkeypatch.setattr(torch._C, "_distributed_c10d", SimpleNamespace(**dump))
    target = tmp_path / "rank-0.collectives.json"
    Heartbeat(None, WatchedSteps(lambda: 0, lambda: 0), lambda *_, **__: None, target).write_flight_record()
    assert "has no Flight Recorder trace of the last collectives" in capsys.readouterr().err
    assert not target.exists()
