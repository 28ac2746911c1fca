"""What pyproject.toml promises is what the matrix of versions runs."""

from __future__ import annotations

from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from tests.versions import report
from tests.versions.__main__ import SLURM_TESTS, TESTS, files
from tests.versions.environments import PAIRS, REPOSITORY, other_requirements, tomllib  # type: ignore[attr-defined]

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
REQUIRED = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}


def test_the_matrix_runs_each_python_and_both_ends_of_torchs_range() -> None:
    """A newer minor version of torch is allowed once the matrix has it."""
    classifiers = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert classifiers == [pair.python for pair in PAIRS]
    torch = REQUIRED["torch"].specifier
    assert f">={PAIRS[0].torch}" in str(torch) and all(pair.torch in torch for pair in PAIRS)
    newest = max(Version(pair.torch) for pair in PAIRS)
    assert f"{newest.major}.{newest.minor + 1}.0" not in torch


def test_the_matrix_names_files_that_exist() -> None:
    """A test that was moved would otherwise fail all rows, which take most of an hour."""
    missing = [name for name in files([*TESTS, *SLURM_TESTS]) if not (REPOSITORY / name).is_file()]
    assert not missing


def test_the_oldest_environment_has_the_lower_bounds() -> None:
    """And the one with constraints.txt takes the ranges."""
    wanted = other_requirements(PAIRS[0], PROJECT)
    assert "submitit==1.5.1" in wanted and "numpy==1.23" in wanted and not any(">" in word for word in wanted)
    assert "submitit<1.6,>=1.5.1" in {str(Requirement(word)) for word in other_requirements(PAIRS[-1], PROJECT)[:5]}


def test_the_page_says_what_failed_and_what_was_not_run() -> None:
    """Nothing of a row is left out."""
    versions = dict.fromkeys(report.PACKAGES, "1.0")
    rows: dict[str, dict[str, Any]] = {
        PAIRS[0].name: {"versions": versions, "passed": 3, "skipped": 1, "failed": ["test_a"], "slurm": "passed"},
        PAIRS[1].name: {"not_run": "no Python 3.11 here"},
        "slurm-sid": {"versions": {"slurm": "26.05.5"}, "passed": 2, "skipped": 0, "failed": []},
    }
    made = report.tables({name: {**row, "date": "2026-11-21"} for name, row in rows.items()})
    page = "\n".join(made.values())
    assert "| 3 | 1 | test_a | passed | 2026-11-21 |" in page and "not run: no Python 3.11 here" in page
    assert "| 26.05.5 | Debian sid | 2 | 0 | 0 | 2026-11-21 |" in page
