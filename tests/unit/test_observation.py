"""What the ranks timed becomes one profile, and one factor for each rank."""

import pytest

from poseidon.profile.graph import LayerSpec, ModelProfile, TensorSpec
from poseidon.runtime.observation import ALIKE, combine


def timed(forward, backward=0.2, *, loader=0.0, optimizer=0.01, batch_size=8, extra=()):
    weight = TensorSpec(name="weight", shape=(10,), num_bytes=40)
    layer = LayerSpec(
        name="fc", kind="Linear", parameters=(weight,), forward_seconds=forward, backward_seconds=backward
    )
    return ModelProfile(
        model="net",
        batch_size=batch_size,
        layers=(layer, *extra),
        step_seconds=forward + backward,
        loader_seconds=loader,
        optimizer_seconds=optimizer,
    )


def test_seconds_are_the_median_over_the_ranks_and_a_slow_rank_has_a_factor():
    profile, scales = combine([timed(0.1), timed(0.1), timed(0.4, 0.8)])
    assert profile.layers[0].forward_seconds == 0.1
    assert profile.seconds == pytest.approx(0.3)
    assert scales == [1.0, 1.0, pytest.approx(4.0)]


def test_ranks_that_differ_by_noise_are_equal():
    assert combine([timed(0.1), timed(0.1 * (1 + ALIKE / 2)), timed(0.1 * (1 - ALIKE / 2))]).compute_scales == [1.0] * 3


def test_the_slowest_loader_counts_because_everybody_waits_for_it():
    profile, _ = combine([timed(0.1, loader=0.0), timed(0.1, loader=0.5), timed(0.1, loader=0.1)])
    assert profile.loader_seconds == 0.5


def test_a_rank_without_samples_says_nothing():
    silent = timed(0.0, 0.0, batch_size=0).model_copy(update={"step_seconds": 0.0})
    for profiles in ([silent, timed(0.1)], [timed(0.1), silent]):
        profile, scales = combine(profiles)
        assert profile.seconds == pytest.approx(0.3)
        assert profile.batch_size == 8
        assert scales == [1.0, 1.0]


def test_what_only_some_ranks_computed_is_the_median_of_theirs():
    loss = LayerSpec(name="loss", kind="outside", parameters=(), forward_seconds=0.05)
    profile, _ = combine([timed(0.1, extra=(loss,)), timed(0.1)])
    assert [layer.name for layer in profile.layers] == ["fc", "loss"]
    assert profile.layers[1].forward_seconds == 0.05


def test_where_nobody_timed_anything_the_structure_remains():
    untimed = timed(0.0, 0.0)
    assert combine([untimed, untimed]) == (untimed, [1.0, 1.0])
