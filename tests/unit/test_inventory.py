"""What counts as a change of what is trained, and what does not."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from poseidon.comm.group import Group
from poseidon.errors import CommError, ProfileError
from poseidon.runtime.inventory import Inventory, agree


def make_model(frozen=()):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def test_nothing_new():
    model = make_model()
    inventory = Inventory(model)
    assert inventory.look() is None
    model(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert inventory.look() is None


def test_freezing_and_back_is_no_change():
    model = make_model()
    inventory = Inventory(model)
    for trained in (False, True, False):
        model[0].requires_grad_(trained)
        assert inventory.look() is None
        assert id(model[0].weight) in inventory.trained


def test_unfrozen():
    model = make_model(["0.weight", "0.bias", "2.bias"])
    inventory = Inventory(model)
    model[0].requires_grad_(True)
    change = inventory.look()
    assert change.added == ("0.weight", "0.bias")
    assert change.gone == ()
    assert "as rank 0 had it" in change.forms[0]
    assert str(change) == "'0.weight', '0.bias' newly trained"
    assert inventory.changed_layers == {"0"}
    inventory.take()
    assert inventory.look() is None
    model[0].requires_grad_(False)  # from now on it is known
    model[0].requires_grad_(True)
    assert inventory.look() is None
    model[2].bias.requires_grad_(True)
    assert inventory.look().added == ("2.bias",)
    assert inventory.changed_layers == {"2"}


def test_a_new_module():
    model = make_model()
    inventory = Inventory(model)
    model.append(nn.Linear(3, 2))
    assert inventory.has_other_parameters()
    change = inventory.look()
    assert change.added == ("3.weight", "3.bias")
    assert "new" in change.forms[0]


def test_a_new_module_that_is_frozen_is_nothing_until_it_is_trained():
    model = make_model()
    inventory = Inventory(model)
    model.append(nn.Linear(3, 2).requires_grad_(False))
    assert inventory.look() is None
    assert not inventory.has_other_parameters()
    model[3].requires_grad_(True)
    change = inventory.look()
    assert change.added == ("3.weight", "3.bias")
    assert "new" in change.forms[0]


def test_replaced_and_removed():
    model = make_model()
    inventory = Inventory(model)
    model[2].weight = nn.Parameter(torch.zeros(3, 4))
    change = inventory.look()
    assert change.added == change.gone == ("2.weight",)
    assert inventory.changed_layers == {"2"}
    inventory.take()
    del model[2]
    change = inventory.look()
    assert (change.added, change.gone) == ((), ("2.weight", "2.bias"))
    assert str(change) == "'2.weight', '2.bias' gone from the model"


def test_the_same_parameter_under_another_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    inventory = Inventory(model)
    model["a"] = nn.Sequential(model["a"])
    change = inventory.look()
    assert change.added == ("a.0.weight", "a.0.bias")
    assert change.gone == ("a.weight", "a.bias")
    assert "as rank 0 had it" in change.forms[0]


def test_conversion_is_refused_with_the_name():
    model = make_model()
    inventory = Inventory(model)
    model[2].half()
    with pytest.raises(CommError, match=r"parameter '2\.weight' is torch\.float16 on cpu now and was torch\.float32"):
        inventory.look()


def test_ignored_parameters_are_never_trained():
    model = make_model(["0.weight"])
    inventory = Inventory(model, {"0.weight", "0.bias"})
    model[0].weight.requires_grad_(True)
    assert inventory.look() is None
    model[0].weight = nn.Parameter(torch.zeros(4, 3))
    assert inventory.look() is None


def test_tensors_put_in_for_one_call_are_nothing():
    model = make_model()
    inventory = Inventory(model)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append((inventory.has_other_parameters(), inventory.look())))
    others = {name: p.detach() + 1 for name, p in model.named_parameters()}
    functional_call(model, others, torch.ones(2, 3))
    assert seen == [(True, None)]
    assert inventory.look() is None
    assert not inventory.has_other_parameters()


def test_one_rank_agrees_with_itself():
    model = make_model(["0.weight"])
    inventory = Inventory(model)
    model[0].weight.requires_grad_(True)
    for is_open in (False, True):
        assert agree(inventory.look(), Group([]), 0, is_open=is_open, wait=lambda *_: None) is False


def test_many_names_are_shortened():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5))).requires_grad_(False)
    inventory = Inventory(model)
    model.requires_grad_(True)
    assert str(inventory.look()) == "'0.weight', '0.bias', '1.weight', '1.bias' and 6 more newly trained"


def test_lazy_modules_need_a_forward_pass_first():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ProfileError, match=r"parameter 'weight' of layer '0' has no shape yet: run a forward pass"):
        Inventory(model)
    model(torch.ones(2, 4))
    assert Inventory(model).look() is None
