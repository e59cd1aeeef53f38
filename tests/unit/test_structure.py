"""Which gradients have a structure: by looking at the modules, then by watching a step."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from poseidon.profile.graph import GradientStructure
from poseidon.profile.structure import StepWatch, merge, owned_parameters, profile_structure


def linear(change=lambda layer: None):
    layer = nn.Linear(4, 3)
    change(layer)
    return layer


def replaced(layer):
    layer.forward = lambda x: x


def normed_by_hooks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(4, 3))


class Subclass(nn.Linear):
    """Its forward may do anything."""


@pytest.mark.parametrize(
    ("module", "structure", "reason"),
    [
        (linear(), "outer_product", ""),
        (nn.Embedding(5, 3), "rows", ""),
        (nn.EmbeddingBag(5, 3), "rows", ""),
        (nn.Conv2d(1, 1, 1), "dense", ""),
        (Subclass(4, 3), "dense", ""),
        (linear(replaced), "dense", "its forward has been replaced on the instance"),
        (linear(lambda m: m.weight.register_hook(lambda g: g)), "dense", "its weight has gradient hooks"),
        (linear(lambda m: m.weight.requires_grad_(False)), "dense", "its weight is frozen"),
        (normed_by_hooks(), "dense", "its weight is computed from other parameters"),
        (prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5), "dense", "its weight is computed"),
        (nn.Embedding(5, 3, max_norm=1.0), "dense", "max_norm changes the rows"),
        (nn.Embedding(5, 3, scale_grad_by_freq=True), "dense", "scale_grad_by_freq counts the lookups"),
        (nn.EmbeddingBag(5, 3, mode="max"), "dense", "mode 'max' has no sparse gradient"),
    ],
)
def test_what_a_module_says(module, structure, reason):
    (layer,) = profile_structure(module).layers
    assert layer.structure == structure
    assert layer.reason.startswith(reason)
    assert bool(layer.reason) == bool(reason)


def test_tied_weights_say_so():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    profile = profile_structure(nn.Sequential(first, second))
    assert [layer.reason for layer in profile.layers[:1]] == ["its weight is tied: another module uses it too"]
    owned = owned_parameters(nn.Sequential(first, second))
    assert {name: list(parameters) for name, parameters in owned.items()} == {"0": ["weight", "bias"], "1": ["bias"]}


def watch(model, *batches, loss=lambda y: y.square().sum()):
    watching = StepWatch(model)
    sum(loss(model(x)) for x in batches).backward()
    return {layer.name: layer for layer in watching.profile(7).layers}


class Model(nn.Module):
    """Whatever a lambda says."""

    def __init__(self, run, **layers):
        super().__init__()
        torch.manual_seed(0)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


IDS = torch.tensor([1, 3, 3, 8])


@pytest.mark.parametrize(
    ("run", "rows"),
    [
        (lambda m, x: m.fc(x), 6),
        (lambda m, x: m.fc(m.fc(x)), 12),
        (lambda m, x: m.fc(input=x.view(2, 3, 4)), 6),
        (lambda m, x: F.relu(m.fc(x), inplace=True), 6),
        (lambda m, x: m.fc(x[0]), 1),
        (lambda m, x: m.fc(x) + F.linear(x, m.fc.weight), 0),
        (lambda m, x: m.fc(x) + m.fc.weight.square().sum(), 0),
        (lambda m, x: F.linear(x, m.fc.weight, m.fc.bias), 0),
    ],
)
def test_fully_connected_layers_are_watched(run, rows):
    layer = watch(Model(run, fc=nn.Linear(4, 4)), torch.randn(6, 4))["fc"]
    assert layer.rows == rows
    assert layer.structure == ("outer_product" if rows else "dense")
    if not rows:
        assert "used outside the module" in layer.reason or "its forward was not called" in layer.reason


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("run", "rows"),
    [
        (lambda m, x: m.table(x), 3),
        (lambda m, x: m.table(x) + m.table(x + 1), 6),
        (lambda m, x: m.table(x) + F.embedding(x, m.table.weight, sparse=m.table.sparse), 0),
        (lambda m, x: m.table(x) + F.embedding(x + 1, m.table.weight, sparse=m.table.sparse), 0),
    ],
)
def test_embeddings_are_watched(run, rows, sparse):
    layer = watch(Model(run, table=nn.Embedding(1000, 3, sparse=sparse, padding_idx=1)), IDS)["table"]
    assert layer.rows == rows
    assert layer.structure == ("rows" if rows else "dense")


def test_bags_are_watched():
    def outside(model, x):
        return model.bag(x) + F.embedding(torch.tensor(999), model.bag.weight)

    assert watch(nn.Sequential(nn.EmbeddingBag(1000, 3)), IDS.view(2, 2))["0"].rows == 3
    assert watch(Model(outside, bag=nn.EmbeddingBag(1000, 3)), IDS.view(2, 2))["bag"].structure == "dense"


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize(("layer", "batch"), [(nn.Linear(4, 4), torch.randn(6, 4)), (nn.Embedding(9, 3), IDS)])
def test_a_gradient_that_was_there_before_does_not_confuse(layer, batch, zeroed):
    layer(batch if layer.weight.shape[1] == 4 else IDS - 1).sum().backward()
    watching = StepWatch(layer)
    loss = layer(batch).square().sum()
    if zeroed:
        layer.zero_grad()
    loss.backward()
    assert watching.profile().layers[0].structure != "dense"


def test_attention_keeps_its_output_projection_dense():
    attention = nn.MultiheadAttention(4, 2)
    layers = watch(Model(lambda m, x: m.attention(x, x, x)[0], attention=attention), torch.randn(3, 1, 4))
    assert {layer.structure for layer in layers.values()} == {GradientStructure.DENSE}


def test_parametrized_weights_are_dense_layers_of_their_own():
    layers = watch(parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(6, 4))
    assert {layer.structure for layer in layers.values()} == {GradientStructure.DENSE}
    assert set(layers) == {"", "parametrizations.weight"}


def test_factors_are_as_wide_as_autograd_makes_them():
    model = nn.Sequential(nn.Linear(4, 3))
    watching = StepWatch(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(6, 4)).float().square().sum().backward()
    (layer,) = watching.profile().layers
    assert (layer.structure, layer.rows, layer.factor_num_bytes) == ("outer_product", 6, 2)


def test_layers_come_in_the_order_of_the_forward_pass():
    run = lambda m, x: m.a(m.b(x))  # noqa: E731
    layers = watch(Model(run, a=nn.Linear(4, 4), never=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(2, 4))
    assert list(layers) == ["b", "a", "never"]
    assert layers["never"].reason.startswith("its forward was not called")


def test_watching_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 3), nn.Embedding(5, 3))
    StepWatch(model).profile()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_ranks_are_merged_to_the_most_rows_and_the_least_structure():
    def profile(run, count):
        watching = StepWatch(model := Model(run, fc=nn.Linear(4, 4), table=nn.Embedding(9, 4)))
        model(torch.randn(count, 4)).sum().backward()
        return watching.profile()

    inside = lambda m, x: m.fc(x) + m.table(IDS[: len(x)]).sum()  # noqa: E731
    outside = lambda m, x: inside(m, x) + m.fc.weight.square().sum()  # noqa: E731
    without = lambda m, x: m.table(IDS[: len(x)])  # noqa: E731
    fc, table = merge([profile(inside, 2), profile(inside, 4)]).layers
    assert (fc.rows, table.rows) == (4, 3)
    assert merge([profile(inside, 2), profile(outside, 4)]).layers[0].structure == "dense"
    one_rank_without = merge([profile(inside, 2), profile(without, 4)])
    assert {layer.name: layer.rows for layer in one_rank_without.layers} == {"fc": 2, "table": 3}


# Accumulation


def test_rows_are_those_of_all_passes_and_their_units_may_differ():
    """Between two passes of unequal batches what has accumulated is brought into the unit of the next one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    watch = StepWatch(model)
    model(torch.randn(5, 6)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.mul_(5 / 2)
    model(torch.randn(2, 6)).square().mean().backward()
    profile = watch.profile(7)
    assert [layer.structure for layer in profile.layers] == [GradientStructure.OUTER_PRODUCT] * 2
    assert [layer.rows for layer in profile.layers] == [7, 7]


def test_a_use_outside_the_module_is_seen_in_the_first_of_several_passes():
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4))
    watch = StepWatch(model)
    for _ in range(2):
        (model(torch.randn(5, 6)).square().mean() + model[0].weight.square().sum()).backward()
    assert [layer.structure for layer in watch.profile(10).layers] == [
        GradientStructure.DENSE,
        GradientStructure.OUTER_PRODUCT,
    ]
