"""What is no file, or seems to have no end, where a run has its files: in a folder that others can write to, it must
not keep a command from ending, nor hide other runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.cli.report import collected
from clusterddp.rundir.run_directory import RunDirectory
from tests.runs_on_disk import BEGAN, event, of_job, recorded_run, started, steps

FILES = [
    "job.yaml", "events.jsonl", "metrics.jsonl", "outcome.json", "timing.jsonl", "private/submitted.json",
    "private/attempt-0/holder.json", "logs/attempt-0/rank-0.out",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two runs, neither of which has a job that Slurm would be asked about."""
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("net-0", "net-1"):
        history = [started(), event("training", step=0), event("completed", step=9, attempts=1, reason="done")]
        recorded_run(tmp_path / name, history, metrics=steps(range(9), loss=0.5), holder=of_job())
    return tmp_path


def run_command(*words: str) -> object:
    with pytest.raises(SystemExit) as exited:
        main(list(words))
    return exited.value.code


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(
    folder: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waits for a writer, who never comes. Lists have the other run, and one run's commands say what is wrong."""
    pipe = folder / "net-1" / name
    pipe.unlink(missing_ok=True)
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)
    assert run_command("list", str(folder)) == 0
    assert "net-0" in capfd.readouterr().out
    for words in (["status"], ["status", "--json"], ["logs"]):
        run_command(*words, str(folder / "net-1"))
    collected([RunDirectory(folder / "net-1")], BEGAN + 60)
    assert "Traceback" not in capfd.readouterr().err
    pipe.unlink()
