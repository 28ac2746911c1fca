"""Each job definition in jobs/ as it stands, on a real Slurm: two nodes of one or two CPU ranks, the right result.

Only ``make test-product`` runs them there. Without Slurm, tests/ranks/test_jobs.py does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from clusterddp.data import randomness
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Shuffled
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import content_of
from tests.conftest import Clusters
from tests.ranks.test_jobs import FACTORS, ROW, held_out_loss, script
from tests.trained_alone import trained_alone
from tests.waiting import story, wait_for_outcome

#: By job: what is asked for beyond two nodes, and the script's arguments. charlm has its own global batch.
JOBS = {
    "basic": "--gpus 2 -- --steps 4",
    "checkpoint": "--gpus 2 -- --steps 5 --save-every 2",
    "checkpoint_folder": "--gpus 2 -- --steps 5 --save-every 2",
    "model_parallel": "--gpus 4 -- --steps 4",
    "collectives": "--gpus 2 -- --sizes 1200 --repetitions 2",
    "skew": "--gpus 2 -- --steps 2 --late 1",
    "scaling": "--gpus 2 -- --steps 3 --warm-up 1 --width 32",
    "digits": "--gpus 1 -- --steps 80",
    "charlm": "--gpus 2 -- --steps 12 --width 32 --layers 1",
}


#: Those of which tests/ranks/test_example_jobs.py trains all, on this machine.
LOCAL = {"bucketed_text", "early_stopping", "gan", "hf_streaming", "weighted_digits"}


@pytest.fixture(scope="module")
def result(clusters: Clusters) -> Iterator[Callable[[str], tuple[RunDirectory, str]]]:
    """Waits for a job's run: its folder and what rank 0 has printed. All are submitted at once; Slurm queues them."""
    cluster = clusters.get(Clusters.standard)
    folder = cluster.scratch / "jobs"
    folder.mkdir()
    os.chown(folder, cluster.uid, -1)
    for job, words in JOBS.items():
        command = [cluster.python, "-m", "clusterddp.submit", f"jobs/{job}.yaml", "--run-dir", folder / job]
        shape = ["--nodes", "2", "--device", "cpu", "--partition", "off"]
        cluster.run([*command, *shape, *words.split()], cwd=cluster.source)

    def wait(job: str) -> tuple[RunDirectory, str]:
        run = RunDirectory(folder / job)
        assert wait_for_outcome(run) == "completed", story(run)
        return run, (run.attempt_logs(0) / "rank-0.out").read_text()

    yield wait
    cluster.drain_jobs()


Result = Callable[[str], tuple[RunDirectory, str]]


def test_every_job_is_here() -> None:
    """Except the array's, which is not a run, and those that are tested without Slurm."""
    files = {path.stem for path in (Path(__file__).parents[2] / "jobs").glob("*.yaml")}
    assert files - {"digits_folds"} - LOCAL == JOBS.keys()
    assert files >= LOCAL


def newest_model(folder: Path) -> dict[str, torch.Tensor]:
    return dict(content_of(max(folder.glob("step-*")))["model"])


def seeded_as_by_init(seed: int = 0) -> None:
    randomness.seed_all(randomness.hash32("init", seed))


@pytest.mark.product
def test_basic(result: Result) -> None:
    """The weights are those of one process that trains on the joined batches, in the run's own order."""
    run, said = result("basic")
    assert "4 steps: the gradients of 4 ranks were equal, and those of the joined batch" in said
    seeded_as_by_init()
    dataset = TensorDataset(torch.randn(1000, 10), torch.randn(1000, 5))
    model = script("basic").ToyModel()
    loaders = [
        Loader(dataset, 20, order=Shuffled(), seed=0, rank=rank, world_size=4, global_batch=None) for rank in range(4)
    ]
    batches = zip(*(loader.batches(0) for loader in loaders), strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, shares in zip(range(4), batches, strict=False):
        inputs, targets = (torch.cat(column) for column in zip(*shares, strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    torch.testing.assert_close(newest_model(run.checkpoints), dict(model.state_dict()))


@pytest.mark.product
@pytest.mark.parametrize("job", ["checkpoint", "checkpoint_folder"])
def test_checkpoint(result: Result, job: str) -> None:
    """The last file holds what one process's training on the joined batches makes; all ranks have it, too."""
    run, _ = result(job)
    if job == "checkpoint":
        state = torch.load(run.path / "checkpoint.pt")
        assert state["step"] == 5
        saved = dict(state["model"])
        torch.manual_seed(0)
    else:
        saved = newest_model(run.path / "own" / "checkpoints")
        seeded_as_by_init()
    expected = torch.nn.Linear(10, 5)
    trained_alone(expected, 5, ranks=4, momentum=0.9)
    torch.testing.assert_close(saved, dict(expected.state_dict()))
    total = float(sum(part.sum() for part in saved.values()))
    for rank in range(4):
        output = (run.attempt_logs(0) / f"rank-{rank}.out").read_text()
        assert float(re.findall(r"weights sum to (\S+)", output)[0]) == pytest.approx(total, abs=2e-6)


@pytest.mark.product
def test_model_parallel(result: Result) -> None:
    """The mean loss of the last step is that of a model on one device."""
    said = re.search(r"cpu and cpu: loss (\S+) after 4 steps", result("model_parallel")[1])
    assert said is not None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    assert float(said[1]) == pytest.approx(trained_alone(model, 4, ranks=4), abs=2e-6)


@pytest.mark.product
def test_collectives(result: Result) -> None:
    """Each collective, and the pair of nodes, was checked and timed."""
    said = result("collectives")[1]
    assert "all results are correct" in said
    assert {row[0] for row in ROW.findall(said)} == FACTORS.keys() | {"nodes 0 and 1"}


@pytest.mark.product
def test_skew(result: Result) -> None:
    """Each step continues when the last rank has arrived, which itself does not wait."""
    run, said = result("skew")
    assert "all 2 steps are done, at the slowest rank's pace" in said
    waits = [[float(s) for s in re.findall(r"([\d.]+) s \(rank", line)] for line in re.findall("step . took .*", said)]
    assert len(waits) == 2 and all(len(wait) == 4 and min(wait) == wait[3] < max(wait) for wait in waits)
    assert len(run.metrics()) == 2


@pytest.mark.product
def test_scaling(result: Result) -> None:
    """A row for each number of ranks, with the throughput that its time means."""
    said = result("scaling")[1]
    number = r" +([\d.]+)"
    rows = re.findall(rf"^ *(\d+){number * 5}%$", said, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "4"], said
    for ranks, _, ddp_ms, _, rate, efficiency in rows:
        assert float(rate) == pytest.approx(int(ranks) * 64 / float(ddp_ms) * 1e3, rel=1e-2, abs=1)
        assert float(efficiency) == pytest.approx(100 * float(rows[0][1]) / float(ddp_ms), rel=1e-2, abs=0.1)


@pytest.mark.product
def test_digits(result: Result) -> None:
    """The accuracy that the ranks counted together is that of the saved weights, and high."""
    run, said = result("digits")
    found = re.search(r"test accuracy (\S+), macro-F1 \S+, 359 images, 2 ranks", said)
    assert found is not None, said
    digits = script("digits")
    model = digits.Net()
    model.load_state_dict(newest_model(run.checkpoints))
    images, labels = digits.load_digits()[1].tensors
    right = (model.eval()(images).argmax(1) == labels).double().mean().item()
    assert float(found[1]) == pytest.approx(right, abs=5e-5)
    assert right > 0.85


class Cpu:
    """A context, as far as a loss needs one."""

    device = torch.device("cpu")


@pytest.mark.product
def test_charlm(result: Result) -> None:
    """The held-out loss of all ranks together is that of the saved weights, and has decreased."""
    run, said = result("charlm")
    charlm = script("charlm")
    model = charlm.GPT(64, 32, 1, 4)
    model.load_state_dict(newest_model(run.checkpoints))
    text = charlm.load_text()
    blocks = charlm.Blocks(text[len(text) * 95 // 100 :], 64)
    loss, count = 0.0, 0
    with torch.no_grad():
        for piece in DataLoader(blocks, batch_size=256):
            loss += charlm.loss_of(Cpu, model, *piece).item() * len(piece[0])
            count += len(piece[0])
    assert float(held_out_loss(said)) == pytest.approx(loss / count, abs=1e-3)
    assert run.metrics()[-1]["loss"] < run.metrics()[0]["loss"]
