"""Every job of jobs/ on stand-in devices, with few steps: it ends well, and each rank uses its own device only."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.gpu.conftest import GPUs
from tests.packages import require
from tests.preempted import attempt
from tests.ranks.test_local import submit

JOBS = ddp.REPOSITORY / "jobs"
WITH_GRU = Path(__file__).with_name("scripts") / "with_gru.py"
#: By job: the script's arguments, and what rank 0 prints. Digits are trained in test_exact_resume.py.
CASES = {
    "basic": ("--steps 3", r"3 steps: the gradients of 2 ranks were equal"),
    "bucketed_text": ("--steps 2 --lines 392 --global-batch 16 --width 8", r"392 lines of"),
    "charlm": ("--steps 2 --width 16 --layers 1 --batch-size 4", r"held-out"),
    "checkpoint": ("--steps 3 --save-every 2", r"weights sum to"),
    "checkpoint_folder": ("--steps 3 --save-every 2", r"weights sum to"),
    "collectives": ("--sizes 1200 --repetitions 1", r"all_reduce"),
    "early_stopping": ("--steps 11", r"best held-out loss"),
    "gan": ("--steps 2", r"the generated points are at"),
    "hf_streaming": ("--steps 2 --files 2", r"2 files"),
    "scaling": ("--steps 2 --warm-up 1 --width 16", r"DDP itself costs"),
    "skew": ("--steps 2 --late 1", r"rank 1"),
    "weighted_digits": ("--steps 2 --workers 1", r"769 training images"),
}


def test_every_job_is_tested() -> None:
    digits = {"digits", "digits_folds", "model_parallel"}
    assert CASES.keys() | digits == {path.stem for path in JOBS.glob("*.yaml")}


@pytest.mark.parametrize("job", CASES)
def test_a_job_runs_on_devices(tmp_path: Path, job: str) -> None:
    if job == "hf_streaming":
        require("datasets")
    options, said = CASES[job]
    (tmp_path / "files").mkdir()
    arguments = [*options.split(), *(["--folder", tmp_path / "files"] if job.startswith("checkpoint") else [])]
    counts = {"STANDIN_CUDA_COUNTS": str(tmp_path / "counts"), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    script = [*([WITH_GRU] if job == "bucketed_text" else []), JOBS / f"{job}.py", *arguments]
    ranks = attempt(RunDirectory(tmp_path / "run"), script, (), ranks=2, devices=2, **counts).expect(0)
    assert re.search(said, ranks.output(0)), ranks.text()
    for rank in range(2):
        (written,) = (tmp_path / "counts").glob(f"rank-{rank}.*.json")
        assert list(json.loads(written.read_text())["contexts"]) == [str(rank)], written.read_text()


def test_a_model_on_two_devices_of_each_rank_runs(gpus: GPUs, tmp_path: Path) -> None:
    """By the job definition, whose ``gpus_per_rank`` is 2."""
    gpus(2)
    done = submit(RunDirectory(tmp_path / "run"), "jobs/model_parallel.yaml", "--gpus", "2", "--", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "cuda:0 and cuda:1: loss " in done.stderr


@pytest.mark.product  # unit/test_best_checkpoint.py has the checkpoint that is kept, test_exact_resume.py the digits
def test_a_fold_of_the_digits_keeps_its_best_checkpoint(gpus: GPUs, tmp_path: Path) -> None:
    """By the job definition: the best one by ``f1``, beside the last one."""
    gpus(2)
    run = RunDirectory(tmp_path / "run")
    script = "--steps 6 --folds 5 --fold 4 --eval-every 2".split()
    done = submit(run, "jobs/digits_folds.yaml", "--device", "cuda", "--", *script)
    assert done.returncode == 0 and "images, 2 ranks" in done.stderr, done.stderr
    scores = {line["step"] + 1: line["f1"] for line in run.metrics() if "f1" in line}
    best = max(scores, key=lambda step: (scores[step], step))
    assert {int(path.name.split(".")[0].removeprefix("step-")) for path in run.checkpoints.glob("step-*")} == {best, 6}
