"""Which rank a hang on GPUs is attributed to: by where the devices are and by the ranks' flight records.

The hosts are ahead of their devices and wait for them in any line, so that where they are tells little.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.failures.hangs import Hang, RankStatus, Watch, compare, find_hang, outline
from clusterddp.protocol import IDLE, OWN, WAIT
from tests.reports import beat_of

NOW = 1000.0
ITEM = {"place": "train.py:50 (<module>), item"}
IN_BACKWARD: dict[str, Any] = {"place": "the all_reduce of backward", "waits": True}


def gpu(rank: int, step: int, does: str, count: int = 90, age: float = 610.0, **at: Any) -> RankStatus:
    """Rank r on node n<r>, whose host has been at one place since its last boundary; its device is in ``step``."""
    values = {"allowed_s": 600.0, **ITEM, "device": (step, does), **at}
    return RankStatus(rank, f"n{rank}", count, count - 1, moved=NOW - age, heard=NOW - 1, **values)


def hang(*statuses: RankStatus) -> Hang:
    found = find_hang(statuses, NOW, beat_s=2.0)
    assert found is not None
    return found


def test_the_rank_whose_device_does_not_end_its_work_is_named_when_all_hosts_wait_for_their_devices() -> None:
    """All are in the same line, which reads the loss; its node is suspect."""
    found = hang(gpu(0, 90, WAIT), gpu(1, 90, WAIT), gpu(2, 90, OWN))
    assert (found.late, found.host, found.of_device) == ((2,), "n2", True)
    assert found.what == (
        "rank 2 (n2) has been stuck at step 89 for 610 s in train.py:50 (<module>), item. Its GPU is still working on "
        "step 90. The other ranks' GPUs wait in step 90"
    )


def test_hosts_that_are_ahead_by_different_numbers_of_steps_did_not_call_different_collectives() -> None:
    """A host sleeps in its backward when the device's queue is full, which on a CPU would be a wait for others."""
    behind = {"count": 88, **IN_BACKWARD, "line": "train.py:48"}
    found = hang(gpu(0, 86, WAIT, **behind), gpu(1, 86, OWN, count=91), gpu(2, 86, WAIT, count=89, **IN_BACKWARD))
    assert (found.late, found.of_device) == ((1,), True)
    assert "Its GPU is still working on step 86. The other ranks' GPUs wait in step 86" in found.what
    assert "different" not in found.what


def test_a_device_that_is_a_step_behind_is_the_late_one_whatever_it_does_there() -> None:
    """It hangs after the reduction, in the optimizer, and the others wait in the next step's; or in the reduction
    itself, which the others have completed."""
    ahead = gpu(0, 91, WAIT), gpu(1, 91, OWN)
    assert (hang(*ahead, gpu(2, 90, OWN)).late, hang(*ahead, gpu(2, 90, OWN)).of_device) == ((2,), True)
    found = hang(*ahead, gpu(2, 90, WAIT))
    assert (found.late, found.of_device) == ((2,), False)  # its link, or a peer's
    assert "Its GPU is still in a collective of step 90. The other ranks' GPUs wait in step 91" in found.what


def test_a_host_that_hangs_leaves_its_device_idle_and_is_named_with_its_line() -> None:
    reads: dict[str, Any] = {"place": "data.py:88 (read)"}
    found = hang(gpu(0, 90, WAIT), gpu(1, 90, IDLE, **reads), gpu(2, 90, WAIT))
    assert (found.late, found.of_device) == ((1,), False)
    assert found.what.startswith(
        "rank 1 (n1) has been stuck at step 89 for 610 s in data.py:88 (read). Its GPU is idle in step 90. The oth"
    )
    outside = gpu(0, 90, IDLE, **IN_BACKWARD), gpu(1, 90, IDLE, **IN_BACKWARD), gpu(2, 90, IDLE, **reads)
    assert hang(*outside).what == (
        "rank 2 (n2) has been stuck at step 89 for 610 s in data.py:88 (read). The others wait in the all_reduce of "
        "backward"
    )  # no device has anything to do, so that the hosts tell


def test_devices_that_cannot_be_told_apart_make_no_node_suspect() -> None:
    """All wait for each other, as after a lost link; or all are at work, as in a kernel of the script without end."""
    found = hang(*(gpu(rank, 90, WAIT) for rank in range(3)))
    assert (found.late, found.of_device) == ((0, 1, 2), False)
    assert found.what.endswith("item. All GPUs are still in a collective of step 90")
    found = hang(*(gpu(rank, 90, OWN) for rank in range(3)))
    assert (found.late, found.of_device) == ((0, 1, 2), False)
    assert found.what.endswith("item. Their GPUs are still working on step 90")
    assert hang(gpu(0, 90, OWN)).of_device is False  # a rank alone
    two = hang(gpu(0, 90, WAIT), gpu(1, 90, OWN), gpu(2, 90, OWN))
    assert (two.late, two.of_device) == ((1, 2), True)


REDUCE, BARRIER = "nccl:all_reduce of 25557032", "nccl:all_reduce_barrier"


def rows(completed: int, called: int, waits_in: str = REDUCE) -> dict[str, Any]:
    return {"collectives": [["0", completed, called, waits_in if called > completed else ""]]}


def test_flight_records_tell_which_rank_has_not_called_or_not_completed_a_collective() -> None:
    """Where the devices and the hosts tell nothing."""
    same = [gpu(rank, 90, OWN, **rows(300, 303)) for rank in (0, 1)]
    found = hang(*same, gpu(2, 90, OWN, **rows(300, 300)))
    assert (found.late, found.of_device) == ((2,), False)
    assert "rank 2 (n2) has been stuck at step 89" in found.what
    assert f"item. It did not call {REDUCE}, collective 301 of the process group" in found.what
    waiting = [gpu(rank, 90, WAIT, **rows(302, 303)) for rank in (0, 1)]
    found = hang(*waiting, gpu(2, 90, WAIT, **rows(300, 303)))
    assert found.late == (2,)
    assert f"It did not complete {REDUCE}, collective 301 of the process group, unlike the others" in found.what
    on_cpus = [replace(status, device=None, waits=True, place="all_reduce") for status in waiting]
    late = gpu(2, 90, OWN, device=None, waits=True, place="all_reduce", **rows(300, 303))
    assert find_hang([*on_cpus, late], NOW, 2.0).late == (2,)  # type: ignore[union-attr]


def test_flight_records_tell_that_ranks_called_different_collectives() -> None:
    """A device in a collective of the script looks as if it were at its own work."""
    others = [gpu(rank, 90, WAIT, **rows(300, 301)) for rank in (1, 2)]
    found = hang(gpu(0, 90, OWN, **rows(300, 301, BARRIER)), *others)
    assert (found.late, found.of_device) == ((0,), False)
    assert found.what == (
        f"the ranks called different collectives: rank 0 (n0) called {BARRIER} as collective 301 of the process group, "
        f"ranks 1 (n1), 2 (n2) called {REDUCE} as collective 301 of the process group. They have waited for 610 s. "
        "Every rank must call the same collectives in the same order"
    )
    assert hang(gpu(0, 90, OWN, **rows(300, 301, BARRIER)), others[0]).late == (0, 1)  # it is unknown which


def test_a_device_that_makes_steps_for_a_waiting_host_does_not_hang() -> None:
    """With CUDA graphs a host may be a thousand steps ahead, and wait for longer than its timeout."""
    slow = [gpu(rank, 90, OWN, device_still_s=3.0, step_s=1.0) for rank in range(2)]
    assert find_hang(slow, NOW, 2.0) is None
    assert hang(*(replace(status, device_still_s=5.0) for status in slow)).late == (0, 1)


def test_devices_are_compared_once_all_ranks_have_timed_out() -> None:
    """Before, only those of the first are known; a rank that will not time out is not waited for."""
    first = gpu(0, 90, WAIT)
    waits: dict[str, Any] = {"device": None, "place": "", "age": 590.0}
    assert find_hang([first, gpu(1, 90, OWN, **waits)], NOW, 2.0) is None
    assert find_hang([first, gpu(1, 90, OWN, **{**waits, "age": 610.0})], NOW, 2.0) is not None  # CUDA did not answer


def test_a_heartbeat_tells_the_device_and_the_collectives() -> None:
    watch = Watch(beat_s=2.0)
    beat = {"count": 90, "step": 89, "age_s": 610.0, "allowed_s": 600.0, **ITEM}
    for rank, does in enumerate((WAIT, OWN)):
        told = {"device": [90, does, 4.0], "collectives": [["0", 300, 301, REDUCE]]}
        watch.update(rank, f"n{rank}", beat_of({**beat, **told}))
    found = find_hang(watch._statuses.values(), 5.0, 2.0)
    assert found is not None and found.late == (1,)


def test_the_outline_of_a_flight_record_has_the_first_collective_that_is_not_complete(tmp_path: Path) -> None:
    """NCCL's in the format of torch 2.4 to 2.15, gloo's in that of 2.13, whose state is never "completed"."""

    def entry(name: str, number: int, state: str, retired: bool, **values: Any) -> dict[str, Any]:
        sizes = {"input_sizes": [[64, 3], []], "process_group": ["0", "default_pg"], "is_p2p": False}
        return {
            "profiling_name": name,
            "collective_seq_id": number,
            "state": state,
            "retired": retired,
            **sizes,
            **values,
        }

    nccl = [
        entry("nccl:all_reduce", 7, "completed", True),
        entry("nccl:send 0->1", 7, "started", False, is_p2p=True),
        entry("nccl:all_reduce", 8, "scheduled", True),  # it timed out
        entry("nccl:_all_gather_base", 9, "scheduled", False),
        entry("nccl:all_reduce_barrier", 1, "completed", True, process_group=["1", "undefined"]),
    ]
    found = outline(json.loads(json.dumps({"version": "2.10", "entries": nccl})))
    assert found == [("0 nccl", 7, 9, "nccl:all_reduce of 64x3, 1"), ("1 nccl", 1, 1, "")]
    assert beat_of({"collectives": found}).collectives == tuple(found)
    gloo = [entry("gloo:all_reduce", 1, "scheduled", True), entry("gloo:barrier", 2, "scheduled", False)]
    assert outline({"entries": gloo}) == [("0 gloo", 1, 2, "gloo:barrier")]
    assert outline({"entries": [*nccl[:1], *gloo]}) == [("0 nccl", 7, 7, ""), ("0 gloo", 1, 2, "gloo:barrier")]
    nccl2 = [entry("nccl2:all_reduce", 3, "completed", True), entry("nccl2:broadcast", 4, "scheduled", False)]
    assert outline({"entries": nccl2}) == [("0 nccl2", 3, 4, "nccl2:broadcast of 64x3, 1")]
    with pytest.raises(KeyError):
        outline({"entries": [{"name": "of another format"}]})


def test_the_rank_that_all_others_wait_for_is_named_when_a_step_outlasts_the_notice() -> None:
    watch = Watch(2.0)
    beat = {"count": 90, "step": 89, "allowed_s": 600.0, "age_s": 20.0, "still_s": 20.0}
    waiting = {**beat, "place": "the all_reduce of backward", "waits": True}
    for rank in range(3):
        watch.update(rank, f"n{rank}", beat_of({**waiting, "line": "train.py:48"}))
    assert watch.behind() == ""
    watch.update(2, "n2", beat_of({**beat, "place": "train.py:20 (load)", "waits": False, "line": ""}))
    assert watch.behind() == "waiting for rank 2 (n2) at step 89 in train.py:20 (load)"
    for rank in range(3):
        watch.update(rank, f"n{rank}", beat_of({**beat, "place": "train.py:20 (load)", "waits": False, "line": ""}))
    assert watch.behind() == ""


def test_records_of_ranks_without_a_difference_name_nobody() -> None:
    """Nor do those of different groups, or of ranks that wait for nothing."""
    assert compare({0: [("0", 3, 4, REDUCE)], 1: [("0", 3, 5, REDUCE)]}) is None
    assert compare({0: [("0", 3, 3, "")], 1: [("0", 9, 9, "")]}) is None
    assert compare({0: [("1", 3, 4, REDUCE)], 1: [("2", 3, 4, BARRIER)]}) is None
    assert compare({0: [], 1: []}) is None
