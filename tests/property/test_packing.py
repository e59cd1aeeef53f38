"""A law: any state that is data comes back bit for bit, through memory and through a file; damage is an error."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from poseidon.errors import CheckpointError
from poseidon.runtime.packing import DTYPES, pack, unpack
from poseidon.runtime.tensor_file import pieces, read_tensors
from support.states import same_bits

SHAPES = st.lists(st.integers(0, 4), max_size=4)
TEXTS = st.text(st.characters(), max_size=6)  # halves of pairs, too
KEYS = st.one_of(TEXTS, st.integers(), st.tuples(st.integers(), TEXTS), st.none(), st.binary(max_size=3))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any dtype, with any bits, in any order of dimensions, sometimes a part of a larger one."""
    dtype = draw(st.sampled_from([*DTYPES.values(), torch.complex64]))
    shape = draw(SHAPES)
    count = int(np.prod(shape)) * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype == torch.bool:
        content = bytearray(byte % 2 for byte in content)
    raw = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape).permute(draw(st.permutations(range(len(shape)))))
    return tensor[1:] if tensor.dim() and draw(st.booleans()) else tensor


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    TEXTS,
    st.binary(max_size=8),
    tensors(),
    SHAPES.map(torch.Size),
    arrays.arrays(st.one_of(arrays.scalar_dtypes(), arrays.unicode_string_dtypes(max_len=3)), arrays.array_shapes()),
    arrays.scalar_dtypes().flatmap(arrays.from_dtype),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


def read(content: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    rest = memoryview(content)

    def read_into(buffer: memoryview) -> None:
        nonlocal rest
        buffer[:], rest = rest[: len(buffer)], rest[len(buffer) :]

    return read_tensors(read_into, len(content))


def as_file(parts: Mapping[str, torch.Tensor], structure: str) -> bytes:
    return b"".join(pieces(parts, {"structure": structure}))


@given(STATES)
def test_what_is_packed_comes_back(state: Any) -> None:
    parts, structure = pack(state)
    assert same_bits(unpack(parts, structure), state)
    from_file, metadata = read(as_file(parts, structure))
    assert same_bits(unpack(from_file, metadata["structure"]), state)


@given(STATES, st.data())
def test_a_damaged_file_is_another_state_or_an_error(state: Any, data: st.DataObject) -> None:
    content = bytearray(as_file(*pack(state)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.sampled_from([len(content), len(content) // 2, len(content) - 1]))]
    try:
        from_file, metadata = read(bytes(content))
        unpack(from_file, metadata.get("structure", ""))
    except CheckpointError:
        pass
