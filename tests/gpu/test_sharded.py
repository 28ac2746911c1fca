"""Sharded models (FSDP2) on stand-in devices, whose streams FSDP orders by events."""

from __future__ import annotations

from pathlib import Path

from tests import ddp
from tests.ranks.test_sharded_resume import SHARDED, events, losses, samples, state


def train(run_dir: Path, *options: object, code: int = 0) -> ddp.Ranks:
    """Two ranks with a device each. Copies to the host are late."""
    environment = {"STANDIN_CUDA_FREES": "events", "STANDIN_CUDA_DELAY_MS": "5"}
    out = run_dir.parent / "out"
    return ddp.start(SHARDED, run_dir, *options, ranks=2, devices=2, folder=out, **environment).expect(code)


def test_a_preempted_run_on_devices_ends_with_the_same_bits(tmp_path: Path) -> None:
    """No stream uses memory that another one may still use, in training and in the copies of a save."""
    whole = train(tmp_path / "whole", 8, "--every", 2)
    train(tmp_path / "stopped", 8, "--every", 2, "--stop-in", 4, code=75)
    resumed = train(tmp_path / "stopped", 8, "--every", 2)
    assert [event["inexact"] for event in events(tmp_path / "stopped", "resumed")] == [[]]
    assert state(resumed, "end") == state(whole, "end")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert samples(tmp_path / "stopped") == samples(tmp_path / "whole")
