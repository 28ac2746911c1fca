"""A run that is stopped and continued ends with the bits of the same run left alone, or says beforehand why it may not.

Real gloo ranks, real TERMs; every rank's losses, batches, weights, optimizer, average, scheduler and scaler are
compared. The model has 1.9 MB, so that DDP really rebuilds its buckets.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.waiting import flatten

EXACT = Path(__file__).parents[1] / "scripts" / "exact.py"
#: 200 samples, 24 in each step: an epoch has 8 steps and a third, and the run ends in its second.
STEPS, SAMPLES, GLOBAL_BATCH = 14, 200, 24
IN_EPOCH_0 = 7

GRAPHS: dict[str, tuple[str, ...]] = {
    "dynamic": (),
    "static": ("--ddp", '{"static_graph": true, "all_used_once": true}'),
    "unused": ("--unused", "--ddp", '{"find_unused_parameters": true}'),
}
TWICE_IN_AN_EPOCH, AT_THE_END_OF_AN_EPOCH, FIRST_STEP_AND_SECOND_EPOCH = (1, 4), (7,), (0, 10)
AMP = (None, "float16", "bfloat16")
#: Ranks, the graph, the pieces of a batch, AMP's type, the loader's workers, the steps in which a TERM comes.
FACTORS = (
    (1, 2, 3, 4),
    tuple(GRAPHS),
    (1, 2),
    AMP,
    (0, 2),
    (TWICE_IN_AN_EPOCH, AT_THE_END_OF_AN_EPOCH, FIRST_STEP_AND_SECOND_EPOCH),
)
#: Each value of a factor meets a few of every other. A run of 4 ranks shows what one of 3 does.
TYPICAL = [
    (1, "dynamic", 1, None, 0, AT_THE_END_OF_AN_EPOCH),
    (2, "static", 1, "bfloat16", 2, FIRST_STEP_AND_SECOND_EPOCH),
    (2, "unused", 2, None, 0, AT_THE_END_OF_AN_EPOCH),
    (3, "dynamic", 2, "float16", 2, TWICE_IN_AN_EPOCH),
]
CASES = list(itertools.product(*FACTORS)) if "CLUSTERDDP_TEST_PRODUCT" in os.environ else TYPICAL


@dataclass(frozen=True)
class Left:
    """What a run left: the attempts' outputs, rank by rank, and the run directory."""

    attempts: list[ddp.Ranks]
    directory: RunDirectory

    def begun(self) -> list[int]:
        """The step that each attempt began with."""
        return [int(attempt.output(0).split("begin ")[1].split()[0]) for attempt in self.attempts]

    def steps(self, rank: int) -> list[str]:
        """The lines of all steps of a rank, over all attempts: number, loss and batch, floats in hexadecimal."""
        lines = itertools.chain.from_iterable(attempt.output(rank).splitlines() for attempt in self.attempts)
        return [line for line in lines if line.startswith("step ")]

    def metrics(self) -> list[dict[str, Any]]:
        """All values of the history that counts, floats in hexadecimal."""
        return [
            {name: value.hex() if isinstance(value, float) else value for name, value in line.items()}
            for line in ({k: v for k, v in line.items() if k not in ("time", "attempt")} for line in self.raw())
        ]

    def raw(self) -> list[dict[str, Any]]:
        return self.directory.metrics()

    def mean_losses(self, ranks: int) -> list[float]:
        """Of each step, over the ranks, from what they printed."""
        losses = [[float.fromhex(line.split()[5]) for line in self.steps(rank)] for rank in range(ranks)]
        return [math.fsum(of_step) / ranks for of_step in zip(*losses, strict=True)]

    def state(self, rank: int) -> dict[str, Any]:
        """All parts' final state on a rank, flat."""
        flat: dict[str, Any] = {}
        flatten("", torch.load(self.directory.path / f"final-{rank}.pt", weights_only=True), flat)
        return flat

    def inexact(self) -> list[list[str]]:
        """Why each resumed attempt was reported as inexact."""
        return [event["inexact"] for event in self.directory.events() if event["event"] == "resumed"]


def train(run_dir: Path, *options: object, ranks: int, stops: tuple[int, ...] = (), then_ranks: int = 0) -> Left:
    """The run to its end, stopped by a TERM to one rank in each step of ``stops``."""
    base = (run_dir, STEPS, "--samples", SAMPLES)
    attempts = []
    for number in range(len(stops) + 1):
        now = then_ranks if number and then_ranks else ranks
        arguments = (*base, "--batch", GLOBAL_BATCH // now, *options, *(("--stop-in", *stops) if stops else ()))
        attempt = ddp.start(EXACT, *arguments, ranks=now, folder=run_dir.with_name("out"))
        attempts.append(attempt.expect(75 if number < len(stops) else 0))
    return Left(attempts, RunDirectory(run_dir))


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Left]:
    """Trains without a stop, once for all tests that compare with the same."""

    @functools.cache
    def whole(*options: object, ranks: int) -> Left:
        return train(tmp_path_factory.mktemp("whole") / "run", *options, ranks=ranks)

    return whole


def differing_values(one: dict[str, Any], other: dict[str, Any]) -> dict[str, int]:
    """How many values of each entry are not the same to the last bit."""
    assert one.keys() == other.keys()
    found = {name: _differing(one[name], other[name]) for name in one}
    return {name: count for name, count in found.items() if count}


def _differing(one: Any, other: Any) -> int:
    if not isinstance(one, torch.Tensor):
        return int(repr(one) != repr(other))
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    bits = [tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (one, other)]
    return int((bits[0] != bits[1]).any(dim=1).sum())


def assert_exact(resumed: Left, whole: Left, ranks: int) -> None:
    assert resumed.metrics() == whole.metrics()
    for rank in range(ranks):
        assert resumed.steps(rank) == whole.steps(rank), f"rank {rank}"
        assert differing_values(resumed.state(rank), whole.state(rank)) == {}, f"rank {rank}"


@pytest.mark.parametrize(("ranks", "graph", "micro", "amp", "workers", "stops"), CASES)
def test_a_stopped_run_ends_with_the_bits_of_the_uninterrupted_one(
    tmp_path: Path, left_alone: Any, ranks: int, graph: Any, micro: Any, amp: Any, workers: Any, stops: Any
) -> None:
    options = (*GRAPHS[graph], "--micro", micro, *(["--amp", amp] if amp else []))
    whole = left_alone(*options, ranks=ranks)
    resumed = train(tmp_path / "stopped", *options, "--workers", workers, ranks=ranks, stops=stops)

    assert_exact(resumed, whole, ranks)
    assert [line["step"] for line in resumed.raw()] == list(range(STEPS))
    assert [line["mean_loss"] for line in resumed.raw()] == resumed.mean_losses(ranks)
    assert resumed.inexact() == [[]] * len(stops)
    # A stop comes after the step in which it is requested, or one later, on all ranks.
    assert all(0 < begin - stop <= 2 for begin, stop in zip(resumed.begun()[1:], stops, strict=True))
    if stops == TWICE_IN_AN_EPOCH:
        assert max(resumed.begun()) <= IN_EPOCH_0
    for stopped in resumed.attempts[:-1]:
        assert stopped.text().count("finally ran") == ranks and "all done" not in stopped.text()
    if amp == "float16":  # Some steps were skipped for an overflow, and the scale has grown, too.
        scales = [line["scale"] for line in whole.raw()]
        assert {later / former for former, later in itertools.pairwise(scales)} == {0.5, 1.0, 2.0}


@pytest.mark.product  # compiling takes a minute
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("amp", AMP)
def test_a_compiled_model_is_resumed_exactly(
    tmp_path: Path, left_alone: Any, ranks: int, amp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process compiles, or uses inductor's cache of an earlier one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    options = ("--compile", "inductor", *(["--amp", amp] if amp else []))
    whole = left_alone(*options, ranks=ranks)
    resumed = train(tmp_path / "stopped", *options, ranks=ranks, stops=(4,))
    assert_exact(resumed, whole, ranks)
    assert resumed.inexact() == [[]]


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.product)])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ("--ddp", '{"static_graph": true}'),
            "model is wrapped in DDP with static_graph=True, without all_used_once=True",
        ),
        pytest.param(("--plain-ddp",), "model is wrapped in DDP, but not by ctx.wrap()", marks=pytest.mark.product),
    ],
)
def test_without_the_throw_away_passes_the_bits_differ_and_the_run_says_so(
    tmp_path: Path, left_alone: Any, ranks: int, options: Any, reason: Any
) -> None:
    whole = left_alone(*options, ranks=ranks)
    resumed = train(tmp_path / "stopped", *options, ranks=ranks, stops=(4,))
    assert resumed.inexact() == [[reason]]
    assert sum(differing_values(resumed.state(0), whole.state(0)).values()) > 1000


@pytest.mark.parametrize(
    ("options", "reasons", "where"),
    [
        (("--rng", "user"), ["rng='user'"], "model.body.0.weight"),
        (
            ("--ddp", '{"broadcast_buffers": false}'),
            ["ema differed between ranks, which now all have rank 0's"],
            "ema.body.1.running_mean",
        ),
    ],
)
def test_every_other_inexact_resume_differs_and_is_reported(
    tmp_path: Path, left_alone: Any, options: Any, reasons: Any, where: Any
) -> None:
    whole = left_alone(*options, ranks=2)
    resumed = train(tmp_path / "stopped", *options, ranks=2, stops=(4,))
    assert resumed.inexact() == [reasons]
    different = differing_values(resumed.state(1), whole.state(1))
    assert any(where in name.replace("module.", "") for name in different), different


def test_another_number_of_ranks_keeps_the_samples_and_is_reported_as_inexact(tmp_path: Path) -> None:
    resumed = train(tmp_path / "stopped", ranks=2, stops=(4,), then_ranks=3)
    assert resumed.inexact() == [["3 ranks instead of 2"]]
    assert [line["step"] for line in resumed.raw()] == list(range(STEPS))


def test_a_stop_in_an_evaluation_keeps_a_step_that_the_scaler_skipped(tmp_path: Path, left_alone: Any) -> None:
    options = ("--amp", "float16", "--evaluate-in-step", 0)
    whole = left_alone(*options, ranks=2)
    assert whole.raw()[0]["scale"] < 2.0**22
    stopped = ddp.start(
        *(EXACT, tmp_path / "stopped", STEPS, "--samples", SAMPLES, "--batch", GLOBAL_BATCH // 2, *options),
        *("--sleep", 0.2),
        ranks=2,
        folder=tmp_path / "out",
    )
    stopped.wait_for(0, "evaluation batch")
    stopped.signal(1)
    stopped.expect(75)
    resumed = train(tmp_path / "stopped", *options, ranks=2)
    assert resumed.begun() == [1]
    assert resumed.metrics() == whole.metrics()
    assert differing_values(resumed.state(0), whole.state(0)) == {}
