"""Batches and logged values of runs on stand-in devices."""

from __future__ import annotations

from pathlib import Path

from tests.preempted import check_same, logged, train_twice

SCRIPT = Path(__file__).with_name("scripts") / "loaders.py"


def test_batches_of_workers_and_samples_on_the_device_are_the_same_after_a_stop(tmp_path: Path) -> None:
    """Pinned by default, on the rank's device, and logged from there: values of any dtype, also reduced."""
    preempted, whole, _ = train_twice(tmp_path, [SCRIPT, 8], [5], devices=2)
    check_same(preempted, whole)
    lines = logged(whole)
    assert all(isinstance(line["count"], int) and line["true"] == 1 for line in lines)
    assert [line["step"] for line in lines if "right" in line] == [0, 4]
    assert any(line["loss"] != line["on_host"] for line in lines)  # the mean of both ranks
