"""A run continues with another number of ranks: the same global batches in the same order, and equal losses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import Training, events_of
from tests.waiting import story, wait_for_step

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "tests/scripts/elastic.py"
STEPS, GLOBAL_BATCH, SAMPLES = 120, 24, 100
SHAPE = "--gpus 1 --device cpu --set checkpoint.every=never".split()
LARGE = ["--batch-size", str(GLOBAL_BATCH // 2)]
KEPT = ["--set", f"global_batch={GLOBAL_BATCH}"]


def local(run: RunDirectory, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clusterddp.submit", "--local", "--run-dir", str(run), *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run that keeps its ranks."""
    run = RunDirectory(tmp_path_factory.mktemp("elastic") / "run")
    done = local(run, SCRIPT, "--nodes", "2", *SHAPE, "--", *LARGE)
    assert done.returncode == 0, done.stderr
    return run


def check_same_learning(run: RunDirectory, reference: RunDirectory) -> None:
    """The same samples step by step, each once per epoch; the losses agree but for rounding."""
    assert [line["step"] for line in read_lines(run.metrics_file)] == list(range(STEPS)), story(run)
    taken, expected = ([json.loads(line) for line in open(r.path / "samples.jsonl")] for r in (run, reference))
    assert taken == expected
    stream = [index for step in taken for index in step]
    assert len(stream) == STEPS * GLOBAL_BATCH
    for start in range(0, len(stream), SAMPLES):
        epoch = stream[start : start + SAMPLES]
        assert len(set(epoch)) == len(epoch)
    losses, wanted = ([line["loss"] for line in r.metrics()] for r in (run, reference))
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert sum(wanted[-5:]) < 0.6 * sum(wanted[:5])


def reported_ranks(run: RunDirectory) -> list[Any]:
    """The ranks of each attempt, and what the history says of each resume."""
    return [*(e["ranks"] for e in events_of(run, "started")), *(e["inexact"] for e in events_of(run, "resumed"))]


@pytest.mark.product  # test_a_run_uses_the_nodes_that_slurm_allocates has the same on a real Slurm
def test_a_local_run_goes_from_two_ranks_to_one_and_back(tmp_path: Path, on_two_ranks: RunDirectory) -> None:
    """The second attempt takes each batch in two pieces; the history calls both resumes inexact.

    The global batch is the first attempt's, 12 samples for each of two ranks; to name it later changes nothing.
    """
    run = RunDirectory(tmp_path / "run")
    first = local(run, SCRIPT, "--nodes", "2", *SHAPE, "--", *LARGE, "--stops", "40,80")
    assert first.returncode == 130, first.stderr
    second = local(run, "--change", "--nodes", "1", *KEPT)
    assert second.returncode == 130, second.stderr
    assert "repeating 0 steps. The resume is not bit-exact: 1 rank instead of 2" in second.stderr
    third = local(run, "--change", "--nodes", "2")
    assert third.returncode == 0, third.stderr
    assert reported_ranks(run) == [2, 1, 2, ["1 rank instead of 2"], ["2 ranks instead of 1"]]
    check_same_learning(run, on_two_ranks)


def test_a_rank_share_larger_than_the_batch_size_is_reported_once(tmp_path: Path) -> None:
    """A script that never calls run.micro() gets its whole share, if its memory allows."""
    run = RunDirectory(tmp_path / "run")
    done = local(run, SCRIPT, "--nodes", "1", *SHAPE, *KEPT, "--", "--steps", "3", "--whole")
    assert done.returncode == 0, done.stderr
    words = "each rank takes 24 samples at once, more than its batch_size of 6, because the script does not call"
    assert done.stderr.count(words) == 1
    assert len(events_of(run, "microbatching_skipped")) == 1


def submit(cluster: Cluster, run: RunDirectory, nodes: str, *script: str, options: Sequence[str] = ()) -> str:
    command = [cluster.python, "-m", "clusterddp.submit", "--run-dir", run.path, SCRIPT, "--nodes", nodes]
    done = cluster.run([*command, "--partition", "low", *SHAPE, *KEPT, *options, "--", *script], cwd=cluster.source)
    return done.stdout.strip()


@pytest.mark.product
def test_a_run_uses_the_nodes_that_slurm_allocates(cluster: Cluster, runs: Path, on_two_ranks: RunDirectory) -> None:
    """Two nodes; after a preemption one, the others being drained; after the next two again: a new job each time.

    Each rank takes its share in pieces, as its batch size is smaller than the reference's.
    """
    run = RunDirectory(runs / "run")
    training = Training(cluster, runs, run, submit(cluster, run, "1-2", "--pause", "0.05"))
    wait_for_step(run, 20)
    others = cluster.nodes[1:]
    cluster.root(["scontrol", "update", f"nodename={','.join(others)}", "state=drain", "reason=test"])
    cluster.preempt(seconds=0.1, nodes=1)
    training.wait_for_attempt(1)
    training.wait(lambda: events_of(run, "resumed"), "attempt 1 to resume")
    wait_for_step(run, events_of(run, "resumed")[-1]["step"] + 20)
    cluster.root(["scontrol", "update", f"nodename={others[0]}", "state=resume"])
    cluster.preempt(seconds=0.1, nodes=2)
    assert training.finish() == "completed", story(run)
    assert reported_ranks(run) == [2, 1, 2, ["1 rank instead of 2"], ["2 ranks instead of 1"]]
    assert len(events_of(run, "resubmitted")) == 2
    check_same_learning(run, on_two_ranks)
    shown = cluster.run([cluster.python, "-m", "clusterddp", "status", run.path]).stdout
    assert "1 to 2 nodes x 1 process per node = 1 to 2 ranks" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["jobs/digits.yaml", "--nodes", "2-3", "--set", "global_batch=96"], "never calls run.micro()"),
        (["--nodes", "2-4", SCRIPT, "--set", "global_batch=100"], "Choose 96 or 108"),
        (["--nodes", "5-9", SCRIPT, "--set", "global_batch=2520"], "has 3 nodes, fewer than --nodes 5-9"),
    ],
)
def test_an_impossible_range_is_refused_at_submit(cluster: Cluster, runs: Path, options: list[str], words: str) -> None:
    """In a sentence; nothing is left behind."""
    run = RunDirectory(runs / "run")
    command = [cluster.python, "-m", "clusterddp.submit", "--device", "cpu", "--run-dir", run.path, *options]
    refused = cluster.run(command, cwd=cluster.source, check=False)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not run.path.exists()
