"""Cases that need two GPUs: what one rank does while it waits for another. Never run on a device so far."""

from __future__ import annotations

import json

from benchmarks.gpu_check.case import SCRIPTS, Finding, Lab, NotRun
from benchmarks.gpu_check.faults import events

SCRIPT = SCRIPTS / "gpu_pairs.py"
#: By how much the share of the backward until the first bucket is ready may differ from plain DDP's.
BAR = 0.02
#: Seconds until ranks that do not connect end their attempt.
CONNECT_S = 20


def first_bucket(lab: Lab) -> Finding:
    """When the first bucket of a model that registers its decoder first can be reduced, beside plain DDP."""
    _need_two(lab)
    lab.need_gpu("the stand-in's clock is that of the CPU")
    file = lab.folder / "shares.json"
    lab.train("overlap", file, program=SCRIPT, ranks=2)
    shares = json.loads(file.read_text())
    assert abs(shares["ours"] - shares["DDP"]) <= BAR, f"{shares}"
    return f"after {shares['ours']:.2f} of the backward, DDP after {shares['DDP']:.2f}", shares


def killed(lab: Lab) -> Finding:
    """A rank is killed while the other waits for it in an all-reduce."""
    return _ended_by_rank_1(lab, "killed")


def absent(lab: Lab) -> Finding:
    """A rank never connects."""
    return _ended_by_rank_1(lab, "absent")


def _ended_by_rank_1(lab: Lab, mode: str) -> Finding:
    """The first attempt ends, and the second one completes."""
    _need_two(lab)
    options = ["--set", f"timeouts.connect_s={CONNECT_S}", "--set", "checkpoint.every=1 steps"]
    run = lab.train(mode, lab.folder / "mode", program=SCRIPT, ranks=2, options=options)
    attempts = 1 + max(one["attempt"] for one in events(run, "started"))
    assert attempts == 2, f"{attempts} attempts instead of 2"
    failures = events(run, "rank_failed")
    return "completed in the second attempt", {"failures": failures}


def _need_two(lab: Lab) -> None:
    if lab.ranks < 2 and not lab.stand_in:
        raise NotRun("it needs two GPUs")
