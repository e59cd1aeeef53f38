"""Ranks of a loader in one process: what each of them sees, and what it tells its run."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from poseidon.runtime.loading import Sharding, shard
from poseidon.runtime.portions import Dealing
from poseidon.runtime.recorder import Recorder


class Group:
    """Every rank says what this one says."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def all_gather_text(self, text: str, what: str) -> list[str]:
        return [text] * self.world_size


class Run:
    """Writes down what it is told."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.group: Any = Group(rank, world_size)
        self.dealing = Dealing(self.group, (1.0,) * world_size)
        self.recorder = Recorder(rank)
        self.told: list[Any] = []

    def weight(self, num_items: float) -> None:
        self.told.append(num_items)

    def drain(self, update: Callable[[], None] | None = None) -> None:
        self.told.append("drained")
        if update is not None:
            update()


def make(source: Any, rank: int = 0, world_size: int = 1, batch_size: int | None = None, **options: Any) -> Any:
    return shard(Run(rank, world_size), source, batch_size=batch_size, sharding=Sharding(**options))


def deal(make_source: Callable[[], Any], world_size: int, *, epochs: int = 1, **options: Any) -> list[list[list[int]]]:
    """The batches of each rank, all epochs one after another, as lists of numbers."""
    ranks = []
    for rank in range(world_size):
        loader = make(make_source(), rank, world_size, **options)
        ranks.append([numbers(batch) for _ in range(epochs) for batch in loader])
    return ranks


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in torch.as_tensor(batch).reshape(-1)]


def flat(ranks: list[list[list[int]]]) -> list[int]:
    return [number for batches in ranks for batch in batches for number in batch]


class Numbers(Dataset[int]):
    """Map-style: each sample is its index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Draws from all three generators for each sample."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


class Stream(IterableDataset[int]):
    """Iterable: the numbers up to a count; ignores whose worker it is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


class ShuffledStream(Stream):
    """Shuffles with the global generators, as a buffer would."""

    def __iter__(self) -> Any:
        order = list(range(self.count))
        random.shuffle(order)
        for number in order:
            yield number if torch.rand(()) < 2 else -1


class DividedStream(Stream):
    """Reads its part only, as its worker's number says."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, self.count, info.num_workers))


class StatefulStream(IterableDataset[int]):
    """Knows where it is, as torchdata asks for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.place = 0
        self.num_reads = 0

    def __iter__(self) -> Any:
        while self.place < self.count:
            self.place += 1
            self.num_reads += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def loader_of(dataset: Any, batch_size: int | None = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, **options)
