"""A script reads its run directory and the number of its attempt."""

from __future__ import annotations

import errno
from pathlib import Path

import clusterddp
from tests import ddp
from tests.conftest import Launch

SCRIPT = """
import sys, clusterddp
ctx = clusterddp.init(run_dir=sys.argv[1] if len(sys.argv) > 1 else None)
print("directory", ctx.run_dir, "attempt", ctx.attempt)
"""


def test_every_rank_of_every_attempt_gets_run_dir_and_attempt(launch: Launch, tmp_path: Path) -> None:
    """What rank 0 writes there in the first attempt, all find in the second."""

    def where() -> tuple[int, str, str]:
        ctx = clusterddp.init()
        assert ctx.run_dir is not None
        if ctx.attempt == 0:
            if ctx.is_main:
                (ctx.run_dir / "notes.txt").write_text("of attempt 0")
            ctx.all_reduce_sum(1.0)  # it is written
            raise ConnectionResetError(errno.ECONNRESET, "so that all ranks are restarted")
        return ctx.attempt, str(ctx.run_dir), (ctx.run_dir / "notes.txt").read_text()

    expected = (1, str(tmp_path / "run"), "of attempt 0")
    assert launch(where).result(all_ranks=True) == [expected, expected]


def test_under_another_launcher_it_is_the_one_given_to_init(tmp_path: Path) -> None:
    """Or none; the attempts are counted there."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for arguments, said in (
        ([], "directory None attempt 0"),
        ([tmp_path / "run"], f"directory {tmp_path}/run attempt 0"),
        ([tmp_path / "run"], f"directory {tmp_path}/run attempt 1"),
    ):
        ranks = ddp.run(script, *arguments, ranks=2, folder=tmp_path / "out")
        assert all(said in ranks.output(rank) for rank in (0, 1)), ranks.text()


SEEDED = """
import sys, clusterddp, numpy as np
ctx = clusterddp.init(run_dir=sys.argv[1], seed=eval(sys.argv[2]))
run = ctx.run(loader=ctx.loader(range(8), batch_size=1))
for _ in run.steps(run.step + 1):
    pass
print("steps", run.step)
"""


def test_a_seed_is_a_number_and_a_resume_takes_no_other_not_even_of_another_type(tmp_path: Path) -> None:
    """The order is made from the seed's repr, in which numpy's 5 is not 5."""
    script = tmp_path / "script.py"
    script.write_text(SEEDED)
    for seed, said in (
        ("float('nan')", "clusterddp.init(seed=nan): expected an integer"),
        ("np.int64(5)", "steps 1"),
        ("5", "the run started with seed np.int64(5), but the seed is now 5"),
        ("np.int64(5)", "steps 2"),
    ):
        ranks = ddp.start(script, tmp_path / "run", seed, ranks=1, folder=tmp_path / "out").wait()
        assert said in ranks.output(0), (seed, ranks.text())
