"""Copies of nested state in the memory of the host, made again and again: into the same memory where it fits.

Fresh memory has to be mapped page by page, which costs more than the copy itself.
"""

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch

Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class HostCopies:
    """Makes copies; what one `copy` hands out is used again by the next, after `give_back`."""

    def __init__(self) -> None:
        self._free: defaultdict[Form, list[torch.Tensor]] = defaultdict(list)
        self._given: list[torch.Tensor] = []

    def copy(self, state: Any) -> Any:
        """The same nested state with tensors and arrays of its own; a tensor that is in it twice is copied once."""
        copied = _Copying(self._take).copy(state)
        self._free.clear()  # what did not fit this time will not fit the next
        return copied

    def give_back(self) -> None:
        """What was handed out is no longer used."""
        for tensor in self._given:
            self._free[_form(tensor)].append(tensor)
        self._given = []

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        free = self._free[_form(tensor)]
        there = free.pop() if free else torch.empty_like(tensor, device="cpu")
        self._given.append(there)
        return there


class _Copying:
    """One state while it is copied."""

    def __init__(self, take: Any) -> None:
        self._take = take
        self._seen: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], torch.Tensor] = {}

    def copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach())
        if isinstance(value, np.ndarray):
            return value.copy()
        if type(value) in (dict, OrderedDict, Counter):
            return self._dict(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.copy, value))
        return value  # a subclass too: whoever saves it refuses it by its place

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        copied: dict[Any, Any] = type(value)()
        for key, item in value.items():
            copied[key] = self.copy(item)
        if hasattr(value, "_metadata"):
            copied._metadata = self.copy(value._metadata)  # type: ignore[attr-defined]
        return copied

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided or type(value) is not torch.Tensor:
            return value.clone()
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in self._seen or not value.numel():
            self._seen[key] = self._take(value).copy_(value)
        return self._seen[key]


def _form(tensor: torch.Tensor) -> Form:
    return tensor.dtype, tensor.shape, tensor.stride()
