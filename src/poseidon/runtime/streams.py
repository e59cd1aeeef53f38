"""One rank's and one loader worker's part of an iterable data set, so that each element is seen once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, get_worker_info

from poseidon.errors import ConfigError
from poseidon.runtime.seeding import draws_of

Split = Literal["elements", "workers", "none"]
"""How an iterable data set is divided.

- `elements`: every worker of every rank reads all of it and takes one element in so many. Right for any data set that
  gives the same elements in each process.
- `workers`: the data set divides itself by `get_worker_info()`, which counts the workers of all ranks here. Each worker
  reads its own part only.
- `none`: the data set divides itself, by rank and by worker.
"""

_END = object()
"""What no data set has as an element."""


class Part(IterableDataset[Any]):
    """What a loader of one rank iterates over, in each of its workers.

    In a stream that is divided by elements, what is drawn at random for an element depends on the seed, the epoch and
    the element's number, so that a data set that shuffles does so alike in every process.

    Args:
        dataset: The user's.
        rank: Whose part.
        world_size: Of how many ranks.
        split: How it is divided.
        seed: Of random draws.
    """

    def __init__(self, dataset: IterableDataset[Any], rank: int, world_size: int, split: Split, seed: int) -> None:
        if split not in ("elements", "workers", "none"):
            raise ConfigError(f"cannot split a stream by {split!r}: use 'elements', 'workers' or 'none'")
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self.split = split
        self.seed = seed
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # persistent workers see it change

    def begin_epoch(self, epoch: int) -> None:
        """Says which epoch is read from the next `iter` on, in workers too."""
        self._epoch.fill_(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> "Reading":
        return Reading(self, int(self._epoch))


@dataclass(frozen=True)
class InitWorker:
    """Shows a `worker_init_fn` the data set that its loader was made with, not what that is wrapped in."""

    init: Callable[[int], None]

    def __call__(self, worker: int) -> None:
        """Runs in the worker, once."""
        info: Any = get_worker_info()
        inner = torch_worker.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset.dataset
        )
        with worker_seen(inner):
            self.init(worker)


class Reading:
    """One pass through a part, in one process; its state is what torchdata's `StatefulDataLoader` saves."""

    def __init__(self, part: Part, epoch: int) -> None:
        self._part = part
        self._epoch = epoch
        self._number = 0
        """Elements of the data set that were read."""
        self._ended = False
        info = get_worker_info()
        self._worker, self._num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._elements: Iterator[Any] | None = None

    def __iter__(self) -> "Reading":
        return self

    def __next__(self) -> Any:
        while not self._ended:
            is_mine = self._is_mine()
            element = self._read()
            if is_mine and not self._ended:
                return element
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Where it is, with the state of the data set or of its iterator if they have any."""
        of_dataset = of_elements = None
        if self._elements is not None and not self._ended:
            dataset: Any = self._part.dataset
            of_dataset = _state(dataset)
            of_elements = None if self._elements is dataset else _state(self._elements)
        return {"number": self._number, "ended": self._ended, "dataset": of_dataset, "elements": of_elements}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; a data set without a state of its own is read again and its elements are dropped."""
        self._ended = state["ended"]
        if self._ended:
            return
        dataset: Any = self._part.dataset
        if state["dataset"] is not None:
            dataset.load_state_dict(state["dataset"])
        if state["elements"] is not None:
            with self._surroundings(state["number"]):
                elements: Any = iter(dataset)
            elements.load_state_dict(state["elements"])
            self._elements = elements
        if state["dataset"] is not None or state["elements"] is not None:
            self._number = state["number"]
        while self._number < state["number"] and not self._ended:
            self._read()

    def _is_mine(self) -> bool:
        if self._part.split != "elements":
            return True
        round_number, rank = divmod(self._number, self._part.world_size)
        return rank == self._part.rank and round_number % self._num_workers == self._worker

    def _read(self) -> Any:
        with self._surroundings(self._number):
            if self._elements is None:
                self._elements = iter(self._part.dataset)
            element = next(self._elements, _END)
        self._ended = element is _END
        self._number += not self._ended
        return element

    @contextmanager
    def _surroundings(self, number: int) -> Iterator[None]:
        """What the data set finds while it makes an element: random numbers, and whose worker it is."""
        part = self._part
        if part.split == "none":
            yield
            return
        draws = draws_of(part.seed, self._epoch, number) if part.split == "elements" else nullcontext()
        with draws, worker_seen(None if part.split == "elements" else self._worker_of_all()):
            yield

    def _worker_of_all(self) -> torch_worker.WorkerInfo:
        """This worker among those of all ranks."""
        info = get_worker_info()
        return torch_worker.WorkerInfo(
            id=self._part.rank * self._num_workers + self._worker,
            num_workers=self._part.world_size * self._num_workers,
            seed=torch.initial_seed() if info is None else info.seed,
            dataset=self._part.dataset,
        )


@contextmanager
def worker_seen(info: torch_worker.WorkerInfo | None) -> Iterator[None]:
    """What `get_worker_info()` says meanwhile."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before


def _state(of: Any) -> dict[str, Any] | None:
    if hasattr(of, "state_dict") and hasattr(of, "load_state_dict"):
        state: dict[str, Any] = of.state_dict()
        return state
    return None
