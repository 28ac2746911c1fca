"""Saves and restores of state that lies on devices."""

from __future__ import annotations

import re
from pathlib import Path

from tests import ddp

SCRIPTS = Path(__file__).with_name("scripts")


def test_a_restore_holds_no_copy_of_the_optimizers_state_on_the_host_for_each_rank(tmp_path: Path) -> None:
    """The ranks of a host share one copy; with another for each rank, eight of them need nine times the memory."""
    script = SCRIPTS / "host_memory.py"
    ddp.start(script, tmp_path / "run", ranks=2, folder=tmp_path / "out", devices=2).expect(75)
    restored = ddp.run(script, tmp_path / "run", ranks=2, folder=tmp_path / "out", devices=2)
    for rank in range(2):
        needs = re.search(r"needs (\S+)", restored.output(rank))
        assert needs is not None and float(needs[1]) < 0.3, restored.text()


def test_every_thread_is_on_the_ranks_device_and_captures_of_other_threads_do_not_concern_it(tmp_path: Path) -> None:
    """A thread begins on device 0, where its first call of CUDA would open a context on another rank's GPU."""
    ranks = ddp.run(SCRIPTS / "threads.py", tmp_path / "run", ranks=2, folder=tmp_path / "out", devices=2)
    assert "all threads were on cuda:1 [1]" in ranks.output(0)
    assert "all threads were on cuda:0 []" in ranks.output(1)
