"""What contributors run: each check is written once, and the others follow it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_commit_hooks_run_what_make_lint_runs() -> None:
    """A commit that passes its hooks passes `make lint`."""
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [line.strip() for line in recipe[1].splitlines()]


def test_every_file_that_the_guide_for_contributors_names_exists() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| (`[^|]+) \| (`[^|]+) \|$", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    named = [
        folder / path
        for code, tests in rows
        for folder, cell in ((REPOSITORY / "clusterddp", code), (REPOSITORY / "tests", tests))
        for path in re.findall(r"`([^`]+)`", cell)
    ]
    assert len(named) > 50
    assert [str(path) for path in named if not path.exists()] == []
