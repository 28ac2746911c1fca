"""Another user of a real cluster's nodes can neither read nor disturb a run."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker.control_channel import ControlChannel
from tests.cluster import Cluster
from tests.cluster.system import Process
from tests.trainings import STEPS, Training, events_of
from tests.waiting import story, wait_for_outcome

NOBODY = 65534

LOOK = """
import json, os, sys
seen = []
for path in sys.argv[1:]:
    try:
        seen.append([path, os.listdir(path) if os.path.isdir(path) else open(path, errors="replace").read()])
    except OSError:
        pass
print(json.dumps(seen))
"""

DISTURB = """
import socket, sys
place = sys.argv[1], int(sys.argv[2])
def said(words):
    with socket.create_connection(place, timeout=20) as line:
        try:
            line.sendall(words)
            return line.makefile("rb").read()
        except OSError:
            return b""
words = [b"x" * 2**20, b"[" * 4000 + b"\\n", b"GET / HTTP/1.1\\r\\n\\r\\n", b"\\x16\\x03\\x01" * 99 + b"\\n",
         b'{"token": "guess", "rank": 0, "port": 9, "host": "x", "pid": 1}\\n', b"null\\n", b"\\n"]
answers = [said(each) for each in words]
held = [socket.create_connection(place, timeout=20) for _ in range(600)]
for line in held[::2]:
    line.sendall(b'{"token": ')
print(b"".join(answers), flush=True)
sys.stdin.read()
"""


#: Replaces a run's folder by one of the member's own, with links to files of the run's user: RUN FOLDER.
REPLACE = """
import os, sys
run, precious = sys.argv[1:]
os.rename(run, run + "-old")
os.mkdir(run)
os.chmod(run, 0o777)
for name in ("checkpoints", "logs", "private"):
    os.symlink(precious, f"{run}/{name}")
for name in ("metrics.jsonl", "events.jsonl", "timing.jsonl", "outcome.json"):
    os.symlink(f"{precious}/notes", f"{run}/{name}")
"""


def as_nobody(code: str, *arguments: object, group: int = NOBODY) -> subprocess.Popen[str]:
    """A program of another ordinary user's."""
    return subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", code, *map(str, arguments)],
        user=NOBODY, group=group, extra_groups=[], cwd="/", env={},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def variables(process: Process) -> dict[str, str]:
    """What a process was started with; root may look."""
    pairs = [pair.decode().partition("=") for pair in process.environment()]
    return {name: value for name, _, value in pairs}


def test_another_user_sees_nothing_of_a_run_and_cannot_disturb_it(cluster: Cluster, runs: Path) -> None:
    """Files, the ranks' environment, the supervisor's port: the run continues while hundreds of connections hold it."""
    secret = {"options": ["--set", "env.HF_TOKEN=s3cret-value"]}
    training = Training.submit(cluster, runs, "--moments", "first step", **secret)  # type: ignore[arg-type]
    training.wait_at_moment(0)
    run, host = training.run, cluster.job(training.job_id)["BatchHost"]
    ranks = [
        each for node in cluster.nodes for each in cluster.processes(node) if "clusterddp.worker" in each.command()
    ]
    tasks = [each for each in ranks if "CLUSTERDDP_TOKEN" in variables(each) and "RANK" not in variables(each)]
    known = variables(tasks[0])
    token, port = known["CLUSTERDDP_TOKEN"], int(known["CLUSTERDDP_SUPERVISOR"].rpartition(":")[2])
    assert known["HF_TOKEN"] == "s3cret-value"

    files = [run.path, run.job_file, run.private, run.private / "secrets.json", run.attempt_private(0), run.events_file]
    files += [Path(f"/proc/{each.pid}/{name}") for each in ranks for name in ("environ", "cmdline")]
    seen = json.loads(as_nobody(LOOK, *files).communicate(timeout=30)[0])
    assert {Path(path).name for path, _ in seen} <= {"cmdline"}
    everything = json.dumps(seen) + cluster.root(["scontrol", "show", "job", training.job_id]).stdout
    assert token not in everything
    assert "s3cret" not in everything + run.job_file.read_text() + run.batch_script.read_text()

    address = cluster.address(host)
    stranger = as_nobody(DISTURB, address, port)
    # Nothing is answered, but to what could be a rank of another attempt: that it is refused.
    refused = b'{"refused": "its token is not this attempt\'s"}\n'
    assert stranger.stdout is not None and stranger.stdout.readline() == f"{refused!r}\n"
    for rank, words in ((0, "rank 0 has already joined"), (2, "there is no rank 2 in a run of 2 ranks")):
        with pytest.raises(LauncherEnvironmentError, match=words):
            ControlChannel.join(f"{address}:{port}", token, rank, 1, timeout=10)
    supervisor = next(each for each in cluster.processes(host) if "clusterddp.supervisor" in each.command())
    assert len(list(Path(f"/proc/{supervisor.pid}/fd").iterdir())) < 300
    training.go(0)
    assert training.finish() == "completed", story(run)
    stranger.communicate(timeout=30)
    assert [line["step"] for line in read_lines(run.metrics_file)] == list(range(STEPS))
    assert not events_of(run, "rank_failed")
    with pytest.raises(OSError):
        socket.create_connection((address, port), timeout=5).close()


def test_the_group_reads_a_shared_run_and_nobody_else_does(cluster: Cluster, runs: Path) -> None:
    """All but `private`, though the submitting user's umask would close everything; and they cannot write."""
    (runs / "train.py").write_text("print('hello')\n")
    run = RunDirectory(runs / "run")
    options = ["--run-dir", run.path, "--device", "cpu", "--partition", "low", "--set", "share=group"]
    command = [cluster.python, "-m", "clusterddp.submit", "train.py", *options, "--set", "env.HF_TOKEN=s3cret"]
    job_id = cluster.run(["sh", "-c", 'umask 077; exec "$@"', "sh", *command], cwd=runs).stdout.strip()
    assert wait_for_outcome(run, 60) == "completed", story(run)
    logs = [run.logs / f"job-{job_id}.log", *(run.attempt_logs(0) / f"rank-0.{name}" for name in ("out", "err"))]
    shared = [run.path, run.job_file, run.batch_script, run.events_file, run.outcome_file, run.logs, *logs]
    closed = [run.private, run.private / "secrets.json"]
    for group, expected in ((run.path.stat().st_gid, shared), (NOBODY, [])):
        seen = json.loads(as_nobody(LOOK, *shared, *closed, group=group).communicate(timeout=30)[0])
        assert [path for path, _ in seen] == [str(path) for path in expected]
        assert "s3cret" not in json.dumps(seen)
    shown = subprocess.run(
        [str(cluster.python), "-m", "clusterddp", "status", str(run)],
        user=NOBODY, group=run.path.stat().st_gid, extra_groups=[], cwd=cluster.source, env=cluster.environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "state     completed: all ranks finished" in shown.stdout, shown.stderr
    writable = [path for path in (run.path, *run.path.rglob("*")) if path.stat().st_mode & 0o022]
    assert writable == []


@pytest.fixture
def group_folder(cluster: Cluster, runs: Path) -> Path:
    """A folder of runs in which all members of a group may create, rename and link."""
    folder = runs / "group"
    folder.mkdir()
    os.chown(folder, 0, pwd.getpwuid(cluster.uid).pw_gid)
    folder.chmod(0o2770)
    return folder


@pytest.mark.product
def test_a_member_of_the_group_who_links_the_memory_of_nodes_deletes_no_file(
    cluster: Cluster, runs: Path, group_folder: Path
) -> None:
    """A rank fails in a run whose `.node-failures` another member has linked to a folder of the run's user."""
    precious = runs / "precious"
    precious.mkdir()
    names = ["1000-n1-0a1b2c3d.json", "1000-run.csv", "notes"]
    for path in (precious, *(precious / name for name in names)):
        if path != precious:
            path.write_text("mine")
        os.chown(path, cluster.uid, -1)
    link = f"import os; os.symlink({str(precious)!r}, {str(group_folder / '.node-failures')!r})"
    assert as_nobody(link, group=group_folder.stat().st_gid).wait(30) == 0
    training = Training.submit(cluster, group_folder, "--pause", "0.2", options=["--set", "share=group"])
    training.wait_for_a_step_of(0)
    training.ranks_on(cluster.nodes[1])[0].kill(signal.SIGKILL)
    assert training.finish() == "completed", story(training.run)
    assert events_of(training.run, "rank_failed")
    assert sorted(path.name for path in precious.iterdir()) == names


@pytest.mark.product
def test_a_member_of_the_group_who_replaces_a_runs_folder_changes_and_deletes_no_file(
    cluster: Cluster, runs: Path, group_folder: Path
) -> None:
    """The run's user keeps the files that the links in the new folder lead to, also those named as checkpoints."""
    precious = runs / "precious"
    precious.mkdir()
    names = ["notes", *(f"step-{step:012d}.attempt-0.safetensors" for step in (5, 20, 40))]
    for name in sorted(names):
        (precious / name).write_text("mine")
    for path in (precious, *precious.iterdir()):
        os.chown(path, cluster.uid, -1)
    options = ["--set", "share=group", "--set", "checkpoint.every=5 steps", "--set", "checkpoint.keep=1"]
    training = Training.submit(cluster, group_folder, "--pause", "0.2", options=options)
    training.wait_for_a_step_of(0)
    replaced = as_nobody(REPLACE, training.run.path, precious, group=group_folder.stat().st_gid)
    assert replaced.wait(30) == 0
    old = RunDirectory(f"{training.run.path}-old")
    training.wait(lambda: cluster.job(training.job_id)["JobState"] not in ("RUNNING", "COMPLETING"), "its end", 120)
    assert {path.name: path.read_bytes() for path in precious.iterdir()} == dict.fromkeys(names, b"mine")
    assert wait_for_outcome(old) == "completed", story(old)
    assert [line["step"] for line in read_lines(old.metrics_file)] == list(range(STEPS))
