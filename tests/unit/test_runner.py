"""``python -m tests``: a few tests that fail are run once more, and said to have been."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = """
import pathlib
import pytest

@pytest.mark.slurm
def test_on_a_cluster():
    pass

@pytest.mark.parametrize("number", range({failing}))
def test_other(number):
    tried = pathlib.Path(f"tried-{{number}}")
    again = tried.exists()
    tried.touch()
    assert again and {right_then}
"""


@pytest.mark.parametrize(
    ("failing", "right_then", "code", "said"),
    [
        (1, True, 0, "passed only at the second try: test_some.py::test_other[0]"),
        (2, False, 1, "failed again: test_some.py::test_other[0], test_some.py::test_other[1]"),
        (5, True, 1, None),
    ],
)
def test_a_few_tests_that_fail_have_a_second_try_and_are_named(
    tmp_path: Path, failing: int, right_then: bool, code: int, said: str | None
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slurm\n")
    (tmp_path / "test_some.py").write_text(TESTS.format(failing=failing, right_then=right_then))
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from tests.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{failing} failed" in done.stdout, done.stdout
    assert ("once more, with nothing beside" in done.stdout) == (said is not None), done.stdout
    assert said is None or said in done.stdout, done.stdout
