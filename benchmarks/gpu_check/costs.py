"""Cases that measure: what steps and saves cost, hidden waits, graph capture beside saves, and a large state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks import common
from benchmarks.gpu_check.case import SCRIPTS, Finding, Lab, Sizes
from clusterddp.rundir.run_directory import RunDirectory
from tests.waiting import wait_until

#: What a step in the loop, and a save, may take of the time of the least that does the same.
STEP_BAR, STALL_BAR, STALL_MORE_MS, COPY_BAR = 1.02, 1.15, 0.5, 1.05
_TIMES = ("step", "stall", "copies")


def costs(lab: Lab) -> Finding:
    """Rows of what a step and a save cost; a missed bar is a result, and no failure."""
    file, sizes = lab.folder / "costs.json", lab.sizes
    often = ["--pairs", sizes.pairs, "--block", sizes.pairs]
    lab.train(file, "--megabytes", sizes.megabytes, *often, program=SCRIPTS / "gpu_costs.py")
    found = json.loads(file.read_text())
    assert found["pinned"] or lab.stand_in, "the memory of the snapshot is not pinned"
    made = [asdict(row) for row in cost_rows(found, f"cuda, {lab.ranks} ranks", sizes.megabytes)]
    missed = [row["row"] for row in made if row["met"] is False]
    return f"{len(made)} rows; missed: {', '.join(missed) or 'none'}", {"rows": made, "megabytes": sizes.megabytes}


def cost_rows(found: Mapping[str, Any], where: str, megabytes: int) -> list[common.Row]:
    """The rows of one run of ``gpu_costs.py``, in milliseconds."""
    times = {what: {name: [1000 * one for one in values] for name, values in found[what].items()} for what in _TIMES}
    step, stall, copies = (times[what] for what in _TIMES)
    state, pinned = f"{where}, {megabytes} MB", "torch's copies into pinned memory"
    relative = common.median(stall["pinned"]) * (STALL_BAR - 1) > STALL_MORE_MS
    bar = {"allowed": STALL_BAR} if relative else {"more": STALL_MORE_MS}
    return [
        common.paired(f"step ({where}): loop", "ms", step["ours"], step["DDP"], "DDP alone", allowed=STEP_BAR),
        common.paired(f"step ({where}): DDP", "ms", step["DDP"], step["bare"], "the model without DDP"),
        common.paired(f"save ({state}): stall", "ms", stall["ours"], stall["pinned"], f"queueing {pinned}", **bar),
        common.paired(f"save ({state}): copies", "ms", copies["ours"], copies["pinned"], pinned, allowed=COPY_BAR),
    ]


def unsynchronized(lab: Lab) -> Finding:
    """No wait for the device in steps, logs and saves: torch's debug mode raises none, and the host stays ahead."""
    found = lab.piece("unsynchronized", lab.folder / "run", lab.sizes.megabytes, 24)
    steps, ahead = found["steps"], found["ahead"]
    if lab.stand_in:
        return f"{steps} steps with saves called no wait; whether the host stays ahead needs a GPU", found
    assert ahead == steps, f"the host waited for the device in {steps - ahead} of {steps} steps"
    return f"{steps} steps with saves, with the device 0.2 s behind: no wait", found


def graph(lab: Lab, mode: str) -> Finding:
    """CUDA graphs are captured while memory is pinned, saves are copied and metrics arrive."""
    lab.need_gpu("on the stand-in, nothing disturbs a capture")
    found = lab.piece("graph", lab.folder / "run", lab.sizes.megabytes, 30, mode)
    assert not found["failed"], f"{len(found['failed'])} of {found['steps']} captures failed: {found['failed'][:3]}"
    assert not found["wrong"], f"{found['wrong']} replays gave other values"
    return f"{found['steps']} captures in mode {mode}, with a save in each step", found


def large_state_moved(sizes: Sizes) -> float:
    """Two saves and a restore, and one of each by torch."""
    return 3 * sizes.state_gb


def large_state(lab: Lab) -> Finding:
    """Many tensors and gigabytes saved, and restored after a preemption, beside torch.save and torch.load."""
    sizes = lab.sizes
    run, process = lab.start(
        *(lab.folder, "--gigabytes", sizes.state_gb, "--tensors", sizes.tensors),
        program=SCRIPTS / "gpu_large.py",
        ranks=1,
        options=["--set", "checkpoint.every=4 steps", "--set", "checkpoint.keep=1"],
        preempted=[6],
    )
    files = [lab.folder / f"attempt-{attempt}.json" for attempt in (0, 1)]
    wait_until(lambda: files[1].exists() or process.poll() is not None, "the restored attempt", timeout=3600)
    assert files[1].exists(), f"exit code {process.wait()}: {lab.said(run)}"
    first, second = (json.loads(file.read_text()) for file in files)
    digests = {line["step"]: line["digest"] for line in run.metrics()}
    assert second["step"] > 4, f"resumed at step {second['step']}"
    assert second["digest"] == digests[second["step"] - 1], "the restored state is not that of its step"
    words = f"saved in {first_save(run)['durable_s']:.1f} s, restored in {second['run_s']:.1f} s"
    return words, {
        "rows": [asdict(row) for row in large_rows(run, first, second, sizes)],
        "first": first,
        "second": second,
    }


def first_save(run: RunDirectory) -> Mapping[str, Any]:
    return next(event for event in run.events() if event["event"] == "checkpoint")


def large_rows(
    run: RunDirectory, first: Mapping[str, Any], second: Mapping[str, Any], sizes: Sizes
) -> list[common.Row]:
    """Single measurements beside torch's: times in seconds, memory in GB."""
    state = f"{sizes.state_gb:g} GB in {sizes.tensors:,} tensors (cuda)"
    save = str(first_save(run)["step"])

    def row(what: str, unit: str, ours: float, limit: float, limit_is: str) -> common.Row:
        return common.counted(f"{state}: {what}", unit, ours, limit, limit_is)

    return [
        row("save, stall of the host", "s", first["host_stall_s"][save], first["torch_stall_s"], "torch.save"),
        row("save, stall of the device", "s", first["device_stall_s"][save], first["torch_stall_s"], "torch.save"),
        row("save, until durable", "s", first_save(run)["durable_s"], first["torch_save_s"], "torch.save and fsync"),
        row("save, host memory", "GB", first["save_bytes"] / 1e9, sizes.state_gb, "the state"),
        row("restore", "s", second["run_s"], first["torch_load_s"], "torch.load"),
        row("restore, host memory", "GB", second["run_bytes"] / 1e9, sizes.state_gb, "the state"),
    ]
