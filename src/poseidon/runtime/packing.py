"""Nested state as named tensors and a text of JSON, and back, bit for bit and without pickle.

What a checkpoint holds is data: tensors, arrays, numbers, texts, and lists, tuples and dicts of them. `pack` takes such
a state apart, `unpack` builds it again; nothing that is read can run code. Whatever else is found in a state is refused
by its place, `scheduler.lr_lambdas[0] is a function`, when it is saved and not when it is needed.

In the JSON a number, a text, a truth value or null stands for itself, and everything else is an array that begins with
its kind: `["dict", "lr", 0.1, "betas", ["tuple", 0.9, 0.999]]`, `["tensor", "state.0.exp_avg"]`.
"""

import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from poseidon.errors import CheckpointError

MAX_DEPTH = 64
"""Of dicts, lists and tuples in one another."""
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Of the tensors that `pack` hands out, by their name in safetensors. Complex numbers are pairs of real ones."""

_PLAIN_INTS = range(-(2**63), 2**63)  # others in hexadecimal: Python reads no decimals of thousands of digits
_LIST_KINDS: Mapping[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}
_DICT_KINDS: Mapping[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSUMm][0-9]{1,9}(\[[0-9a-zA-Zμ]+\])?")  # of numpy's, those that are only bytes
_ALL_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_DATA = "a checkpoint holds tensors, arrays, numbers, texts, and lists, tuples and dicts of them"


def pack(state: Any) -> tuple[dict[str, Tensor], str]:
    """Takes a state apart.

    Tensors that are on the CPU and contiguous are handed out as they are, not copied. Tensors that are the same memory
    seen in the same way, as tied weights are, are one tensor afterwards too; others get memory of their own.

    Returns:
        Tensors on the CPU, contiguous, by names that follow their place in the state; and the rest as JSON.

    Raises:
        CheckpointError: Something in it is not data; the message says where and what.
    """
    packing = _Packing()
    structure = packing.pack(state, path="", name="", depth=0)
    return packing.tensors, json.dumps(structure, separators=(",", ":"))


def unpack(tensors: Mapping[str, Tensor], structure: str) -> Any:
    """Builds the state that `pack` took apart; tensors that were contiguous become part of it and are not copied.

    Raises:
        CheckpointError: Tensors and structure do not belong together, or are not what `pack` makes.
    """
    try:
        return _Unpacking(tensors).unpack(json.loads(structure))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(f"cannot build the saved state: its structure is damaged ({error})") from error


class _Packing:
    """One state while it is taken apart."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Hashable, tuple[str, Tensor]] = {}  # with the tensor, so that its address stays its own

    def pack(self, value: Any, *, path: str, name: str, depth: int) -> Any:
        """The JSON of a value, which may name tensors that are now in `tensors`."""
        if depth > MAX_DEPTH:
            raise CheckpointError(f"cannot save {path}: it is deeper than {MAX_DEPTH} levels, or contains itself")
        kind = type(value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _LIST_KINDS:
            items = (self._pack_item(index, item, path, name, depth) for index, item in enumerate(value))
            return [_LIST_KINDS[kind], *items]
        if kind in _DICT_KINDS:
            return self._pack_dict(value, path, name, depth)
        if isinstance(value, Tensor):
            return self._pack_tensor(value, path, name)
        if isinstance(value, np.ndarray | np.generic):
            return self._pack_array(value, path, name)
        if kind is bytes:
            return ["bytes", self._add(name, _as_tensor(value))]
        raise _refuse(path, kind.__name__)

    def _pack_item(self, key: Any, value: Any, path: str, name: str, depth: int) -> Any:
        inner = f"{name}.{key}" if name else str(key)
        return self.pack(value, path=_join(path, key), name=inner, depth=depth + 1)

    def _pack_dict(self, value: Mapping[Any, Any], path: str, name: str, depth: int) -> list[Any]:
        content: list[Any] = []
        for key, item in value.items():
            content.append(self.pack(key, path=f"a key of {path or 'the state'}", name="key", depth=depth + 1))
            content.append(self._pack_item(key, item, path, name, depth))
        if hasattr(value, "_metadata"):  # of a module's state_dict: which version of each module wrote it
            return ["state_dict", self._pack_item("_metadata", value._metadata, path, name, depth), *content]
        return [_DICT_KINDS[type(value)], *content]

    def _pack_tensor(self, tensor: Tensor, path: str, name: str) -> list[Any]:
        if what := _unsupported(tensor):
            raise _refuse(path, what)
        tensor = tensor.detach()
        way = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        seen = (tensor.device, tensor.data_ptr(), *way)
        if seen not in self._names or tensor.numel() == 0:
            plain = tensor.resolve_conj().resolve_neg()
            plain = torch.view_as_real(plain) if plain.is_complex() else plain
            self._names[seen] = self._add(name, plain.cpu().contiguous()), tensor
        kind = "complex" if tensor.is_complex() else "tensor"
        strides = list(tensor.stride())
        own_order = not tensor.is_contiguous() and _is_dense(tensor.shape, strides)
        return [kind, self._names[seen][0], *([strides] if own_order else [])]

    def _pack_array(self, array: "np.ndarray | np.generic", path: str, name: str) -> list[Any]:
        dtype = array.dtype
        is_plain = isinstance(array, np.generic) or type(array) is np.ndarray
        if not _ARRAY_DTYPE.fullmatch(dtype.str) or not is_plain:
            raise _refuse(path, f"{type(array).__name__} of {dtype}")
        if isinstance(array, np.generic):
            return ["scalar", dtype.str, array.tobytes().hex()]
        return ["array", self._add(name, _as_tensor(array.tobytes())), dtype.str, list(array.shape)]

    def _add(self, name: str, tensor: Tensor) -> str:
        """Takes a tensor under its name, or under a similar one where that is taken."""
        name = name.encode("utf-8", "replace").decode() or "state"
        free, number = name, 1
        while free in self.tensors or free == "__metadata__":  # the latter is safetensors' own
            number += 1
            free = f"{name}~{number}"
        self.tensors[free] = tensor
        return free


class _Unpacking:
    """One state while it is built."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()
        self._restrided: dict[str, tuple[list[int], Tensor]] = {}
        self._readers: Mapping[str, Callable[..., Any]] = {
            "tensor": self._tensor,
            "complex": self._complex_tensor,
            "array": self._array,
            "bytes": lambda name: self._content(name).tobytes(),
        }

    def unpack(self, packed: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"deeper than {MAX_DEPTH} levels")
        if not isinstance(packed, list):
            if isinstance(packed, dict):
                raise ValueError("an object of JSON")
            return packed
        kind, *content = packed
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]([self.unpack(item, depth + 1) for item in content])
        if kind in self._readers:
            return self._readers[kind](*content)
        return _LITERALS[kind](*content)

    def _tensor(self, name: str, strides: list[int] | None = None) -> Tensor:
        return self._laid_out(name, self._tensors[name], strides)

    def _complex_tensor(self, name: str, strides: list[int] | None = None) -> Tensor:
        return self._laid_out(name, torch.view_as_complex(self._tensors[name]), strides)

    def _laid_out(self, name: str, tensor: Tensor, strides: list[int] | None) -> Tensor:
        """A tensor that was not contiguous, with the strides that it had."""
        if strides is None:
            return tensor
        if name not in self._restrided:
            if not _is_dense(tensor.shape, strides):
                raise ValueError(f"strides {strides} of {name!r}")
            own = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
            self._restrided[name] = strides, own
        known, own = self._restrided[name]
        if known != strides:
            raise ValueError(f"{name!r} has two layouts")
        return own

    def _array(self, name: str, dtype: str, shape: list[int]) -> "np.ndarray":
        content = self._content(name)
        kind = _dtype_of_array(dtype)
        if math.prod(shape) * kind.itemsize != content.nbytes:
            raise ValueError(f"an array of {shape} and {content.nbytes} bytes")
        return np.ndarray(shape, kind, buffer=content.tobytes() or None).copy()

    def _content(self, name: str) -> "np.ndarray":
        tensor = self._tensors[name]
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or name in self._used:
            raise ValueError(f"{name!r} is no row of bytes, or is used twice")
        self._used.add(name)
        return tensor.numpy()


def _pack_int(value: int) -> int | list[Any]:
    return value if value in _PLAIN_INTS else ["int", hex(value)]


def _pack_float(value: float) -> float | list[Any]:
    return value if math.isfinite(value) else ["float", struct.pack("<d", value).hex()]


def _pack_str(value: str) -> str | list[Any]:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair, as in the names of some files
        return ["text", value.encode("utf-8", "surrogatepass").hex()]
    return value


_SCALARS: Mapping[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _pack_int,
    float: _pack_float,
    str: _pack_str,
    complex: lambda value: ["number", struct.pack("<dd", value.real, value.imag).hex()],
    torch.dtype: lambda value: ["dtype", str(value).removeprefix("torch.")],
    torch.device: lambda value: ["device", str(value)],
}


def _dtype_of_array(text: str) -> "np.dtype":
    if not _ARRAY_DTYPE.fullmatch(text):
        raise ValueError(f"arrays of {text!r}")
    return np.dtype(text)


def _pairs(content: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(content[::2], content[1::2], strict=True))


def _read_state_dict(content: list[Any]) -> OrderedDict:
    state = OrderedDict(_pairs(content[1:]))
    state._metadata = content[0]  # type: ignore[attr-defined]
    return state


_CONTAINERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "size": torch.Size,
    "dict": lambda content: dict(_pairs(content)),
    "ordered": lambda content: OrderedDict(_pairs(content)),
    "counter": lambda content: Counter(dict(_pairs(content))),
    "state_dict": _read_state_dict,
}
_LITERALS: Mapping[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack("<d", bytes.fromhex(text))[0],
    "number": lambda text: complex(*struct.unpack("<dd", bytes.fromhex(text))),
    "text": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "dtype": lambda name: _ALL_DTYPES[name],
    "device": torch.device,
    "scalar": lambda dtype, text: np.frombuffer(bytes.fromhex(text), _dtype_of_array(dtype), count=1)[0],
}


def _unsupported(tensor: Tensor) -> str:
    """Why a tensor cannot be saved, as what it is."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return type(tensor).__name__
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return f"tensor of layout {tensor.layout} on {tensor.device}"
    dtype = tensor.real.dtype if tensor.is_complex() else tensor.dtype
    return "" if dtype in DTYPES.values() else f"tensor of {tensor.dtype}"


def _is_dense(shape: torch.Size, strides: list[int]) -> bool:
    """Whether every element has memory of its own and nothing lies between them."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _join(path: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def _refuse(path: str, what: str) -> CheckpointError:
    article = "an" if what[0].lower() in "aeiou" else "a"
    return CheckpointError(f"cannot save the state: {path or 'all of it'} is {article} {what}; {_DATA}")
