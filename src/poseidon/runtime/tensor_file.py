"""Tensors as a file of safetensors, made and read piece by piece.

Each byte passes once, so that whoever writes or reads can hash on the way, and a tensor is read into the memory that it
keeps. Any reader of safetensors opens such a file.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from poseidon.errors import CheckpointError
from poseidon.runtime.packing import DTYPES
from poseidon.units import MIB, format_bytes

PIECE = 8 * MIB
MAX_HEADER = 256 * MIB
"""Of names, shapes and metadata. Other readers of safetensors end at 100 MB."""
ALIGNMENT = 8
LENGTH_BYTES = 8

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a file, in their order.

    Args:
        tensors: On the CPU and contiguous, as `pack` makes them. Their memory is handed out, not a copy.
        metadata: Texts that the file also holds.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"cannot save {format_bytes(len(text))} of what is no tensor in one part, {format_bytes(MAX_HEADER)} is "
            "the most: make tensors of long lists"
        )
    yield memoryview(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for _, tensor in ordered:
        content = _bytes_of(tensor)
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]


def read_tensors(read_into: Callable[[memoryview], None], size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads a file.

    Args:
        read_into: Fills a buffer with the next bytes.
        size: Of the whole file, in bytes: what its header promises is held against it before memory is taken.

    Returns:
        The tensors and the metadata.

    Raises:
        CheckpointError: It is no file of safetensors.
    """
    length_bytes = bytearray(LENGTH_BYTES)
    if size < LENGTH_BYTES:
        raise CheckpointError(f"it has only {size} bytes")
    read_into(memoryview(length_bytes))
    length = int.from_bytes(length_bytes, "little")
    if length > min(size - LENGTH_BYTES, MAX_HEADER):
        raise CheckpointError(f"its header claims {length} bytes of a file of {size}")
    text = bytearray(length)
    read_into(memoryview(text))
    try:
        header = json.loads(text)
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        specs = {name: _Spec(**spec) for name, spec in header.items()}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"its header cannot be read ({error})") from error
    tensors = {}
    end = LENGTH_BYTES + length
    for name, spec in sorted(specs.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if LENGTH_BYTES + length + spec.start != end or end + spec.num_bytes > size:
            raise CheckpointError(f"the place of tensor {name!r} in it is wrong")
        try:
            tensors[name] = torch.empty(spec.shape, dtype=spec.dtype)
        except (RuntimeError, TypeError) as error:  # the latter for a dimension beyond 64 bits
            raise CheckpointError(f"there is no memory for tensor {name!r} of {spec.shape}") from error
        read_into(_bytes_of(tensors[name]))
        end += spec.num_bytes
    if end != size:
        raise CheckpointError(f"it has {size - end} bytes after the last tensor")
    return tensors, metadata


class _Spec:
    """One tensor as the header of a file describes it."""

    def __init__(self, *, dtype: str, shape: list[int], data_offsets: list[int]) -> None:
        self.dtype = DTYPES[dtype]
        self.shape = shape
        self.start, stop = data_offsets
        if not all(type(number) is int and number >= 0 for number in (*shape, self.start, stop)):
            raise ValueError(f"a tensor of {shape} at {data_offsets}")
        self.num_bytes = math.prod(shape) * self.dtype.itemsize
        if stop - self.start != self.num_bytes:
            raise ValueError(f"a tensor of {shape} in {stop - self.start} bytes")


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
