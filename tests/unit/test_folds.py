"""jobs/digits_folds.yaml: the five folds share out the images, and each run keeps its best checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.data import TensorDataset

from tests.ranks.test_jobs import script


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
