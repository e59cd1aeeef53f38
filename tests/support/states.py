"""Nested states: whether two are the same bit for bit, and such as hypothesis draws."""

import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor


def same_bits(a: Any, b: Any) -> bool:
    """Whether two states have the same types and bits throughout; NaN equals the same NaN only."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bytes_of(a) == _bytes_of(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict | OrderedDict):
        return len(a) == len(b) and all(map(same_bits, a.items(), b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same_bits((a.real, a.imag), (b.real, b.imag))
    return bool(a == b)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
