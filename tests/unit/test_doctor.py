"""``clusterddp doctor`` on a login node: what it says of a cluster, of folders and of a torch that is not imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterddp.checks import login_node, node
from clusterddp.checks.node import Check, Mount, failed, guarded, mount_of, ok, warning, worst
from clusterddp.cli import doctor
from clusterddp.cli.command_line import command
from clusterddp.errors import SlurmError, SlurmMissing, SlurmUnavailable, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.slurm import configuration
from tests.fake_slurm import FakeSlurm
from tests.runs_on_disk import BEGAN, event, recorded_run, started

# scontrol show config, shortened. 22.05.8, 24.11.5 and 26.05.5 print these lines alike but for the last.
CONFIG = """Configuration data as of 2026-11-22T09:05:26
AccountingStorageEnforce = associations
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = socket=/run/munge.sock,cred_expire=6
ClusterName             = alps
CliFilterPlugins        = (null)
JobSubmitPlugins        = (null)
KillWait                = 10 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SchedulerParameters     = sched_interval=1,bf_interval=1
SlurmctldHost[0]        = ctl1(10.0.0.1)
SlurmctldHost[1]        = ctl2(10.0.0.2)
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at ctl1 is UP
"""
# scontrol show partition -o: 22.05.8, 24.11.5 and 26.05.5, shortened at the end.
PARTITIONS = """\
PartitionName=low AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=00:30:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=20 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED \
Nodes=n[1-2] PreemptMode=REQUEUE State=UP TotalCPUs=16 TotalNodes=2 TRES=cpu=16,mem=2000000M,node=2,billing=16
PartitionName=high AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE \
DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 \
Nodes=n[1-2] PreemptMode=REQUEUE State=DOWN TotalCPUs=16 TotalNodes=2 TRES=cpu=16,mem=2000000M,node=2,billing=16
PartitionName=off AllowGroups=ALL AllowAccounts=vision,nlp AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A \
DefaultTime=00:30:00 DisableRootJobs=NO Exclusive=NO GraceTime=0 Hidden=NO MaxTime=UNLIMITED \
MaxCPUsPerSocket=UNLIMITED Nodes=n[1-2] PreemptMode=OFF State=UP TotalCPUs=16 TotalNodes=2 TRES=cpu=16,node=2
"""
ASSOCIATIONS = "ddp||normal,long|normal\nddp|gpu|high|\n"
ANSWERS = {
    "scontrol show config": CONFIG,
    "scontrol show partition -o": PARTITIONS,
    "sinfo -h -o %R|%D|%G": "low|1|gpu:a100:4(S:0-1)\nlow|1|gpu:2\nhigh|2|(null)\n",
    "sacctmgr -nP show assoc": ASSOCIATIONS,
    "sacctmgr -nP show user": "ddp\n",
}


@pytest.fixture
def answers(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """What Slurm's commands print."""
    fake_slurm |= ANSWERS
    monkeypatch.setattr(login_node.time, "time", lambda: time.mktime((2026, 11, 22, 9, 5, 26, 0, 0, -1)) + 0.4)
    return fake_slurm


def test_what_slurm_says_becomes_a_row_each(answers: FakeSlurm) -> None:
    """Release, clock, accounts and partitions, with what preemption does to a run in the default one."""
    checks, preempted = login_node.slurm_checks(None, None)
    assert [f"{check.state} {check.name}: {check.found}" for check in checks] == [
        "ok slurm: 22.05.8 on ctl1, ctl2, cluster alps (tested: 22.05 to 26.05)",
        "ok clock: this host and the controller agree to the second",
        "ok accounts: ddp (QOS normal, long, high), default account ddp",
        "ok partition low (default): 2 nodes, 6 GPUs, limit UNLIMITED, default 00:30:00, "
        "preempts (REQUEUE, 20 s grace period, held 7 s)",
        "warning partition high: DOWN, 2 nodes, limit 1-00:00:00, "
        "preempts (REQUEUE, no grace period, KillWait 10 s, held 7 s)",
        "warning partition off: not open to your accounts, 2 nodes, limit UNLIMITED, default 00:30:00, no preemption",
    ]
    assert preempted.startswith("low preempts with 20 s of notice. The run is requeued and then held for 7 s")
    assert login_node.slurm_checks("off", None)[1] == "off does not preempt"
    (*_, unknown), preempted = login_node.slurm_checks("lwo", None)
    assert preempted == "unknown: no partition 'lwo' on this cluster. Available: low, high, off"
    assert (unknown.state, unknown.found) == (
        "failed",
        "no partition 'lwo' on this cluster. Available: low, high, off",
    )


def test_the_hold_is_the_requeue_delay_where_the_site_sets_one() -> None:
    """From 25.11 on it goes before cred_expire."""
    line = PARTITIONS.splitlines()[0]
    assert configuration.policy(CONFIG, line, "low", None).hold_s == 7
    delayed = CONFIG.replace("bf_interval=1", "bf_interval=1,requeue_delay=30")
    assert configuration.policy(delayed, line, "low", None).hold_s == 31
    assert configuration.policy(CONFIG.replace(",cred_expire=6", ""), line, "low", None).hold_s == 121


def test_the_policy_says_whether_the_site_allows_expedited_requeues() -> None:
    """From 25.11 on. A run that asks for it is told that it will not be held."""
    line, job = PARTITIONS.splitlines()[0], Job(name="x", module="x", expedite_requeue=True)
    assert not configuration.policy(CONFIG, line, "low", None).expedites
    allowed = CONFIG.replace("SLURM_VERSION", "SlurmctldParameters = cloud_dns,enable_expedited_requeue\nSLURM_VERSION")
    policy = configuration.policy(allowed, line, "low", None)
    assert policy.expedites
    assert policy.sentence(job).endswith("The run is requeued and starts again without a hold (expedite_requeue)")


def test_with_preemption_by_qos_the_qos_says_what_happens(answers: FakeSlurm) -> None:
    answers["scontrol show config"] = CONFIG.replace("partition_prio", "qos")
    answers["sacctmgr -nP show qos name=long"] = "cluster|00:05:00\n"
    checks, preempted = login_node.slurm_checks(None, "long")
    assert "preempts (REQUEUE, 300 s grace period" in checks[3].found
    assert preempted.startswith("long preempts with 300 s of notice")


@pytest.mark.parametrize(
    ("release", "tested"),
    [("22.05.8", True), ("26.05.5", True), ("21.08.8-2", False), ("26.11.0", False), ("", None), ("unknown", None)],
)
def test_a_release_that_is_not_tested_is_told(release: str, tested: bool | None) -> None:
    config = configuration.parse_configuration(CONFIG.replace("22.05.8", release))
    assert config.tested is tested
    assert login_node.judge_release(config).state == ("ok" if tested else "warning")


@pytest.mark.parametrize(
    ("theirs", "state"),
    [(100.0, "ok"), (99.0, "ok"), (101.0, "ok"), (102.5, "warning"), (97.0, "warning"), (None, "warning")],
)
def test_the_controllers_clock_is_compared_as_exactly_as_it_is_told(theirs: float | None, state: str) -> None:
    """In whole seconds, between the question and the answer."""
    assert login_node.judge_clock(theirs, 100.2, 100.4).state == state


@pytest.mark.parametrize(
    ("old", "new", "state", "words"),
    [
        (
            "AccountingStorageType   = accounting_storage/slurmdbd",
            "AccountingStorageType   = (null)",
            "ok",
            "no accounting",
        ),
        ("ddp||normal,long|normal\nddp|gpu|high|\n", "", "failed", "this user has no account"),
        ("= associations", "= none", "ok", "this user has no account, and the cluster requires none"),
        ("ddp\n", "\n", "warning", "no default account"),
    ],
)
def test_what_is_missing_of_accounting_is_told(answers: FakeSlurm, old: str, new: str, state: str, words: str) -> None:
    """A cluster without a database is no error; a user whom Slurm refuses is."""
    if new == "= none":
        answers["sacctmgr -nP show assoc"] = ""
    for asked in ("sacctmgr -nP show user",) if old == "ddp\n" else list(answers):
        answers[asked] = answers[asked].replace(old, new)
    (accounts,) = (check for check in login_node.slurm_checks(None, None)[0] if check.name == "accounts")
    assert accounts.state == state and words in accounts.found


def test_a_user_without_a_name_is_a_row(answers: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container."""

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", unknown)
    (accounts,) = (check for check in login_node.slurm_checks(None, None)[0] if check.name == "accounts")
    assert accounts.state == "warning" and "has no name on this host" in accounts.found


@pytest.mark.parametrize(
    ("command", "error", "name", "state", "rows"),
    [
        ("scontrol show config", SlurmUnavailable("`scontrol show config` failed: timed out"), "slurm", "failed", 1),
        ("scontrol show config", SlurmMissing("scontrol not found"), "slurm", "failed", 1),
        ("sacctmgr -nP show assoc", SlurmError("slurmdbd is down"), "accounts", "warning", 6),
        ("scontrol show partition -o", SlurmError("denied"), "partitions", "failed", 4),
    ],
)
def test_a_command_that_fails_is_a_row(
    answers: FakeSlurm, command: str, error: Exception, name: str, state: str, rows: int
) -> None:
    """The other rows are still there."""
    answers[command] = error
    checks, _ = login_node.slurm_checks(None, None)
    assert len(checks) == rows
    assert (name, state) in [(check.name, check.state) for check in checks]


# --- without Slurm

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:40 / /home rw,relatime shared:20 - nfs4 filer:/home rw,vers=4.2
41 40 0:41 / /home/my\\040data rw - lustre 10.0.0.1@o2ib:/work rw
42 22 0:42 / /scratch rw - fuse.unheardof unheardof rw
43 22 0:43 / /mnt rw - nfs old:/ rw
44 22 0:44 / /mnt rw - xfs /dev/sdb rw
not a line of the table
"""


@pytest.mark.parametrize(
    ("path", "mount", "shared"),
    [
        ("/srv/runs", Mount("/", "ext4", "/dev/vda"), False),
        ("/home/me/runs", Mount("/home", "nfs4", "filer:/home"), True),
        ("/home/my data/runs", Mount("/home/my data", "lustre", "10.0.0.1@o2ib:/work"), True),
        ("/homes", Mount("/", "ext4", "/dev/vda"), False),
        ("/scratch", Mount("/scratch", "fuse.unheardof", "unheardof"), None),
        ("/mnt/x", Mount("/mnt", "xfs", "/dev/sdb"), False),
    ],
)
def test_the_file_system_of_a_folder_is_found_in_the_mount_table(path: str, mount: Mount, shared: bool | None) -> None:
    """The longest mount point, the last of two at one place, blanks as octal numbers."""
    found = mount_of(Path(path), MOUNTS)
    assert found == mount and found.shared is shared
    assert login_node.judge_mount(path, found).state == ("ok" if shared else "warning")


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    assert node.existing(tmp_path / "a" / "b") == tmp_path
    names = [check.name for check in login_node.of_the_runs_folder(tmp_path / "a" / "runs", MOUNTS)]
    assert names == ["runs folder", "free space", "writes"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    check = guarded("writes", "choose another", lambda: login_node.timed_write(file))
    assert (check.state, check.advice) == ("failed", "choose another")
    assert "NotADirectoryError" in check.found


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"python": Path("/home/me/venv/bin/python")}, ""),
        ({"python": Path("/usr/bin/python3")}, ""),
        ({"python": Path("/tmp/venv/bin/python")}, "Each node has its own /tmp"),
        ({"python": Path("/home/me/python"), "clusterddp": Path("/root/clusterddp")}, "Each node has its own /root"),
        ({"python": Path("/srv/venv/bin/python")}, "doctor --nodes 2"),
    ],
)
def test_an_environment_that_nodes_may_not_have_is_told(places: dict[str, Path], words: str) -> None:
    check = login_node.judge_places(places, MOUNTS)
    assert check.state == ("warning" if words else "ok")
    assert words in check.advice


def test_a_submission_warns_of_paths_that_only_this_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `doctor` does: the job would fail before anything can say why. A file system that is mounted there counts."""
    table = tmp_path / "mounts"
    table.write_text("21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:5 / /tmp/shared rw - nfs4 server:/shared rw\n")
    monkeypatch.setattr(node, "existing", lambda path: path)
    places = {"the run directory": Path("/tmp/runs/a"), "Python": Path("/tmp/venv/bin/python")}
    (warning,) = node.only_here({**places, "clusterddp": Path("/home/me/clusterddp")}, table)
    assert warning.startswith("the run directory (/tmp/runs/a), Python (/tmp/venv/bin/python): usually each node")
    assert node.only_here({"the run directory": Path("/tmp/shared/runs/a")}, table) == []


BUILD = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.9.1+cu128'
debug = False
cuda: Optional[str] = '12.8'
git_version = '5811a8d7da873dd699ff6687092c225caffcf1bb'
hip: Optional[str] = None
"""


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        (BUILD, "ok", "2.9.1+cu128, CUDA 12.8, NCCL 2.27.5"),
        (BUILD.replace("'12.8'", "None"), "warning", "built without CUDA"),
        (
            BUILD.replace("'12.8'", "None").replace("hip: Optional[str] = None", "hip: Optional[str] = '6.4'"),
            "ok",
            "ROCm 6.4",
        ),
        (BUILD.replace("2.9.1", "2.16.0"), "warning", "2.16.0"),
        (BUILD.replace("2.9.1", "2.4.0"), "warning", "2.4.0"),
        ("", "warning", "unknown version"),
    ],
)
def test_the_build_of_torch_is_read_from_its_files(text: str, state: str, words: str) -> None:
    check = login_node.judge_build(text, "2.27.5", "<2.16,>=2.4.1")
    assert check.state == state and words in check.found


def test_doctor_does_not_import_torch_and_works_without_slurm(tmp_path: Path) -> None:
    """Its rows are complete; only those of Slurm fail."""
    code = (
        "import sys; from clusterddp.cli.main import main; from contextlib import suppress\n"
        "with suppress(SystemExit): main()\n"
        "assert 'torch' not in sys.modules"
    )
    environ = {"PATH": "/nowhere", "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, "doctor", "--json"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert (results["schema"], results["state"]) == (1, "failed")
    bad = {check["name"] for check in results["checks"] if check["state"] == "failed"}
    assert bad == {"slurm", "commands"}
    assert {"runs folder", "free space", "writes", "python", "torch", "driver"} <= {
        c["name"] for c in results["checks"]
    }


def test_rows_fit_the_terminal_and_are_whole_in_a_pipe() -> None:
    """Each row has its state first; advice follows."""
    checks = [ok("slurm", "22.05.8"), warning("runs folder", "a local file system " * 4, "use a shared one")]
    piped = doctor.rows(checks, None)
    assert piped[0] == "ok       slurm        22.05.8"
    assert piped[2] == " " * 22 + "-> use a shared one"
    assert max(map(len, doctor.rows(checks, 60))) <= 60
    assert worst(checks) == "warning" and worst([]) == "ok"


def test_doctor_sums_what_lost_nodes_cost_the_runs_in_the_folder(
    answers: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and none if no run lost a node."""
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path))
    command(["doctor"])
    assert "lost nodes" not in capsys.readouterr().out
    lost = event("node_lost", node="n2", suspect="n2") | {"time": BEGAN + 3600}
    end, again = event("resubmitted", job="42"), started(1, "42")
    history = [started(), lost, end | {"time": BEGAN + 3600}, again | {"time": BEGAN + 7200}]
    recorded_run(tmp_path / "a", history)
    recorded_run(tmp_path / "b", [started(), event("completed") | {"time": BEGAN + 7200}])
    command(["doctor"])
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"lost nodes: they ended 1 job of 2 runs without spare nodes in {tmp_path}. These runs then waited 60 min "
        "in the queue. `--spare-nodes 1` for each run would have saved up to that, and used 3 node-hours more"
    )


@pytest.mark.parametrize(
    "words",
    [
        *(["--gpus", "2", "--device", "cpu"], ["--group"]),
        *(["--failed-nodes", "-N", "0"], ["--failed-nodes", "--json"], ["--failed-nodes", ".", "-q", "low"]),
    ],
)
def test_options_that_would_have_no_effect_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        command(["doctor", *words])


def test_a_check_survives_json() -> None:
    """With its figures."""
    check = failed("device", "no GPU", "request one", visible=0)
    assert Check.from_json(json.loads(json.dumps(check.as_json()))) == check
    assert Check.from_json({"name": "x", "state": "splendid", "found": ""}).state == "failed"
