"""The test cluster itself: what it writes, what it runs, and that it cleans up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterConfig, config, release
from tests.cluster.config import Site
from tests.cluster.system import Process, mounts_below, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


def site(version: tuple[int, int, int] = (22, 5, 8), proctrack: str = "cgroup", root: str = "/state") -> Site:
    return Site(root=Path(root), version=version, host="head", subnet="10.213.77.0/24", proctrack=proctrack)


# ---- the configuration files


def test_every_path_is_below_the_state_folder() -> None:
    """Another Slurm on the machine keeps its spool, sockets, pid files and logs."""
    asked = ClusterConfig()
    texts = [config.slurm_conf(asked, site()), config.slurmdbd_conf(site()), config.my_cnf(site())]
    values = [line.split("=")[-1] for text in texts for line in text.splitlines() if "=" in line]
    paths = {value for value in values if value.startswith("/")}
    assert {path for path in paths if not path.startswith("/state/")} == {"/bin/true"}


# ---- what is ours


def test_a_reused_pid_is_not_taken_for_ours() -> None:
    """A process is its pid and its start time together."""
    child = subprocess.Popen(["sleep", "60"])
    try:
        process = Process.of(child.pid)
        assert process is not None and process.alive()
        stranger = Process(process.pid, process.start - 1)
        stranger.kill()
        assert process.alive() and not stranger.alive()
    finally:
        child.kill()
    assert wait_until(lambda: not process.alive(), 5)  # dead, though not yet reaped
    child.wait()


# ---- on the real cluster


def finished(cluster: Cluster, script: str, *options: str) -> tuple[dict[str, str], str]:
    """Runs a batch script to its end: the job's fields and its output."""
    out = cluster.scratch / "test-cluster.out"
    body = "#!/bin/bash\n" + script
    done = cluster.run(["sbatch", "--parsable", f"--output={out}", *options], input=body)
    job = cluster.wait_job(done.stdout.strip(), {"COMPLETED", "FAILED"})
    return job, out.read_text()


@pytest.mark.slurm
def test_a_job_runs_on_two_nodes_as_the_ordinary_user(cluster: Cluster) -> None:
    """Each node has its own name, and knows the others'."""
    script = "srun bash -c 'echo $(hostname) $(id -un) $(getent hosts n1 | cut -d\" \" -f1) $(getent hosts n2)'"
    job, text = finished(cluster, script, "--nodes=2")
    first, second = cluster.address("n1"), cluster.address("n2")
    user = cluster.user
    assert job["JobState"] == "COMPLETED" and job["UserId"] == f"{user}({cluster.uid})"
    assert sorted(text.splitlines()) == [f"n1 {user} {first} {second} n2", f"n2 {user} {first} {second} n2"]


@pytest.mark.product  # as every test of a preemption
@pytest.mark.slurm
def test_high_preempts_low_which_is_requeued(cluster: Cluster) -> None:
    """And sacct knows both attempts."""
    cluster.drain_jobs()
    cluster.set_grace(0)
    try:
        script = "--wrap=srun sleep 300"
        low = cluster.run(["sbatch", "--parsable", "--nodes=2", "--output=/dev/null", script]).stdout.strip()
        cluster.wait_job(low, {"RUNNING"})
        high = cluster.preempt(1)
        cluster.wait_job(high, {"COMPLETED"})
        assert cluster.wait_job(low, {"RUNNING"})["Restarts"] == "1"
    finally:
        cluster.set_grace(cluster.config.grace)
    sacct = ["sacct", "--duplicates", "--allocations", "--noheader", "--parsable2", "--format=state", f"--jobs={low}"]
    assert cluster.run(sacct).stdout.split() == ["PREEMPTED", "RUNNING"]
    cluster.drain_jobs()
    assert cluster.run(["squeue", "--noheader"]).stdout == ""


@pytest.mark.slurm
def test_a_job_survives_the_controller_and_slurmd(cluster: Cluster) -> None:
    """Both can be restarted under a running job."""
    low = cluster.run(["sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 300"]).stdout.strip()
    node = cluster.wait_job(low, {"RUNNING"})["NodeList"]
    cluster.stop_controller()
    cluster.restart_slurmd(node)
    cluster.start_controller()
    assert cluster.job(low)["JobState"] == "RUNNING"
    assert any("sleep 300" in process.command() for process in cluster.processes(node))
    cluster.drain_jobs()


@pytest.mark.slurm
def test_a_cut_node_cannot_be_reached_until_it_is_healed(cluster: Cluster) -> None:
    """Its processes keep running."""

    def reached() -> bool:
        ping = f"import socket; socket.create_connection(('{cluster.address('n2')}', {config.NODE_PORT}), 1)"
        return cluster.run([cluster.python, "-c", ping], check=False).returncode == 0

    assert reached()
    cluster.cut("n2")
    assert not reached() and cluster.processes("n2")
    cluster.heal("n2")
    assert wait_until(reached, 30)


@pytest.mark.slurm
def test_a_second_up_names_the_holder_of_the_first(cluster: Cluster) -> None:
    """Two never run at once."""
    assert cluster.job(999_999) == {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster", "up"], cwd=REPOSITORY, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1 and f"held by process {os.getpid()} (" in done.stderr


# A network and a /var/lib of its own: the cluster that the other tests use is out of reach. It is up, too: its
# user is then there already, and its lock keeps another run of the tests from sharing that user.
APART = """
    set -e
    ip link set lo up
    here=/var/lib/clusterddp-cluster
    ! mountpoint -q $here || umount --recursive --lazy $here
    mount --bind "$1" /var/lib
    up="$2 -m tests.cluster up --nodes 1 --proctrack linuxproc"
    {script}
"""


def apart(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    text = textwrap.dedent(APART).replace("{script}", textwrap.dedent(script))
    tmp_path.chmod(0o755)  # munged wants its socket reachable for all
    words = ["unshare", "--mount", "--net", "bash", "-c", text, "bash", str(tmp_path), sys.executable]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "daemon",
    [
        "munged",
        pytest.param("slurmctld", marks=pytest.mark.product),
        *(pytest.param(name, marks=pytest.mark.product) for name in ("mariadb-install", "slurmd-n1")),
    ],
)
def test_what_a_killed_up_left_is_cleared_by_the_next(tmp_path: Path, daemon: str) -> None:
    """Killed just after it started one of its daemons; then `up` and `down` work as usual."""
    script = f"""
        $up & pid=$!
        until grep -qs '"{daemon}"' $here/state.json; do kill -0 $pid; sleep 0.02; done
        kill -KILL $pid
        wait $pid || true
        cat $here/state.json > /var/lib/before.json
        $up
        $2 -m tests.cluster status
        $2 -m tests.cluster down
        ! $2 -m tests.cluster status
        ! ip -brief link | grep cddp
        ls /var/lib
    """
    done = apart(tmp_path, script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["down", "before.json"]
    before = json.loads((tmp_path / "before.json").read_text())
    assert daemon in before["daemons"]
    assert not any(Process(**process).alive() for process in before["daemons"].values())


@pytest.mark.product
@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
def test_an_up_that_fails_shows_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    """Here the port of slurmctld is taken."""
    script = f"""
        exec 3< <(exec $2 -c '
import socket, time
listener = socket.create_server(("", {config.CONTROLLER_PORT}))
print(flush=True)
time.sleep(60)') && pid=$!
        read -u 3
        $up && exit 9
        kill $pid
        ls -A /var/lib
    """
    done = apart(tmp_path, script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slurmctld does not come up; its log ends with:" in done.stderr and "Address already in use" in done.stderr
    assert done.stdout == "" and mounts_below(tmp_path) == []


@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("name", "year"), [("trixie", "24.11."), ("sid", "26.")])
def test_another_releases_slurm_runs_the_machines_own_programs(tmp_path: Path, name: str, year: str) -> None:
    """Daemons and commands are the release's; a task is as on any other Slurm, with nothing set for the loader."""
    if reason := release.missing(name):
        pytest.skip(reason)
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\nsrun --version\n"
        "srun python -c \"import os, sys; print(sys.version_info[:3], os.environ.get('LD_LIBRARY_PATH'))\"\n"
    )
    script = """
        $2 -m tests.cluster run --nodes 1 --proctrack linuxproc --release RELEASE -- bash -c '
            sbatch --quiet --wait --output=$HOME/out /var/lib/job.sh; cat $HOME/out; sacct -nXP --format=state
            sinfo -hNO version -p low; scontrol show config | grep -o "SLURM_VERSION.*"'
        ls -A /var/lib
    """
    done = apart(tmp_path, script.replace("RELEASE", name))
    assert done.returncode == 0, done.stdout + done.stderr
    command, task, accounting, slurmd, slurmctld, left = done.stdout.splitlines()
    number = command.removeprefix("slurm-wlm ")
    assert number.startswith(year) and task == f"{sys.version_info[:3]} None" and accounting == "COMPLETED"
    assert slurmd.strip() == number and slurmctld.split()[-1] == number and left == "job.sh"
