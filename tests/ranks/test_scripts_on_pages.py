"""The pages' scripts with an output below them print it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clusterddp.errors import UNCONFIRMED
from tests import ddp
from tests.cli import clusterddp

PAGES = [*(ddp.REPOSITORY / "docs" / "guide").glob("*.md"), *(ddp.REPOSITORY / "docs" / "design").glob("*.md")]
BLOCKS = [
    pytest.param(*block, id=f"{page.stem}-{number}")
    for page in sorted(PAGES)
    for number, block in enumerate(
        re.findall(r"```python\n# (\d) ranks\n(.*?)```\n\n```text\n(.*?)```", page.read_text(), re.DOTALL)
    )
]
#: Those that need a run directory.
SUBMITTED = [block for block in BLOCKS if re.search("run_dir=|CLUSTERDDP_RUN_DIR", str(block.values[1]))]


def test_every_script_for_several_ranks_has_its_output_below_it() -> None:
    assert len(BLOCKS) == sum(len(re.findall(r"^# \d ranks$", page.read_text(), re.MULTILINE)) for page in PAGES) > 0


@pytest.mark.parametrize(("ranks", "script", "printed"), [block for block in BLOCKS if block not in SUBMITTED])
def test_a_script_prints_the_text_below_it(tmp_path: Path, ranks: str, script: str, printed: str) -> None:
    (tmp_path / "script.py").write_text(script)
    ended = ddp.run(tmp_path / "script.py", ranks=int(ranks), folder=tmp_path / "out", CLUSTERDDP_DEVICE="cpu")
    assert ended.output(0) == printed


@pytest.mark.parametrize(("ranks", "script", "printed"), SUBMITTED)
def test_a_submitted_script_prints_the_text_below_it(tmp_path: Path, ranks: str, script: str, printed: str) -> None:
    (tmp_path / "script.py").write_text(script)
    shape = ["--local", "--device", "cpu", "--gpus", ranks, "--run-dir", "run"]
    clusterddp("submit", "script.py", *shape, cwd=tmp_path, code=UNCONFIRMED)  # none of them trains
    assert (tmp_path / "run" / "logs" / "attempt-0" / "rank-0.out").read_text() == printed
