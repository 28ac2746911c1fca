"""A script reads its run directory and the number of its attempt."""

from __future__ import annotations

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
            raise ConnectionError("so that all ranks are restarted")
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
