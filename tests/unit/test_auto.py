"""What `distribute` refuses before anything is changed."""

import pytest
import torch
from torch import nn

from poseidon.auto import distribute
from poseidon.comm.group import Group
from poseidon.errors import ConfigError


def attempt(**options):
    model = nn.Linear(4, 4)
    before = dict(model.__dict__)
    with pytest.raises(ConfigError) as caught:
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), group=Group([]), **options)
    assert dict(model.__dict__) == before
    return str(caught.value)


def test_a_level_of_exactness_that_is_not_known():
    assert attempt(allow="nearly") == "cannot allow 'nearly': choose one of exact, rounded, compressed, relaxed"


def test_a_plan_that_is_not_there():
    assert "cannot find the plan 'nowhere.json'" in attempt(plan="nowhere.json")
