"""``preflight: true`` with real ranks: all pass, one has a wrong sum, a node fails and passes when it is retried."""

from __future__ import annotations

from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.ranks.test_local import submit
from tests.trainings import events_of

CHECKED = """
import os
import sys
from clusterddp.checks import node

if os.environ["RANK"] == sys.argv[1]:
    right = node.sum_is_right
    node.sum_is_right = lambda *arguments: right(*arguments) and False
import clusterddp

ctx = clusterddp.init(device="cpu")
print("trains on", ctx.all_reduce_sum(1.0), "ranks")
"""

#: In the first attempt, a GPU that computes nonsense.
BREAKS = (
    "import os; from clusterddp.checks import node; os.environ['CLUSTERDDP_ATTEMPT'] != '0' or "
    "setattr(node, 'multiply', lambda device: node.failed('compute', '3 of 9 elements are wrong', ''))"
)


def test_ranks_that_pass_train_and_one_with_a_wrong_sum_does_not(tmp_path: Path) -> None:
    """Its message has the node."""
    script = tmp_path / "checked.py"
    script.write_text(CHECKED)
    passed = ddp.run(script, "none", ranks=2, folder=tmp_path / "pass", CLUSTERDDP_PREFLIGHT="on")
    assert [passed.output(rank) for rank in range(2)] == ["trains on 2.0 ranks\n"] * 2
    broken = ddp.start(script, 1, ranks=2, folder=tmp_path / "fail", CLUSTERDDP_PREFLIGHT="on").expect(1)
    assert "failed the check 'all-reduce': wrong sum on 1 of 2 ranks" in broken.output(1)
    assert "PreflightError" not in broken.output(0)


def test_a_node_that_fails_is_retried_and_checked_again(tmp_path: Path) -> None:
    """The failure is no error of the script: the ranks restart, and the history has both."""
    run = RunDirectory(tmp_path / "run")
    script = ["tests/scripts/changed.py", "--device", "cpu", "--gpus", "1", "--set", "preflight=true"]
    done = submit(run, *script, "--", BREAKS, "tests/scripts/small.py", "-", "3")
    assert done.returncode == 0, done.stderr
    (failure,) = events_of(run, "rank_failed")
    assert "failed the check 'compute' on cpu: 3 of 9 elements are wrong" in failure["error"]
    (passed,) = events_of(run, "preflight")
    assert (passed["attempt"], passed["warnings"]) == (1, [])
    assert "attempt 1: all nodes passed the preflight in" in done.stderr
