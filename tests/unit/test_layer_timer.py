"""A stop watch in somebody else's training: the same numbers, no step missed, nothing counted that is no step."""

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.errors import ProfileError
from poseidon.profile.graph import LayerSpec, ModelProfile
from poseidon.profile.measure import LayerTimer
from poseidon.profile.structure import StepWatch

PAUSE = 0.2
"""Seconds that are no part of a step."""


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
        result: torch.Tensor = Sleep.apply(x, self.weight, self.seconds)
        return result


def sleepers() -> nn.Sequential:
    return nn.Sequential(Sleeper(0.01), nn.Identity(), Sleeper(0.02))


def structure(model: nn.Module) -> ModelProfile:
    watch = StepWatch(model)
    model(torch.zeros(3, 4)).sum().backward()
    model.zero_grad()
    return watch.profile(3)


def by_name(profile: ModelProfile) -> dict[str, LayerSpec]:
    return {layer.name: layer for layer in profile.layers}


def assert_took(seconds: float, slept: float) -> None:
    assert slept <= seconds < slept + 0.1


def step(model: nn.Module) -> None:
    model(torch.zeros(3, 4)).sum().backward()


def test_layers_have_the_seconds_that_they_took() -> None:
    model = sleepers()
    profile = structure(model)
    timer = LayerTimer(model)
    for _ in range(3):
        step(model)
        timer.end_step()
        time.sleep(PAUSE)  # the loader, the optimizer
    assert timer.num_steps == 3
    timed = timer.apply(profile)
    layers = by_name(timed)
    assert_took(layers["0"].forward_seconds, 0.01)
    assert_took(layers["0"].backward_seconds, 0.02)
    assert_took(layers["2"].forward_seconds, 0.02)
    assert_took(layers["2"].backward_seconds, 0.04)
    assert timed.seconds == pytest.approx(timed.step_seconds)
    assert timed.step_seconds < 0.09 + PAUSE
    assert [layer.name for layer in timed.layers if not layer.name.startswith("before")] == ["0", "1", "2", "loss"]
    assert timed.trainable == tuple(layers[name] for name in ("0", "2"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_several_passes_to_a_step_count_together() -> None:
    """As under `no_sync`: two forwards and backwards, with a wait for data between, and then the exchange."""
    model = sleepers()
    profile = structure(model)
    timer = LayerTimer(model)
    for _ in range(2):
        step(model)
        time.sleep(PAUSE)
        step(model)
        timer.end_step()
    timed = timer.apply(profile)
    assert_took(by_name(timed)["2"].forward_seconds, 2 * 0.02)
    assert_took(by_name(timed)["2"].backward_seconds, 2 * 0.04)
    assert timed.seconds < 0.18 + PAUSE, "what lies between is nobody's"


def test_several_forwards_before_one_backward() -> None:
    model = sleepers()
    profile = structure(model)
    timer = LayerTimer(model)
    for _ in range(2):
        (model(torch.zeros(3, 4)) + model(torch.zeros(3, 4))).sum().backward()
        timer.end_step()
    layers = by_name(timer.apply(profile))
    assert_took(layers["2"].forward_seconds, 2 * 0.02)
    assert_took(layers["2"].backward_seconds, 2 * 0.04)
    assert layers["2"].calls == 2


@pytest.mark.parametrize("when", ["between steps", "before backward"])
def test_an_evaluation_is_not_looked_at(when: str) -> None:
    model = sleepers()
    profile = structure(model)
    timer = LayerTimer(model)

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(4):
                model(torch.zeros(3, 4))

    for _ in range(2):
        loss = model(torch.zeros(3, 4)).sum()
        if when == "before backward":
            evaluate()
        loss.backward()
        timer.end_step()
        evaluate()
    timed = timer.apply(profile)
    assert timer.num_steps == 1, "the first one has warmed up"
    assert_took(by_name(timed)["2"].forward_seconds, 0.02)
    assert timed.step_seconds < 0.09 + 0.12


def test_a_step_that_breaks_off_is_forgotten() -> None:
    model = sleepers()
    profile = structure(model)
    timer = LayerTimer(model)
    for _ in range(2):
        step(model)
        timer.end_step()
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, 5))
    timer.end_step()
    for _ in range(2):
        step(model)
        timer.end_step()
    assert_took(by_name(timer.apply(profile))["2"].backward_seconds, 0.04)


def test_the_numbers_stay_what_they_are() -> None:
    def trained(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 4)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        timer = LayerTimer(model) if watched else None
        for _ in range(3):
            model(torch.randn(2, 1, 6, 6)).square().mean().backward()
            if timer is not None:
                timer.end_step()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_a_copy_of_the_model_is_not_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    timer = LayerTimer(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        step(copied)
        timer.end_step()
    assert timer.num_steps == 0
    timer.remove()


def test_without_a_step_there_is_nothing_to_say() -> None:
    model = sleepers()
    profile = structure(model)
    timer = LayerTimer(model)
    with torch.no_grad():
        model(torch.zeros(3, 4))
    timer.end_step()
    with pytest.raises(ProfileError, match="no training step was timed"):
        timer.apply(profile)
    assert not any(m._forward_hooks for m in model.modules()), "the hooks are out all the same"


def test_hooks_on_an_input_that_outlives_the_step_are_taken_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.zeros(3, 4, requires_grad=True)
    timer = LayerTimer(model)
    for _ in range(3):
        model(x).sum().backward()
        timer.end_step()
        assert not x._backward_hooks
    timer.remove()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_one_block_and_left_as_it_was(in_place: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    compiled = model._compiled_call_impl
    profile = structure(model)
    timer = LayerTimer(model)
    for _ in range(3):
        step(model)
        timer.end_step()
    layers = by_name(timer.apply(profile))
    assert layers[""].parameters == ()
    assert min(layers[""].forward_seconds, layers[""].backward_seconds) > 0
    assert model._compiled_call_impl is compiled
