"""A script may make its own default process group after ``clusterddp.init()``, which has made one.

torch refuses that: "trying to initialize the default process group twice!". But nearly every public training repository
calls ``init_process_group`` without asking ``is_initialized()``, and ``init()`` cannot leave the group to the script:
others, and libraries, use the group that exists. So until the script calls torch's function, another one is in its
place, which destroys the group of ``init()`` first.

The function is replaced in every module that has it under its name, as ``from torch.distributed import
init_process_group`` usually comes before ``init()``. Under another name it fails as without this module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_NAME = "init_process_group"


class SecondGroup:
    """From now on, and once, the script may make a default group.

    Args:
        before: removes the group that there is.
        made: called once the script's own exists.
    """

    def __init__(self, before: Callable[[], None], made: Callable[[], None]) -> None:
        self._torchs = dist.init_process_group

        @functools.wraps(self._torchs)
        def init_process_group(*values: Any, **options: Any) -> None:
            self.allow()
            before()
            self._torchs(*values, **options)
            made()

        self._ours = init_process_group
        _replace(self._torchs, self._ours)

    def allow(self) -> None:
        """Puts torch's function back."""
        _replace(self._ours, self._torchs)


def _replace(old: Callable[..., None], new: Callable[..., None]) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is old:
            setattr(module, _NAME, new)
