"""Cases of what only the device knows: graphs of whole steps, its lead, tensors that live there, and its memory."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.case import SCRIPTS, Finding, Lab
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import content_of

#: The steps of a run, and the one in which its first attempt stops.
STEPS, STOP = 12, 7
#: Seconds of the device for each step of ``lead``, and the most steps that a stop may wait for.
SLOW_S, MOST_WAITED = 0.2, 6
#: How much more memory than a tensor a comparison may take, in GB.
SPARE_GB = 0.2


def whole_step(lab: Lab) -> Finding:
    """A CUDA graph of the whole step, stopped in an evaluation after its replay."""
    whole, resumed = _twice(lab, "whole_step")
    assert resumed["begun"] == STOP + 1, f"resumed at step {resumed['begun']} instead of {STOP + 1}"
    assert resumed["weights"] == whole["weights"], "the weights differ from those of the uninterrupted run"
    return f"resumed at step {resumed['begun']} with the bits of the uninterrupted run", resumed


def tensor_lr(lab: Lab) -> Finding:
    """A learning rate, its schedule and the optimizer's steps that are tensors on the device."""
    whole, resumed = _twice(lab, "tensor_lr")
    assert resumed["on"] == whole["on"] and "cpu" not in resumed["on"], f"restored on {resumed['on']}"
    assert (resumed["rate"], resumed["weights"]) == (whole["rate"], whole["weights"]), f"{resumed} instead of {whole}"
    return f"restored on {', '.join(resumed['on'])}, with the bits of the uninterrupted run", resumed


def _twice(lab: Lab, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an uninterrupted run finds, and the second attempt of one that stops."""
    whole = _piece(lab, name, lab.folder / "whole", STEPS, -1)
    run = RunDirectory(lab.folder / "stopped")
    _piece(lab, name, run, STEPS, STOP)
    return whole, _piece(lab, name, run, STEPS, STOP)


def lead(lab: Lab) -> Finding:
    """The host is a few steps ahead of a slow device, so that a stop does not wait for many."""
    found = _piece(lab, "lead", lab.folder / "run", SLOW_S)
    ahead, waited = found["ahead"], found["stopped_s"] / SLOW_S
    assert ahead <= found["most"], f"the host was {ahead} steps ahead, not at most {found['most']}"
    assert lab.stand_in or waited < MOST_WAITED, f"the stop took as long as {waited:.1f} steps of the device"
    return f"at most {ahead} steps ahead; a stop took as long as {waited:.1f} steps of {SLOW_S} s", found


def unpinned(lab: Lab) -> Finding:
    """Memory that CUDA refuses to pin is copied without it, and the error disturbs no kernel."""
    run = RunDirectory(lab.folder / "run")
    found = _piece(lab, "unpinned", run, STEPS)
    assert lab.stand_in or (found["codes"] and 0 not in found["codes"]), f"CUDA's answers: {found['codes']}"
    (weight,) = {len(content_of(path)["model"]["weight"]) for path in run.checkpoints.glob("step-*")}
    assert weight == 512
    return f"saved in every step, although CUDA answered {sorted(set(found['codes']))} to pin memory", found


def fingerprints(lab: Lab) -> Finding:
    """A tensor in bfloat16 is compared on a device of which 90% are in use."""
    found = _piece(lab, "fingerprints", 0.9)
    assert found["more_gb"] < SPARE_GB, f"{found['more_gb']:.2f} GB beside a tensor of {found['tensor_gb']:.2f} GB"
    return f"{found['tensor_gb']:.1f} GB compared with {1e3 * found['more_gb']:.0f} MB more", found


def _piece(lab: Lab, name: str, *arguments: object) -> dict[str, Any]:
    return lab.piece(name, *arguments, program=SCRIPTS / "gpu_devices.py")
