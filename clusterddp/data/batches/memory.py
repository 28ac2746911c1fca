"""Memory for the tensors of a batch: in a worker, where the rank can map it."""

from __future__ import annotations

import ctypes

import torch
from torch.utils.data import get_worker_info

#: Bytes of a tensor that is sent within the message. A place in shared memory takes the worker and the rank 0.3 ms
#: each: they pass its file descriptor over a connection that is made, and authenticated, for each tensor.
SMALL = 128 << 10
#: Of ``madvise``, since Linux 5.14. Older kernels refuse it, and map the pages one by one.
_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def batch_of(first: torch.Tensor, size: int) -> torch.Tensor | None:
    """An empty tensor for so many like the first one; None if any memory will do."""
    if first.nbytes * size <= SMALL or get_worker_info() is None or not first.is_cpu:
        return None
    storage = torch.UntypedStorage._new_shared(first.nbytes * size)  # type: ignore[no-untyped-call]
    # All pages in one call: one by one, each when it is first written to, they take a tenth of a worker's time.
    _madvise(storage.data_ptr(), storage.nbytes(), _POPULATE_WRITE)
    return torch.empty(0, dtype=first.dtype).set_(storage, 0, (size, *first.shape))  # type: ignore[call-overload,no-any-return]
