"""No value becomes a command or an option in the batch script, read by a real bash."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterddp.errors import JobDefinitionError, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import from_values
from clusterddp.process import module_command
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.batch import batch_script

FULL = "CLUSTERDDP_TEST_PRODUCT" in os.environ
PIECES = [
    *("$(touch canary)", "`touch canary`", "; touch canary;", "\ntouch canary\n", "&& touch canary", "| touch canary"),
    *("'", '"', "\\", "${HOME}", "!x", "*", "~", "#", " #", "--wrap=x", "-", "%j", "%%", "é", "\u2028", "\x85", "\r"),
    *("\0", "\t", " ", "\x1b[2J", "a", "EOF", "\n#SBATCH --exclusive\n", "=", ",", "[", "]", "\ud800", "$'\\n'"),
]
NASTY = st.lists(st.sampled_from(PIECES) | st.characters(), min_size=1, max_size=5).map("".join)
#: What a folder can be called, and a batch script can hold; the rest is refused, which another test looks at.
FOLDERS = NASTY.map(lambda name: "".join(c for c in name if c.isprintable() and c not in "/\\%")[:40])


@settings(
    max_examples=1000 if FULL else 60,
    derandomize=not FULL,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.dictionaries(st.sampled_from(["job_name", "partition", "account", "nodelist", "constraint"]), NASTY, max_size=1),
    st.dictionaries(st.sampled_from(["comment", "mail-user", "licenses"]), NASTY, max_size=2),
    st.tuples(FOLDERS, FOLDERS, FOLDERS),
)
def test_every_value_arrives_as_it_is_or_is_refused(
    tmp_path_factory: Any, values: dict[str, str], options: dict[str, str], folders: tuple[str, str, str]
) -> None:
    """One word on its #SBATCH line, one word of the last command; bash runs nothing else."""
    base = tmp_path_factory.mktemp("x")
    run_name, work_name, python_name = folders
    try:
        job = from_values({"module": "net", "device": "cpu", **values, "sbatch": options})
        job = dataclasses.replace(job, python=str(base / f"bin{python_name}" / "python"))
        run = RunDirectory(base / f"run{run_name}")
        text = batch_script(job, run, base / f"work{work_name}")
    except JobDefinitionError:
        return
    lines = text.splitlines()
    directives = [shlex.split(line.removeprefix("#SBATCH ")) for line in lines if line.startswith("#SBATCH")]
    given = dict(word.removeprefix("--").partition("=")[::2] for words in directives for word in words)
    assert all(len(words) == 1 for words in directives)
    for name, value in {"job-name": job.name, **job.sbatch, "chdir": str(base / f"work{work_name}")}.items():
        assert given[name] == value
    assert given["output"] == f"{run.logs}/job-%j.log"
    assert set(given) <= {
        *("job-name", "output", "error", "chdir", "nodes", "ntasks-per-node", "requeue", "open-mode", "signal"),
        *("partition", "account", "nodelist", "mem", "constraint", *job.sbatch),
    }
    check_with_bash(base, text, Path(job.python or ""), run)


def check_with_bash(base: Path, text: str, python: Path, run: RunDirectory) -> None:
    """Runs the script where `python` writes down its arguments."""
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {shlex.quote(str(base / 'seen'))}\n")
    python.chmod(0o755)
    (base / "script").write_text(text)
    empty = base / "empty"
    empty.mkdir()
    done = subprocess.run(
        ["bash", str(base / "script")], cwd=empty, capture_output=True, env={"PATH": os.environ["PATH"]}, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    seen = (base / "seen").read_bytes().decode().split("\0")[:-1]
    assert seen == [*module_command("clusterddp.supervisor", str(python))[1:], str(run)]
    assert not list(empty.iterdir())


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x1bb", "a\u2028b", "a\\b", "a%j"])
def test_a_run_directory_that_no_batch_script_can_hold_is_refused(name: str, tmp_path: Path) -> None:
    """Whether it was named, or follows from the folder around it."""
    job = Job(name="net", module="net", device="cpu")
    with pytest.raises(UsageError, match="not allowed in a batch script|Slurm replaces"):
        batch_script(job, RunDirectory(tmp_path / name), Path("/work"))
    done = subprocess.run(
        [sys.executable, "-m", "clusterddp.submit", "-m", "net", "--dry-run", "--run-dir", name],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert list(tmp_path.iterdir()) == []
