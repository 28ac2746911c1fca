"""Cases that train: a run on a GPU has the right bits, whatever interrupts it."""

from __future__ import annotations

import re
from typing import Any

import torch

from benchmarks import common
from benchmarks.gpu_check.case import REPOSITORY, Finding, Lab
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import content_of
from tests.waiting import flatten

#: Steps that are long enough for a preemption to come within a few of them.
PACED = ("--pace", 0.02)


def start(lab: Lab, ranks: int) -> Finding:
    """The process group stands, and a sum over all ranks is right (the script's own assertion)."""
    run = lab.train("--steps", 2, ranks=ranks)
    said = (run.attempt_logs(0) / "rank-0.out").read_text().splitlines()[0]
    assert re.fullmatch(rf"backend .*nccl, {ranks} ranks on cuda", said), said
    (ready,) = (event["time"] for event in run.events() if event["event"] == "started")
    return said, {"first_step_s": run.metrics()[0]["time"] - ready}


def wrap(lab: Lab) -> Finding:
    """Each variant trains under NCCL with the gradients of the model alone."""
    found = lab.piece("wrap")
    return f"{len(found['variants'])} variants have the gradients of the model alone", found


def folder(lab: Lab) -> Finding:
    """CheckpointFolder, without a process group and with NCCL."""
    return "the restored state is the saved one, alone and with NCCL", lab.piece("folder", lab.folder / "saved")


def exact(lab: Lab, *script: object, environment: dict[str, str] | None = None) -> Finding:
    """A run that is preempted, killed and preempted again ends with the bits of one that is not."""
    steps = lab.sizes.steps
    script = (*PACED, "--steps", steps, *script)
    whole = lab.reference(*script)
    stopped = lab.train(
        *(*script, "--wrong", "kill", "--attempt", 1, "--at", steps // 2),
        options=["--set", f"checkpoint.every={steps // 10} steps"],
        preempted=[steps // 5, steps * 7 // 10],
        environment=environment,
    )
    resumed = [event["step"] for event in stopped.events() if event["event"] == "resumed"]
    assert len(resumed) == 3, f"{len(resumed)} resumes instead of 3: at {resumed}"
    if different := differing(whole, stopped):
        repeatable = not differing(whole, lab.train(*script))
        other = "two uninterrupted runs are equal" if repeatable else "two uninterrupted runs differ, too"
        raise AssertionError(f"these differ from the uninterrupted run's: {different[:5]}; {other}")
    return "bit-exact after a preemption, a SIGKILL and another preemption", {"resumed_at": resumed}


def compiled(lab: Lab, *script: object, graphs: bool = False) -> Finding:
    """The same with torch.compile."""
    if graphs:
        lab.need_gpu("inductor has no CUDA graphs on the stand-in")
    return exact(lab, "--compile", lab.backend, *script)


def fast(lab: Lab) -> Finding:
    """channels_last, fused AdamW and capturable Adam, in expandable segments."""
    # PYTORCH_ALLOC_CONF since torch 2.9; both are read.
    words, figures = exact(lab, "--fast", environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    return f"{words}: channels_last, fused AdamW, capturable Adam, expandable segments", figures


def workers(lab: Lab) -> Finding:
    """Two loader workers, and a device that lags: the bits are those of a run without either."""
    steps = lab.sizes.steps
    whole = lab.reference(*PACED, "--steps", steps)
    lagging = lab.train(*("--steps", steps, "--workers", 2, "--lag", 0.02), preempted=[steps // 2])
    different = differing(whole, lagging)
    assert not different, f"these differ from the run without workers and lag: {different[:5]}"
    cycles = [line["cycle_s"] for line in lagging.metrics()]
    return "the bits are those without workers and lag", {"host_step_s": common.median(cycles)}


def differing(one: RunDirectory, other: RunDirectory) -> list[str]:
    """The values of the last checkpoint, and the steps' losses and scales, that differ."""
    states = [_state(run) for run in (one, other)]
    names = [name for name in sorted(states[0].keys() | states[1].keys()) if not _same(name, *states)]
    kept = [[(line["loss"], line["scale"], line["digest"]) for line in run.metrics()] for run in (one, other)]
    return names + [f"step {step}" for step, pair in enumerate(zip(*kept, strict=True)) if pair[0] != pair[1]]


def _state(run: RunDirectory) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    content = content_of(max(run.checkpoints.glob("step-*")))
    flatten("", {name: part for name, part in content.items() if name != "parent"}, flat)  # a resume adds a parent
    return flat


def _same(name: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    if isinstance(one.get(name), torch.Tensor):
        return isinstance(other.get(name), torch.Tensor) and torch.equal(one[name], other[name])
    return bool(one.get(name) == other.get(name))


def snapshot(lab: Lab) -> Finding:
    """Checkpoints hold what the parameters were at their step, though each next step changes all of them at once."""
    every, steps = 6, 30
    keep = ["--set", f"checkpoint.every={every} steps", "--set", f"checkpoint.keep={steps}"]
    run = lab.train("--steps", steps, "--megabytes", lab.sizes.megabytes, options=keep)
    lines = run.metrics()
    saved = {int(path.name[5:17]): path for path in run.checkpoints.glob("step-*")}
    for step, path in saved.items():
        parameters = [value for name, value in content_of(path)["model"].items() if not _is_buffer(name)]
        found = sum(int(value.view(torch.int32).sum(dtype=torch.int64)) for value in parameters) % 2**50
        assert found == lines[step - 1]["digest"], f"checkpoint {step} is not the state after {step} steps"
    assert len(saved) > 2, f"only checkpoints {sorted(saved)}"
    cycles = {line["step"]: line["cycle_s"] for line in lines}
    after = common.median([cycles[step] for step in saved if step in cycles])
    usual = common.median([seconds for step, seconds in cycles.items() if step > 2 and step not in saved])
    figures = {"megabytes": lab.sizes.megabytes, "step_s": usual, "step_after_a_save_s": after}
    words = f"{len(saved)} checkpoints are right; a save costs {(after - usual) * 1000:.1f} ms of a step"
    return words, {**figures, "checkpoints": len(saved)}


def _is_buffer(name: str) -> bool:
    return any(word in name for word in ("running", "num_batches"))


def digits(lab: Lab) -> Finding:
    """jobs/digits.yaml as it stands, on GPUs, preempted once."""
    run = lab.train(*("--steps", 240), program=REPOSITORY / "jobs" / "digits.yaml", preempted=[120])
    (last,) = max(run.logs.glob("attempt-*")).glob("rank-0.out")
    accuracy = re.search(r"test accuracy ([\d.]+), macro-F1 ([\d.]+)", last.read_text())
    assert accuracy, f"no accuracy in {last.read_text()[-300:]!r}"
    assert float(accuracy[1]) > 0.9, f"accuracy {accuracy[1]}"
    return f"preempted once, accuracy {accuracy[1]}", {"accuracy": float(accuracy[1]), "f1": float(accuracy[2])}
