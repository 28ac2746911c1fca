"""What pyproject.toml promises is what the matrix of versions runs."""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.version import Version

from tests.versions.__main__ import SLURM_TESTS, TESTS, files
from tests.versions.environments import PAIRS, REPOSITORY, tomllib  # type: ignore[attr-defined]

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
