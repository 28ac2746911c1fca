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


def test_every_rule_that_is_switched_off_has_a_reason() -> None:
    """Of ruff's rules, next to their names."""
    ignored = re.search(
        r"^ignore = \[\n(.*?)^\]", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL
    )
    assert ignored is not None
    for line in ignored[1].splitlines():
        assert re.fullmatch(r'    "[A-Z]+\d+",  # [a-z-]+: .{20,}', line), line


def test_the_version_is_written_once() -> None:
    """In the package, where the build reads it."""
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'version = {attr = "clusterddp.__version__"}' in project
    assert not re.search(r'^version = "', project, re.MULTILINE)


def test_every_test_is_in_a_folder_of_its_kind() -> None:
    """CONTRIBUTING.md says what belongs in which."""
    assert not list((REPOSITORY / "tests").glob("test_*.py"))


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
