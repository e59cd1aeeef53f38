"""Operations and seconds per layer: counted by hand, against a model that sleeps, and the model left as it was."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from poseidon.errors import ProfileError
from poseidon.profile.flops import forward_flops
from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile
from poseidon.profile.measure import profile_model, scale_to
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
    ],
)
def test_operations_are_two_per_multiply_add(module: nn.Module, shape: tuple[int, ...], flops: int) -> None:
    given = torch.zeros(shape)
    assert forward_flops(module, given, module(given)) == flops


def test_a_lookup_computes_nothing() -> None:
    given = torch.tensor([1, 2])
    assert forward_flops(nn.Embedding(5, 3), given, torch.zeros(2, 3)) == 0


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


def test_seconds_are_those_of_each_layer_and_add_up_to_the_pass() -> None:
    model = nn.Sequential(Sleeper(0.02), nn.ReLU(), Sleeper(0.04))
    profile = profile_model(model, torch.zeros(3, 4), first, num_passes=3)
    lower, upper = profile.layers
    assert_took(lower.forward_seconds, 0.02)
    assert_took(lower.backward_seconds, 0.04)
    assert_took(upper.forward_seconds, 0.04)
    assert_took(upper.backward_seconds, 0.08)
    assert_took(profile.seconds, 0.18)
    assert profile.source.startswith("measured on")


def test_what_owns_no_parameters_counts_with_the_layer_that_follows() -> None:
    class Idle(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return x

    profile = profile_model(nn.Sequential(Sleeper(0), Idle(), Sleeper(0), Idle()), torch.zeros(3, 4), first)
    assert profile.layers[0].forward_seconds < 0.05
    assert profile.layers[1].forward_seconds >= 0.1


def test_of_a_fully_connected_layer_the_weight_gradient_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    bottom, top = profile_model(model, torch.zeros(8, 64), first).layers
    assert bottom.backward_seconds == 0, "no gradient of the input is wanted down there"
    assert top.backward_seconds > 0
    assert (bottom.rows, top.rows) == (8, 8)
    assert bottom.flops == 2 * 8 * 64 * 64


def test_a_weight_with_two_uses_is_one_layer() -> None:
    model = GPT(vocabulary_size=16, context=8, width=8, num_layers=1, num_heads=2)
    batch = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    profile = profile_model(
        model, batch, lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    )
    names = [layer.name for layer in profile.layers]
    assert "head" not in names
    assert names[0] == "characters"
    assert all(layer.forward_seconds > 0 for layer in profile.layers)


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
    seconds = [(layer.forward_seconds, layer.backward_seconds) for layer in profile.layers]
    assert seconds == [(2.0, 4.0), (1.0, 1.0), (0.0, 0.0)]
    assert profile.seconds == 8.0, "all but the weight gradient of the fully connected layer"
    assert profile.source == "a paper"


def test_without_operations_there_is_nothing_to_spread_by() -> None:
    with pytest.raises(ProfileError, match="none has operations"):
        scale_to(ModelProfile(model="net", batch_size=1, layers=(spec("any", 0),)), 1.0, source="")
