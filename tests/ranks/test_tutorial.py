"""The scripts in the tutorial and its pages do what these say, and its messages are the ones that users see."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
SECTIONS = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)


def test_every_block_of_python_is_run() -> None:
    assert len(BLOCKS) == TEXT.count("```python") + RENDEZVOUS.count("```python") == 10


@pytest.mark.parametrize(("ranks", "script", "printed"), BLOCKS)
def test_a_script_prints_what_stands_below_it(tmp_path: Path, ranks: int, script: Any, printed: Any) -> None:
    (tmp_path / "script.py").write_text(script)
    command = [
        sys.executable,
        "-m",
        "clusterddp",
        "submit",
        "script.py",
        "--local",
        "--device",
        "cpu",
        "--gpus",
        str(ranks),
    ]
    done = subprocess.run([*command, "--run-dir", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "logs" / "attempt-0" / "rank-0.out").read_text() == printed
