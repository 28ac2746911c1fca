"""A model in DDP is still the script's own: it may be copied and saved at any time."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from clusterddp.checkpoint.gradients import Gradients
from clusterddp.distributed.bucket_order import BucketOrders
from clusterddp.distributed.wrapping import wrap


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def copied(model: DistributedDataParallel) -> DistributedDataParallel:
    return copy.deepcopy(model)


def saved_and_loaded(model: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"clusterddp" not in file.getvalue()
    file.seek(0)
    loaded: DistributedDataParallel = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("options", [{}, {"static_graph": True, "all_used_once": True}], ids=["plain", "static"])
@pytest.mark.parametrize("taken", [copied, saved_and_loaded])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_wrapped_model_of_a_run_can_be_copied_and_saved_whole(steps: int, taken: Any, options: Any) -> None:
    """Before and after the first steps, in which hooks watch the order of its gradients. What the copy does is not the
    model's: its gradients do not wait for the run's optimizer."""
    model = wrap(torch.nn.Linear(2, 1), [torch.device("cpu")], BucketOrders(lambda: None), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = Gradients({"model": model, "optimizer": optimizer}, world_size=1)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        gradients.stepped(optimizer)
    other = taken(model)
    for _ in range(2):
        other(torch.ones(1, 2)).sum().backward()
    assert torch.equal(other.module.weight, model.module.weight)
    assert "gradients" not in gradients.progress(before_step=False)
    model(torch.ones(1, 2)).sum().backward()
    assert list(gradients.progress(before_step=False)["gradients"]) == ["model"]
