"""Which tensors stay each rank's own."""

import pytest
from torch import nn

from poseidon.errors import ConfigError
from poseidon.profile.structure import StepWatch, owned_parameters, profile_structure
from poseidon.runtime.ignored import ignored_names


def make_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
    model.tied = nn.Linear(4, 3, bias=False)
    model.tied.weight = model[2].weight
    return model


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), []),
        (("0.weight",), ["0.weight"]),
        (("1.running_mean",), ["1.running_mean"]),
        (("1",), ["1.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var", "1.weight"]),
        (("tied",), ["2.weight", "tied.weight"]),  # another name of the same tensor
    ],
)
def test_names_of_tensors_and_modules(names, expected):
    assert sorted(ignored_names(make_model(), names)) == expected


def test_a_prefix_ends_at_a_dot():
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "ab": nn.Linear(1, 1)})
    assert sorted(ignored_names(model, ("a",))) == ["a.bias", "a.weight"]


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"cannot ignore '0\.wieght': .* did you mean '0\.weight'\?"):
        ignored_names(make_model(), ("0.wieght",))


@pytest.mark.parametrize("name", ["", "something", "0."])
def test_what_names_nothing_is_refused(name):
    with pytest.raises(ConfigError, match="cannot ignore"):
        ignored_names(make_model(), (name,))


def test_what_ddp_is_told_to_ignore_is_ignored():
    model = make_model()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias", "gone"])
    assert sorted(ignored_names(model, ("1.weight",))) == ["0.bias", "1.weight"]


def test_ignored_parameters_belong_to_no_layer():
    model = make_model()
    names = ignored_names(model, ("0", "1.weight"))
    assert "0" not in owned_parameters(model, ignored=names)
    assert list(owned_parameters(model, ignored=names)["1"]) == ["bias"]
    assert [layer.name for layer in profile_structure(model, ignored=names).layers] == ["1", "2"]
    assert [layer.name for layer in StepWatch(model, names).profile().layers] == ["1", "2"]


def test_frozen_parameters_that_are_trained_belong_to_their_layer():
    model = make_model()
    model[0].weight.requires_grad_(False)
    assert list(owned_parameters(model)["0"]) == ["bias"]
    assert list(owned_parameters(model, trained={id(model[0].weight)})["0"]) == ["weight", "bias"]
