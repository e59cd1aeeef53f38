"""What a loop waits for its data: with anything that gives batches, the first epoch apart."""

import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, TensorDataset

from poseidon.profile.loader import measure_loader
from poseidon.runtime.data import Shares, batches
from poseidon.tasks import load_task


def test_the_first_epoch_is_told_apart() -> None:
    def epoch(number: int) -> Iterator[int]:
        for batch in range(3):
            time.sleep(0.001 if number else 0.02)
            yield batch

    waits = measure_loader(epoch)
    assert waits.first_epoch >= 0.02
    assert 0.001 <= waits.later < waits.first_epoch


def test_what_the_loop_does_itself_is_not_waited_for() -> None:
    start = time.perf_counter()
    waits = measure_loader(lambda _: range(3), step_seconds=0.05)
    assert time.perf_counter() - start >= 2 * 3 * 0.05
    assert waits.later < 0.05


def test_an_epoch_may_be_long_or_empty() -> None:
    taken = []

    def epoch(number: int) -> Iterator[int]:
        for batch in range(1000):
            taken.append((number, batch))
            yield batch

    measure_loader(epoch, num_batches=4)
    assert taken == [(number, batch) for number in range(2) for batch in range(4)]
    assert measure_loader(lambda _: []).later == 0


def test_a_data_loader_and_a_tasks_own_batches() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(12, 3)), batch_size=4)
    assert measure_loader(lambda _: loader).later > 0
    task = load_task("fc-heavy")
    data = task.make_train_data()
    shares = Shares(num_samples=len(data), rank=0, world_size=1, local_batch_size=4, seed=0)
    waits = measure_loader(lambda n: batches(data, shares.epoch(n), collate=task.collate), num_batches=3)
    assert min(waits.first_epoch, waits.later) > 0
