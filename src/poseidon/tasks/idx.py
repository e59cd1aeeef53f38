"""IDX files, the format of MNIST and its successors: read whole, checked, never written."""

import gzip
import hashlib
import zlib
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from poseidon.errors import ConfigError
from poseidon.reading import read_stream
from poseidon.units import GIB

MOST_BYTES = 4 * GIB
"""Of the content, after decompression: what a small gzipped file may grow to, and no more."""
_UNSIGNED_BYTES = 0x08
_HEADER_BYTES = 4
_DIMENSION_BYTES = 4
_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, *, sha256: str | None = None) -> Tensor:
    """The bytes of an IDX file, plain or gzipped, as a tensor of its dimensions, dtype uint8.

    Args:
        path: The file.
        sha256: Expected SHA-256 of the content, after decompression, in hexadecimal.

    Raises:
        ConfigError: The file cannot be read, is not an IDX file of bytes, has another length than its header says,
            another checksum than expected, or more than `MOST_BYTES`.
    """
    content = _content(path)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise ConfigError(
            f"cannot use {path}: its content has the SHA-256 {found}, expected {sha256}; "
            "it is damaged or another data set, so install or copy it again"
        )
    dimensions = _dimensions(path, content)
    start = _HEADER_BYTES + _DIMENSION_BYTES * len(dimensions)
    if len(content) != start + prod(dimensions):
        raise ConfigError(
            f"cannot use {path}: its header says {dimensions}, so {start + prod(dimensions)} bytes, and it has "
            f"{len(content)}; install or copy it again"
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).copy()).view(dimensions)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            is_gzipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            return read_stream(gzip.GzipFile(fileobj=file) if is_gzipped else file, path, MOST_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason}; install or copy it again") from error


def _dimensions(path: Path, content: bytes) -> tuple[int, ...]:
    """Source: LeCun et al., "The MNIST database of handwritten digits", section on the IDX file format."""
    magic = content[:_HEADER_BYTES]
    num_dimensions = magic[3] if len(magic) == _HEADER_BYTES else 0
    start_of_data = _HEADER_BYTES + _DIMENSION_BYTES * num_dimensions
    if magic[:3] != bytes((0, 0, _UNSIGNED_BYTES)) or num_dimensions == 0 or len(content) < start_of_data:
        raise ConfigError(
            f"cannot use {path} as an IDX file of bytes: it starts with {magic.hex() or 'nothing'}, expected 000008 "
            "and the number of dimensions; give another file"
        )
    return tuple(
        int.from_bytes(content[start : start + _DIMENSION_BYTES], "big")
        for start in range(_HEADER_BYTES, start_of_data, _DIMENSION_BYTES)
    )
