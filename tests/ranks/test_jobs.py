"""The job definitions in jobs/: each runs with one command, and its claims are checked."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import TensorDataset

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.checkpoint_files import content_of
from tests.cli import clusterddp
from tests.preempted import attempt
from tests.preempting import preempting
from tests.trained_alone import trained_alone
from tests.waiting import differing, final_state, story
from tests.wording import raises

JOBS = ddp.REPOSITORY / "jobs"
CHANGED = Path(__file__).parents[1] / "scripts" / "changed.py"


def submit(run: RunDirectory, job: str, *options: str, code: int = 0) -> str:
    """Runs ``jobs/JOB.yaml`` here with two ranks; its messages, with rank 0's output."""
    shape = ["--local", "--device", "cpu", "--gpus", "2", "--run-dir", str(run)]
    return clusterddp("submit", f"jobs/{job}.yaml", *shape, *options, code=code).stderr


def script(job: str) -> ModuleType:
    """The script of a job as a module, for its functions."""
    spec = importlib.util.spec_from_file_location(job, JOBS / f"{job}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- basic


def test_basic_two_ranks_train_as_one_process_does_on_the_joined_batch(run: RunDirectory, tmp_path: Path) -> None:
    """The script compares gradients in every step; here the weights of 20 steps are compared with one rank's."""
    assert "20 steps: the gradients of 2 ranks were equal, and those of the joined batch" in submit(run, "basic")
    alone = RunDirectory(tmp_path / "alone")
    attempt(alone, [JOBS / "basic.py", "--batch-size", 40], ranks=1).expect(0)
    weights, expected = (
        {name: value for name, value in final_state(of).items() if name.startswith(".model")} for of in (run, alone)
    )
    assert len(weights) == 4
    torch.testing.assert_close(weights, expected)
    assert differing(weights, expected), "one rank sums in another order: equal bits would be the same run"


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("model(inputs)", "model.module(inputs)", "0.weight on ranks 0 and 1 differ. Is DDP's forward bypassed?"),
        (
            "model(inputs), targets)",
            "model(inputs), targets, reduction='sum')",
            "is not that of the joined batch (largest difference",
        ),
    ],
)
def test_basic_notices_gradients_that_are_not_the_joined_batchs(
    tmp_path: Path, right: str, wrong: str, words: str
) -> None:
    """With a common mistake in one of its lines."""
    source = (JOBS / "basic.py").read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(source.replace(f"loss = F.mse_loss({right}", f"loss = F.mse_loss({wrong}"))
    assert broken.read_text() != source
    ended = ddp.start(broken, "--steps", 2, ranks=2, folder=tmp_path).expect(1)
    assert words in ended.output(0)


# ---- checkpoint


# test_checkpoint_folder.py has more of the other one.
@pytest.mark.parametrize("job", ["checkpoint", pytest.param("checkpoint_folder", marks=pytest.mark.product)])
def test_checkpoint_a_second_start_ends_as_a_single_one(tmp_path: Path, job: str) -> None:
    """On both ranks, with the optimizer's momentum: to the last digit shown."""

    def start(folder: str, steps: int) -> ddp.Ranks:
        (tmp_path / folder).mkdir(exist_ok=True)
        arguments = ("--steps", steps, "--folder", tmp_path / folder)
        return ddp.run(JOBS / f"{job}.py", *arguments, ranks=2, folder=tmp_path / "out")

    whole = start("whole", 60)
    start("parts", 25)
    part = start("parts", 60)
    for rank in (0, 1):
        assert f"rank {rank} starts at step 25" in part.output(rank)
        assert result(part.output(rank)) == result(whole.output(rank))


def result(output: str) -> str:
    found = re.search(r"weights sum to (\S+)", output)
    assert found is not None, output
    return found[1]


def test_checkpoint_folder_saves_the_step_at_which_it_stops(tmp_path: Path) -> None:
    """All ranks stop together, though only one got the signal; the saved state is that after so many steps."""
    file = JOBS / "checkpoint_folder.py"
    endless = ["--steps", 10**9, "--save-every", 10**9, "--folder", tmp_path / "stopped"]
    ranks = ddp.start(file, *endless, ranks=2, folder=tmp_path / "out")
    for rank in (0, 1):
        ranks.wait_for(rank, "starts at step 0")
    ranks.signal(1, signal.SIGTERM)
    ranks.expect(75)
    (stopped,) = (tmp_path / "stopped" / "checkpoints").iterdir()
    steps = int(re.search(r"step-(\d+)", stopped.name)[1])  # type: ignore[index]
    ddp.run(file, "--steps", steps, "--folder", tmp_path / "whole", ranks=2, folder=tmp_path / "out")
    whole = max((tmp_path / "whole" / "checkpoints").iterdir())
    weights, expected = content_of(stopped)["model"], content_of(whole)["model"]
    assert steps > 0 and differing(weights, expected) == []


# ---- model_parallel


@pytest.mark.product  # gpu/test_jobs.py runs it, test_gpus_per_rank.py a smaller model on two devices of a rank
def test_model_parallel_trains_as_one_process_does_on_the_joined_batch(run: RunDirectory) -> None:
    """Both halves on the CPU; the mean loss of the last step is that of a model on one device."""
    said = re.search(r"cpu and cpu: loss (\S+) after 20 steps", submit(run, "model_parallel", "--gpus", "4"))
    assert said is not None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    assert float(said[1]) == pytest.approx(trained_alone(model, 20, ranks=2), abs=2e-6)


def test_model_parallel_gives_each_rank_two_gpus_and_says_when_there_are_too_few() -> None:
    """Local rank r has GPUs 2r and 2r + 1 of its node."""
    two_devices = script("model_parallel").two_devices
    assert two_devices(True, 0, 4, 8) == (torch.device("cuda:0"), torch.device("cuda:1"))
    assert two_devices(True, 3, 4, 8) == (torch.device("cuda:6"), torch.device("cuda:7"))
    assert two_devices(False, 3, 4, 0) == (torch.device("cpu"), torch.device("cpu"))
    with raises(SystemExit):
        two_devices(True, 0, 4, 4)
    with raises(SystemExit):
        two_devices(True, 3, 4, 7)


# ---- collectives

#: From algorithm to bus bandwidth, for 3 ranks and 2: nccl-tests, doc/PERFORMANCE.md.
FACTORS = {
    **dict.fromkeys(["send_recv", "isend_irecv", "broadcast", "reduce"], 1),
    **dict.fromkeys(["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"], 2 / 3),
    "all_reduce": 4 / 3,
    "barrier": 1,  # of no bytes
    "subgroup": 1,
}
ROW = re.compile(r"^(\w+|nodes \d+ and \d+) +(\d+) +([\d.e+-]+) +([\d.e+-]+) +([\d.e+-]+)$", re.MULTILINE)


def test_collectives_prints_each_one_with_the_bandwidths_of_nccl_tests(tmp_path: Path) -> None:
    """On 3 ranks, each on a node of its own: an odd number of them, and none a power of two."""
    arguments = ("--sizes", 1200, 120000, "--repetitions", 3)
    job = JOBS / "collectives.py"
    said = ddp.run(job, *arguments, ranks=3, folder=tmp_path, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1").output(0)
    assert "all results are correct" in said and "not supported by" not in said
    rows = ROW.findall(said)
    pairs = {"nodes 0 and 1", "nodes 0 and 2", "nodes 1 and 2"}
    assert {row[0] for row in rows} == FACTORS.keys() | pairs
    assert [row[1] for row in rows if row[0] == "all_reduce"] == ["1200", "120000"]
    for name, size, microseconds, algorithm, bus in rows:
        factor = 1.0 if name in pairs else FACTORS[name]
        assert float(algorithm) == pytest.approx(int(size) / float(microseconds) / 1e3, rel=1e-2)
        assert float(bus) == pytest.approx(float(algorithm) * factor, rel=1e-2)


KEPT = "dist.all_to_all = lambda out, put: [one.copy_(other) for one, other in zip(out, put)]"
LOST = "dist.broadcast = lambda tensor, src: None"
LACKING = """
def lacking(*_): raise RuntimeError('ProcessGroupGloo does not support reduce_scatter')
dist.reduce_scatter = lacking
"""


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        (KEPT, 1, "all_to_all is wrong on 3 of 3 ranks"),
        (LOST, 1, "broadcast is wrong on 2 of 3 ranks"),
        (LACKING, 0, r"reduce_scatter +not supported by gloo of torch \S+: ProcessGroupGloo does not support"),
    ],
)
def test_collectives_a_wrong_result_is_an_error_and_a_missing_one_is_reported(
    tmp_path: Path, statement: str, code: int, words: str
) -> None:
    """As older torch refuses it."""
    arguments = [statement, JOBS / "collectives.py", "--sizes", 12, "--repetitions", 1]
    ended = ddp.start(CHANGED, *arguments, ranks=3, folder=tmp_path).expect(code)
    assert re.search(words, ended.output(0)), ended.output(0)


# ---- charlm


@pytest.fixture(scope="module")
def charlm(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, str]:
    """An uninterrupted run."""
    run = RunDirectory(tmp_path_factory.mktemp("charlm") / "whole")
    return run, submit(run, "charlm", *CHARLM)


CHARLM = ["--", "--steps", "60"]


def held_out_loss(said: str) -> str:
    found = re.search(r"held-out loss (\S+) nats", said)
    assert found is not None, said
    return found[1]


@pytest.mark.product  # gpu/test_jobs.py runs it, test_exact_resume.py trains a smaller model
def test_charlm_learns_more_than_character_frequencies(charlm: tuple[RunDirectory, str]) -> None:
    """Well below what a model without context can reach on that text, and far below a uniform guess (5.55)."""
    text = script("charlm").load_text()
    frequency = torch.bincount(text).double() / len(text)
    unigram = -(frequency * frequency.clamp(min=1e-30).log()).sum().item()
    assert 2.8 < unigram < 3.6, "the text is not as expected"
    assert float(held_out_loss(charlm[1])) < unigram - 0.2


@pytest.mark.product  # test_exact_resume.py has the same for a smaller model
def test_charlm_preempted_is_the_same_run(charlm: tuple[RunDirectory, str], run: RunDirectory) -> None:
    """Each step in two pieces per rank; the losses, and the weights and the optimizer to the last bit."""
    whole, said = charlm
    with preempting(10):
        again = submit(run, "charlm", *CHARLM)
    assert run.attempts() == [0, 1], story(run)
    assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in whole.metrics()]
    assert differing(final_state(run), final_state(whole)) == []
    assert held_out_loss(again) == held_out_loss(said)


# ---- skew


@pytest.mark.product  # test_hangs.py has slow ranks, test_process_group.py the timeout
def test_skew_a_long_timeout_waits_for_the_slow_rank_and_a_short_one_ends_the_attempt(
    run: RunDirectory, tmp_path: Path
) -> None:
    """The first step has the timeout of the start, so the short one applies in the second."""
    long = ddp.run(JOBS / "skew.py", "--steps", 2, "--late", 1, ranks=2, folder=tmp_path / "out")
    assert "all 2 steps are done, at the slowest rank's pace" in long.output(0)
    options = ["--set", "timeouts.step_s=1", "--set", "limits.attempts=1"]
    said = submit(run, "skew", *options, "--", "--steps", "2", "--late", "5", code=1)
    first = r"failed at step 1: .*rank 0 \(\S+\) raised RuntimeError: .*Timed out waiting 1000ms"
    assert re.search(first, said), said
    assert "step 0 took" in said and "step 1 took" not in said


# ---- scaling


def test_scaling_the_table_is_by_the_definitions() -> None:
    scaling = script("scaling")
    lines = scaling.table([scaling.Timing(1, 10, 11, 0.5), scaling.Timing(2, 12, 16, 3)], batch_size=64)
    assert [line.split() for line in lines[1:3]] == [
        ["1", "10.000", "11.000", "0.500", "5818", "90.9%"],
        ["2", "12.000", "16.000", "3.000", "8000", "62.5%"],
    ]
    assert lines[3] == "on one rank DDP itself costs 1.000 ms of a step (10.0%)"


UNWRAPPED = "import clusterddp.training.context as c; c.Context.wrap = lambda ctx, model, **options: model"


@pytest.mark.parametrize(
    ("statement", "options", "code", "words"),
    [
        ("", ["--bucket-mb", 0.01, "--bucket-view", "--static-graph"], 0, "on one rank DDP itself costs"),
        ("", ["--bf16"], 1, "--bf16 needs GPUs and NCCL, found cpu"),
        (UNWRAPPED, [], 1, "after the same steps, the weights of 2 ranks differ"),
    ],
)
def test_scaling_times_ranks_that_exchange_their_gradients_under_every_option(
    tmp_path: Path, statement: str, options: list[object], code: int, words: str
) -> None:
    """Each rank has samples of its own, so that the weights stay equal only by the exchange."""
    arguments = [statement, JOBS / "scaling.py", "--steps", 3, "--width", 32, *options]
    assert words in ddp.start(CHANGED, *arguments, ranks=2, folder=tmp_path).expect(code).output(0)


# ---- digits

ACTUAL = "0123456789" * 3 + "0011122233334444555566667777888899990000" + "9753186420"
PREDICTED = "0123456789" * 2 + "9876543210" + "0111122233335444555567667777888099990001" + "9753186422"


def test_digits_accuracy_and_f1_over_ranks_are_those_of_the_joined_predictions(tmp_path: Path) -> None:
    """80 samples on 3 ranks, in batches of 7: ranks and last batches are uneven."""
    arguments = [JOBS / "digits.py", ACTUAL, PREDICTED]
    ranks = ddp.run(Path(__file__).parents[1] / "scripts" / "digits_metrics.py", *arguments, ranks=3, folder=tmp_path)
    batches = [[7, 7, 7, 6], [7, 7, 7, 6], [7, 7, 7, 5]]
    for rank in range(3):
        said = re.search(r"batches of (\[.*\]): accuracy (\S+), macro-F1 (\S+)", ranks.output(rank))
        assert said is not None and said[1] == str(batches[rank])
        assert float(said[2]) == pytest.approx(accuracy(ACTUAL, PREDICTED), abs=1e-6)
        assert float(said[3]) == pytest.approx(macro_f1(ACTUAL, PREDICTED), abs=1e-6)


def accuracy(actual: str, predicted: str) -> float:
    return sum(a == p for a, p in zip(actual, predicted, strict=True)) / len(actual)


def macro_f1(actual: str, predicted: str) -> float:
    """The mean over the classes of the harmonic mean of precision and recall."""
    pairs, scores = list(zip(actual, predicted, strict=True)), []
    for digit in sorted(set(actual) | set(predicted)):
        hits = pairs.count((digit, digit))
        precision, recall = hits / max(1, predicted.count(digit)), hits / max(1, actual.count(digit))
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    return sum(scores) / len(scores)


# ---- all of them


def test_a_copy_of_the_folder_is_complete(tmp_path: Path) -> None:
    """No job is a link out of it. The packaged one is links into it."""
    copied = shutil.copytree(JOBS, tmp_path / "jobs", symlinks=True)
    assert [path for path in copied.iterdir() if path.is_symlink()] == []
    packaged = sorted((JOBS.parent / "clusterddp" / "digits").glob("digits.*"))
    assert [path.resolve() for path in packaged] == [JOBS / f"digits.{kind}" for kind in ("csv.gz", "py", "yaml")]
    spec = importlib.util.spec_from_file_location("copied_digits", copied / "digits.py")
    assert spec is not None and spec.loader is not None
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    assert [len(part) for part in digits.load_digits()] == [1438, 359]


def test_every_image_is_a_test_image_of_exactly_one_fold() -> None:
    """And a training image of all the others; without arguments the split is the last fold's."""
    digits = script("digits")
    parts = [digits.load_digits(fold, 5) for fold in range(5)]
    assert [len(test) for _, test in parts] == [360, 360, 359, 359, 359]
    assert {len(train) + len(test) for train, test in parts} == {1797}
    assert rows(test for _, test in parts) == rows(parts[0])
    assert all(torch.equal(a, b) for a, b in zip(digits.load_digits()[1][:], parts[4][1][:], strict=True))


def rows(parts: Iterable[TensorDataset]) -> list[list[float]]:
    """Every image with its label, sorted."""
    return sorted([*image.flatten().tolist(), int(label)] for part in parts for image, label in part)  # type: ignore[attr-defined]
