"""State as tensors and JSON: what is kept bit for bit, what is refused and by which name."""

import functools
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import CheckpointError
from poseidon.runtime.packing import DTYPES, MAX_DEPTH, pack, unpack
from support.states import same_bits


def through(state: Any) -> Any:
    tensors, structure = pack(state)
    return unpack(tensors, structure)


def test_a_training_comes_back_bit_for_bit() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
    images = torch.randn(2, 3, 8, 8)
    model(images)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    model(images).sum().backward()
    optimizer.step()
    schedule.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(7).bit_generator.state,
    }
    back = through(state)
    assert same_bits(back, state)
    assert back["model"]._metadata == model.state_dict()._metadata


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        struct.unpack("<d", bytes.fromhex("010000000000f4ff"))[0],
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        0.1,
        1 + 2j,
        complex(math.nan, -0.0),
        0,
        -(2**63),
        2**63,
        10**5000,
        True,
        None,
        "",
        "naïve ☃",
        "half \ud800 a pair",
        "\ud83d\ude00",
        b"",
        b"\x00\xff",
        (),
        ([], {}, ((),)),
        {1: "one", "1": "one too", (1, "a", (2.5,)): 3, None: 4, b"b": 6},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter("abba"),
        torch.Size([2, 0]),
        torch.bfloat16,
        torch.device("cuda:1"),
        np.float32(0.1),
        np.int64(-1),
        np.bool_(True),
        np.datetime64("2024-02-29T12:00", "m"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values(value: Any) -> None:
    assert same_bits(through({"it": [value]}), {"it": [value]})


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.complex32, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 2, 5)], ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * dtype.itemsize
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = content.view(dtype).reshape(shape)
    assert same_bits(through([tensor]), [tensor])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 5).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4, dtype=torch.complex64).t(),
        torch.randn(3, 1, 4).transpose(0, 2),
    ],
    ids=["transposed", "channels_last", "complex", "with a dimension of one"],
)
def test_the_order_in_memory_is_kept(tensor: Tensor) -> None:
    [back] = through([tensor])
    assert same_bits(back, tensor)
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(20)[::3],
        torch.tensor([1.5]).expand(4),
        torch.randn(4, 6)[:, 1:3],
        torch.randn(2, 2, dtype=torch.cfloat).conj(),
    ],
    ids=["strided", "expanded", "sliced", "conjugated"],
)
def test_parts_of_memory_get_memory_of_their_own(tensor: Tensor) -> None:
    [back] = through([tensor])
    assert same_bits(back, tensor.resolve_conj().contiguous())
    assert back.untyped_storage().nbytes() == back.nbytes


def test_tied_weights_are_one_tensor_and_are_written_once() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    tensors, structure = pack({"embedding": weight, "head": weight.detach(), "turned": weight.t(), "row": weight[0]})
    assert list(tensors) == ["embedding", "turned", "row"]
    back = unpack(tensors, structure)
    assert back["embedding"].data_ptr() == back["head"].data_ptr()
    assert same_bits(back["turned"], weight.detach().t())


def test_equal_memory_of_other_numbers_is_not_taken_for_tied() -> None:
    weight = torch.randn(4)
    back = through([weight, weight.view(torch.int32), weight.view(2, 2), weight[:0], weight[4:]])
    assert same_bits(back, [weight, weight.view(torch.int32), weight.view(2, 2), torch.empty(0), torch.empty(0)])


def test_contiguous_tensors_are_not_copied() -> None:
    weight = torch.randn(4)
    tensors, _ = pack([weight])
    assert tensors["0"].data_ptr() == weight.data_ptr()


def test_tensors_have_the_names_of_a_state_dict() -> None:
    tensors, _ = pack(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))).state_dict())
    assert list(tensors) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]


def test_names_that_collide_or_are_taken_differ() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.ones(2), "\ud800": torch.ones(3)}
    tensors, structure = pack(state)
    assert len(tensors) == 4
    assert "__metadata__" not in tensors
    assert same_bits(unpack(tensors, structure), state)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.random.default_rng(0).normal(size=(3, 4))),
        np.zeros((0, 3), np.float16),
        np.array(3, np.uint64),
        np.array(["ab", "c"]),
        np.array([b"ab"]),
        np.array(["2024-01-01"], "M8[D]"),
        np.arange(10)[::3],
        np.array([1.5]).astype(np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays(array: "np.ndarray") -> None:
    [back] = through([array])
    assert same_bits(back, array)
    back[...] = back  # can be written to


class Net(nn.Module):
    pass


class SubTensor(Tensor):
    pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"scheduler": {"lr_lambdas": [lambda epoch: epoch]}}, r"scheduler\.lr_lambdas\[0\] is a function"),
        ([{"a b": (1, functools.partial(print))}], r"\[0\]\['a b'\]\[1\] is a partial"),
        (Net(), "all of it is a Net"),
        ({"kinds": {int}}, "kinds is a set"),
        ({"state": defaultdict(dict)}, "state is a defaultdict"),
        ({"queue": deque([1])}, "queue is a deque"),
        ({"w": torch.eye(2).to_sparse()}, r"w is a tensor of layout torch\.sparse_coo"),
        ({"w": torch.eye(2, device="meta")}, "w is a tensor of layout torch.strided on meta"),
        ({"w": torch.eye(2).as_subclass(SubTensor)}, "w is a SubTensor"),
        ({"w": nn.UninitializedParameter()}, "w is an UninitializedParameter"),
        ({"a": np.array([None])}, "a is a ndarray of object"),
        ({"a": np.ma.masked_array([1])}, "a is a MaskedArray"),
        ({"a": np.zeros(1, [("x", "f4")])}, "a is a ndarray of"),
        ({frozenset(): 1}, "a key of the state is a frozenset"),
        ({"lr": type("Lr", (float,), {})(0.1)}, "lr is a Lr"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_data_is_refused_by_its_place(state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        pack(state)


def test_what_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {"epoch": 1}
    state["self"] = state
    with pytest.raises(CheckpointError, match="contains itself"):
        pack(state)


def nested(depth: int) -> list[Any]:
    state: list[Any] = []
    for _ in range(depth):
        state = [state]
    return state


def test_as_deep_as_may_be() -> None:
    assert through(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(CheckpointError, match=f"deeper than {MAX_DEPTH} levels"):
        pack(nested(MAX_DEPTH + 1))


@pytest.mark.parametrize(
    "structure",
    [
        "",
        "{",
        "[]",
        '{"a": 1}',
        '["eval", "print(1)"]',
        '["dict", "a"]',
        '["dict", ["list"], 1]',
        '["tensor"]',
        '["tensor", "nowhere"]',
        '["tensor", "w", [1, 1]]',
        '["tensor", "w", [1, 3], 4]',
        '["list", ["tensor", "w", [1, 2]], ["tensor", "w", [3, 1]]]',
        '["complex", "bytes"]',
        '["bytes", "w"]',
        '["list", ["bytes", "bytes"], ["bytes", "bytes"]]',
        '["array", "bytes", "O", [4]]',
        '["array", "bytes", "V4", [1]]',
        '["array", "bytes", "<f4", [2]]',
        '["array", "bytes", "<f4", [-1, -1]]',
        '["array", "bytes", "<f4", 1]',
        '["scalar", "O", "00000000"]',
        '["scalar", "<f8", "00"]',
        '["dtype", "load"]',
        '["device", "nowhere"]',
        '["float", "00"]',
        '["int", "0xzz"]',
        '["text", "80"]',
        '["size", "a"]',
        '["state_dict"]',
        json.dumps(nested(MAX_DEPTH + 2)).replace("[", '["list",').replace(",]", "]"),
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_structure_is_refused(structure: str) -> None:
    tensors = {"w": torch.zeros(2, 3), "bytes": torch.zeros(4, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="structure is damaged"):
        unpack(tensors, structure)
