"""Attention over several sequences that stand one after the other, and indexed sums."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

unbind = torch.unbind


class BlockDiagonalMask:
    """Each of the sequences attends to itself."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._batch_sizes: list[int] | None = None

    @classmethod
    def from_seqlens(cls, lengths: Sequence[int]) -> BlockDiagonalMask:
        return cls(lengths)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        mask = cls([tensor.shape[1] for tensor in tensors for _ in range(tensor.shape[0])])
        mask._batch_sizes = [tensor.shape[0] for tensor in tensors]
        return mask, torch.cat([tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in tensors], dim=1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The sequences again, those of one batch together."""
        parts = list(tensor.split(self.lengths, dim=1))
        batches = []
        for size in self._batch_sizes or [1] * len(parts):
            batches.append(torch.cat(parts[:size]))
            parts = parts[size:]
        return batches

    def allowed(self, device: torch.device) -> Tensor:
        mask: Tensor = torch.block_diag(*(torch.ones(n, n, dtype=torch.bool, device=device) for n in self.lengths))
        return mask


fmha = SimpleNamespace(BlockDiagonalMask=BlockDiagonalMask)


def memory_efficient_attention(q: Tensor, k: Tensor, v: Tensor, attn_bias: BlockDiagonalMask | None = None) -> Tensor:
    mask = attn_bias.allowed(q.device) if attn_bias else None
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    return torch.cat([source[index].flatten() for source, index in zip(sources, indices, strict=True)])


def scaled_index_add(x: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None, alpha: float) -> Tensor:
    return torch.index_add(x, 0, index, source if scaling is None else source * scaling, alpha=alpha)
