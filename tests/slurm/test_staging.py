"""The environment of the ranks on a disk of each node, on a real Slurm. Its nodes share file systems by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import environments
from tests.cluster import Cluster
from tests.waiting import story, wait_for_outcome

SCRIPT = "import sys, torch; print(sys.prefix, torch.__file__)"


def submit(cluster: Cluster, runs: Path, *more: str) -> tuple[RunDirectory, Path]:
    """A script with an environment of its own, in which clusterddp is an editable install."""
    prefix = runs / "env"
    python = environments.make(prefix)
    site = Path(cluster.run([cluster.python, "-c", "import numpy; print(numpy.__path__[0])"]).stdout.strip()).parent
    (environments.packages_of(prefix) / "more.pth").write_text(f"{cluster.source}\n{site}\n")
    return submit_with(cluster, runs, python, *more), prefix


def submit_with(cluster: Cluster, runs: Path, python: Path, *more: str, name: str = "run") -> RunDirectory:
    """The script with this interpreter."""
    run = RunDirectory(runs / name)
    (runs / "disk").mkdir(exist_ok=True)
    (runs / "disk").chmod(0o1777)
    (runs / "train.py").write_text(SCRIPT)
    (runs / "job.yaml").write_text(
        f"script: train.py\ndevice: cpu\npartition: low\ncpus_per_task: 1\nsteps: off\npython: {python}\n"
        f"stage: ${{DISK}}\nsetup: export DISK={runs}/disk\n"
    )
    command = [cluster.python, "-m", "clusterddp.submit", runs / "job.yaml", "--run-dir", run.path, *more]
    cluster.run(command, cwd=cluster.source, timeout=300)
    return run


def prefixes(run: RunDirectory) -> set[str]:
    """Of the ranks' interpreters, and of the torch that they have imported."""
    said = [(run.attempt_logs(0) / f"rank-{rank}.out").read_text().split() for rank in (0, 1)]
    assert all(torch.startswith(prefix) for prefix, torch in said)
    return {prefix for prefix, _ in said}


def test_ranks_run_in_the_copy_of_their_environment(cluster: Cluster, runs: Path) -> None:
    """Variables of the folder are those of the job."""
    run, _ = submit(cluster, runs, "--nodes", "1", "--gpus", "2")
    assert wait_for_outcome(run) == "completed", story(run)
    (staged,) = (event for event in run.events() if event["event"] == "staged")
    assert prefixes(run) == {staged["folder"]} and Path(staged["folder"]).parents[1] == runs / "disk"
    assert len(staged["unpacked"]) == 1


@pytest.mark.product
def test_a_folder_that_nodes_share_is_said_and_the_shared_environment_used(cluster: Cluster, runs: Path) -> None:
    """In the history, and in what `status` prints. No copy is left half done."""
    run, prefix = submit(cluster, runs, "--nodes", "2", "--gpus", "1")
    assert wait_for_outcome(run) == "completed", story(run)
    (unstaged,) = (event for event in run.events() if event["event"] == "unstaged")
    assert prefixes(run) == {str(prefix)} and "is the same folder on node" in unstaged["why"]
    assert (
        unstaged["why"]
        in cluster.run([cluster.python, "-m", "clusterddp", "status", run.path], cwd=cluster.source).stdout
    )
    assert not list((runs / "disk").glob("*/*.tmp"))


@pytest.mark.product
def test_an_environment_that_changed_in_the_queue_is_used_as_it_is(cluster: Cluster, runs: Path) -> None:
    """The nodes get no copy of the earlier one."""
    run, prefix = submit(cluster, runs, "--nodes", "1", "--gpus", "2", "--sbatch", "hold=true")
    environments.add(environments.packages_of(prefix), "new")
    cluster.run(["scontrol", "release", cluster.run(["squeue", "--me", "-h", "-o%i"]).stdout.strip()])
    assert wait_for_outcome(run) == "completed", story(run)
    (unstaged,) = (event for event in run.events() if event["event"] == "unstaged")
    assert prefixes(run) == {str(prefix)} and "has changed since it was packed" in unstaged["why"]
    assert not list((runs / "disk").iterdir())


@pytest.fixture
def disks(cluster: Cluster, runs: Path) -> Iterator[Callable[[Mapping[str, str]], Path]]:
    """Gives nodes disks of their own, of these sizes, at one path."""
    disk, mounted = runs / "disk", list[str]()

    def mount(sizes: Mapping[str, str]) -> Path:
        disk.mkdir()
        for node, size in sizes.items():
            cluster.in_mounts(node, ["mount", "-t", "tmpfs", "-o", f"mode=1777,size={size}", "none", str(disk)])
            mounted.append(node)
        return disk

    yield mount
    for node in mounted:
        cluster.in_mounts(node, ["umount", "--lazy", str(disk)])


@pytest.mark.product
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [environments.with_torch, environments.prefix_with_torch])
def test_nodes_with_disks_of_their_own_unpack_a_real_torch_once(
    layout: Callable[[Path], Path],
    cluster: Cluster,
    runs: Path,
    disks: Callable[[Mapping[str, str]], Path],
) -> None:
    """From a virtual environment, and from an interpreter with a standard library of its own, as conda has it. Another
    run then finds the copies."""
    disk = disks(dict.fromkeys(cluster.nodes, "2g"))
    python = layout(runs / "env")
    on = ["--nodes", "2", "--gpus", "1", "--set", "nodelist=n1,n2"]
    for name, unpacked in (("first", ["n1", "n2"]), ("second", [])):
        run = submit_with(cluster, runs, python, *on, name=name)
        assert wait_for_outcome(run, 300) == "completed", story(run)
        (staged,) = (event for event in run.events() if event["event"] == "staged")
        assert sorted(staged["unpacked"]) == unpacked and prefixes(run) == {staged["folder"]}
        assert Path(staged["folder"]).is_relative_to(disk)


@pytest.mark.product
@pytest.mark.parametrize("fault", ["full", "absent"])
def test_a_disk_that_one_node_lacks_is_named_and_the_shared_environment_used(
    fault: str, cluster: Cluster, runs: Path, disks: Callable[[Mapping[str, str]], Path]
) -> None:
    """No node keeps an incomplete copy, and none is held."""
    disk = disks({**dict.fromkeys(cluster.nodes, "100m"), "n2": "64k" if fault == "full" else "100m"})
    if fault == "absent":
        cluster.in_mounts("n1", ["install", "--directory", "--mode=1777", f"{disk}/local"])
    stage = ["--set", f"stage={disk}{'/local' if fault == 'absent' else ''}"]
    run, prefix = submit(cluster, runs, "--nodes", "2", "--gpus", "1", "--set", "nodelist=n1,n2", *stage)
    assert wait_for_outcome(run) == "completed", story(run)
    (unstaged,) = (event for event in run.events() if event["event"] == "unstaged")
    assert unstaged["node"] == "n2" and prefixes(run) == {str(prefix)}
    assert ("No space left" if fault == "full" else "is not a folder") in unstaged["why"]
    for node in ("n1", "n2"):
        assert "tmp" not in cluster.in_mounts(node, ["find", str(disk), "-name", "*.tmp"]).stdout
