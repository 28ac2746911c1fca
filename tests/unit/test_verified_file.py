"""A checkpoint's file that is read in parts, each straight into its place."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.verified_file import VerifiedFile
from clusterddp.errors import CheckpointError
from tests.checkpoint_files import file_bytes


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of 1,000 bytes, with a checksum for each 64."""
    monkeypatch.setattr(file_format, "CHUNK", 64)
    monkeypatch.setattr(file_format, "BUFFER", 10)
    found = tmp_path / "a.safetensors"
    found.write_bytes(file_bytes({"w": torch.arange(1000).to(torch.uint8)}))
    return found


def opened(path: Path) -> VerifiedFile:
    return VerifiedFile(path, file_format.read_head(path), Checkpoint(path, 1, 0).errors)


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_any_size_at_any_place_have_their_bytes(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    ends = sorted(draw.choices(range(1001), k=draw.choice([2, 10, 60])))
    parts = [(start, memoryview(bytearray(stop - start))) for start, stop in zip(ends[::2], ends[1::2], strict=True)]
    with opened(path) as file:
        file.read_all(parts)
        for start, into in parts:
            assert bytes(into) == bytes((start + place) % 256 for place in range(len(into)))
            again = memoryview(bytearray(len(into)))
            file.read_into(again, start)
            assert again == into


def test_damage_is_found_in_the_chunks_that_are_read_and_in_no_other(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[file_format.read_head(path).start + 200] ^= 1
    path.write_bytes(data)
    with opened(path) as file:
        file.read_all([(0, memoryview(bytearray(192))), (256, memoryview(bytearray(744)))])
        with pytest.raises(CheckpointError):
            file.read_all([(255, memoryview(bytearray(1)))])
        with pytest.raises(CheckpointError):
            file.read_into(memoryview(bytearray(1)), 255)
