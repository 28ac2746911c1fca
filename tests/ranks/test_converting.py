"""The guide's first script and its torchrun script, before and after the conversion, do what the pages say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.preempting import preempting

README = (
    next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists()) / "README.md"
)
GUIDE = README.parent / "docs" / "guide"
SUBMIT = [sys.executable, "-m", "clusterddp", "submit", "train.py", "--local", "--device", "cpu", "--gpus", "2"]


def block(page: str, start: str) -> str:
    """The page's block of Python that begins with ``start``."""
    (found,) = re.findall(rf"```python\n({re.escape(start)}\n.*?)```", (GUIDE / page).read_text(), re.DOTALL)
    return str(found)


def submit(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "train.py").write_text(script)
    command = [*SUBMIT, "--run-dir", "run", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def printed(folder: Path) -> list[str]:
    """What rank 0 has printed, in all attempts."""
    run = RunDirectory(folder / "run")
    return [line for n in run.attempts() for line in (run.attempt_logs(n) / "rank-0.out").read_text().splitlines()]


@pytest.mark.product
def test_the_first_run_ends_as_the_page_shows(tmp_path: Path) -> None:
    _, shown = output_on_page(GUIDE / "first-run.md", "train.py")
    done = submit(tmp_path / "first", block("first-run.md", "import torch"))
    assert printed(tmp_path / "first") == ["done after 600 steps"]
    assert in_common(done, shown) == shown


@pytest.mark.product  # test_untouched.py has other scripts that are not changed
def test_the_torchrun_script_is_preempted_and_continues_as_the_readme_shows(tmp_path: Path) -> None:
    options, shown = output_on_page(README, "main.py")
    with preempting("epoch 4"):
        done = submit(tmp_path / "plain", block("converting.md", "# before"), *options)
    assert in_common(done, shown) == shown
    assert [line.partition(":")[0] for line in printed(tmp_path / "plain")] == [f"epoch {n}" for n in range(10)]


def output_on_page(page: Path, script: str) -> tuple[list[str], list[str]]:
    """The options after the number of GPUs of the command that submits the script, and the lines of its output."""
    text = page.read_text().replace("\\\n", "")
    found = re.search(rf"^\$ clusterddp submit {script} .*--gpus 2(.*)\n([^$]*?)```", text, re.MULTILINE)
    assert found is not None
    lines = [neutral(line) for line in found[2].splitlines() if line != "..."]
    assert len(lines) > 3
    return found[1].split(), lines


def in_common(done: subprocess.CompletedProcess[str], shown: list[str]) -> list[str]:
    """The lines of the output that the page shows, too. A busy machine may add lines."""
    lines = map(neutral, [*done.stderr.splitlines(), *done.stdout.splitlines()])
    return sorted((line for line in lines if line in shown), key=shown.index)


def neutral(line: str) -> str:
    """Losses, processes, hosts and folders differ from run to run."""
    return re.sub(r"\d+\.\d+|/\S*/\S*|\(process.*|^\w+(?=: 1 node)", "#", line)


@pytest.mark.parametrize("epochs", [3, pytest.param(20, marks=pytest.mark.product)])
def test_the_converted_script_prints_the_losses_of_torchrun(tmp_path: Path, epochs: int) -> None:
    """Also when it is preempted: in 400 steps, so that the preemption comes before the end."""
    stops = [25] if epochs == 20 else []
    with preempting(*stops):
        submit(tmp_path / "run", block("converting.md", "# after"), "--", "--epochs", str(epochs))
    assert RunDirectory(tmp_path / "run" / "run").attempts() == ([0, 1] if stops else [0])
    script = tmp_path / "train.py"
    script.write_text(block("converting.md", "# after"))
    under_torchrun = ddp.run(script, "--epochs", epochs, ranks=2, folder=tmp_path / "out")  # which sets its variables
    lines = [line for line in under_torchrun.output(0).splitlines() if line.startswith("epoch ")]
    assert printed(tmp_path / "run") == lines and len(lines) == epochs


@pytest.mark.product  # test_launchers.py has another script under torchrun
def test_the_script_runs_under_torchrun_before_its_conversion(tmp_path: Path) -> None:
    """Its exit code is not checked: gloo may abort a plain script as it exits."""
    (tmp_path / "train.py").write_text(block("converting.md", "# before"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["epoch 0", "epoch 1", "epoch 2"]
