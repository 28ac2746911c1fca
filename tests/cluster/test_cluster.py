"""The test cluster itself: what it writes, what it runs, and that it cleans up."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterConfig, config, install, release
from tests.cluster import __main__ as command_line
from tests.cluster.cluster import parse_fields
from tests.cluster.config import Site
from tests.cluster.state import Lock, State, lock_holder
from tests.cluster.system import Process, mounts_below, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


def site(version: tuple[int, int, int] = (22, 5, 8), proctrack: str = "cgroup", root: str = "/state") -> Site:
    return Site(root=Path(root), version=version, host="head", subnet="10.213.77.0/24", proctrack=proctrack)


# ---- the configuration files


def test_nodes_and_partitions_are_as_asked() -> None:
    """The part of slurm.conf that decides what jobs see."""
    lines = config.slurm_conf(ClusterConfig(nodes=2, gpus=4, cpus=6, grace=7), site()).splitlines()
    size = "CPUs=6 Sockets=1 CoresPerSocket=6 ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:4 State=UNKNOWN"
    assert [line for line in lines if line.startswith("NodeName=")] == [
        f"NodeName=n1 NodeAddr=10.213.77.11 {size}",
        f"NodeName=n2 NodeAddr=10.213.77.12 {size}",
    ]
    common = "Nodes=n1,n2 MaxTime=INFINITE DefaultTime=30 OverSubscribe=NO State=UP"
    assert [line for line in lines if line.startswith("PartitionName=")] == [
        f"PartitionName=low {common} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=7",
        f"PartitionName=high {common} PriorityTier=10 PreemptMode=REQUEUE",
        f"PartitionName=cancel {common} PriorityTier=1 PreemptMode=CANCEL GraceTime=7",
        f"PartitionName=off {common} PriorityTier=1 PreemptMode=OFF",
    ]
    assert "SlurmctldHost=head(10.213.77.1)" in lines
    assert "AuthInfo=socket=/state/run/munge.sock,cred_expire=6" in lines


def test_the_command_line_gives_a_configuration() -> None:
    """`make cluster` starts the standard one; an option changes it."""
    assert command_line.configuration(command_line.parser().parse_args(["up"])) == ClusterConfig()
    options = command_line.parser().parse_args(["run", "--max-array-size", "10", "true"])
    assert command_line.configuration(options) == ClusterConfig(max_array_size=10)


def test_every_path_is_below_the_state_folder() -> None:
    """Another Slurm on the machine keeps its spool, sockets, pid files and logs."""
    asked = ClusterConfig()
    texts = [config.slurm_conf(asked, site()), config.slurmdbd_conf(site()), config.my_cnf(site())]
    values = [line.split("=")[-1] for text in texts for line in text.splitlines() if "=" in line]
    paths = {value for value in values if value.startswith("/")}
    assert {path for path in paths if not path.startswith("/state/")} == {"/bin/true"}


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ((22, 5, 8), "SlurmctldParameters=preempt_send_user_signal"),
        ((23, 2, 0), "PreemptParameters=send_user_signal"),
        ((24, 11, 5), "PreemptParameters=send_user_signal"),
    ],
)
def test_the_user_signal_has_the_name_that_the_version_knows(version: tuple[int, int, int], line: str) -> None:
    """22.05 refuses the newer name, and later ones have dropped the older."""
    assert line in config.slurm_conf(ClusterConfig(user_signal=True), site(version)).splitlines()
    assert "send_user_signal" not in config.slurm_conf(ClusterConfig(), site(version))


def test_without_gpus_or_accounting_neither_is_mentioned() -> None:
    """Both are options: many clusters have no slurmdbd."""
    asked = ClusterConfig(gpus=0, slurmdbd=False)
    text = config.slurm_conf(asked, site())
    assert "gres" not in text.lower() and "accounting_storage/none" in text and "slurmdbd" not in text
    assert config.gres_conf(asked, site()) == ""


def test_another_releases_slurm_finds_its_own_programs_and_plugins() -> None:
    """The compiled-in plugin folder and the rest of PATH hold the machine's Slurm."""
    ours, other = site(), dataclasses.replace(site(), programs="/other/bin", plugins="/other/lib")
    assert other.search_path == f"/other/bin:{install.SEARCH_PATH}" and ours.search_path == install.SEARCH_PATH
    for text in (config.slurm_conf(ClusterConfig(), other), config.slurmdbd_conf(other)):
        assert "PluginDir=/other/lib" in text.splitlines()
    assert "PluginDir" not in config.slurm_conf(ClusterConfig(), ours) + config.slurmdbd_conf(ours)


def test_gpus_are_device_files_of_the_state_folder() -> None:
    """/dev stays as it is."""
    last = config.gres_conf(ClusterConfig(gpus=4), site()).splitlines()[-1]
    assert last == "Name=gpu File=/state/dev/nvidia[0-3] Flags=nvidia_gpu_env"
    assert "File=/state/dev/nvidia0 " in config.gres_conf(ClusterConfig(gpus=1), site())


@pytest.mark.parametrize(
    "wrong", [{"nodes": 0}, {"nodes": 65}, {"gpus": -1}, {"proctrack": "pgid"}, {"release": "woody"}]
)
def test_an_impossible_cluster_is_refused(wrong: dict[str, object]) -> None:
    """The message names the option and what it was given."""
    (name, value) = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        ClusterConfig(**wrong)  # type: ignore[arg-type]


def test_fields_of_scontrol_may_hold_blanks_and_equal_signs() -> None:
    """A line as `scontrol show job --oneliner` prints it."""
    line = "JobId=7 JobName=two words ReqB:S:C:T=0:0:*:* Comment=a=b CPUs/Task=1 Command=/x/job.sh --lr=3 k=v Power= "
    assert parse_fields(line) == {
        "JobId": "7",
        "JobName": "two words",
        "ReqB:S:C:T": "0:0:*:*",
        "Comment": "a=b",
        "CPUs/Task": "1",
        "Command": "/x/job.sh --lr=3 k=v",
        "Power": "",
    }


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


def test_state_survives_another_version_of_the_code(tmp_path: Path) -> None:
    """What an older checkout left can be cleared by a newer one, and the other way round."""
    state = State(site(root=str(tmp_path)), ClusterConfig(nodes=3), daemons={"munged": Process(1, 2)})
    state.save()
    assert State.load(tmp_path) == state
    fields = json.loads(state.path.read_text())
    fields["of_the_future"] = 1
    fields["config"]["of_the_future"] = 1
    del fields["user_made"]
    state.path.write_text(json.dumps(fields))
    assert State.load(tmp_path) == state


def test_debian_and_its_children_are_known() -> None:
    """ID or ID_LIKE says so, with quotes or without."""
    if not install.is_debian("ID=debian\n"):
        pytest.skip("no apt-get here")
    assert install.is_debian('ID=ubuntu\nID_LIKE="debian"\n') and install.is_debian(
        'ID="mint"\nID_LIKE="ubuntu debian"\n'
    )
    assert not install.is_debian("ID=fedora\n")


def test_a_policy_of_the_machine_is_restored_after_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when an earlier installation was killed in the middle."""
    policy, saved = tmp_path / "policy-rc.d", tmp_path / "saved"
    monkeypatch.setattr(install, "POLICY", policy)
    monkeypatch.setattr(install, "POLICY_SAVED", saved)
    with install.services_off():
        assert policy.read_text() == install.KEEP_OFF and os.access(policy, os.X_OK)
    assert not policy.exists()
    policy.write_text(install.KEEP_OFF)
    saved.write_text("theirs")
    with install.services_off():
        pass
    assert policy.read_text() == "theirs" and not saved.exists()


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


@pytest.mark.slurm
def test_unknown_names_are_refused_at_once(cluster: Cluster) -> None:
    """With a default route each look-up would wait for the resolver, and torch's first step with it."""
    _, text = finished(
        cluster, 'SECONDS=0; getent hosts nowhere.invalid; getent hosts 10.213.1.1; echo "took $SECONDS"'
    )
    assert int(text.removeprefix("took ")) < 5  # the resolver's timeout


@pytest.mark.slurm
@pytest.mark.parametrize(("option", "visible"), [("--gpus-per-node=2", "0,1"), ("--gpus-per-node=1", "0")])
def test_tasks_see_their_gpus(cluster: Cluster, option: str, visible: str) -> None:
    """Every task of a node sees all of the job's GPUs there."""
    _, text = finished(cluster, "srun sh -c 'echo $CUDA_VISIBLE_DEVICES'", "--nodes=2", "--ntasks-per-node=2", option)
    assert text.splitlines() == [visible] * 4


@pytest.mark.slurm
def test_the_user_runs_this_checkout_with_this_interpreter(cluster: Cluster) -> None:
    """Also when the checkout or the environment lies below a folder that is closed to the user."""
    code = "import sys, pytest, tests.cluster; print(sys.version_info[:3], pytest.__version__)"
    done = cluster.run(["python", "-c", code], cwd=cluster.source)
    assert done.stdout == f"{sys.version_info[:3]} {pytest.__version__}\n"


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
def test_a_node_that_loses_its_power_has_no_process_left(cluster: Cluster) -> None:
    """The next `drain_jobs` restores it."""
    low = cluster.run(
        ["sbatch", "--parsable", "--output=/dev/null", "--nodelist=n2", "--wrap=sleep 300"]
    ).stdout.strip()
    cluster.wait_job(low, {"RUNNING"})
    cluster.kill_node("n2")
    assert cluster.processes("n2") == []
    cluster.drain_jobs()
    assert finished(cluster, "hostname", "--nodelist=n2")[1] == "n2\n"


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
        "slurmctld",
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
def test_run_gives_the_exit_code_and_takes_the_cluster_down(tmp_path: Path) -> None:
    """The command finds a working Slurm."""
    script = """
        $2 -m tests.cluster run --nodes 1 --proctrack linuxproc --no-slurmdbd -- bash -c 'srun hostname; exit 7' ||
            echo $?
        ls -A /var/lib
    """
    assert apart(tmp_path, script).stdout == "n1\n7\n"


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


def test_the_lock_names_its_holder() -> None:
    """It is released with the process, however that ends."""
    if lock_holder() is None:
        lock = Lock()
        assert f"process {os.getpid()} (" in str(lock_holder())
        lock.release()
        assert lock_holder() is None
