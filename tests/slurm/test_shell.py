"""``clusterddp shell`` and ``submit --debug`` on a real Slurm, from a terminal of a login node."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.terminal import Terminal
from tests.waiting import story, wait_for_outcome

SCRIPT = """
import os, torch, clusterddp
import torch.distributed as dist
ctx = clusterddp.init()
for step in range(2):
    value = torch.full((1,), float(ctx.rank))
    breakpoint()
    dist.all_reduce(value)
    print("the sum is", value.item(), "with the timeouts", ctx._settings.job.timeouts.step_s, flush=True)
"""


def test_a_rank_of_a_job_is_debugged_from_the_login_node_and_has_a_shell(cluster: Cluster, runs: Path) -> None:
    """The other rank skips ``breakpoint()``, and waits in its collective without a timeout."""
    run = RunDirectory(runs / "run")
    script = runs / "script.py"
    script.write_text(SCRIPT)
    script.chmod(0o644)
    shape = ["--nodes", "2", "--gpus", "1", "--device", "cpu", "--partition", "low", "--run-dir", run.path]
    command = [cluster.python, "-m", "clusterddp"]
    terminal = Terminal(
        partial(cluster.popen, [*command, "submit", script, *shape, "--debug", "1"], cwd=cluster.source)
    )
    try:
        terminal.wait_for("waiting for breakpoint() in rank 1")
        terminal.wait_for("(Pdb) ")
        on_node = cluster.run([*command, "shell", run.path, "--rank", "1", "--", "hostname"], cwd=cluster.source)
        assert on_node.stdout == "n2\n"
        shell = Terminal(partial(cluster.popen, [*command, "shell", run.path], cwd=cluster.source))
        shell.type("echo $(hostname) has $(test -t 0 && echo a terminal)\n")
        shell.wait_for("n1 has a terminal")
        shell.type("exit 3\n")
        assert shell.process.wait() == 3
        terminal.type("!value += 41\n")
        terminal.wait_for("(Pdb) ")
        terminal.type("c\n")
        terminal.wait_for("(Pdb) ")
        terminal.type("c\n")
        terminal.wait_for("rank 1 has exited")
    finally:
        terminal.end()
    assert wait_for_outcome(run) == "completed", story(run)
    told = (run.attempt_logs(0) / "rank-0.out").read_text()
    assert told.splitlines()[-2:] == [f"the sum is {value} with the timeouts 86400.0" for value in (42.0, 1.0)]
