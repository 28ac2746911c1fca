"""The scripts in the tutorial and its pages do what these say, and its messages are the ones that users see."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ddp

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "guide" / "tutorial.md").read_text()
RENDEZVOUS = (REPOSITORY / "docs" / "design" / "rendezvous.md").read_text()
BLOCKS = [
    pytest.param(*block, id=f"{page}-{number}")
    for page, text in (("tutorial", TEXT), ("rendezvous", RENDEZVOUS))
    for number, block in enumerate(
        re.findall(r"```python\n# (\d) ranks\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    )
]
#: Those with a run directory; the first stands for the others.
SUBMITTED = [BLOCKS[0], *(block for block in BLOCKS if re.search("run_dir=|CLUSTERDDP_RUN_DIR", str(block.values[1])))]


def test_every_block_of_python_is_run() -> None:
    assert len(BLOCKS) == TEXT.count("```python") + RENDEZVOUS.count("```python") == 10


@pytest.mark.parametrize(("ranks", "script", "printed"), [block for block in BLOCKS if block not in SUBMITTED[1:]])
def test_a_script_prints_the_text_below_it(tmp_path: Path, ranks: str, script: str, printed: str) -> None:
    (tmp_path / "script.py").write_text(script)
    ended = ddp.run(tmp_path / "script.py", ranks=int(ranks), folder=tmp_path / "out", CLUSTERDDP_DEVICE="cpu")
    assert ended.output(0) == printed


@pytest.mark.parametrize(("ranks", "script", "printed"), SUBMITTED)
def test_a_submitted_script_prints_the_text_below_it(tmp_path: Path, ranks: str, script: str, printed: str) -> None:
    """By the command on the page."""
    (command,) = re.findall(r"save it and `(.* --gpus )2`", TEXT)
    (tmp_path / "FILE.py").write_text(script)
    words = [sys.executable, "-m", *command.split(), ranks, "--run-dir", "run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "logs" / "attempt-0" / "rank-0.out").read_text() == printed
