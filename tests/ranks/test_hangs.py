"""A hung run is detected, explained and restarted; a slow one is not touched."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from clusterddp.cli.report import collected
from clusterddp.failures.hangs import RankStatus, Watch, find_hang, find_slow
from clusterddp.history.failures import Slow
from clusterddp.report.page import page
from clusterddp.report.stragglers import scores
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import PHASES, read_timings
from tests.trainings import events_of
from tests.unit.test_report import SCHEMA
from tests.waiting import differing, final_state, story

REPOSITORY = Path(__file__).resolve().parents[2]


def start(run: RunDirectory, how: str, *options: str) -> subprocess.Popen[str]:
    """Two ranks of tests/scripts/hanging.py."""
    command = [sys.executable, "-m", "clusterddp.submit", "tests/scripts/hanging.py", "--local", "--run-dir", str(run)]
    shape = ["--device", "cpu", "--gpus", "2", "--set", "watchdog.step_s=4", "--set", "checkpoint.every=10 steps"]
    return subprocess.Popen([*command, *shape, *options, "--", how], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str], run: RunDirectory, code: int = 0) -> str:
    _, said = process.communicate(timeout=240)
    assert process.returncode == code, said + story(run)
    return said


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, str]:
    """A run with a slow rank, which once takes longer than the watchdog allows, and its messages."""
    run = RunDirectory(tmp_path_factory.mktemp("slow") / "run")
    return run, finished(start(run, "slow"), run)


@pytest.mark.product  # unit/test_hangs.py has both
def test_neither_an_announced_pause_nor_work_is_a_hang(slow: tuple[RunDirectory, str]) -> None:
    """The other rank waits for either in a collective, for longer than the watchdog allows."""
    run, _ = slow
    assert run.attempts() == [0], story(run)
    log = (run.attempt_logs(0) / "rank-1.err").read_text()
    for stacks in log.split("Timeout (")[1:]:
        assert "in evaluate" in stacks
        assert "This rank may be hanging. If it is only slow, it continues" in stacks


def test_a_slow_rank_is_named_once_and_left_alone(slow: tuple[RunDirectory, str]) -> None:
    """Every step of it takes longer than the other's, which waits for it."""
    run, said = slow
    # On a busy machine rank 0 may be slow, too, and how much slower rank 1 is may double.
    ratios = [event["ratio"] for event in events_of(run, "slow") if event["rank"] == 1]
    assert ratios and ratios[0] > 1.5, story(run)
    assert all(later > 2 * former for former, later in itertools.pairwise(ratios))
    words = r"attempt 0: rank 1 \(\S+\) is slow\. It computes for \d\.\d+ s per step, \d+\.\d times the others' median"
    assert re.search(words, said), said


def test_the_supervisor_writes_what_the_steps_of_each_rank_spent_their_time_on(slow: tuple[RunDirectory, str]) -> None:
    """All steps but the first, which compiles and connects, have been counted when the ranks exit."""
    hosts, *intervals = map(json.loads, slow[0].timing_file.read_text().splitlines())
    assert len(hosts["hosts"]) == 2
    assert len(intervals) > 1
    sums = {name: [sum(line[name][rank] for line in intervals) for rank in (0, 1)] for name in ("steps", *PHASES)}
    assert sums["steps"] == [159, 159]
    assert sums["own_s"][1] > 159 * 0.08
    assert sums["wait_s"][0] > sums["wait_s"][1] + 5
    found = scores(read_timings(slow[0]).intervals)
    assert found is not None
    assert re.fullmatch(r"rank 1 \(\S+\): [\d.]+ times as long per step as the fastest, in compute", found.sentence())


def test_the_report_on_it_names_the_slow_rank_and_follows_its_schema(slow: tuple[RunDirectory, str]) -> None:
    """Nothing of a whole run is missing in it."""
    found = collected([slow[0]], time.time())
    assert [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(found)] == []
    (data,) = found["runs"]
    assert data["notes"] == []
    assert any(one["event"] == "slow" and one["words"].startswith("rank 1 ") for one in data["history"])
    assert data["time"]["seconds"]["straggler"] > 0
    assert page(found).count("waiting for a straggler") >= 2, "in the timeline, and in where the time went"


def test_a_hung_rank_is_named_with_its_stack_and_all_ranks_restart_in_place(
    run: RunDirectory, slow: tuple[RunDirectory, str]
) -> None:
    """Python code that waits forever; in the next attempt, C code that waits forever and holds the GIL."""
    said = finished(start(run, "lock,extension"), run)
    assert [hung["late"] for hung in events_of(run, "hung")] == [[1], [1]]
    silent = r" without a heartbeat \(stopped, or holding the GIL\)"
    for attempt, where in enumerate((r" in hanging.py:\d+ \(misbehave\)", silent)):
        stuck = rf"rank 1 \(\S+\) has been stuck at step \d+ for \d+ s{where}"
        sentence = rf"{stuck}\. The others wait in the all_reduce of backward"
        assert re.search(f"attempt {attempt}: {sentence}\\. Terminating all ranks", said), said
        check_stacks(run.attempt_logs(attempt))
    assert [event["event"] for event in run.events() if event["event"] in ("restarted", "rank_failed")] == [
        "restarted",
        "restarted",
    ]
    assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in slow[0].metrics()]
    assert differing(final_state(run), final_state(slow[0])) == []


CONNECTING = """
import os, time
import torch.distributed
import clusterddp

first, rank = os.environ["CLUSTERDDP_ATTEMPT"] == "0", os.environ["RANK"]

def stuck(*args, **options):
    time.sleep(600)

if first and rank == "1":
    torch.distributed.init_process_group = stuck  # as NCCL's behind a firewall, to which no timeout applies
if not first and rank == "1":
    time.sleep(6)
ctx = clusterddp.init()
run = ctx.run(model=torch.nn.Linear(2, 1))
for _ in run.steps(1):
    pass
"""


@pytest.mark.product  # unit/test_decide.py has both
def test_ranks_that_never_connect_restart_and_one_that_calls_init_late_is_waited_for(run: RunDirectory) -> None:
    """The first attempt ends with the stack of the rank that did not connect. In the second, a rank is late for longer
    than ranks may take to connect."""
    script = run.path.parent / "connecting.py"
    script.write_text(CONNECTING)
    command = [sys.executable, "-m", "clusterddp.submit", str(script), "--local", "--run-dir", str(run)]
    options = ["--device", "cpu", "--gpus", "2", "--set", "timeouts.connect_s=3"]
    process = subprocess.Popen([*command, *options], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    said = finished(process, run)
    assert [(hung["attempt"], hung["late"][-1]) for hung in events_of(run, "hung")] == [(0, 1)], story(run)
    assert run.attempts() == [0, 1], story(run)
    assert "in stuck" in (run.attempt_logs(0) / "rank-1.err").read_text()
    assert "timeouts.connect_s" in said


def check_stacks(logs: Path) -> None:
    """Of both ranks, and torch's record of the last collectives."""
    assert "_engine_run_backward" in (logs / "rank-0.err").read_text()
    assert "in misbehave" in (logs / "rank-1.err").read_text()
    last = read_json(logs / "rank-0.collectives.json")
    if last is None:  # not every torch keeps it for gloo
        assert "has no Flight Recorder trace of the last collectives" in (logs / "rank-0.err").read_text()
    else:
        assert last["entries"][-1]["profiling_name"].startswith("gloo:all")
        assert len(last["entries"]) <= 100


@pytest.mark.product  # unit/test_hangs.py has the verdict, the test above a rank that is named
def test_a_rank_that_skips_a_collective_is_named_rather_than_those_that_wait_in_it(run: RunDirectory) -> None:
    """It is a step ahead, in the next collective, and its stack is shown."""
    said = finished(start(run, "skip", "--gpus", "3", "--set", "watchdog.on_hang=end"), run, code=1)
    (hung,) = events_of(run, "hung")
    assert (hung["late"], hung["step"]) == ([2], 101)
    ahead = r"rank 2 \(\S+\) at step 101 in the all_reduce of backward at hanging.py:\d+"
    behind = r"ranks 0 \(\S+\), 1 \(\S+\) at step 100 in barrier at hanging.py:\d+"
    assert re.search(
        rf"the ranks called different collectives: {ahead}, {behind}\. They have waited for \d+ s", said
    ), said
    assert re.search(r"log: \S+rank-2.err", said), said


# ---- the decisions alone


IN_BACKWARD: dict[str, Any] = {"place": "the all_reduce of backward", "waits": True}
NOW = 1000.0


def sign(
    rank: int, age: float, silent: float = 1.0, count: int = 90, allowed: float | None = 600, **at: Any
) -> RankStatus:
    """Rank r on node n<r>: its last boundary was ``age`` seconds ago, its last heartbeat ``silent`` seconds ago."""
    return RankStatus(rank, f"n{rank}", count, count - 1, allowed, NOW - age, NOW - silent, **at)


def what(*signs: RankStatus) -> str | None:
    hang = find_hang(signs, NOW, beat_s=2.0)
    return hang.what if hang else None


def test_the_late_ranks_follow_from_what_all_ranks_report() -> None:
    """The first criterion that distinguishes them: silence, fewer steps, not waiting for others, the smaller group."""
    waiting = [sign(rank, 610, **IN_BACKWARD) for rank in range(3)]
    silent = "without a heartbeat (stopped, or holding the GIL)"
    wait = "The others wait in the all_reduce of backward"
    assert (
        what(*waiting, sign(5, 611, silent=611)) == f"rank 5 (n5) has been stuck at step 89 for 611 s {silent}. {wait}"
    )
    behind = sign(5, 611, count=89, place="x.py:1 (f)")
    assert what(*waiting, behind) == f"rank 5 (n5) has been stuck at step 88 for 611 s in x.py:1 (f). {wait}"
    worked = sign(5, 611, still_s=400, place="x.py:1 (f)")
    assert what(*waiting, worked) == f"rank 5 (n5) has been stuck at step 89 for 611 s in x.py:1 (f). {wait}"
    after_its_first_step = sign(5, 611, silent=611, allowed=1800)
    assert what(*waiting, after_its_first_step) == f"rank 5 (n5) has been stuck at step 89 for 611 s {silent}. {wait}"
    assert find_hang([*waiting, sign(5, 611, silent=611, allowed=math.inf)], NOW, beat_s=2.0) is None
    unheard = sign(5, 611, silent=600, still_s=2.0)
    assert what(*waiting, unheard) == f"rank 5 (n5) has been stuck at step 89 for 611 s {silent}. {wait}"
    elsewhere = sign(5, 611, place="x.py:1 (f)")
    assert what(*waiting, elsewhere) == f"rank 5 (n5) has been stuck at step 89 for 611 s in x.py:1 (f). {wait}"
    at_gpu = [sign(rank, 610, place="x.py:9 (g)") for rank in range(3)]
    assert what(*at_gpu, elsewhere) == "rank 5 (n5) has been stuck at step 89 for 611 s in x.py:1 (f)"
    all_stuck = "ranks 0 (n0), 1 (n1), 2 (n2) have been stuck at step 89 for 610 s in the all_reduce of backward"
    assert what(*waiting) == all_stuck
    barrier = {"place": "barrier", "waits": True}
    past, before = (
        [sign(rank, 610, count=count, **at) for rank in range(3)] for count, at in ((90, IN_BACKWARD), (89, barrier))
    )
    order = "Every rank must call the same collectives in the same order"
    different, since = "the ranks called different collectives", f"They have waited for 610 s. {order}"
    two = "ranks 1 (n1), 2 (n2) at step"
    skipped = f"{different}: rank 0 (n0) at step 89 in the all_reduce of backward, {two} 88 in barrier. {since}"
    assert what(past[0], *before[1:]) == skipped
    surplus = f"{different}: rank 0 (n0) at step 88 in barrier, {two} 89 in the all_reduce of backward. {since}"
    assert what(before[0], *past[1:]) == surplus
    hang = find_hang([past[0], before[1]], NOW, beat_s=2.0)
    assert hang and hang.late == (0, 1)  # one of the two; it is unknown which
    alone = sign(0, 610, place="barrier", waits=True, line="x.py:40")
    reduce: dict[str, Any] = {"place": "all_reduce", "waits": True}
    others = [sign(rank, 610, line="x.py:52", **reduce) for rank in (1, 2)]
    assert what(alone, *others) == (
        f"{different}: rank 0 (n0) at step 89 in barrier at x.py:40, ranks 1 (n1), 2 (n2) at step 89 in all_reduce at "
        f"x.py:52. {since}"
    )
    assert find_hang([alone, *others], NOW, beat_s=2.0).late == (0,)  # type: ignore[union-attr]
    assert find_hang([alone, *others[1:]], NOW, beat_s=2.0).late == (0, 2)  # type: ignore[union-attr]
    same_place = what(sign(0, 610, line="x.py:40", **reduce), *others) or ""
    assert same_place.startswith("the ranks are waiting in different calls: ") and same_place.endswith(since)
    assert what(*others) == "ranks 1 (n1), 2 (n2) have been stuck at step 89 for 610 s in all_reduce"
    many = what(*[sign(rank, 620, silent=620) for rank in range(100)])
    assert many == f"ranks 0 (n0), 1 (n1), 2 (n2), 3 (n3) and 96 more have been stuck at step 89 for 620 s {silent}"


def test_a_hang_tells_since_when_no_rank_has_made_a_step() -> None:
    """A rank that was stopped had made steps after its last heartbeat, in which the others took part."""
    hang = find_hang([sign(0, 608, **IN_BACKWARD), sign(1, 611, silent=611)], NOW, beat_s=2.0)
    assert hang and (hang.seconds, hang.stalled_s) == (611, 608)


@pytest.mark.parametrize(
    "signs",
    [
        [],
        [sign(0, 599), sign(1, 600)],
        [sign(0, 604, **IN_BACKWARD), sign(1, 606)],  # it timed out; its stacks are being written
        [sign(0, 9000, allowed=None), sign(1, 1)],  # it has not started to train
        [sign(0, 9000, allowed=math.inf, place="x.py:1 (f)"), sign(1, 9000, **IN_BACKWARD)],  # ctx.unwatched()
        [sign(0, 900, still_s=10.0, place="x.py:1 (f)"), sign(1, 900, still_s=898.0, **IN_BACKWARD)],  # it evaluates
        [sign(0, 900, still_s=10.0, place="x.py:1 (f)"), sign(1, 900, still_s=2.0, place="x.py:1 (f)")],  # both do
        [sign(0, 1, count=89, place="x.py:1 (f)"), sign(1, 900, **IN_BACKWARD)],  # back from ctx.unwatched()
        [sign(0, 1700, allowed=1800, place="compiler"), sign(1, 1700, allowed=1800)],
        [sign(0, 1200, allowed=4 * 400), sign(1, 1200, allowed=4 * 400)],
    ],
)
def test_a_rank_within_its_time_does_not_hang(signs: list[RankStatus]) -> None:
    """Nor do those that wait for a rank whose watchdog is suspended."""
    assert find_hang(signs, NOW, beat_s=2.0) is None


def test_a_late_rank_that_continues_does_not_make_ranks_late_that_have_not_reported_since() -> None:
    """Ranks report in turn: rank 1 reports the end of its long evaluation; rank 0's last report is from before."""
    search = Watch(beat_s=2.0)
    waited = sign(0, 900, count=90, **IN_BACKWARD)
    assert search.confirmed_hang([waited, sign(1, 900, count=90, still_s=2.0, place="x.py:1 (f)")], NOW) is None
    assert search.confirmed_hang([waited, sign(1, 0, count=93)], NOW) is None
    assert search.confirmed_hang([sign(0, 0, count=93), sign(1, 0, count=93)], NOW) is None


def test_a_late_rank_hangs_once_it_reports_the_same_again_or_is_silent() -> None:
    search, others = Watch(beat_s=2.0), [sign(0, 900, **IN_BACKWARD)]
    behind = sign(1, 901, count=89, place="x.py:1 (f)")
    assert search.confirmed_hang([*others, behind], NOW) is None
    assert search.confirmed_hang([*others, behind], NOW + 1) is None
    hang = search.confirmed_hang([*others, replace(behind, heard=NOW + 1)], NOW + 2)
    assert hang is not None and hang.late == (1,)
    hang = Watch(beat_s=2.0).confirmed_hang([*others, sign(1, 901, silent=900)], NOW)
    assert hang is not None and hang.late == (1,)


def test_a_rank_is_slow_by_its_compute_time_against_the_others_median() -> None:
    """A large ratio and a large part of the step: not two milliseconds instead of one in a step of a second."""

    def slow(*own: float | None, step: float = 1.0) -> list[Slow]:
        return find_slow([sign(rank, 1, own_s=seconds, step_s=step) for rank, seconds in enumerate(own)])

    assert slow(0.3, 0.3, 0.9, 0.4) == [Slow(rank=2, host="n2", own_s=0.9, ratio=3.0)]
    assert slow(0.3, 0.3, 0.4, 0.4) == []
    assert slow(0.001, 0.002) == []
    assert slow(0.9) == slow(None, 0.9) == []
    assert slow(0.0, 0.9) == [Slow(rank=1, host="n1", own_s=0.9, ratio=900.0)]
