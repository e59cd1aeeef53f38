"""What counts as drift, and who is named."""

import pytest
import torch
from torch import nn

from poseidon.comm.group import Group
from poseidon.runtime.drift import DriftCheck, digest, odd_ranks, settings_of


@pytest.mark.parametrize(
    ("values", "odd", "like"),
    [("ab", [1], 0), ("aab", [2], 0), ("baa", [0], 1), ("abab", [1, 3], 0), ("abcc", [0, 1], 2), ("abc", [1, 2], 0)],
)
def test_the_fewest_are_odd_and_rank_0_is_usual_in_a_tie(values, odd, like):
    assert odd_ranks(list(values)) == (odd, like)


def test_digests_tell_bits_shapes_and_types_apart():
    one = torch.arange(6.0)
    others = [one.view(2, 3), one.double(), one + 1e-6, -one, one.to(torch.bfloat16)]
    assert len({digest(tensor) for tensor in (one, *others)}) == 6
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(one.view(2, 3).t()) == digest(one.view(2, 3).t().contiguous())


def test_settings_are_those_of_every_group():
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.Adam([{"params": weights[:2]}, {"params": weights[2:], "lr": torch.tensor(0.25)}], lr=0.5)
    settings = settings_of(optimizer)
    assert settings["'lr' of parameter group 0"] == "0.5"
    assert settings["'lr' of parameter group 1"] == "0.25"
    assert settings["'betas' of parameter group 1"] == "(0.9, 0.999)"
    assert settings["the number of parameters in group 0"] == "2"
    assert settings_of(None) == {}


def test_due_every_so_many_exchanges_since_the_last_proof():
    check = DriftCheck(nn.Linear(1, 1), (), Group([]), every=3)
    assert [n for n in range(5) if check.is_due(n)] == [3, 4]
    check.compare(4)
    assert [n for n in range(4, 9) if check.is_due(n)] == [7, 8]
    assert not DriftCheck(nn.Linear(1, 1), (), Group([])).is_due(100)
