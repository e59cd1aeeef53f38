"""Who is seen reaching for a deferred layer's parameters, and who is left alone: without ranks or a network."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from poseidon.runtime.deferral import SHORT, Lookout, Owed, StandIn


class Debt:
    """An open exchange whose gradient is all twos, and how often somebody could not wait for it."""

    def __init__(self):
        self.parameter = nn.Parameter(torch.ones(2, 3))
        self.count = 0
        self.owed = Owed(SimpleNamespace(parameters=(self.parameter,), finish=lambda: None), self.settle)
        self.stand_in = self.owed.stand_ins[0]
        self.gradient = torch.full((2, 3), 2.0)
        self.parameter.grad = self.gradient
        self.owed.open()

    def settle(self, owed):
        self.count += 1
        owed.finish()


@pytest.fixture
def debt():
    return Debt()


READS = {
    "argument": lambda p: F.linear(torch.ones(1, 3), p),
    "keyword": lambda p: torch.add(torch.ones(2, 3), other=p),
    "list": lambda p: torch.cat([torch.ones(1, 3), p]),
    "nested": lambda p: torch.block_diag(*[torch.ones(1), p]),
    "long_list": lambda p: torch._foreach_mul([torch.ones(1)] * (2 * SHORT) + [p], 2.0),
    "method": lambda p: p.norm(),
    "operator": lambda p: p + 1,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "item": lambda p: p[0, 0].item(),
    "gradient": lambda p: p.grad,
    "write": lambda p: nn.init.zeros_(p),
    "repr": repr,
}


@pytest.mark.parametrize("how", READS)
def test_reads_are_seen(debt, how):
    lookout = Lookout()
    lookout.add(debt.owed)
    with lookout:
        READS[how](debt.parameter)
    assert debt.count >= 1


LEFT_ALONE = {
    "shape": lambda p: p.shape,
    "numel": lambda p: p.numel(),
    "dtype": lambda p: (p.dtype, p.device, p.requires_grad, p.is_leaf, p.ndim),
    "taken_out": lambda p: setattr(p, "grad", None),
    "another": lambda p: torch.ones(3) * 2,
    "samples": lambda p: torch.tensor([0.5] * (4 * SHORT)),
}


@pytest.mark.parametrize("how", LEFT_ALONE)
def test_what_needs_no_numbers_is_left_alone(debt, how):
    lookout = Lookout()
    lookout.add(debt.owed)
    with lookout:
        LEFT_ALONE[how](debt.parameter)
    assert debt.count == 0


class Unwilling(list):
    def __iter__(self):
        raise AssertionError("looked through")


def test_long_lists_of_numbers_are_not_looked_through(debt):
    lookout = Lookout()
    lookout.add(debt.owed)
    assert lookout.__torch_function__(len, (), (Unwilling([1.0] * (SHORT + 1)),)) == SHORT + 1
    with pytest.raises(AssertionError, match="looked through"):
        lookout.__torch_function__(len, (), (Unwilling([1.0] * SHORT),))


def test_who_is_no_longer_owed_is_left_alone(debt):
    lookout = Lookout()
    lookout.add(debt.owed)
    lookout.remove(debt.owed)
    with lookout:
        debt.parameter.norm()
    assert debt.count == 0


def test_a_stand_in_is_the_gradient(debt):
    """Where nothing in Python has seen it coming."""
    assert isinstance(debt.parameter.grad, StandIn)
    debt.stand_in.mul_(3)
    assert debt.count == 1
    assert debt.parameter.grad is debt.gradient
    assert torch.equal(debt.gradient, torch.full((2, 3), 6.0))
    debt.stand_in.zero_()
    assert not debt.gradient.any(), "who has kept it, still has the gradient"


def test_autograd_adds_to_what_stands_in(debt):
    debt.parameter.sum().backward()
    assert torch.equal(debt.gradient, torch.full((2, 3), 3.0))
    assert debt.parameter.grad is debt.gradient


class Other(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_other_modes_come_and_go_as_they_like():
    """Entered before or after, they find themselves uppermost when they leave."""
    lookout, outer, inner = Lookout(), Other(), Other()
    with torch.device("cpu"), outer:
        (device, _) = _get_current_function_mode_stack()
        lookout.keep(True)
        lookout.keep(True)
        assert _get_current_function_mode_stack() == [lookout, device, outer]
        with inner:
            assert _get_current_function_mode_stack() == [lookout, device, outer, inner]
        with torch.device("meta"):
            assert torch.ones(1).device.type == "meta"
    assert _get_current_function_mode_stack() == [lookout]
    with outer:
        lookout.keep(False)
        lookout.keep(False)
        assert _get_current_function_mode_stack() == [outer]
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("first", [True, False])
def test_a_default_device_may_be_set_and_reset(first):
    lookout = Lookout()
    lookout.keep(not first)
    torch.set_default_device("meta")
    try:
        lookout.keep(True)
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"
    assert _get_current_function_mode_stack() == [lookout]
    lookout.keep(False)
