"""Means over ranks, of which each says what it has."""

import json
import math
from typing import Any

import pytest
import torch

from poseidon.errors import ConfigError
from poseidon.runtime.means import mean_over_ranks


class Group:
    """Rank 0 of several; what the others say is given."""

    rank = 0

    def __init__(self, *others: tuple[dict[str, float], float]) -> None:
        self._others = [json.dumps({"n": n, "values": values}) for values, n in others]

    def all_gather_text(self, text: str, what: str) -> list[str]:
        return [text, *self._others]


def mean(value: Any, n: float, *others: tuple[dict[str, float], float]) -> Any:
    group: Any = Group(*others)
    return mean_over_ranks(group, value, n)


def test_each_sample_counts_once() -> None:
    assert mean(1.0, 3, ({"": 5.0}, 1)) == 2.0
    assert mean({"loss": 1.0, "accuracy": 0.5}, 1, ({"loss": 4.0, "accuracy": 0.8}, 2)) == {
        "loss": 3.0,
        "accuracy": pytest.approx(0.7),
    }


def test_tensors_are_taken_and_added_up_in_float64() -> None:
    value = torch.tensor(0.1, dtype=torch.float32)
    assert mean(value, 1, ({"": 0.1}, 1)) == (value.item() + 0.1) / 2
    assert mean({"loss": torch.ones(1, requires_grad=True)}, 1) == {"loss": 1.0}


def test_a_rank_without_samples_does_not_count_whatever_it_gives() -> None:
    assert mean(math.nan, 0, ({}, 0), ({"": 2.0}, 4)) == 2.0
    assert mean({}, 0, ({"loss": 2.0}, 4)) == {"loss": 2.0}
    assert math.isnan(mean(1.0, 0, ({}, 0)))
    assert math.isnan(mean({"loss": 1.0}, 0, ({}, 0))["loss"])


def test_what_is_no_number_stays_none() -> None:
    assert math.isnan(mean(math.nan, 1, ({"": 2.0}, 1)))
    assert mean(math.inf, 1, ({"": 2.0}, 1)) == math.inf


def test_figures_of_different_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank 0 gives 'loss', rank 2 'loss', 'accuracy'; give figures of the same"):
        mean({"loss": 1.0}, 1, ({}, 0), ({"loss": 1.0, "accuracy": 1.0}, 1))
    with pytest.raises(ConfigError, match="rank 0 gives one figure without a name, rank 1 'loss'"):
        mean(1.0, 1, ({"loss": 1.0}, 1))


@pytest.mark.parametrize("n", [-1, math.inf, math.nan])
def test_a_number_of_samples_that_is_none_is_refused(n: float) -> None:
    with pytest.raises(ConfigError, match="zero or more"):
        mean(1.0, n)


def test_a_figure_of_several_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a mean of loss of shape \(2,\)"):
        mean({"loss": torch.zeros(2)}, 1)
