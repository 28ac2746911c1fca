"""Saves and restores of state that lies on devices."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.checkpoint_files import content_of
from tests.gpu.conftest import GPUs
from tests.trainings import events_of

SCRIPTS = Path(__file__).with_name("scripts")


def test_a_restore_holds_no_copy_of_the_optimizers_state_on_the_host_for_each_rank(tmp_path: Path) -> None:
    """The ranks of a host share one copy; with another for each rank, eight of them need nine times the memory.

    Ranks that have another kind of GPU then say that their resume is not exact.
    """
    script = SCRIPTS / "host_memory.py"
    ddp.start(script, tmp_path / "run", ranks=2, folder=tmp_path / "out", devices=2).expect(75)
    restored = ddp.run(script, tmp_path / "run", "Another GPU", ranks=2, folder=tmp_path / "out", devices=2)
    for rank in range(2):
        needs = re.search(r"needs (\S+)", restored.output(rank))
        assert needs is not None and float(needs[1]) < 0.3, restored.text()
    (resumed,) = events_of(RunDirectory(tmp_path / "run"), "resumed")
    assert resumed["inexact"] == ["on Another GPU instead of Stand-in GPU"]


def test_every_thread_is_on_the_ranks_device_and_captures_of_other_threads_do_not_concern_it(tmp_path: Path) -> None:
    """A thread begins on device 0, where its first call of CUDA would open a context on another rank's GPU."""
    ranks = ddp.run(SCRIPTS / "threads.py", tmp_path / "run", ranks=2, folder=tmp_path / "out", devices=2)
    assert "all threads were on cuda:1 [1]" in ranks.output(0)
    assert "all threads were on cuda:0 []" in ranks.output(1)


def test_a_step_on_a_stream_of_the_scripts_own_is_saved_as_it_ends(gpus: GPUs, tmp_path: Path) -> None:
    """The copies of a save wait for it, and the next step waits for them."""
    gpus(1, delay_ms="20")
    subprocess.run([sys.executable, SCRIPTS / "side_stream.py", tmp_path / "run"], check=True, timeout=120)
    saved = [content_of(path)["model"]["weight"] for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert [weight.unique().tolist() for weight in saved] == [[1.0], [2.0], [3.0], [4.0]]
