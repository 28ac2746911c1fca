"""``clusterddp export`` without ranks: of checkpoints in one file, and of sharded ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.export import INDEX, export
from clusterddp.checkpoint.sharded.folder import FORMAT, ShardedCheckpoint, rank_file
from clusterddp.checkpoint.weights_file import read_weights
from clusterddp.errors import ClusterddpError
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import save, save_sharded
from tests.wording import raises

RANKS = 3
#: No number of elements that 3 ranks divide, a dimension of which rank 2 has none, and one larger than a checksum's
#: chunk.
DIMS = {"model.rows": 0, "model.columns": 1, "model.middle": 1, "model.short": 0, "model.large": 0, "ema.w": 0}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    found.create()
    return found


def state(step: int) -> dict[str, Any]:
    """With a tied weight, a transposed one, and dtypes of different sizes."""
    made = torch.Generator().manual_seed(step)
    model: Any = OrderedDict(
        rows=torch.rand(11, 5, generator=made),
        columns=torch.rand(6, 7, generator=made).bfloat16(),
        middle=torch.rand(2, 5, 3, generator=made).half(),
        short=torch.rand(2, generator=made),
        large=torch.rand(1200, 1000, generator=made),
        turned=torch.rand(3, 4, generator=made).t(),
        flags=torch.tensor([True, False, True]),
        seen=torch.tensor(step),
        none=torch.empty(0, 3),
    )
    model["tied"] = model["rows"]
    model._metadata = OrderedDict()
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.5}]}
    return {"model": model, "ema": {"w": torch.rand(5, generator=made)}, "optimizer": optimizer}


def sharded(directory: RunDirectory, step: int = 6) -> ShardedCheckpoint:
    return save_sharded(directory, directory.create_attempt(), step, state(step), DIMS, RANKS)


def equal(found: Any, step: int = 6, part: str = "model") -> bool:
    expected = state(step)[part]
    return found.keys() == expected.keys() and all(
        found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in expected.items()
    )


@pytest.mark.parametrize("kind", ["sharded", "file"])
def test_a_file_has_the_whole_tensors_with_their_names(directory: RunDirectory, tmp_path: Path, kind: str) -> None:
    if kind == "sharded":
        sharded(directory)
    else:
        save(directory, directory.create_attempt(), 6, state(6))
    assert export(directory, tmp_path / "a.safetensors").startswith("wrote model of checkpoint 6 to ")
    assert equal(load_file(tmp_path / "a.safetensors"))
    export(directory, tmp_path / "ema.safetensors", "ema")
    assert equal(load_file(tmp_path / "ema.safetensors"), part="ema")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "ema.safetensors", "run"]


def test_a_folder_has_files_of_limited_size_and_their_index(directory: RunDirectory, tmp_path: Path) -> None:
    sharded(directory)
    export(directory, tmp_path / "small")
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["model.safetensors"]
    assert equal(load_file(tmp_path / "small" / "model.safetensors"))
    export(directory, tmp_path / "large", largest_file=250)
    index = json.loads((tmp_path / "large" / INDEX).read_bytes())
    found: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "large" / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == tensors.keys()
        assert len(tensors) == 1 or sum(one.nbytes for one in tensors.values()) <= 250
        found |= tensors
    assert equal(found) and index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())
    for folder in ("small", "large"):  # as a warm start reads them
        assert equal(read_weights(tmp_path / folder, "model"))


def test_export_needs_neither_torch_nor_memory_for_a_whole_tensor(directory: RunDirectory, tmp_path: Path) -> None:
    """The tensor has 64 MB. An export may take 24 MB."""
    whole = torch.arange(16_000_000.0)
    save_sharded(directory, directory.create_attempt(), 1, {"model": {"w": whole}}, {"model.w": 0}, 2)
    code = (
        "import sys; from pathlib import Path; from clusterddp.checkpoint.export import export;"
        "from clusterddp.rundir.run_directory import RunDirectory;"
        "peak = lambda: int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]);"
        "before = peak(); export(RunDirectory(sys.argv[1]), Path(sys.argv[2]));"
        "print('torch' in sys.modules, peak() - before)"
    )
    words = [sys.executable, "-c", code, str(directory), str(tmp_path / "w.safetensors")]
    torch_imported, grown = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert torch_imported == "False" and int(grown) < 24_000, grown
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], whole)


@pytest.mark.parametrize("damage", ["missing", "short", "changed", "foreign", "newer manifest"])
def test_a_damaged_checkpoint_is_not_exported(
    directory: RunDirectory, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before is, with a message, if no step was given."""
    older = sharded(directory, 3)
    newest = save_sharded(directory, 0, 6, state(6), DIMS, RANKS)
    file = newest.path / rank_file(1)
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(data[:-1])
    elif damage == "changed":
        data[-100_000] ^= 1
        file.write_bytes(data)
    elif damage == "foreign":
        file.write_bytes((older.path / rank_file(1)).read_bytes())
    else:
        newest.manifest_file.write_bytes(
            newest.manifest_file.read_bytes().replace(FORMAT.encode(), b"clusterddp sharded 2")
        )
    with raises(ClusterddpError):
        export(directory, tmp_path / "a.safetensors", step=6)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert "checkpoint 3" in export(directory, tmp_path / "a.safetensors")
    assert "is damaged" in capsys.readouterr().err
    assert equal(load_file(tmp_path / "a.safetensors"), 3)


def test_what_cannot_be_exported_is_named(directory: RunDirectory, tmp_path: Path) -> None:
    sharded(directory)
    for name, part in (("a.pt", "model"), ("a.safetensors", "optimizer"), ("a.safetensors", "head"), ("a.bin", None)):
        with raises(ClusterddpError):
            export(directory, tmp_path / name, part)
    with raises(ClusterddpError):
        export(directory, tmp_path / "a.safetensors", everything=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_leaves_nothing(directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(directory)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_format, "write_at", full)
    with raises(ClusterddpError):
        export(directory, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_warm_start_from_a_checkpoint_names_the_command(directory: RunDirectory) -> None:
    folder = sharded(directory).path
    for path in (folder, folder / rank_file(0)):
        with raises(ClusterddpError):
            read_weights(path, "model")
