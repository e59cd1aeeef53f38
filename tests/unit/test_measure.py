"""Operations and seconds per layer: counted by hand, against a model that sleeps, and the model left as it was."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from poseidon.errors import ProfileError
from poseidon.profile.flops import forward_flops
from poseidon.profile.graph import OUTSIDE, GradientStructure, LayerSpec, ModelProfile, TensorSpec
from poseidon.profile.measure import profile_model, scale_to
from poseidon.profile.products import Products
from poseidon.tasks.models import GPT, VGG19


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def first(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


@pytest.mark.parametrize(
    ("module", "shape", "flops"),
    [
        (nn.Linear(5, 7), (3, 2, 5), 2 * 6 * 5 * 7),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 8, 8), 2 * (2 * 6 * 64) * 2 * 9),
        (nn.Conv1d(3, 5, 4, stride=2), (1, 3, 10), 2 * (5 * 4) * 3 * 4),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (1, 4, 3, 3), 2 * (4 * 9) * 6 * 4),
        (nn.LayerNorm(8), (3, 8), 2 * 24),
        (nn.LSTM(5, 7, num_layers=2, batch_first=True), (3, 4, 5), 2 * 12 * 4 * 7 * (5 + 7 + 7 + 7)),
        (nn.GRU(5, 7, bidirectional=True), (4, 3, 5), 2 * 12 * 2 * 3 * 7 * (5 + 7)),
        (nn.Flatten(), (3, 8), 0),
        (Conv1D(7, 5), (3, 4, 5), 2 * 12 * 5 * 7),
    ],
)
def test_operations_are_two_per_multiply_add(module: nn.Module, shape: tuple[int, ...], flops: int) -> None:
    given = torch.zeros(shape)
    made = module(given)
    assert forward_flops(module, [given], made[0] if isinstance(made, tuple) else made) == flops


def test_a_lookup_computes_nothing() -> None:
    given = torch.tensor([1, 2])
    assert forward_flops(nn.Embedding(5, 3), [given], torch.zeros(2, 3)) == 0


def test_attention_is_four_projections_and_two_products() -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(3, 5, 8)
    projections, products = 4 * 2 * 15 * 8 * 8, 2 * 2 * 3 * 5 * 5 * 8
    assert forward_flops(attention, [x, x, x], x) == projections + products


def test_vgg19_22k_without_a_weight_in_memory() -> None:
    """The published sizes: 229 M parameters, 19.6 G multiply-adds a sample and the larger head on top."""
    with torch.device("meta"):
        model = VGG19(num_classes=21841)
        batch = torch.empty(32, 3, 224, 224), torch.empty(32, dtype=torch.long)
    profile = profile_model(model, batch, classify)
    assert profile.batch_size == 32
    assert profile.num_bytes == 4 * 229_052_817
    assert sum(layer.flops for layer in profile.layers) / 32 == pytest.approx(2 * 19.7e9, rel=0.01)
    assert [layer.name for layer in profile.layers if layer.rows] == ["classifier.0", "classifier.3", "classifier.6"]
    assert {layer.rows for layer in profile.layers} == {0, 32}
    assert sum(layer.kind == "ReLU" for layer in profile.layers) == 18, "modules without parameters are layers too"
    assert profile.layers[0].activation_num_bytes == 4 * 32 * 64 * 224 * 224
    assert profile.seconds == 0
    assert "not measured" in profile.source


def test_meta_counts_at_most_as_many_touched_rows_as_lookups() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 3))
        profile = profile_model(model, torch.zeros(2, 5, dtype=torch.long), first)
    assert [(layer.structure, layer.rows) for layer in profile.layers] == [
        (GradientStructure.ROWS, 10),
        (GradientStructure.OUTER_PRODUCT, 10),
    ]


def assert_took(seconds: float, slept: float) -> None:
    """Never less than what was slept, and not much more even where other processes have the cores."""
    assert slept <= seconds < slept + 0.1


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, gradient.sum(0), None


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.seconds)


class Idle(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, torch.zeros(4), self.seconds)


def by_name(profile: ModelProfile) -> dict[str, LayerSpec]:
    assert len({layer.name for layer in profile.layers}) == len(profile.layers)
    return {layer.name: layer for layer in profile.layers}


def test_seconds_are_those_of_each_layer_and_add_up_to_the_step() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.idle, self.upper = Sleeper(0.02), Idle(0.03), Sleeper(0.04)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.upper(Sleep.apply(self.idle(self.lower(x)), torch.zeros(4), 0.01))

    def slow_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(model(batch), torch.zeros(4), 0.02).sum()

    profile = profile_model(Net(), torch.zeros(3, 4), slow_loss, num_passes=3)
    slept = {"lower": 0.02, "idle": 0.03, "before upper": 0.01, "upper": 0.04, "loss": 0.02}
    slow = [layer for layer in profile.layers if layer.seconds > 0.02]  # on a busy machine, gaps may take a moment
    assert [layer.name for layer in slow] == list(slept), "in the order of the forward pass"
    for layer in slow:
        assert_took(layer.forward_seconds, slept[layer.name] * 0.99)
        assert_took(layer.backward_seconds, 2 * slept[layer.name] * 0.99)
    assert [layer.kind for layer in slow] == ["Sleeper", "Idle", OUTSIDE, "Sleeper", OUTSIDE]
    assert [layer.name for layer in profile.trainable] == ["lower", "upper"]
    assert 0.97 <= profile.seconds / profile.step_seconds <= 1.1
    assert profile.source.startswith("measured on")
    assert profile.device is not None


def test_a_fully_connected_backward_is_split_into_its_two_products() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    layers = by_name(profile_model(model, torch.zeros(8, 64), first))
    bottom, top = layers["0"], layers["2"]
    assert bottom.backward_seconds == 0, "no gradient of the input is wanted down there"
    assert bottom.weight_gradient_seconds > 0
    assert top.backward_seconds > 0
    assert top.weight_gradient_seconds > 0
    assert (bottom.rows, top.rows) == (8, 8)
    assert bottom.flops == 2 * 8 * 64 * 64


def test_either_product_is_computed_once_for_layers_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    of_weight_then_input = iter([3.0, 1.0])
    monkeypatch.setattr(
        "poseidon.profile.products.seconds_of", lambda work, device, seconds: next(of_weight_then_input)
    )
    weight = TensorSpec(name="weight", shape=(20, 30), num_bytes=2400)
    layer = LayerSpec(name="fc", kind="Linear", parameters=(weight,), rows=8, calls=2)
    products = Products(torch.device("cpu"))
    module = nn.Linear(30, 20)
    assert products.weight_gradient_share(layer, module) == 0.75
    assert products.weight_gradient_share(layer.model_copy(update={"name": "other"}), module) == 0.75


def test_a_weight_with_two_uses_is_one_layer() -> None:
    model = GPT(vocabulary_size=16, context=8, width=8, num_layers=1, num_heads=2)
    batch = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    profile = profile_model(
        model, batch, lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    )
    layers = by_name(profile)
    assert layers["head"].parameters == ()
    assert layers["head"].backward_seconds > 0
    assert layers["characters"].structure is GradientStructure.DENSE
    assert next(name for name in layers if not name.startswith("before")) == "characters"
    assert all(layer.calls == 1 for layer in profile.trainable)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model(torch.randn(3, 4)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    profile_model(model, torch.randn(3, 4).detach(), first)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(gradients, values, strict=True) if g is not None and v is not None)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_optimizer_is_timed_and_its_changes_are_taken_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    profile = profile_model(
        model, torch.randn(3, 4), first, num_passes=2, optimizer=lambda ps: torch.optim.Adam(ps, lr=0.1)
    )
    assert profile.optimizer == "Adam"
    assert profile.optimizer_seconds > 0
    assert profile.optimizer_state_num_bytes >= 2 * profile.num_bytes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))


def test_what_a_broken_loss_leaves_behind_is_nothing() -> None:
    model = nn.Linear(4, 4)
    calls = []

    def breaks_later(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(model(batch))
        if len(calls) > 1:
            raise RuntimeError("out of luck")
        return calls[0].sum()

    with pytest.raises(RuntimeError, match="out of luck"):
        profile_model(model, torch.zeros(2, 4), breaks_later)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_random_numbers_go_on_as_if_nothing_had_run() -> None:
    sample = torch.zeros(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    profile_model(model, sample, first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "loss", "what"),
    [
        (lambda: nn.Sequential(nn.ReLU()), first, "no trainable parameters"),
        (lambda: nn.Linear(4, 4), lambda model, batch: torch.zeros(()), "does not depend on"),
    ],
)
def test_what_cannot_be_profiled(make: Callable[[], nn.Module], loss: Any, what: str) -> None:
    with pytest.raises(ProfileError, match=what):
        profile_model(make(), torch.zeros(2, 4), loss)


def spec(name: str, flops: int, structure: GradientStructure = GradientStructure.DENSE) -> LayerSpec:
    return LayerSpec(name=name, kind="Any", parameters=(), flops=flops, structure=structure)


def test_a_published_step_is_spread_by_operations() -> None:
    layers = (spec("conv", 600), spec("fc", 300, GradientStructure.OUTER_PRODUCT), spec("embedding", 0))
    profile = scale_to(ModelProfile(model="net", batch_size=1, layers=layers), 9.0, source="a paper")
    seconds = [(x.forward_seconds, x.backward_seconds, x.weight_gradient_seconds) for x in profile.layers]
    assert seconds == [(2.0, 4.0, 0.0), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)]
    assert profile.seconds == profile.step_seconds == 9.0
    assert profile.source == "a paper"


def test_without_operations_there_is_nothing_to_spread_by() -> None:
    with pytest.raises(ProfileError, match="none has operations"):
        scale_to(ModelProfile(model="net", batch_size=1, layers=(spec("any", 0),)), 1.0, source="")
