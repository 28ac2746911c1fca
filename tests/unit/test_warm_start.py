"""``ctx.run(init_from=...)``: which files are read, what fits, and what is said of the rest. No ranks."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clusterddp.checkpoint import file_format
from clusterddp.errors import CheckpointError
from clusterddp.training.warm_start import Files, Loaded, load
from tests.wording import raises, says

GROUP: Any = SimpleNamespace(
    rank=0, world_size=1, collective_device=torch.device("cpu"), control_device=torch.device("cpu")
)


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return dict(net().state_dict())


def loaded(files: Files, strict: bool = True, **parts: Any) -> list[Loaded]:
    return load(files, strict, parts, GROUP)


def same(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def save_safetensors(path: Path, tensors: dict[str, torch.Tensor], **facts: str) -> None:
    """As other programs write it: no checksums, and data that need not be aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **facts}}
    data = b"x"
    header["odd"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    for name, tensor in tensors.items():
        kind = {torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
        more = tensor.numpy().tobytes()
        place = [len(data), len(data) + len(more)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": place}
        data += more
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("shape", ["plain", "in DDP", "compiled", "under its name", "under state_dict", "under both"])
def test_weights_are_found_however_the_model_was_saved(
    tmp_path: Path, weights: dict[str, torch.Tensor], shape: str
) -> None:
    """By torch.save, with the prefixes of DDP and torch.compile, alone or beside other states."""
    contents: dict[str, dict[str, Any]] = {
        "plain": weights,
        "in DDP": OrderedDict((f"module.{name}", value) for name, value in weights.items()),
        "compiled": {f"module._orig_mod.{name}": value for name, value in weights.items()},
        "under its name": {"model": weights, "optimizer": {"state": {}}, "epoch": 3},
        "under state_dict": {"state_dict": weights, "epoch": 3},
        "under both": {"state_dict": net().state_dict(), "model": weights},
    }
    torch.save(contents[shape], tmp_path / "net.pt")
    model = net()
    (found,) = loaded(tmp_path / "net.pt", model=model, other=net())
    assert (found.part, found.missing, found.unexpected) == ("model", [], []) and same(model, weights)


def test_safetensors_of_other_programs_are_read(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Without the safetensors package; a model of any name, if it is the only one."""
    save_safetensors(tmp_path / "net.safetensors", weights)
    model, optimizer = net(), torch.optim.SGD(net().parameters(), lr=1.0)
    (found,) = loaded(str(tmp_path / "net.safetensors"), strict=False, optimizer=optimizer, net=model)
    assert (found.part, found.missing, found.unexpected) == ("net", [], ["odd"]) and same(model, weights)


def test_a_file_for_each_part(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Parts that are no modules too: they load what the file holds."""
    torch.save(weights, tmp_path / "net.pt")
    optimizer = torch.optim.SGD(net().parameters(), lr=1.0)
    torch.save({"optimizer": {**optimizer.state_dict(), "param_groups": [{"lr": 0.5, "params": [0, 1, 2, 3]}]}},
               tmp_path / "sgd.pt")  # fmt: skip
    parts: dict[str, Any] = {"a": net(), "b": net(), "optimizer": optimizer}
    files = {"a": tmp_path / "net.pt", "b": tmp_path / "net.pt", "optimizer": tmp_path / "sgd.pt"}
    assert [one.part for one in loaded(files, **parts)] == ["a", "b", "optimizer"]
    assert same(parts["a"], weights) and same(parts["b"], weights)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_names_on_one_side_only_are_an_error_unless_they_are_expected(
    tmp_path: Path, weights: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    """Then they are reported, and the model keeps its own values."""
    del weights["0.bias"]
    torch.save({**weights, "head.weight": torch.ones(1)}, tmp_path / "net.pt")
    model = net()
    with raises(CheckpointError):
        loaded(tmp_path / "net.pt", model=model)
    own = model.state_dict()["0.bias"].clone()
    (found,) = loaded(tmp_path / "net.pt", strict=False, model=model)
    assert (found.missing, found.unexpected) == (["0.bias"], ["head.weight"])
    assert same(model, {**weights, "0.bias": own})
    says(capsys.readouterr().err)


def test_another_shape_is_always_an_error(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """In torch's words, with the part and the file."""
    torch.save({**weights, "0.bias": torch.ones(4)}, tmp_path / "net.pt")
    with raises(CheckpointError):
        loaded(tmp_path / "net.pt", strict=False, model=net())


class _Code:
    """Would run a command if it was unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_a_file_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, weights: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in it is executed."""
    torch.save({"model": weights, "more": _Code()}, tmp_path / "code.pt")
    (tmp_path / "short.pt").write_bytes(b"PK")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    (tmp_path / "short.safetensors").write_bytes(b"\xff" * 9)
    save_safetensors(tmp_path / "run.safetensors", weights, format=file_format.FORMAT)
    with pytest.raises(CheckpointError, match=r"short.pt .* \(Weights only load failed"):  # torch's words differ
        loaded(tmp_path / "short.pt", model=net())
    for name in ("code.pt", "empty.pt", "short.safetensors", "run.safetensors", "none.pt", "net.npz"):
        with raises(CheckpointError) as refused:
            loaded(tmp_path / name, model=net())
        assert name in str(refused.value)
    assert "executed" not in capsys.readouterr().out


def test_the_part_must_be_clear() -> None:
    """The message names those that it could be."""
    with raises(TypeError):
        loaded("net.pt", a=net(), b=net())
    with raises(TypeError):
        loaded({"c": "net.pt"}, a=net())
    with raises(TypeError):
        loaded({"a": 3}, a=net())  # type: ignore[dict-item]
