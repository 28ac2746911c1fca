"""Which sharded models a run takes. A process group that only pretends to have four ranks is enough to ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from clusterddp.checkpoint.sharded.sharding import Sharding, check_version
from clusterddp.distributed import wrapping
from tests.wording import raises

RANKS = 4


@pytest.fixture(autouse=True)
def _four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def sharding_of(part: nn.Module) -> Sharding | None:
    return Sharding.of({"model": part}, RANKS)


def test_a_model_that_fully_shard_has_sharded_over_all_ranks_is_taken() -> None:
    assert sharding_of(model()) is None
    one_dimension, replicas = model(), model()
    fully_shard(one_dimension)
    fully_shard(replicas, mesh=mesh(2, 2))
    assert all(sharding_of(one) is not None for one in (one_dimension, replicas))


@pytest.mark.parametrize("case", ["tensor parallel", "both", "part of the ranks", "several meshes"])
def test_other_models_are_refused(case: str) -> None:
    found = model()
    if case == "tensor parallel":
        parallelize_module(found, mesh(4), {"0": ColwiseParallel()})
    elif case == "both":
        of_both = mesh(2, 2)
        parallelize_module(found, of_both["inner"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
        fully_shard(found, mesh=of_both["outer"])
    elif case == "part of the ranks":
        fully_shard(found, mesh=mesh(2, 2)["inner"])
    else:
        fully_shard(found[0], mesh=mesh(4))
        fully_shard(found[1], mesh=mesh(2, 2))
    with raises(TypeError):
        sharding_of(found)


def test_wrap_refuses_a_sharded_model() -> None:
    sharded = model()
    fully_shard(sharded)
    with raises(TypeError):
        wrapping.wrap(sharded, [torch.device("cpu")])


@pytest.mark.parametrize("version", ["2.6.0", "2.8.1+cpu"])
def test_an_older_torch_is_refused(version: str) -> None:
    check_version("2.9.0")
    check_version("2.13.0+cu130")
    with raises(RuntimeError):
        check_version(version)
