"""What runs on every node before its ranks start, with an srun that starts its tasks here."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from clusterddp import protocol
from clusterddp.failures.placement import Placement
from clusterddp.jobdef.job import Job
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.launcher import SlurmLauncher
from clusterddp.supervisor.node_setup import NodeSetup
from clusterddp.supervisor.node_task import Plan, set_up
from tests.waiting import wait_until

#: The tasks of a step with a list of nodes. Without one, a rank. Each has its standard input.
SRUN = """\
#!/bin/bash
trap 'kill $(jobs -p); exit 137' QUIT
input=$(cat)
for word; do case $word in --nodelist=*) nodes=${word#*=};; --*) ;; srun) ;; *) break;; esac; shift; done
for node in ${nodes//,/ }; do SLURMD_NODENAME=$node "$@" <<< "$input" & done
[ "$nodes" ] || "$@" &
wait
"""
NODES = ("n1", "n2", "n3")
PLACEMENT = Placement(NODES, NODES[:2])


@pytest.fixture(autouse=True)
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # as the supervisor does
    yield
    signal.signal(signal.SIGQUIT, before)


def launcher(setup: NodeSetup, folder: Path) -> SlurmLauncher:
    """Of an attempt whose rank writes a file."""
    made = SlurmLauncher(JOB, Placement(NODES, NODES), setup)
    made.read_interval_s = 0.05
    made.start(["touch", str(folder / "rank")], {**os.environ, protocol.SUPERVISOR: ":1"}, folder)
    return made


JOB = Job("train", script="/train.py", nodes=3, device="cpu")


def of(*lines: str) -> NodeSetup:
    """With these lines."""
    return NodeSetup(
        RunDirectory("/run"), Job("train", script="/train.py", nodes=3, device="cpu", node_setup=lines), {}
    )


def test_ranks_start_after_the_setup_of_every_node_which_none_has_twice(tmp_path: Path) -> None:
    """Also a node without ranks. The next attempt of the job starts its ranks at once."""
    setup = of(f"cd {tmp_path}", "[ ! -e rank ]", "echo $SLURMD_NODENAME >> ready", "echo said")
    assert launcher(setup, tmp_path).wait() == 0
    assert sorted((tmp_path / "ready").read_text().split()) == list(NODES) and (tmp_path / "rank").exists()
    assert "n3: said" in (tmp_path / "nodes.err").read_text().splitlines()
    assert setup.pending(Placement(NODES, NODES)) == ()


def test_a_node_whose_setup_fails_is_named_and_no_rank_starts(tmp_path: Path) -> None:
    """The others need it no second time."""
    setup = of("echo why", "[ $SLURMD_NODENAME != n2 ]", "echo not here")
    made = launcher(setup, tmp_path)
    assert made.wait() == 1 and made.failure is not None and made.failure.refused
    assert made.failure.node == "n2" and made.failure.lines == ("n2: why",) and "why" in made.failure.error
    assert not (tmp_path / "rank").exists() and setup.pending(PLACEMENT) == ("n2",)


def test_no_node_is_blamed_if_the_setup_fails_on_all(tmp_path: Path) -> None:
    made = launcher(of("exit 3"), tmp_path)
    assert made.wait() == 1 and made.failure is not None
    assert made.failure.node == "" and made.failure.lines == () and "code 3" in made.failure.error


def test_a_setup_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    """Its report has what it printed so far."""
    report = set_up(Plan([f"cd {tmp_path}", "echo $$ > pid", "echo begun; sleep 600; true"], 0.5), "n1")
    assert report.failed is not None and "timeouts.nodes_s" in report.failed and report.output == "begun"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_process_that_stays_behind_does_not_keep_the_ranks_waiting(tmp_path: Path) -> None:
    report = set_up(Plan([f"sleep 600 & echo $! > {tmp_path}/pid"], 60), "n1")
    assert report.failed is None
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("how", ["notify", "kill"])
def test_a_stop_ends_the_setup_and_no_rank_starts(how: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    made = launcher(of(f"echo $$ >> {pids}; exec sleep 600"), tmp_path)

    def interrupt() -> None:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == len(NODES), "the setup of all nodes")
        getattr(made, how)()

    threading.Thread(target=interrupt, daemon=True).start()
    assert made.wait() == 1 and not (tmp_path / "rank").exists()
    assert made.failure is not None and not made.failure.refused
    for pid in pids.read_text().split():  # Slurm would have ended the whole step
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
