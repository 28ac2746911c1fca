"""A batch in pieces: the gradients are those of the global batch, on any number of ranks, and mistakes are reported."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.data.training_loader import cut, sizes
from tests import ddp
from tests.wording import raises

SCRIPT = Path(__file__).parents[1] / "scripts" / "micro.py"


def test_a_batch_has_the_fewest_pieces_that_fit_as_equal_as_they_can_be() -> None:
    assert sizes(8, 8) == sizes(8, 100) == [8]
    assert sizes(8, 4) == [4, 4] and sizes(9, 8) == [5, 4] and sizes(11, 4) == [4, 4, 3] and sizes(3, 1) == [1, 1, 1]
    for samples in range(1, 40):
        for most in range(1, 40):
            parts = sizes(samples, most)
            assert sum(parts) == samples and max(parts) <= most and max(parts) - min(parts) <= 1
            assert len(parts) == 1 or samples > most * (len(parts) - 1)


def test_a_nested_batch_is_split_and_keeps_its_types() -> None:
    Pair = namedtuple("Pair", "x y")
    x, y, names = torch.arange(10).reshape(5, 2), torch.arange(5).numpy(), ["a", "b", "c", "d", "e"]
    first, second = cut({"pair": Pair(x, y), "names": names, "list": [x, (y,)]}, [3, 2])
    assert first["names"] == ["a", "b", "c"] and second["names"] == ["d", "e"]
    assert isinstance(second["pair"], Pair) and torch.equal(second["pair"].x, x[3:])
    assert second["pair"].y.tolist() == second["list"][1][0].tolist() == [3, 4]
    assert torch.equal(first["list"][0], x[:3])
    # Two columns of two samples each are columns; five images of other sizes are a column of samples.
    assert [part[0].tolist() for part in cut([torch.tensor([1, 2]), torch.tensor([3, 4])], [1, 1])] == [[1], [2]]
    images = [torch.zeros(3, size) for size in range(5)]
    assert [len(part[0]) for part in cut((images, names), [3, 2])] == [3, 2]


@pytest.mark.parametrize(
    "batch",
    [{"x": torch.zeros(5), "size": 5}, {"x": torch.zeros(4)}, torch.tensor(1.0), []],
    ids=["a number", "shorter", "a scalar", "empty"],
)
def test_a_batch_that_cannot_be_split_is_named(batch: Any) -> None:
    with raises(TypeError):
        cut(batch, [3, 2])


def gradients(folder: Path, *arguments: object, ranks: int) -> dict[str, torch.Tensor]:
    out = folder / f"{ranks}-{'-'.join(map(str, arguments))}.pt"
    ddp.run(SCRIPT, out, *arguments, ranks=ranks, folder=folder / "out")
    result: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    return result


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 5), (1, 24), (2, 5), (2, 4), (4, 4), (4, 6)])
def test_the_gradients_are_those_of_the_joined_batch(tmp_path: Path, ranks: int, batch_size: int) -> None:
    """Pieces of 5, 5, 5, 5, 4 and of 4, 4, 4 and so on: also where they are not all of one size."""
    joined = gradients(tmp_path, 24, 24, "--whole", ranks=1)
    assert distance(gradients(tmp_path, 24, batch_size, ranks=ranks), joined) < 1e-6


@pytest.mark.parametrize("option", ["find_unused_parameters", "gradient_as_bucket_view", "static_graph"])
def test_the_gradients_are_those_of_the_joined_batch_under_every_option_of_ddp(tmp_path: Path, option: Any) -> None:
    """Pieces of 3 of which some leave a branch unused; views of buckets; a graph learnt from the first pass."""
    joined = gradients(tmp_path, 24, 24, "--whole", ranks=1)
    assert distance(gradients(tmp_path, 24, 3, "--ddp", option, ranks=2), joined) < 1e-6


def test_the_ranks_exchange_gradients_once_a_step_however_many_pieces_there_are(tmp_path: Path) -> None:
    counts = []
    for batch_size in (12, 3):
        done = ddp.run(SCRIPT, tmp_path / "x.pt", 24, batch_size, "--count", ranks=2, folder=tmp_path / "out")
        counts.append(next(line for line in done.output(0).splitlines() if line.endswith("buckets reduced")))
    assert counts[0] == counts[1] != "0 buckets reduced"


def test_one_piece_changes_no_bit(tmp_path: Path) -> None:
    whole, micro = (gradients(tmp_path, 24, 12, *more, ranks=2) for more in (["--whole"], []))
    assert all(torch.equal(whole[name], micro[name]) for name in whole)


@pytest.mark.parametrize("batch_size", [24, 5])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("step", "the optimizer stepped inside the loop over run.micro(batch). Call optimizer.step() after the loop"),
        ("no backward", "there are no gradients. Call loss.backward() inside the loop"),
        ("zero_grad", "gradients were zeroed inside the loop"),
        ("break", "ended early"),
    ],
)
def test_a_loop_body_that_is_wrong_for_several_pieces_is_an_error_for_one_too(
    tmp_path: Path, body: Any, words: str, batch_size: int
) -> None:
    done = ddp.start(SCRIPT, tmp_path / "x.pt", 24, batch_size, "--body", body, ranks=1, folder=tmp_path).expect(1)
    assert words in done.output(0)
