"""What all loaders of a run cut by: joined, asked and changed together."""

import json
from typing import Any

import pytest

from poseidon.errors import ConfigError
from poseidon.runtime.options import RunOptions
from poseidon.runtime.portions import Dealing


class Group:
    """Two ranks, of which the other one says something else."""

    world_size = 2

    def __init__(self, other: list[Any]) -> None:
        self.other = other

    def all_gather_text(self, text: str, what: str) -> list[str]:
        return [json.dumps(self.other), text]


def make(other: list[Any] | None = None) -> Dealing:
    return Dealing(Group(other or []), (1.0, 1.0))  # type: ignore[arg-type]


def test_nothing_is_known_before_a_loader_has_cut() -> None:
    dealing = make()
    assert dealing.parts is None
    portions = dealing.join()
    assert dealing.parts is None
    portions.cut(9)
    assert dealing.parts == (5, 4)


def test_the_last_batch_of_an_epoch_is_not_taken_for_a_full_one() -> None:
    dealing = make()
    portions = dealing.join()
    for count in (16, 16, 3):
        portions.cut(count)
    portions.begin_epoch()
    assert dealing.parts == (8, 8)


def test_a_change_is_rank_0s_and_begins_where_no_rank_has_cut_yet() -> None:
    """The other rank, rank 0, has cut four batches with its first loader; this one is ahead with its second."""
    dealing = make([[4, 0], [12, 4]])
    first, second = dealing.join(), dealing.join()
    assert [first.cut(16), second.cut(16), second.cut(16)] == [(8, 8)] * 3
    assert dealing.change([9, 7]) == (12.0, 4.0)
    assert [first.cut(16) for _ in range(4)] == [(8, 8)] * 3 + [(12, 4)]
    assert second.cut(16) == (12, 4)
    assert dealing.parts == (12, 4)


def test_a_loader_that_comes_later_cuts_by_the_latest_portions() -> None:
    dealing = make([[], [3, 1]])
    dealing.change([3, 1])
    assert dealing.join().cut(8) == (6, 2)


def test_a_new_epoch_begins_with_the_latest_portions() -> None:
    """Its loaders had cut ahead when the loop left the epoch."""
    dealing = make([[7], [3, 1]])
    portions = dealing.join()
    portions.cut(8)
    dealing.change([3, 1])
    portions.begin_epoch()
    assert portions.cut(8) == (6, 2)


def test_no_rank_goes_without_a_sample_where_there_are_enough() -> None:
    dealing = make([[], [99, 1]])
    dealing.change([99, 1])
    assert dealing.join().cut(8) == (7, 1)


def test_shares_by_speed_need_the_mean_over_samples() -> None:
    with pytest.raises(ConfigError, match="mean='samples'"):
        RunOptions(mean="ranks", shares="speed")
    with pytest.raises(ConfigError, match="'equal' or 'speed'"):
        RunOptions(mean="samples", shares="fast")  # type: ignore[arg-type]
