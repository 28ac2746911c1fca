"""Fingerprints of tensors on a GPU need little memory, and no dtypes that CUDA's kernels lack."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from clusterddp.distributed.wrapping import Buffers
from clusterddp.training import exactness
from clusterddp.training.exactness import fingerprints

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def test_a_comparison_of_a_large_tensor_needs_little_memory() -> None:
    """torch converts all elements that it sums at once. The most that one operator allocated, by torch's profiler."""
    weights = torch.ones(3 * exactness.SUMMED, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        (found,) = fingerprints([weights])
    most = max(event.self_cpu_memory_usage for event in profiled.events())
    assert 0 < most <= 8 * exactness.SUMMED + 4096
    assert found == int(weights.view(torch.int16).sum(dtype=torch.int64))


def test_a_changed_bit_or_element_changes_the_fingerprint_also_at_the_end() -> None:
    weights = torch.ones(exactness.SUMMED + 7)
    before = fingerprints([weights])
    for place in (0, exactness.SUMMED, -1):
        changed = weights.clone()
        changed[place] = -1.0
        assert fingerprints([changed]) != before


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_buffers_are_copied_without_the_dtypes_that_cuda_cannot_copy_together(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A fake of CUDA's kernel, which refuses them: "foreach_tensor_copy" not implemented for 'UInt32'."""
    copy = torch._foreach_copy_

    def on_cuda(to: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        assert not {tensor.dtype for tensor in (*to, *sources)} & set(UNSIGNED)
        copy(to, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", on_cuda)
    module = torch.nn.Module()
    counts = torch.tensor([1, 2], dtype=dtype)
    module.register_buffer("counts", counts)
    buffers = Buffers({"model": module}, 1)
    buffers.begin_step()
    counts[0] = 9
    assert not buffers.unchanged()
    assert buffers.rewind()
    assert counts.tolist() == [1, 2]
    assert buffers.unchanged()
