"""From laps to layers, with laps made up: what is folded, what is left out, what the figures are."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from poseidon.profile.clock import ProcessorClock
from poseidon.profile.composition import compose
from poseidon.profile.graph import OUTSIDE, LayerSpec, ModelProfile
from poseidon.profile.structure import StepWatch
from poseidon.profile.timer import LapWatch

Pass = dict[tuple[str, bool], float]


def watched(*passes: Pass) -> tuple[ModelProfile, LapWatch]:
    """Two fully connected layers with an activation between, and these laps."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    step = StepWatch(model)
    watch = LapWatch(model, ProcessorClock())
    watch.install()
    watch.start()
    model(torch.zeros(2, 4)).sum().backward()
    watch.stop(keep=False)
    watch.remove()
    watch.laps.passes = list(passes)
    watch.laps.counts = dict.fromkeys(passes[0], 1)
    return step.profile(2), watch


def composed(*passes: Pass, step_seconds: Sequence[float] = ()) -> ModelProfile:
    profile, watch = watched(*passes)
    return compose(profile, watch, lambda layer, module: 0.75, step_seconds=step_seconds)


def layers_of(profile: ModelProfile) -> dict[str, LayerSpec]:
    return {layer.name: layer for layer in profile.layers}


FORWARD, BACKWARD = False, True
STEP: Pass = {
    ("before 0", FORWARD): 0.001,
    ("0", FORWARD): 1.0,
    ("1", FORWARD): 0.5,
    ("before 2", FORWARD): 0.25,
    ("2", FORWARD): 2.0,
    ("loss", FORWARD): 0.125,
    ("loss", BACKWARD): 0.375,
    ("2", BACKWARD): 4.0,
    ("before 2", BACKWARD): 0.5,
    ("1", BACKWARD): 0.25,
    ("0", BACKWARD): 1.0,
    ("before 0", BACKWARD): 0.002,
}


def test_each_layer_in_its_place_and_small_gaps_with_what_follows() -> None:
    profile = composed(STEP)
    assert [layer.name for layer in profile.layers] == ["0", "1", "before 2", "2", "loss"]
    layers = layers_of(profile)
    assert layers["0"].forward_seconds == pytest.approx(1.001)
    assert (layers["before 2"].kind, layers["loss"].kind) == (OUTSIDE, OUTSIDE)
    assert (layers["before 2"].forward_seconds, layers["before 2"].backward_seconds) == pytest.approx((0.25, 0.5))
    assert profile.seconds == pytest.approx(sum(STEP.values()))


def test_only_a_backward_that_computes_both_products_is_split() -> None:
    layers = layers_of(composed(STEP))
    assert (layers["2"].backward_seconds, layers["2"].weight_gradient_seconds) == pytest.approx((1.0, 3.0))
    assert (layers["0"].backward_seconds, layers["0"].weight_gradient_seconds) == pytest.approx((0.0, 1.002))


def test_medians_and_the_spread_between_the_tenths() -> None:
    passes = [{**STEP, ("1", FORWARD): 0.5 + number / 10} for number in range(11)]
    layer = layers_of(composed(*passes))["1"]
    assert layer.forward_seconds == pytest.approx(1.0)
    assert layer.forward_spread_seconds == pytest.approx(0.8)
    assert layer.backward_spread_seconds == 0


def test_medians_are_scaled_to_add_up_to_the_median_pass() -> None:
    """Each of three passes is held up in another layer; none of the medians shows it."""
    passes = [{**STEP, (name, FORWARD): STEP[name, FORWARD] + 1.0} for name in ("0", "1", "2")]
    assert composed(*passes).seconds == pytest.approx(sum(STEP.values()) + 1.0)


def test_what_calling_hooks_takes_is_left_out_lap_by_lap() -> None:
    profile = composed(STEP, step_seconds=[sum(STEP.values()) - 12 * 2e-6])
    assert profile.seconds == pytest.approx(sum(STEP.values()) - 12 * 2e-6, abs=1e-9)
    assert layers_of(profile)["1"].forward_seconds == pytest.approx(0.5 - 2e-6, abs=1e-9)


def test_a_difference_that_hooks_cannot_make_stays() -> None:
    profile = composed(STEP, step_seconds=[sum(STEP.values()) / 2])
    assert profile.seconds == pytest.approx(sum(STEP.values()), rel=1e-4)


def test_a_pass_is_compared_with_its_neighbor() -> None:
    """The machine was twice as busy during the last two pairs of passes: layers explain a step all the same."""
    busy = {key: 2 * seconds for key, seconds in STEP.items()}
    step = sum(STEP.values())
    assert composed(STEP, busy, busy, step_seconds=[step, 2 * step, 2 * step]).seconds == pytest.approx(2 * step)
    assert composed(STEP, STEP, busy, step_seconds=[step, 2 * step, 2 * step]).seconds == pytest.approx(2 * step)


def test_a_module_called_loss_keeps_its_name() -> None:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4))
    model.add_module("loss", nn.ReLU())
    step, watch = StepWatch(model), LapWatch(model, ProcessorClock())
    watch.install()
    watch.start()
    model(torch.zeros(2, 4)).sum().backward()
    watch.stop()
    watch.remove()
    names = [layer.name for layer in compose(step.profile(2), watch, lambda layer, module: 0.5).layers]
    assert names.count("loss") == 1
    assert names[-1] == "after the model"
