"""Stand-in devices for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.build import environment

GPUs = Callable[..., None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> GPUs:
    """Gives the processes that the test starts from now on so many stand-in devices."""

    def give(devices: int = 2, **settings: str) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in environment(devices, **settings).items():
            monkeypatch.setenv(name, value)

    return give
