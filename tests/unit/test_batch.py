"""The batch script, a pure function of the job and the run directory, and what it requests from the cluster."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from submitit import SlurmExecutor

from clusterddp.errors import JobDefinitionError, UsageError
from clusterddp.jobdef.job import Job, Timeouts
from clusterddp.jobdef.load import from_values
from clusterddp.process import PACKAGE_FOLDER, module_command
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.batch import batch_script, check_micro, submit
from tests.fake_slurm import FakeSlurm
from tests.wording import raises

GOLDEN = f"""\
#!/bin/bash

# Parameters
#SBATCH --account=vision
#SBATCH --chdir=/work
#SBATCH --comment='two words'
#SBATCH --cpus-per-task=4
#SBATCH --error=/runs/net-0/logs/job-%j.log
#SBATCH --exclusive
#SBATCH --gpus-per-node=a100:8
#SBATCH --job-name=net
#SBATCH --mem=64G
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/runs/net-0/logs/job-%j.log
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@30
#SBATCH --time=1-00:00:00

# setup
trap '' TERM
module load cuda

# command
export SUBMITIT_EXECUTOR=slurm
exec /venv/bin/python -u -c 'import sys; sys.path = [*filter(None, sys.path), "{PACKAGE_FOLDER}"]; import runpy; \
runpy.run_module("clusterddp.supervisor", None, "__main__", True)' /runs/net-0
"""


def script(job: Job, run: str = "/runs/net-0") -> str:
    return batch_script(job, RunDirectory(run), Path("/work"))


def test_the_whole_script_is_as_a_cluster_engineer_would_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """TERM is ignored before srun exists, the supervisor replaces the shell, nothing hides its exit code. It keeps the
    interpreter of the submission, whatever that of the ranks is."""
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    job = Job(
        name="net", script="/work/net.py", nodes=2, gpus_per_node=8, gpu_type="a100", time_s=86400, partition="gpu",
        account="vision", mem="64G", cpus_per_task=4, setup=("module load cuda",), python="$ENV/python",
        sbatch={"comment": "two words", "exclusive": True, "hold": False},
    )  # fmt: skip
    assert script(job).rstrip("\n") + "\n" == GOLDEN


def test_slurm_requeues_no_job_of_a_run_that_is_not_to_continue() -> None:
    """Neither after a preemption nor after a lost node."""
    lines = batch_script(Job(name="x", module="x", continues=False), RunDirectory("/r"), Path("/work")).splitlines()
    assert "#SBATCH --no-requeue" in lines and "#SBATCH --requeue" not in lines


def test_an_expedited_requeue_is_requested_of_sbatch() -> None:
    text = script(Job(name="net", script="/net.py", expedite_requeue=True))
    assert "#SBATCH --requeue=expedite\n" in text


def test_the_script_needs_no_slurm_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what submitit's private method is used for, with the arguments that all allowed versions take."""
    monkeypatch.setenv("PATH", str(tmp_path))
    text = script(Job(name="net", script="/net.py"), run=str(tmp_path / "net-0"))
    assert list(tmp_path.iterdir()) == []
    assert text.index("trap '' TERM") < text.index("exec ") and "srun" not in text
    assert list(inspect.signature(SlurmExecutor._make_submission_file_text).parameters) == ["self", "command", "uid"]


def test_a_job_may_start_sooner_with_a_shorter_time_limit() -> None:
    """Slurm chooses a limit between the two."""
    text = script(from_values({"module": "net", "time": "24:00:00", "time_min": "4:00:00"}))
    assert "#SBATCH --time=1-00:00:00\n" in text and "#SBATCH --time-min=0-04:00:00\n" in text


@pytest.mark.parametrize(("key", "option"), [("gpu_request", "gpus"), ("mem", "mem")])
def test_what_is_not_to_be_requested_is_not(key: str, option: str) -> None:
    """As sites require that refuse the options."""
    values = {"module": "net", "gpus_per_node": "a100:8", "mem": "8G"}
    assert f"--{option}" in script(from_values(values))
    assert f"--{option}" not in script(from_values({**values, key: "none"}))


def test_cpu_jobs_request_no_gpu_and_a_missing_limit_is_left_to_the_partition() -> None:
    """submitit's default would be five minutes."""
    text = script(Job(name="net", script="/net.py", device="cpu", gpus_per_node=4))
    assert "gpus" not in text
    assert "--time" not in text
    assert "--ntasks-per-node=4" in text


def test_a_rank_with_several_gpus_is_one_task() -> None:
    """All of the node's GPUs are requested, and every task sees them all."""
    text = script(Job(name="net", script="/net.py", gpus_per_node=8, gpus_per_rank=2))
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "#SBATCH --ntasks-per-node=4\n" in text
    assert "gpus-per-task" not in text and "gpu-bind" not in text


@pytest.mark.parametrize(
    ("gpu_type", "other", "gres"),
    [("a100", {}, "gpu:a100:8"), (None, {"gres": "nvme:1"}, "gpu:8,nvme:1"), (None, {"gres": False}, "gpu:8")],
)
def test_gpus_are_requested_as_the_site_expects(gpu_type: str | None, other: dict[str, str | bool], gres: str) -> None:
    """By --gres, beside other resources of the job definition; the script has no --gpus-per-node then."""
    job = Job(name="net", script="/net.py", gpus_per_node=8, gpu_type=gpu_type, gpu_request="gres", sbatch=other)
    text = script(job)
    assert f"#SBATCH --gres={gres}\n" in text and "gpus" not in text


def test_a_range_of_nodes_is_slurms_to_choose_from() -> None:
    """Also for the job's later starts, and for a resubmission, which take the same script.

    The tasks of the fewest nodes would be a limit on the number of nodes.
    """
    job = Job(name="net", script="/net.py", nodes=4, min_nodes=2, gpus_per_node=8, cpus_per_task=3)
    text = script(job)
    assert "#SBATCH --nodes=2-4\n" in text
    assert "#SBATCH --cpus-per-task=24\n" in text
    assert "ntasks" not in text


@pytest.mark.parametrize(("time_s", "notice"), [(120, 15), (86400, 30), (None, 30)])
def test_slurms_own_warning_is_a_late_fallback_and_leaves_a_short_limit_its_time(
    time_s: int | None, notice: int
) -> None:
    """With a limit of two minutes, a warning two minutes before the end would come at the start."""
    job = Job(name="net", script="/net.py", time_s=time_s, timeouts=Timeouts(notice_s=120))
    assert f"--signal=USR2@{notice}\n" in script(job)


def test_a_folder_with_blanks_and_quotes_stays_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shell words are quoted."""
    monkeypatch.setattr(sys, "executable", "/a b/python")
    text = script(Job(name="net", script="/net.py"), run="/runs/it's mine")
    assert text.splitlines()[-1].startswith("exec '/a b/python' -u -c ")
    assert """'/runs/it'"'"'s mine'""" in text


def test_a_job_excludes_the_nodes_of_its_definition_and_those_to_avoid(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """sbatch's option replaces the line of the script."""
    fake_slurm["sbatch"] = "41"
    submit(Job(name="net", script="/net.py", exclude="n[1-2]"), RunDirectory(tmp_path), tmp_path, ["n3"])
    assert fake_slurm.asked == [f"sbatch --parsable --exclude=n[1-2],n3 {tmp_path / 'job.sbatch'}"]


# --- No value becomes a command or an option in the batch script, read by a real bash


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
        python = base / f"bin{python_name}" / "python"
        run = RunDirectory(base / f"run{run_name}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", str(python))
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
    check_with_bash(base, text, python, run)


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
    with raises(UsageError):
        batch_script(job, RunDirectory(tmp_path / name), Path("/work"))
    done = subprocess.run(
        [sys.executable, "-m", "clusterddp.submit", "-m", "net", "--dry-run", "--run-dir", name],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("values", [{"python": "-c"}, {"partition": "a b"}, {"account": "a'b"}, {"job_name": "$(x)"}])
def test_what_would_be_an_option_or_several_words_is_refused(values: dict[str, str]) -> None:
    """Before anything is written."""
    with pytest.raises(JobDefinitionError):
        from_values({"module": "net", **values})


# --- Whether the program of a job with a range of nodes can split its samples


def job(script: Path | None = None, **values: object) -> Job:
    named = {"name": "x", "script": str(script) if script else None, "gpus_per_node": 4}
    return Job(**{**named, **values})  # type: ignore[arg-type]


CALLS = "for batch in run.steps(9):\n    for micro in run.micro(batch): pass\n"
IMPORTS = ["import loop", "from loop import fit", "import inner.loop", "from inner import loop", "from . import loop"]


def test_a_range_needs_a_script_that_takes_pieces(tmp_path: Path) -> None:
    """One sentence that says what to write; a word in a comment, or an attribute, is no call."""
    script = tmp_path / "train.py"
    script.write_text("# run.micro(batch)\nmicro = print\nmicro(run.micro)\n")
    assert check_micro(job(script, nodes=2)) == []
    with raises(UsageError):
        check_micro(job(script, nodes=2, min_nodes=1))
    script.write_text(CALLS)
    assert check_micro(job(script, nodes=2, min_nodes=1)) == []
    script.write_text("if x = 1: pass\n")
    with pytest.raises(UsageError, match="train.py:1: "):  # Python's words differ
        check_micro(job(script, nodes=2, min_nodes=1))


@pytest.mark.parametrize("line", IMPORTS)
def test_the_call_may_be_in_a_file_that_the_script_imports(tmp_path: Path, line: str) -> None:
    """Next to it, or in a package there; files that import each other are read once."""
    for folder in (tmp_path, tmp_path / "inner"):
        folder.mkdir(exist_ok=True)
        (folder / "loop.py").write_text(f"import train\n{CALLS}")
    (tmp_path / "train.py").write_text(f"import torch, os.path\nfrom nowhere import x\n{line}\n")
    assert check_micro(job(tmp_path / "train.py", nodes=2, min_nodes=1)) == []


def test_a_module_is_looked_for_where_it_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed module elsewhere is not checked, and a message says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__main__.py").write_text(CALLS)
    (tmp_path / "pkg" / "plain.py").write_text("import torch\n")
    assert check_micro(job(module="pkg", nodes=2, min_nodes=1)) == []
    with raises(UsageError):
        check_micro(job(module="pkg.plain", nodes=2, min_nodes=1))
    assert "clusterddp did not check" in check_micro(job(module="installed.train", nodes=2, min_nodes=1))[0]
