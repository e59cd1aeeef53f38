"""Gradients in buckets: which ones share a message, and the flat buffers that hold them; how these are cut.

A bucket is one flat tensor. The gradients are views into it, so there is no second copy of them; behind them stand one
number per gradient, which says on how many ranks it was made in this step, and one vote for a new order.
"""

from collections.abc import Sequence

import torch
from torch import nn

from poseidon.units import MIB

FIRST_BUCKET_BYTES = MIB
"""Small, so that the link starts early; as in PyTorch's DDP."""
BUCKET_BYTES = 25 * MIB
"""As in PyTorch's DDP (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3)."""


def split_into_buckets(
    num_bytes: Sequence[int], *, first_bytes: int = FIRST_BUCKET_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> list[list[int]]:
    """Groups consecutive gradients so that each bucket is closed once it has reached its size.

    Args:
        num_bytes: Bytes of each gradient, in the order in which they become ready.
        first_bytes: Size at which the first bucket is closed.
        bucket_bytes: Size at which the others are closed.

    Returns:
        Positions in `num_bytes`, bucket by bucket, order kept, each exactly once.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for index, size in enumerate(num_bytes):
        current.append(index)
        filled += size
        if filled >= (first_bytes if not buckets else bucket_bytes):
            buckets.append(current)
            current, filled = [], 0
    if current:
        buckets.append(current)
    return buckets


def stretches(count: int, world_size: int) -> list[tuple[int, int]]:
    """Start and end of each rank's stretch of `count` elements, equal to within one."""
    return [(count * rank // world_size, count * (rank + 1) // world_size) for rank in range(world_size)]


def pieces(start: int, end: int, piece: int) -> list[tuple[int, int]]:
    """A stretch cut into pieces of at most `piece` elements."""
    return [(at, min(at + piece, end)) for at in range(start, end, piece)]


class Bucket:
    """A flat buffer whose parts are the gradients of some parameters of one dtype and device."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        count = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(count + len(self.parameters) + 1, dtype=first.dtype, device=first.device)
        self.views: list[torch.Tensor] = []
        offset = 0
        for parameter in self.parameters:
            part = self.flat[offset : offset + parameter.numel()]
            self.views.append(_shaped_like(part, parameter))
            offset += parameter.numel()
        self.gradients = self.flat[:offset]
        """All of them, end to end."""
        self.facts = self.flat[offset:]
        """One number per gradient: 1 where this rank made it, after the sum on how many ranks it was made. Then the
        vote: above zero if some rank wants a new order."""


def _shaped_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of `flat` with the parameter's shape and, where it is dense, its memory layout."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's numbers fill their memory without gaps or overlaps (channels-last does)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
