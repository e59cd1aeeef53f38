"""`run.shard`: a loop's own data, of which each rank sees its part.

It takes what the loop reads from already: a data set, or a `DataLoader` with all that was said there about workers,
collating and pinned memory. What comes out is iterated over in the same way, once per epoch.
"""

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from poseidon.comm.group import Group
from poseidon.errors import CheckpointError, ConfigError
from poseidon.runtime.data import Batches, Share, Shares
from poseidon.runtime.portions import Dealing, Portions
from poseidon.runtime.recorder import Recorder
from poseidon.runtime.seeding import draws_of, number_from
from poseidon.runtime.streams import InitWorker, Part, Split
from poseidon.timeline import Activity

T = TypeVar("T")
Source = Dataset[Any] | DataLoader[Any]


class Trained(Protocol):
    """What a loader tells a run."""

    group: Group
    dealing: Dealing
    recorder: Recorder

    def weight(self, num_items: float) -> None:
        """The loss of the next backward pass is a mean over so many samples."""

    def drain(self, update: Callable[[], None] | None = None) -> None:
        """This rank has no samples left."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How data is dealt to the ranks; the same on every rank.

    Raises:
        ConfigError: A field cannot be used.
    """

    shuffle: bool | None = None
    """Whether map-style data comes in another order in each epoch. None: as the loader's sampler says; a data set is
    shuffled for training and not for evaluation."""
    seed: int = 0
    """Of the order, and of the random numbers that loader workers draw."""
    train: bool = True
    """False for evaluation: the run is told nothing, and no exchange is answered."""
    portions: tuple[float, ...] | None = None
    """How much of each global batch of map-style data each rank takes, in relation to the others. None: for training as
    the run deals samples, which may change, and equal parts for evaluation."""
    split: Split = "elements"
    """How an iterable data set is divided: see `poseidon.runtime.streams.Split`."""
    seed_samples: bool = False
    """Makes random draws in `__getitem__` depend on seed, epoch and index only: the same on any number of ranks and
    workers, and after resuming. Seeding takes a moment for each sample, which only tiny samples notice."""
    update: Callable[[], None] | None = None
    """What the loop does after a backward pass, for the exchanges that are answered when other ranks have a batch more:
    see `run.drain`. None where that is the optimizer's step and zeroing gradients."""

    def __post_init__(self) -> None:
        """Refuses what no data can be dealt by."""
        if self.seed < 0:
            raise ConfigError(f"cannot shuffle with the seed {self.seed}: use 0 or more")


class ShardedLoader(ABC):
    """Batches of one rank, for one epoch after another: what `run.shard` returns.

    Each `for` over it is an epoch; the next one is dealt in another order. One that was left early is over.

    Args:
        run: Is told how many samples each batch has.
        loader: As it was given.
        sharding: How the data is dealt.
    """

    def __init__(self, run: Trained, loader: DataLoader[Any], sharding: Sharding) -> None:
        self.dataset = loader.dataset
        """All of the data."""
        self.epoch = 0
        """The epoch that is under way, or between two the next one; `range(loader.epoch, num_epochs)` are left."""
        self._run = run
        self._sharding = sharding
        self._taken = 0
        """What lies behind in this epoch: samples of all ranks, or batches of this rank's part of a stream."""
        self._resumed = False

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or what is left of the one that `load_state_dict` went back to."""
        if self._taken and not self._resumed:
            self._begin_next_epoch()
        self._resumed = False
        tells = self._sharding.train
        for num_samples, batch in timed(self._run.recorder, self._pass()) if tells else self._pass():
            if tells and num_samples is not None:
                self._run.weight(num_samples)
            yield batch
        self._begin_next_epoch()
        if tells and self._may_end_apart():
            self._run.drain(self._sharding.update)

    @property
    def trains(self) -> bool:
        """Whether the run is told what its batches have."""
        return self._sharding.train

    def _begin_next_epoch(self) -> None:
        self.epoch += 1
        self._taken = 0

    @abstractmethod
    def _pass(self) -> Iterator[tuple[int | None, Any]]:
        """The batches that are left in this epoch, with their numbers of samples where known; counts what is taken."""

    @abstractmethod
    def _may_end_apart(self) -> bool:
        """Whether one rank may have a batch more than another in an epoch."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Where this rank is: after the batch that the loop has in hand."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to where `state_dict` was called: the next `for` yields the batches that would have come then.

        Raises:
            CheckpointError: The state is one of other data, or of other ranks where that makes a difference.
        """


class MapLoader(ShardedLoader):
    """Of map-style data: each rank has its share of each global batch, whatever the number of ranks.

    Its state is the same on every rank and holds for another number of ranks, too: the epoch goes on with the samples
    that are left, in the same order.
    """

    def __init__(self, run: Trained, loader: DataLoader[Any], sharding: Sharding) -> None:
        super().__init__(run, loader, sharding)
        shuffle, self._sampler = _read_sampler(loader, sharding.shuffle)
        self._shuffle = shuffle
        self._is_batched = loader.batch_size is not None
        self._num_samples = len(cast("Any", loader.dataset if self._sampler is None else self._sampler))
        self._batch_size = loader.batch_size or 1
        self._drop_last = loader.drop_last
        self._shares = self._make_shares(self._num_samples)
        self._began_at = 0
        """Where in the epoch's order the present pass began: not at its start if it was resumed."""
        self._num_passed = 0
        """Global batches of the present pass that the loop has been given."""
        self._changes: list[tuple[int, tuple[float, ...]]] = []
        """By what portions a pass that is resumed goes on."""
        if sharding.train and sharding.portions is None:
            self.portions = run.dealing.join()
        else:
            self.portions = Portions(sharding.portions or (1.0,) * run.group.world_size)
        self._generator = torch.Generator()
        self._batches = Batches(
            cast("Any", loader.dataset),
            collate=loader.collate_fn if self._is_batched else _CollateOne(loader.collate_fn),
            sample_seed=sharding.seed if sharding.seed_samples else None,
            generator=self._generator,
            **_options(loader),
        )

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        last = self._count_last(0)
        has_last = Portions(self.portions.latest).cut(last)[self._run.group.rank] > 0
        return self._shares.num_steps - (last > 0 and not has_last)

    def state_dict(self) -> dict[str, Any]:
        """See `ShardedLoader`; it can be written as JSON."""
        return {
            "kind": "map",
            "epoch": self.epoch,
            "num_taken": self._taken,
            "num_samples": self._num_samples,
            "seed": self._sharding.seed,
            "portions": self._changes if self._resumed else self.portions.changes_from(self._num_passed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `ShardedLoader`."""
        here = {"kind": "map", "num_samples": self._num_samples, "seed": self._sharding.seed}
        _check_state(state, here)
        self.epoch, self._taken, self._resumed = state["epoch"], state["num_taken"], True
        changes = [(first, tuple(portions)) for first, portions in state.get("portions", ())]
        alike = all(len(portions) == self._run.group.world_size for _, portions in changes)
        self._changes = changes if alike else []

    def _pass(self) -> Iterator[tuple[int | None, Any]]:
        order = self._order()
        self._shares = self._make_shares(len(order))
        self._began_at, self._num_passed = self._taken, 0
        self.portions.begin_epoch(self._changes)
        self._changes = []
        self._generator.manual_seed(number_from(self._sharding.seed, self.epoch, self._run.group.rank))
        for share, batch in self._batches.load(self._deal(order), epoch=self.epoch):
            self._taken = share.end
            self._num_passed += 1
            if share.indices:
                yield len(share.indices) if self._is_batched else None, batch

    def _deal(self, order: np.ndarray) -> Iterator[Share]:
        """What is left of the epoch; the parts are cut when they are asked for, by the portions of that moment."""
        start = self._taken
        while count := self._shares.count(start):
            yield self._shares.share(order, start, self.portions.cut(count))
            start += count

    def _may_end_apart(self) -> bool:
        """Whether the last global batch had too few samples for all: every rank knows without asking."""
        return 0 < self._count_last(self._began_at) < self._shares.world_size

    def _count_last(self, start: int) -> int:
        """Samples of a last global batch that is not full, in an epoch that begins at place `start` of its order."""
        return 0 if self._drop_last else (self._shares.num_samples - start) % self._shares.global_batch_size

    def _order(self) -> np.ndarray:
        if self._sampler is None:
            return self._shares.order(self.epoch)
        seed = self._sharding.seed
        order = np.array(_draw(self._sampler, seed, self.epoch), dtype=np.int64)
        digest = hashlib.sha256(order.tobytes()).hexdigest()
        digests = self._run.group.all_gather_text(digest, "comparing the orders of the samplers")
        if digests != [digest] * len(digests):
            raise ConfigError(
                f"cannot deal samples in the order of {type(self._sampler).__name__}: it gives another one on another "
                "rank; let it draw from torch's, numpy's or Python's global generator, or from a torch.Generator that "
                "is its attribute `generator`, all of which are seeded here"
            )
        return order

    def _make_shares(self, num_samples: int) -> Shares:
        group = self._run.group
        return Shares(
            num_samples=num_samples,
            rank=group.rank,
            world_size=group.world_size,
            local_batch_size=self._batch_size,
            seed=self._sharding.seed if self._shuffle else None,
            portions=self._sharding.portions,
            drop_last=self._drop_last,
        )


class StreamLoader(ShardedLoader):
    """Of an iterable data set: its state is this rank's own, and holds for as many ranks and workers."""

    def __init__(self, run: Trained, loader: DataLoader[Any], sharding: Sharding) -> None:
        super().__init__(run, loader, sharding)
        if sharding.shuffle:
            raise ConfigError("cannot shuffle an iterable data set: it decides on its order itself; leave shuffle out")
        if sharding.portions is not None:
            raise ConfigError(
                "cannot cut an iterable data set by portions; use another batch_size on each rank instead"
            )
        if sharding.seed_samples:
            raise ConfigError("cannot seed the samples of an iterable data set; leave seed_samples out")
        group = run.group
        dataset = cast("IterableDataset[Any]", loader.dataset)
        self._part = Part(dataset, group.rank, group.world_size, sharding.split, sharding.seed)
        self._generator = torch.Generator()
        self._is_stateful = _is_stateful(loader)
        make: Any = type(loader) if self._is_stateful else DataLoader
        self._loader: Any = make(
            self._part,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=(_CollateCounted if loader.batch_size else _CollateUncounted)(loader.collate_fn),
            generator=self._generator,
            **_options(loader),
        )

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch, where the data set says how many elements it has.

        Raises:
            TypeError: It does not, or divides itself.
        """
        if self._part.split != "elements":
            raise TypeError("a stream that divides itself does not say how many batches each rank has")
        num_elements = len(cast("Any", self._part.dataset))
        group, num_workers = self._run.group, max(1, self._loader.num_workers)
        mine = len(range(group.rank, num_elements, group.world_size))
        sizes = [len(range(worker, mine, num_workers)) for worker in range(num_workers)]
        batch_size = self._loader.batch_size or 1
        return sum(size // batch_size if self._loader.drop_last else -(-size // batch_size) for size in sizes)

    def state_dict(self) -> dict[str, Any]:
        """See `ShardedLoader`; where the loader is torchdata's, what that and the data set give is in it as it is."""
        inner = self._loader.state_dict() if self._is_stateful and self._taken else None
        return {**self._identity(), "epoch": self.epoch, "num_taken": self._taken, "loader": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `ShardedLoader`; without torchdata's loader the batches that were taken are loaded again and dropped."""
        _check_state(state, self._identity())
        self.epoch, self._taken, self._resumed = state["epoch"], state["num_taken"], True
        if self._is_stateful:
            self._loader.load_state_dict(state["loader"] or {})

    def _pass(self) -> Iterator[tuple[int | None, Any]]:
        self._part.begin_epoch(self.epoch)
        self._generator.manual_seed(number_from(self._sharding.seed, self.epoch, self._run.group.rank))
        batches = iter(self._loader)
        if not self._is_stateful:
            batches = islice(batches, self._taken, None)
        for num_samples, batch in batches:
            self._taken += 1
            yield num_samples, batch

    def _may_end_apart(self) -> bool:
        return self._run.group.world_size > 1

    def _identity(self) -> dict[str, Any]:
        group = self._run.group
        return {
            "kind": "stream",
            "rank": group.rank,
            "world_size": group.world_size,
            "num_workers": self._loader.num_workers,
            "seed": self._sharding.seed,
        }


def shard(run: Trained, source: Source, *, batch_size: int | None = None, sharding: Sharding) -> ShardedLoader:
    """A rank's part of the data; all ranks call this together, with the same data and the same options.

    Args:
        run: Is told how many samples each batch has; its ranks share the data.
        source: A data set, map-style or iterable, or a `DataLoader` of one, whose batch size is that of one rank.
        batch_size: Of one rank, for a data set.
        sharding: How the data is dealt.

    Raises:
        ConfigError: The source or an option cannot be used, or they differ between ranks.
    """
    loader = _as_loader(source, batch_size, sharding)
    _check_alike(run.group, _facts(loader, sharding))
    is_stream = isinstance(loader.dataset, IterableDataset)
    return (StreamLoader if is_stream else MapLoader)(run, loader, sharding)


def timed(recorder: Recorder, source: Iterator[T]) -> Iterator[T]:
    """The same items; stamps how long the training thread waits for its samples."""
    while True:
        recorder.begin(Activity.LOADER)
        item = next(source, None)
        recorder.end(Activity.LOADER)
        if item is None:
            return
        yield item


def _as_loader(source: Source, batch_size: int | None, sharding: Sharding) -> DataLoader[Any]:
    if isinstance(source, DataLoader):
        if batch_size is not None:
            raise ConfigError(f"cannot use batch_size={batch_size}: the loader has its own; give one of the two")
        _check_loader(source)
        return source
    is_stream = isinstance(source, IterableDataset)
    if not is_stream and not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise ConfigError(
            f"cannot shard a {type(source).__name__}: give a data set with __getitem__ and __len__, an "
            "IterableDataset, or a DataLoader of one"
        )
    if batch_size is None:
        raise ConfigError("cannot shard a data set without a batch_size: say how many samples one rank has per step")
    shuffle = sharding.train if sharding.shuffle is None else sharding.shuffle
    return DataLoader(source, batch_size=batch_size, shuffle=shuffle and not is_stream)


def _check_loader(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ and not _is_stateful(loader):
        raise ConfigError(
            f"cannot shard a {kind.__name__}: it has its own __iter__, which may do anything; give its data set"
        )
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise ConfigError(
            f"cannot shard a loader with a batch sampler of its own, {type(loader.batch_sampler).__name__}: it says "
            "what is in a batch, not how batches are divided; give a sampler of single samples and a batch_size"
        )


def _is_stateful(loader: DataLoader[Any]) -> bool:
    return type(loader) is _torchdata("StatefulDataLoader")


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """What else a loader was made with; batches come in order whatever it said about that."""
    names = ["num_workers", "pin_memory", "timeout", "prefetch_factor", "persistent_workers"]
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        options["multiprocessing_context"] = loader.multiprocessing_context
    if hasattr(loader, "snapshot_every_n_steps") and isinstance(loader.dataset, IterableDataset):
        options["snapshot_every_n_steps"] = loader.snapshot_every_n_steps
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    if loader.worker_init_fn is not None:
        options["worker_init_fn"] = InitWorker(loader.worker_init_fn)
    return options


def _read_sampler(loader: DataLoader[Any], shuffle: bool | None) -> tuple[bool, Sampler[int] | None]:
    """Whether to shuffle, and the sampler that is asked for each epoch's order where it is not one of torch's own."""
    sampler: Any = loader.sampler
    if type(sampler) is SequentialSampler:
        return bool(shuffle), None
    if _is_permutation(sampler):
        return shuffle is not False, None
    if type(sampler) in (DistributedSampler, _torchdata("StatefulDistributedSampler")):  # what it does is done here
        return sampler.shuffle if shuffle is None else shuffle, None
    if shuffle is not None:
        raise ConfigError(
            f"cannot use shuffle={shuffle}: the loader has a sampler, {type(sampler).__name__}, that decides on the "
            "order; give one of the two"
        )
    if not hasattr(sampler, "__len__"):
        raise ConfigError(f"cannot shard by the sampler {type(sampler).__name__}: it does not say its length")
    return False, sampler


def _is_permutation(sampler: Any) -> bool:
    """Whether it gives each sample once, in any order."""
    if type(sampler) not in (RandomSampler, _torchdata("RandomSampler")):
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _torchdata(name: str) -> type | None:
    """A class of torchdata's loader, which is imported if somebody uses it."""
    for module in ("torchdata.stateful_dataloader", "torchdata.stateful_dataloader.sampler"):
        found: type | None = getattr(sys.modules.get(module), name, None)
        if found is not None:
            return found
    return None


def _draw(sampler: Any, seed: int, epoch: int) -> list[int]:
    """A sampler's order in an epoch, which depends on nothing else."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number_from(seed, epoch))
    with draws_of(seed, epoch):
        return list(sampler)


def _facts(loader: DataLoader[Any], sharding: Sharding) -> dict[str, Any]:
    """What has to be the same on every rank."""
    facts = {name: getattr(sharding, name) for name in ("seed", "shuffle", "train", "portions", "split")}
    facts["seed_samples"] = sharding.seed_samples
    if isinstance(loader.dataset, IterableDataset):
        return {"data": "iterable", **facts}
    sizes = {"samples": len(cast("Any", loader.dataset)), "batch_size": loader.batch_size}
    return {"data": "map-style", **sizes, "drop_last": loader.drop_last, **facts}


def _check_alike(group: Group, facts: dict[str, Any]) -> None:
    """Raises ConfigError with the first difference between rank 0 and another."""
    lines = [f"{name} = {value}" for name, value in facts.items()]
    everyone = [text.splitlines() for text in group.all_gather_text("\n".join(lines), "comparing the data")]
    for rank, others in enumerate(everyone):
        for here, there in zip(everyone[0], others, strict=False):
            if here != there:
                raise ConfigError(
                    f"cannot shard data that differs between ranks: {here} on rank 0 and {there} on rank {rank}; give "
                    "the same on every rank, and portions where ranks should have batches of another size"
                )


def _check_state(state: dict[str, Any], here: dict[str, Any]) -> None:
    for name, value in here.items():
        if state.get(name) != value:
            raise CheckpointError(
                f"cannot resume the loader: {name} was {state.get(name)!r} when its state was saved and is {value!r} "
                "here; resume with the same data and options"
            )


@dataclass(frozen=True)
class _CollateOne:
    """For a loader without batches: what is made of its single sample."""

    convert: Callable[[Any], Any]

    def __call__(self, samples: list[Any]) -> Any:
        return self.convert(samples[0])


@dataclass(frozen=True)
class _CollateCounted:
    """A batch of a stream with the number of its elements."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), self.collate(samples)


@dataclass(frozen=True)
class _CollateUncounted:
    """An element of a stream that is not batched here: nobody knows how many samples are in it."""

    convert: Callable[[Any], Any]

    def __call__(self, element: Any) -> tuple[None, Any]:
        return None, self.convert(element)
