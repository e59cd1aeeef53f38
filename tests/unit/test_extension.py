"""A plan for what is trained now: choices stay, what is new goes plainly and in its place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from poseidon.comm import AllReduce, SparseRows, SufficientFactor
from poseidon.plan import Choice, uniform_plan
from poseidon.profile.structure import StepWatch, profile_structure
from poseidon.runtime.extension import extend


def make_model(frozen=()):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for index in frozen:
        model[index].requires_grad_(False)
    return model


def plan_of(model, schemes=None, **changes):
    watch = StepWatch(model)
    model(torch.ones(2, 4)).square().sum().backward()
    plan = uniform_plan(watch.profile(2), 3, schemes)
    return plan.model_validate({**dict(plan), **changes})


def test_choices_stay_and_new_layers_take_their_places():
    model = make_model(frozen=[0, 2])
    plan = plan_of(model, {"1": SufficientFactor()}, buckets=(("3",),), deferred=("1",), order=("1", "3"))
    plan = plan.model_copy(update={"choices": {"1": Choice(reason="because"), "3": Choice()}})
    model.requires_grad_(True)
    plan = extend(plan, profile_structure(model), {"0", "2"})
    assert {name: scheme.kind for name, scheme in plan.schemes.items()} == {
        "0": "all_reduce",
        "1": "sufficient_factor",
        "2": "all_reduce",
        "3": "all_reduce",
    }
    assert [layer.name for layer in plan.profile.layers] == ["0", "1", "2", "3"]
    assert plan.layers["1"].rows == 2
    assert plan.arrival == ("3", "2", "1", "0")
    assert plan.order == ("2", "1", "3", "0")  # before the layer in front of it, "0" last of all
    assert plan.buckets == (("3",), ("2", "0"))
    assert plan.deferred == ("1",)
    assert plan.choices["1"].reason == "because"
    assert "after the plan was made" in plan.choices["0"].reason


def test_a_layer_with_other_parameters_starts_anew():
    model = make_model()
    plan = plan_of(model, {str(i): SufficientFactor() for i in range(4)})
    model[1] = nn.Linear(4, 4)
    plan = extend(plan, profile_structure(model), {"1"})
    assert [plan.schemes[str(i)].kind for i in range(4)] == ["sufficient_factor", "all_reduce"] + [
        "sufficient_factor"
    ] * 2
    assert plan.layers["1"].rows == 0


def test_a_layer_that_is_gone_is_dropped_everywhere():
    model = make_model()
    plan = plan_of(model, buckets=(("3", "2"), ("1", "0")), order=("3", "2", "1", "0"), deferred=("0", "1"))
    del model[3]
    plan = extend(plan, profile_structure(model), ())
    assert list(plan.schemes) == ["0", "1", "2"]
    assert plan.buckets == (("2",), ("1", "0"))
    assert plan.arrival == plan.order == ("2", "1", "0")


def test_frozen_for_now_is_kept():
    model = make_model()
    plan = plan_of(model)
    trained = {id(p) for p in model.parameters()}
    model[2].requires_grad_(False)
    assert extend(plan, profile_structure(model, trained=trained), ()) == plan


def test_sparse_gradients_go_by_rows():
    model = nn.ModuleDict({"table": nn.Embedding(5, 2, sparse=True), "top": nn.Linear(2, 2)})
    model["table"].requires_grad_(False)
    watch = StepWatch(model)
    model["top"](model["table"](torch.tensor([1]))).sum().backward()
    plan = uniform_plan(watch.profile(1), 2)
    model["table"].requires_grad_(True)
    assert extend(plan, profile_structure(model), {"table"}).schemes == {"table": SparseRows(), "top": AllReduce()}


@pytest.mark.parametrize("with_order", [False, True])
@given(data=st.data())
def test_layers_that_stay_keep_their_order(with_order, data):
    names = [str(index) for index in range(6)]
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in names))
    first = data.draw(st.sets(st.sampled_from(names), min_size=1))
    for name in names:
        model.get_submodule(name).requires_grad_(name in first)
    watch = StepWatch(model)
    arrival = tuple(data.draw(st.permutations(sorted(first))))
    order = tuple(data.draw(st.permutations(sorted(first)))) if with_order else ()
    plan = uniform_plan(watch.profile(), 2, arrival=arrival).model_copy(update={"order": order})
    second = data.draw(st.sets(st.sampled_from(names), min_size=1))
    for name in names:
        model.get_submodule(name).requires_grad_(name in second)
    extended = extend(plan, profile_structure(model), second - first)
    assert set(extended.arrival) == second
    assert [name for name in extended.arrival if name in first] == [name for name in arrival if name in second]
    assert bool(extended.order) == with_order
    assert [name for name in extended.order if name in first] == [name for name in order if name in second]
