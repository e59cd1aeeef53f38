"""Random numbers that differ between ranks and not between runs."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import poseidon
from poseidon.errors import ConfigError
from poseidon.runtime.seeding import draws_of, number_from


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(()).item()]


def seeded(number: int, rank: int) -> list[float]:
    group: Any = SimpleNamespace(rank=rank, world_size=4)
    poseidon.seed(number, group=group)
    return draw()


def test_each_rank_draws_its_own_numbers_and_again_the_same() -> None:
    everyone = [seeded(number, rank) for number in range(3) for rank in range(4)]
    assert len({figure for figures in everyone for figure in figures}) == 3 * 3 * 4
    assert seeded(1, 2) == everyone[6]


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot seed with -1"):
        seeded(-1, 0)


def test_draws_depend_on_the_numbers_alone_and_leave_no_trace() -> None:
    def inside(*numbers: int) -> list[float]:
        with draws_of(*numbers):
            return draw()

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = draw()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert inside(1, 2) == inside(1, 2) != inside(2, 1)
    with pytest.raises(KeyError), draws_of(1):
        raise KeyError
    assert draw() == expected


def test_one_number_from_several() -> None:
    assert number_from(1, 2) == number_from(1, 2)
    numbers = {number_from(a, b) for a in range(10) for b in range(10)}
    assert len(numbers) == 100
    assert all(0 <= number < 2**63 for number in numbers)
