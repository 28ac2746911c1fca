"""Cases in which something goes wrong: what the history says of it, and whether the run goes through."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from benchmarks.gpu_check.case import Finding, Lab, NotRun
from clusterddp.failures.exit_status import Blame, find
from clusterddp.process import descendants
from clusterddp.report.efficiency import gpu_rows
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import read_timings
from clusterddp.worker import gpus
from tests.waiting import preempt_local, wait_for_step

#: Saves often enough that a fault costs little, and notices a hang soon.
QUICK = ("--set", "checkpoint.every=10 steps", "--set", "watchdog.step_s=4")
STEPS = ("--steps", 60)


def events(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [dict(event) for event in run.events() if event["event"] == name]


def hang(lab: Lab, where: str) -> Finding:
    """The last rank is named, its attempt is ended, and the run completes in the next."""
    run = lab.train(*STEPS, "--wrong", f"hang-{where}", options=QUICK)
    return _named(run, lab.ranks - 1)


def _named(run: RunDirectory, rank: int) -> Finding:
    hung = events(run, "hung")
    assert len(hung) == 1, f"{len(hung)} hangs were noticed instead of 1"
    assert hung[0]["late"] == [rank], f"rank {hung[0]['late']} was named instead of {rank}"
    records = sorted(run.attempt_logs(0).glob("rank-*.collectives.json"))
    entries = [entry for path in records for entry in (read_json(path) or {}).get("entries", [])]
    kinds = {str(entry.get("profiling_name")).split(":")[0] for entry in entries}
    return f"rank {rank} was named, the run completed", {"flight_records_of": sorted(kinds), "hung": hung[0]}


def collective(lab: Lab) -> Finding:
    """torch's own watchdog ends a collective behind an endless kernel; ours is off, so that it has the word."""
    lab.need_gpu("the stand-in has no NCCL, whose timeout this is")
    options = [*QUICK[:2], "--set", "watchdog=off", "--set", "timeouts.step_s=8"]
    run = lab.train(*STEPS, "--wrong", "collective", options=options)
    return _restarted(run, "collective operation timeout", Blame.PEER)


def _restarted(run: RunDirectory, word: str, blame: Blame | None) -> Finding:
    """The failure's error has the word, is understood as ``blame``, and the next attempt completed."""
    failures = events(run, "rank_failed")
    assert len(failures) == 1, f"{len(failures)} failures instead of 1"
    error = str(failures[0]["error"])
    assert word in error, f"the error does not say {word!r}: {error[:300]}"
    known = find(error)
    assert (known and known.blame) == blame, f"the error is taken for {known}: {error[:300]}"
    attempts = 1 + max(event["attempt"] for event in events(run, "started"))
    assert attempts == 2, f"{attempts} attempts instead of 2"
    return f"completed in the second attempt, after: {error.splitlines()[0][:150]}", {"failure": failures[0]}


def device_assert(lab: Lab) -> Finding:
    """An index out of range in a kernel."""
    return _fails(lab, "assert", "device-side assert")


def illegal_access(lab: Lab) -> Finding:
    """A kernel reads an address that is nobody's."""
    return _fails(lab, "illegal", "illegal memory access")


def nvml(lab: Lab) -> Finding:
    """NVML's figures of a run, its event for an invalid access, and the CPU time of a look."""
    lab.need_gpu("NVML has no stand-in device")
    found = gpus.visible({}, 0, 1)
    if not found:
        raise NotRun("nvidia-ml-py is not installed, or NVML lists no GPU")
    gpu = found[0]
    began = time.thread_time()
    for _ in range(100):
        gpu.busy(), gpu.throttles()
    look_s = (time.thread_time() - began) / 100
    assert look_s < 1e-3 * gpus.SAMPLE_S, f"the looks take {look_s / gpus.SAMPLE_S:.2%} of a core, not less than 0.1%"
    figures = gpu_rows(read_timings(lab.train("--steps", 150, "--pace", 0.2)).intervals)
    assert len(figures) == lab.ranks, f"figures of {len(figures)} ranks instead of {lab.ranks}"
    wrong = [row for row in figures if row["busy"] is None or not row["memory"] or not row["watts"]]
    assert not wrong, f"figures are missing: {wrong}"
    run = lab.train(*STEPS, "--wrong", "illegal", options=QUICK)
    xids = [event.get("xid") for event in events(run, "gpu_fault")]
    assert set(xids) & set(gpus.OF_KERNELS), f"the Xids of the invalid access: {xids}"
    words = f"a look takes {1e6 * look_s:.0f} us of CPU time per second; Xids of an invalid access: {xids}"
    return words, {"look_s": look_s, "gpus": figures, "problems": gpu.problems()}


def out_of_memory(lab: Lab) -> Finding:
    """More device memory than there is, after progress."""
    return _fails(lab, "memory", "out of memory")


def _fails(lab: Lab, wrong: str, word: str) -> Finding:
    return _restarted(lab.train(*STEPS, "--wrong", wrong, options=QUICK), word, Blame.SCRIPT)


def spinning(lab: Lab) -> Finding:
    """A preemption while the device computes for seconds: the state is saved when it is done, and nothing is lost."""
    run, process = lab.start(*STEPS, "--wrong", "spin", "--spin", 5, options=QUICK[:2])
    wait_for_step(run, 17)  # the values of later steps may still be on their way
    time.sleep(1)
    preempt_local(run)
    assert process.wait() == 0, lab.said(run)
    resumed = [event["step"] for event in events(run, "resumed")]
    assert len(resumed) == 1 and resumed[0] in (20, 21, 22), f"resumed at {resumed}"
    told = events(run, "signal")[0]["time"]
    again = events(run, "started")[1]["time"]
    return f"resumed at step {resumed[0]}", {"from_term_to_restart_s": again - told}


def held(lab: Lab) -> Finding:
    """A rank is killed with most of the device's memory; its restart takes as much at once."""
    gigabytes = lab.sizes.held_gb
    run = lab.train(*STEPS, "--hold", gigabytes, "--wrong", "kill", options=QUICK[:2])
    words, figures = _restarted(run, "killed by SIGKILL", None)
    lost, again = events(run, "rank_failed")[0]["time"], events(run, "training") + events(run, "resumed")
    figures["from_kill_to_training_s"] = max(event["time"] for event in again) - lost
    return f"{gigabytes:g} GB were free for the restart; {words}", figures


def two_ranks(lab: Lab) -> Finding:
    """Two gloo ranks share one GPU: a buffer that differs, a hang of rank 1, and the restore after it are seen."""
    # Each of two "nodes" of a local run gets its part of this list. gloo crashes on the tensors of a stand-in.
    gpus, options = ("0,1", QUICK) if lab.stand_in else ("0,0", (*QUICK, "--set", "backend=gloo"))
    run = lab.train(
        *(*STEPS, "--diverge", "--wrong", "hang-device"),
        nodes=2, ranks=1, options=options, environment={"CUDA_VISIBLE_DEVICES": gpus},
    )  # fmt: skip
    diverged = events(run, "diverged")
    assert diverged and diverged[0]["parts"] == ["model"], f"the ranks' difference was not seen: {diverged}"
    assert [event["step"] for event in events(run, "resumed")] == [20], f"resumed: {events(run, 'resumed')}"
    words, figures = _named(run, 1)
    return f"{words} (on two pretend devices, with their backend)" if lab.stand_in else words, figures


def suspended(lab: Lab) -> Finding:
    """All processes of the run are stopped for longer than each timeout, and then continued."""
    stop_s = 10
    options = [*QUICK, "--set", "timeouts.step_s=6"]
    run, process = lab.start(*STEPS, "--pace", 0.2, options=options)
    wait_for_step(run, 5)
    (loop,) = [pid for pid, line in descendants(process.pid).items() if "clusterddp.supervisor" in line]
    stopped = [loop, *descendants(loop)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(stop_s)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert process.wait() == 0, lab.said(run)
    hung, attempts = events(run, "hung"), len(events(run, "started"))
    assert not hung, f"the suspension was taken for a hang: {hung}"
    failures = [event["error"] for event in events(run, "rank_failed")]
    words = f"suspended for {stop_s} s, the run completed in {attempts} attempt{'s' * (attempts > 1)}"
    return words, {"attempts": attempts, "failures": failures}
