"""What `run.shard` makes of a loop's own data, rank by rank in one process."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from poseidon.errors import CheckpointError, ConfigError
from poseidon.runtime.loading import Sharding, shard
from support.loaders import (
    DividedStream,
    Group,
    Noisy,
    Numbers,
    Run,
    ShuffledStream,
    SizedStream,
    StatefulStream,
    Stream,
    deal,
    flat,
    loader_of,
    make,
    numbers,
)

stateful = pytest.importorskip("torchdata.stateful_dataloader")
StatefulDataLoader = stateful.StatefulDataLoader
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own


# Map-style data


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_sample_is_seen_once_per_epoch_in_another_order(num_workers: int) -> None:
    ranks = deal(lambda: loader_of(Numbers(103), 4, shuffle=True, num_workers=num_workers), 4, epochs=2)
    first, second = (flat([batches[7 * epoch : 7 * epoch + 7] for batches in ranks]) for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(103))
    assert first != second


def test_workers_make_no_difference() -> None:
    dealt = [
        deal(lambda: loader_of(Numbers(50), 3, shuffle=True, num_workers=num_workers), 2)  # noqa: B023
        for num_workers in (0, 1, 2)
    ]
    assert dealt[0] == dealt[1] == dealt[2]


def test_persistent_workers_see_each_epoch() -> None:
    def make_source() -> DataLoader[Any]:
        return loader_of(Numbers(20), 3, shuffle=True, num_workers=2, persistent_workers=True)

    assert deal(make_source, 2, epochs=3) == deal(lambda: loader_of(Numbers(20), 3, shuffle=True), 2, epochs=3)


def test_a_data_set_is_shuffled_for_training_and_kept_in_order_for_evaluation() -> None:
    assert flat(deal(lambda: Numbers(40), 1, batch_size=8)) != list(range(40))
    assert flat(deal(lambda: Numbers(40), 1, batch_size=8, train=False)) == list(range(40))
    assert flat(deal(lambda: Numbers(40), 1, batch_size=8, shuffle=False)) == list(range(40))


def test_a_sampler_of_torch_decides_whether_to_shuffle() -> None:
    data = Numbers(40)
    assert flat(deal(lambda: loader_of(data, 8, sampler=SequentialSampler(data)), 2)) != list(range(40))
    assert sorted(flat(deal(lambda: loader_of(data, 8), 2))) == list(range(40))
    shuffled = deal(lambda: loader_of(data, 8, sampler=RandomSampler(data)), 2)
    assert shuffled == deal(lambda: data, 2, batch_size=8)
    assert shuffled == deal(lambda: StatefulDataLoader(data, 8, shuffle=True), 2)
    assert shuffled == deal(lambda: loader_of(data, 8, sampler=DistributedSampler(data, 2, 0)), 2)
    assert deal(lambda: loader_of(data, 8, shuffle=True), 2, shuffle=False) == deal(lambda: loader_of(data, 8), 2)


@pytest.mark.parametrize("kind", ["subset", "weighted", "replaced", "generator"])
def test_the_order_of_any_other_sampler_is_dealt_to_all_ranks(kind: str) -> None:
    def make_source() -> DataLoader[Any]:
        samplers: dict[str, Sampler[int]] = {
            "subset": SubsetRandomSampler(range(10, 40)),
            "weighted": WeightedRandomSampler(torch.arange(1, 41), 30),
            "replaced": RandomSampler(Numbers(40), replacement=True, num_samples=30),
            "generator": SubsetRandomSampler(range(10, 40), generator=torch.Generator().manual_seed(9)),
        }
        return loader_of(Numbers(40), 4, sampler=samplers[kind])

    ranks = deal(make_source, 3, epochs=2)
    (alone,) = deal(lambda: loader_of(Numbers(40), 12, sampler=make_source().sampler), 1, epochs=2)
    together = [number for step in range(3) for batches in ranks for number in batches[step]]
    assert together == [number for batch in alone[:3] for number in batch]
    assert alone[:3] != alone[3:]
    if kind == "subset":
        assert sorted(together) == list(range(10, 40))


def test_a_sampler_that_differs_between_ranks_is_refused() -> None:
    class Elsewhere(Group):
        def all_gather_text(self, text: str, what: str) -> list[str]:
            return [text, "another" if "orders" in what else text]

    run = Run()
    run.group = Elsewhere(0, 2)
    loader = shard(run, loader_of(Numbers(9), sampler=SubsetRandomSampler(range(9))), sharding=Sharding())
    with pytest.raises(ConfigError, match="order of SubsetRandomSampler: it gives another one on another rank"):
        next(iter(loader))


def test_what_the_loader_was_made_with_is_kept() -> None:
    def make_source() -> DataLoader[Any]:
        return loader_of(Numbers(11), 2, collate_fn=sum, drop_last=True, num_workers=1, worker_init_fn=count_from_100)

    loader = make(make_source(), 1, 2)
    assert list(loader) == [2 + 3 + 200, 6 + 7 + 200]
    assert len(loader) == 2


def count_from_100(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    data: Any = info.dataset
    data.__class__ = CountsFrom100


class CountsFrom100(Numbers):
    def __getitem__(self, index: int) -> int:
        return 100 + index


def test_data_sets_that_fetch_many_at_once_are_asked_for_many() -> None:
    class Many(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            assert indices
            return [-index for index in indices]

    assert flat(deal(lambda: loader_of(Many(5), 2), 4)) == [0, -1, -2, -3, -4]


def test_samples_that_are_batches_already_stay_as_they_are() -> None:
    class Whole(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.arange(index, index + 2)

    loader = make(loader_of(Whole(5), None), 1, 2)
    assert [numbers(batch) for batch in loader] == [[1, 2], [3, 4]]
    assert loader._run.told == ["drained"]


def test_portions_decide_on_the_size_of_batches() -> None:
    ranks = deal(lambda: Numbers(16), 2, batch_size=4, portions=(3.0, 1.0), shuffle=False)
    assert ranks == [[[0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13]], [[6, 7], [14, 15]]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_portions_change_in_the_middle_and_no_sample_is_lost(num_workers: int) -> None:
    seen, sizes = [], []
    for rank in range(2):
        loader = make(loader_of(Numbers(80), 4, num_workers=num_workers), rank, 2)
        for step, batch in enumerate(loader):
            if step == 2:
                loader.portions.change((3.0, 1.0), 8)
            seen += numbers(batch)
            sizes.append(len(batch))
    assert sorted(seen) == list(range(80))
    assert sizes == [4] * 8 + [6] * 2 + [4] * 8 + [2] * 2
    assert loader.portions.latest == (3.0, 1.0)


# What the run is told


def test_the_run_learns_how_many_samples_each_batch_has() -> None:
    told = []
    for rank in range(4):
        loader = make(Numbers(103), rank, 4, batch_size=8)
        assert len(list(loader)) == len(loader) == 4
        told.append(loader._run.told)
    assert told == [[8, 8, 8, 2], [8, 8, 8, 2], [8, 8, 8, 2], [8, 8, 8, 1]]


def test_where_ranks_have_a_batch_more_the_others_answer() -> None:
    told, updates = [], []
    for rank in range(3):
        loader = make(Numbers(8), rank, 3, batch_size=2, update=lambda: updates.append(1))
        assert len(list(loader)) == len(loader)
        told.append(loader._run.told)
    assert told == [[2, 1, "drained"], [2, 1, "drained"], [2, "drained"]]
    assert len(updates) == 3


def test_evaluating_tells_nothing() -> None:
    loader = make(Numbers(8), 2, 3, batch_size=2, train=False)
    assert [numbers(batch) for batch in loader] == [[4, 5]]
    assert loader._run.told == []


def test_a_loop_that_is_left_early_does_not_answer_and_the_next_epoch_begins() -> None:
    loader = make(Numbers(8), 0, 3, batch_size=2)
    for _ in loader:
        break
    assert loader._run.told == [2]
    list(loader)
    assert loader.epoch == 2


# Streams


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Stream, ShuffledStream])
def test_each_element_is_seen_once(kind: type[Stream], num_workers: int) -> None:
    ranks = deal(lambda: loader_of(kind(103), 4, num_workers=num_workers), 3, epochs=2)
    assert sorted(flat(ranks)) == sorted([*range(103), *range(103)])


def test_a_stream_that_shuffles_does_so_anew_in_each_epoch_and_alike_everywhere() -> None:
    (alone,) = deal(lambda: loader_of(ShuffledStream(20), 20), 1, epochs=2)
    assert alone[0] != alone[1]
    ranks = deal(lambda: loader_of(ShuffledStream(20), 1), 2)
    assert [number for step in zip(*ranks, strict=True) for batch in step for number in batch] == alone[0]


def test_persistent_workers_learn_of_the_next_epoch() -> None:
    def make_source(**options: Any) -> DataLoader[Any]:
        return loader_of(ShuffledStream(20), 5, num_workers=1, **options)

    assert deal(lambda: make_source(persistent_workers=True), 1, epochs=2) == deal(make_source, 1, epochs=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_asks_whose_worker_it_is_can_divide_itself(num_workers: int) -> None:
    ranks = deal(lambda: loader_of(DividedStream(103), 4, num_workers=num_workers), 3, split="workers")
    assert sorted(flat(ranks)) == list(range(103))
    assert get_worker_info() is None


def test_a_stream_that_has_divided_itself_is_taken_as_it_is() -> None:
    ranks = deal(lambda: loader_of(Stream(9), 4), 3, split="none")
    assert ranks == [[[0, 1, 2, 3], [4, 5, 6, 7], [8]]] * 3


def test_a_stream_tells_its_samples_and_answers_at_its_end() -> None:
    loader = make(loader_of(Stream(7), 2), 0, 2)
    assert [numbers(batch) for batch in loader] == [[0, 2], [4, 6]]
    assert loader._run.told == [2, 2, "drained"]
    with pytest.raises(TypeError):
        len(loader)
    assert len(make(loader_of(SizedStream(7), 2), 1, 2)) == 2


def test_a_stream_whose_epoch_can_be_set_is_told() -> None:
    class Told(Stream):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    deal(lambda: loader_of(Told(3), 2), 1, epochs=3)
    assert Told.epochs == [0, 1, 2]


def test_drawing_for_a_stream_leaves_the_loops_own_random_numbers_alone() -> None:
    state = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    deal(lambda: loader_of(ShuffledStream(20), 4), 2)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert np.random.get_state()[1].tolist() == state[2]  # type: ignore[union-attr]


# Going on in the middle


def rest_of(loader: Any, num_epochs: int) -> list[list[int]]:
    """What is left up to an epoch's end."""
    rest = []
    for _ in range(loader.epoch, num_epochs):
        rest += [numbers(batch) for batch in loader]
    return rest


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop_at", [1, 3, 7, 9])
def test_a_resumed_loader_goes_on_with_the_same_batches(num_workers: int, stop_at: int) -> None:
    def make_loader() -> Any:
        return make(loader_of(Numbers(37), 3, shuffle=True, num_workers=num_workers), 1, 2, seed=3)

    loader, seen, state = make_loader(), [], {}
    for _ in range(2):
        for batch in loader:
            seen.append(numbers(batch))
            if len(seen) == stop_at:
                state = json.loads(json.dumps(loader.state_dict()))
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert rest_of(resumed, 2) == seen[stop_at:]


def test_a_state_between_two_epochs_begins_the_next_one() -> None:
    loader = make(Numbers(10), batch_size=4)
    list(loader)
    resumed = make(Numbers(10), batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 1
    assert rest_of(resumed, 3) == rest_of(loader, 3)


def test_a_state_after_the_last_batch_leaves_the_loop_to_end_its_epoch() -> None:
    loader = make(Numbers(8), batch_size=4)
    for _ in loader:
        state = loader.state_dict()
    resumed = make(Numbers(8), batch_size=4)
    resumed.load_state_dict(state)
    assert resumed.epoch == 0
    assert list(resumed) == []
    assert resumed.epoch == 1


def test_other_ranks_that_resume_know_who_has_a_batch_more() -> None:
    """Of 20 samples 6 were taken; the 14 that are left give four ranks 3 each and then 2 of them one."""
    first = make(Numbers(20), 0, 3, batch_size=2)
    next(iter(first))
    told = []
    for rank in range(4):
        resumed = make(Numbers(20), rank, 4, batch_size=3)
        resumed.load_state_dict(first.state_dict())
        list(resumed)
        told.append(resumed._run.told)
        list(resumed)
    assert told[0] == [3, 1, "drained", 3, 2]
    assert told[2] == [3, "drained", 3, 2]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Stream, ShuffledStream, StatefulStream])
@pytest.mark.parametrize("loader_kind", [DataLoader, StatefulDataLoader])
def test_a_resumed_stream_goes_on_with_the_same_batches(loader_kind: Any, kind: Any, num_workers: int) -> None:
    def make_loader() -> Any:
        return make(loader_kind(kind(23), 3, num_workers=num_workers), 1, 2)

    loader, seen, states = make_loader(), [], []
    for _ in range(2):
        for batch in loader:
            seen.append(numbers(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
    for stop_at in (1, len(seen) // 2 - 1, len(seen) // 2, len(seen) // 2 + 1):
        resumed = make_loader()
        resumed.load_state_dict(states[stop_at - 1])
        assert rest_of(resumed, 2) == seen[stop_at:], stop_at


def test_a_stream_with_a_state_is_not_read_again() -> None:
    loader = make(StatefulDataLoader(StatefulStream(100), 5))
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    data = StatefulStream(100)
    resumed = make(StatefulDataLoader(data, 5))
    resumed.load_state_dict(loader.state_dict())
    assert numbers(next(iter(resumed))) == [50, 51, 52, 53, 54]
    assert data.num_reads == 5


@pytest.mark.parametrize(
    ("make_other", "message"),
    [
        (lambda: make(Numbers(11), batch_size=4), "num_samples was 10"),
        (lambda: make(Numbers(10), batch_size=4, seed=1), "seed was 0"),
        (lambda: make(Stream(10), batch_size=4), "kind was 'map'"),
    ],
)
def test_a_state_of_other_data_is_refused(make_other: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        make_other().load_state_dict(make(Numbers(10), batch_size=4).state_dict())


def test_a_stream_on_other_ranks_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"world_size was 2 .* and is 3 here"):
        make(Stream(10), 0, 3, batch_size=4).load_state_dict(make(Stream(10), 0, 2, batch_size=4).state_dict())


# Random draws of samples


def noise(num_workers: int, world_size: int) -> dict[int, list[float]]:
    """What each sample drew in the second epoch, by its index."""
    drawn = {}
    for rank in range(world_size):
        source = loader_of(Noisy(12), 2, shuffle=True, num_workers=num_workers)
        loader = make(source, rank, world_size, seed=5, seed_samples=True)
        list(loader)
        drawn.update({int(row[0]): row[1:].tolist() for batch in loader for row in batch})
    return drawn


def test_draws_can_depend_on_the_sample_only() -> None:
    expected = noise(0, 1)
    assert len({number for row in expected.values() for number in row}) == 36
    assert noise(2, 1) == noise(0, 3) == expected


def test_workers_of_different_ranks_and_epochs_draw_different_numbers() -> None:
    drawn = [
        float(row[column])
        for rank in range(2)
        for loader in [make(loader_of(Noisy(8), 2, num_workers=1), rank, 2)]
        for _ in range(2)
        for batch in loader
        for row in batch
        for column in (1, 2, 3)
    ]
    assert len(set(drawn)) == len(drawn)


# What cannot be used


@pytest.mark.parametrize(
    ("make_source", "options", "message"),
    [
        (lambda: Numbers(4), {}, "without a batch_size"),
        (lambda: loader_of(Numbers(4)), {"batch_size": 2}, "the loader has its own"),
        (lambda: iter([1, 2]), {"batch_size": 2}, "cannot shard a list_iterator"),
        (lambda: Numbers(0), {"batch_size": 2, "shuffle": False}, "the data set is empty"),
        (lambda: Numbers(4), {"batch_size": 2, "seed": -1}, "seed -1"),
        (lambda: Numbers(4), {"batch_size": 2, "portions": (1.0, 2.0)}, "2 portions to 1 ranks"),
        (
            lambda: DataLoader(Numbers(4), batch_sampler=BatchSampler(SequentialSampler(Numbers(4)), 2, False)),
            {},
            "a batch sampler of its own, BatchSampler",
        ),
        (lambda: Special(Numbers(4)), {}, "a Special: it has its own __iter__"),
        (
            lambda: loader_of(Numbers(4), sampler=SubsetRandomSampler(range(4))),
            {"shuffle": True},
            "a sampler, SubsetRandomSampler",
        ),
        (lambda: Stream(4), {"batch_size": 2, "shuffle": True}, "cannot shuffle an iterable"),
        (lambda: Stream(4), {"batch_size": 2, "portions": (1.0,)}, "by portions"),
        (lambda: Stream(4), {"batch_size": 2, "seed_samples": True}, "seed the samples"),
        (lambda: Stream(4), {"batch_size": 2, "split": "ranks"}, "cannot split a stream by 'ranks'"),
    ],
)
def test_what_cannot_be_dealt_is_refused(make_source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(make_source(), **options)


class Special(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from ()


def test_data_that_differs_between_ranks_is_refused() -> None:
    class Elsewhere(Group):
        def all_gather_text(self, text: str, what: str) -> list[str]:
            return [text, text.replace("samples = 10", "samples = 12")]

    run = Run()
    run.group = Elsewhere(0, 2)
    with pytest.raises(ConfigError, match="samples = 10 on rank 0 and samples = 12 on rank 1"):
        shard(run, Numbers(10), batch_size=2, sharding=Sharding())
