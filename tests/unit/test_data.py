"""How samples are dealt to ranks and loaded."""

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from poseidon.errors import ConfigError
from poseidon.runtime.data import Shares, batches

TEN = TensorDataset(torch.arange(10))


def deal(**fields: Any) -> list[tuple[int, ...]]:
    """What each rank sees, step by step, in the data set's order."""
    world_size = fields["world_size"]
    return [share.indices for rank in range(world_size) for share in Shares(rank=rank, **fields).epoch()]


def test_each_rank_takes_its_contiguous_part() -> None:
    assert deal(num_samples=8, world_size=2, local_batch_size=2) == [(0, 1), (4, 5), (2, 3), (6, 7)]


def test_the_last_global_batch_is_split_evenly() -> None:
    fields: dict[str, Any] = {"num_samples": 10, "world_size": 3, "local_batch_size": 2}
    assert deal(**fields) == [(0, 1), (6, 7), (2, 3), (8,), (4, 5), (9,)]


def test_a_rank_without_samples_still_has_the_step() -> None:
    shares = [
        next(iter(Shares(num_samples=2, rank=rank, world_size=4, local_batch_size=8).epoch())) for rank in range(4)
    ]
    assert [share.indices for share in shares] == [(0,), (1,), (), ()]
    assert {share.global_count for share in shares} == {2}


def test_epochs_differ_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        shares = Shares(num_samples=50, rank=0, world_size=1, local_batch_size=50, seed=seed)
        return next(iter(shares.epoch(epoch))).indices

    orders = {order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert order(1, 2) == order(1, 2)


def test_portions_decide_who_takes_how_much() -> None:
    fields: dict[str, Any] = {"num_samples": 16, "world_size": 2, "local_batch_size": 4, "portions": (3.0, 1.0)}
    assert deal(**fields) == [(0, 1, 2, 3, 4, 5), (8, 9, 10, 11, 12, 13), (6, 7), (14, 15)]


def test_no_rank_stands_aside_while_others_have_two_samples() -> None:
    fields: dict[str, Any] = {"num_samples": 5, "world_size": 3, "local_batch_size": 1, "portions": (98.0, 1.0, 1.0)}
    assert deal(**fields) == [(0,), (3,), (1,), (4,), (2,), ()]


def test_what_is_not_a_full_global_batch_can_be_left_out() -> None:
    fields: dict[str, Any] = {"num_samples": 11, "world_size": 2, "local_batch_size": 2, "drop_last": True}
    assert deal(**fields) == [(0, 1), (4, 5), (2, 3), (6, 7)]
    assert Shares(rank=0, **fields).num_steps == 2
    assert Shares(rank=0, **{**fields, "num_samples": 3}).num_steps == 0


def test_other_ranks_go_on_with_the_samples_that_are_left() -> None:
    def seen(world_size: int, start: int, end: int) -> list[int]:
        ranks = [
            Shares(num_samples=50, rank=rank, world_size=world_size, local_batch_size=3, seed=5).epoch(2, start=start)
            for rank in range(world_size)
        ]
        return [
            index
            for step in zip(*ranks, strict=True)
            if step[0].end <= end
            for share in step
            for index in share.indices
        ]

    assert seen(4, 0, 24) + seen(3, 24, 50) == seen(1, 0, 50)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"portions": (1.0, 2.0, 1.0)}, "3 portions to 2 ranks"),
        ({"portions": (1.0, -1.0)}, "portions"),
        ({"num_samples": 0}, "the data set is empty"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1 of 2"),
        ({"world_size": 0}, "rank 0 of 0"),
        ({"local_batch_size": 0}, "batches of 0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_shares_that_make_no_sense_are_refused(changed: dict[str, int], message: str) -> None:
    fields = {"num_samples": 4, "rank": 0, "world_size": 2, "local_batch_size": 1, "seed": 0}
    with pytest.raises(ConfigError, match=message):
        Shares(**{**fields, **changed})


def load(shares: Shares, *, start: int = 0, num_workers: int = 0) -> list[list[int] | None]:
    loaded = batches(TEN, shares.epoch(start=start), collate=default_collate, num_workers=num_workers)
    return [None if batch is None else batch[0].tolist() for _, batch in loaded]


def test_batches_hold_the_samples_of_their_share() -> None:
    shares = Shares(num_samples=10, rank=1, world_size=2, local_batch_size=3, seed=4)
    assert load(shares) == [list(share.indices) for share in shares.epoch()]


def test_a_share_without_samples_has_no_batch() -> None:
    assert load(Shares(num_samples=10, rank=2, world_size=3, local_batch_size=3)) == [[6, 7, 8], None]


def test_batches_can_start_in_the_middle() -> None:
    shares = Shares(num_samples=10, rank=0, world_size=2, local_batch_size=2, seed=1)
    assert load(shares, start=4) == load(shares)[1:]


def test_starting_behind_the_end_loads_nothing() -> None:
    assert load(Shares(num_samples=10, rank=0, world_size=2, local_batch_size=2), start=10) == []


def test_loading_leaves_the_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    load(Shares(num_samples=10, rank=0, world_size=2, local_batch_size=2, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
