"""``ctx.wrap()`` on devices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Launch
from tests.gpu.conftest import GPUs


def train(**options: Any) -> str:
    import torch

    import clusterddp

    ctx = clusterddp.init()
    model = ctx.wrap(torch.nn.Linear(2, 2), **options)
    model(torch.ones(1, 2, device=ctx.device)).sum().backward()
    return str(ctx.device)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_is_wrapped_on_each_rank_s_device(gpus: GPUs, launch: Launch, ranks: int) -> None:
    """Also with DDP's ``device_ids``, which a rank with one device gets."""
    gpus(2)
    handle = launch(train, device="cuda", gpus_per_node=ranks)
    assert handle.result() == "cuda:0"
