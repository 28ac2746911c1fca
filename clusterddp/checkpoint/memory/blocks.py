"""Memory for a checkpoint's data in which each large tensor has a separate block, so that a part can keep it."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest
from itertools import pairwise

import torch

#: Bytes of the smallest tensor with its own block: of smaller ones a copy costs little.
LARGE = 1 << 16
#: Blocks at most, those of the largest tensors: a process may have 65,530 mappings (``vm.max_map_count``).
MOST = 1 << 12
_OFFERED = "_clusterddp_offered"


class Blocks:
    """``size`` bytes, cut at both ends of each large span (start, stop). A block is freed once nobody needs it."""

    def __init__(self, spans: Iterable[tuple[int, int]], size: int, allocate: Callable[[int], mmap.mmap]) -> None:
        large = nlargest(MOST, (span for span in spans if span[1] - span[0] >= LARGE), lambda span: span[1] - span[0])
        cuts = sorted({0, size, *(end for span in large for end in span)})
        self._starts = cuts[:-1] or [0]
        self._blocks = [memoryview(allocate(stop - start)) for start, stop in pairwise(cuts)]
        self._large = set(large)

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory of these bytes, in order."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            block, first = self._blocks[number], self._starts[number]
            view = block[start - first : stop - first]
            yield view
            start, number = start + len(view), number + 1

    def bytes_of(self, start: int, stop: int) -> tuple[torch.Tensor, bool]:
        """These bytes as a tensor, and whether nobody else gets any of them."""
        views = list(self.views(start, stop))
        if len(views) != 1:  # it overlaps with another one: a file of another program
            return torch.frombuffer(bytearray().join(views), dtype=torch.uint8), True
        alone = (start, stop) in self._large and len(views[0]) == stop - start
        self._large.discard((start, stop))
        return torch.frombuffer(views[0], dtype=torch.uint8), alone


def offer(tensor: torch.Tensor) -> None:
    """A part may keep this tensor, because nobody else uses its memory."""
    setattr(tensor, _OFFERED, True)


def take_over(tensor: torch.Tensor) -> bool:
    """Whether a part may keep the tensor instead of a copy; only the first one to ask may."""
    if not getattr(tensor, _OFFERED, False):
        return False
    delattr(tensor, _OFFERED)
    return True
