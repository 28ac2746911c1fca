"""A run directory on a real Slurm whose disk becomes read-only under the training, as ext4 does at its own errors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import Training, check_same_run
from tests.waiting import story, wait_for_step


class Disk:
    """An ext4 of its own in a file, mounted at ``path``."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._image, self.path = cluster, folder / "image", folder / "disk"
        self._image.touch()
        os.truncate(self._image, 200_000_000)
        subprocess.run(["mkfs.ext4", "-q", self._image], check=True)
        self.path.mkdir()
        self.mount()
        os.chown(self.path, cluster.uid, -1)

    def mount(self) -> None:
        self._cluster.root(["mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path)])

    def unmount(self) -> None:
        self._cluster.root(["umount", str(self.path)])

    def fail(self) -> None:
        """From now on the kernel refuses all writes, also to open files."""
        number = self.path.stat().st_dev
        device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
        Path(f"/sys/fs/ext4/{device.name}/trigger_fs_error").write_text("a test's")

    def repair(self) -> None:
        """What an administrator does once no files are open."""
        self.unmount()
        subprocess.run(["fsck.ext4", "-fp", self._image], check=False, capture_output=True)
        self.mount()


@pytest.fixture
def disk(cluster: Cluster, runs: Path) -> Iterator[Disk]:
    disk = Disk(cluster, runs)
    yield disk
    cluster.drain_jobs()
    disk.unmount()


@pytest.mark.product
def test_a_run_on_a_disk_that_became_read_only_resumes_from_its_last_checkpoint_after_the_repair(
    cluster: Cluster, disk: Disk, uninterrupted_training: RunDirectory
) -> None:
    """Nothing can be saved any more: the job fails."""
    training = Training.submit(cluster, disk.path, "--pause", "0.2", options=["--set", "checkpoint.every=5 steps"])
    wait_for_step(training.run, 7)
    disk.fail()
    assert cluster.wait_job(training.job_id, {"COMPLETED", "FAILED"})["JobState"] == "FAILED"
    shown = cluster.run([cluster.python, "-m", "clusterddp", "status", training.run.path]).stdout
    assert f"stopped (job {training.job_id} ended (FAILED)" in shown and "Continue with: clusterddp submit" in shown
    disk.repair()
    again = [cluster.python, "-m", "clusterddp.submit", "--run-dir", training.run.path]
    training.job_id = cluster.run(again, cwd=cluster.source).stdout.strip()
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training, redone=True)
