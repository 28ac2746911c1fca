"""Scripts that save and resume as public repositories do, unchanged, through preemptions and kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.history.codec import sentence
from clusterddp.jobdef import kinds
from clusterddp.rundir.run_directory import RunDirectory
from tests.histories import event_of
from tests.runs_on_disk import outcome_of
from tests.waiting import preempt_local, story, wait_until

SCRIPT = Path(__file__).parents[1] / "scripts" / "like_repositories.py"


def start(
    run: RunDirectory, style: str, *options: str, script: tuple[str, ...] = (), ranks: int = 1
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "clusterddp.submit",
        str(SCRIPT),
        "--local",
        "--run-dir",
        str(run),
        "--device",
        "cpu",
    ]
    command += ["--nodes", str(ranks), "--gpus", "1", *options, "--", "--style", style, *script]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=run.path.parent, text=True, **pipes)


def train(run: RunDirectory, style: str, *options: str, script: tuple[str, ...] = (), ranks: int = 1) -> str:
    """Trains to the end; all that the command printed."""
    return start(run, style, *options, script=script, ranks=ranks).communicate(timeout=200)[0]


def said(run: RunDirectory, name: str) -> list[str]:
    return [sentence(event_of(event)) or "" for event in run.events() if event["event"] == name]


def outcome(run: RunDirectory) -> str:
    return str((outcome_of(run) or {}).get("state"))


def test_one_file_preempted_before_its_first_checkpoint_and_killed_in_every_later_attempt(run: RunDirectory) -> None:
    """Like nanoGPT, by its preset: the attempts 1 to 4 fail in a row, each with a new checkpoint."""
    out, kills = run.path / "out", "1:15,2:25,3:35,4:45"
    process = start(run, "nanogpt", "--preset", "nanogpt", script=("--steps", "50", "--wait", "0:5", "--die", kills))
    wait_until(lambda: (out / "reached-0-5").exists(), "step 5")
    preempt_local(run)
    printed = process.communicate(timeout=200)[0]
    assert outcome(run) == "completed", printed
    assert "done with weight 50" in (run.attempt_logs(5) / "rank-0.out").read_text()
    before, *later = said(run, "own_resume")
    assert before == (
        "attempt 1: no complete checkpoint matches out/ckpt.pt. The script starts from the beginning. If it has saved "
        "a checkpoint, correct `resume.checkpoint` and submit with --change"
    )
    assert [line.partition(", saved")[0] for line in later] == [
        f"attempt {number}: the newest checkpoint of the script is out/ckpt.pt" for number in (2, 3, 4, 5)
    ]
    assert all(line.endswith("before the stop. The script starts with --init_from=resume") for line in later)
    assert [line.partition(", which")[0] for line in said(run, "own_checkpoint_read")] == [
        f"attempt {number}: resumed from out/ckpt.pt" for number in (2, 3, 4, 5)
    ]
    assert len(said(run, "own_checkpoint")) == 5
    assert "check whether memory ran out. The newest checkpoint is out/ckpt.pt. Restarting" in said(run, "restarted")[0]


@pytest.mark.parametrize(
    ("style", "pattern", "option", "names"),
    [
        ("torchvision", "out/checkpoint-*.pth", "--resume", ("checkpoint-20.pth", "checkpoint-25.pth: truncated")),
        (
            "accelerate",
            "out/step_*",
            "--resume_from_checkpoint",
            ("step_20", "step_25: random_states_#.pkl is missing"),
        ),
    ],
)
def test_the_newest_complete_one_of_several(
    run: RunDirectory, style: str, pattern: str, option: str, names: tuple[str, str]
) -> None:
    """Relative to the folder that the run was submitted in; the one that was being written is passed over."""
    args = f'resume.args=[{option}, "{{checkpoint}}"]'
    train(run, style, "--set", f"resume.checkpoint={pattern}", "--set", args, script=("--die", "0:25"))
    assert outcome(run) == "completed", story(run)
    path = run.path.parent / "out" / names[0]
    (line,) = said(run, "own_resume")
    assert f"{path}, saved" in line and f"starts with {option} {path}. Not used: " in line and names[1] in line
    assert f"resumed from {path}" in said(run, "own_checkpoint_read")[0]
    log = (run.attempt_logs(1) / "rank-0.out").read_text()
    assert "starts at step 20" in log and "done with weight 30" in log


def test_each_node_gets_its_own_number_in_arguments_and_variables(run: RunDirectory) -> None:
    """Like detectron2's --machine-rank."""
    numbers = (
        "--machine-rank",
        "{node_rank}",
        "--num-machines={nodes}",
        "--dist-url",
        "tcp://{master_addr}:{master_port}",
    )
    train(run, "detectron2", "--set", "env.OUTPUT={run_dir}/{node_rank}{local_rank}", script=numbers, ranks=2)
    assert outcome(run) == "completed", story(run)
    for rank in (0, 1):
        log = (run.attempt_logs(0) / f"rank-{rank}.out").read_text()
        assert f"machine {rank} of 2 at tcp://127.0.0.1:" in log and f", {run}/{rank}0\n" in log


def test_a_failure_before_any_progress_names_the_arguments_that_were_added(run: RunDirectory) -> None:
    """Whether the file exists: here the argument names another one."""
    options = ("--set", "resume.checkpoint=out/*.pth", "--set", 'resume.args=[--resume, "{checkpoint}.gz"]')
    printed = train(run, "torchvision", *options, script=("--die", "0:15"))
    assert outcome(run) == "failed", story(run)
    path = run.path.parent / "out" / "checkpoint-10.pth"
    lines = " ".join(printed.replace("\n|", "").split())
    assert f"`resume` added `--resume {path}.gz` for {path}. Check that the script can load it" in lines


def test_the_presets_that_come_with_clusterddp_are_in_the_package() -> None:
    assert {"nanogpt", "timm", "torchvision", "mae"} <= set(kinds.preset_names())
