"""Several backward passes to one exchange: what a step is then, which scheme wins, and what hides it."""

import pytest
import torch

from poseidon.comm import AllReduce, ShardedServer, SparseRows, SufficientFactor
from poseidon.errors import ConfigError, ProfileError
from poseidon.plan import Plan, uniform_plan
from poseidon.planner.explain import what_it_does
from poseidon.planner.memory import memory_of
from poseidon.planner.search import search_plan
from poseidon.profile.graph import GradientStructure
from poseidon.runtime.trainer import split
from poseidon.simulator import simulate
from poseidon.timeline import Activity
from support.models_as_data import dense, linear, model, rates

CONV = dense("conv", 4_000_000, forward=0.02, backward=0.04)
FC = linear("fc", 1000, 1000, rows=32, seconds=0.005)
NET = model([CONV, FC], optimizer=0.01, loader=0.002).model_copy(update={"optimizer": "SGD"})
FOUR = rates(4, bandwidth=1e8, latency=1e-4, flops_per_s=1e11)


def transfers(simulation, name):
    return [i for i in simulation.step.intervals if i.activity is Activity.TRANSFER and i.name.startswith(name)]


def test_a_step_of_several_passes_is_all_of_them_together():
    eight = NET.accumulated(8)
    assert (eight.accumulate, eight.batch_size) == (8, 8 * 32)
    assert eight.seconds == pytest.approx(8 * NET.seconds)
    assert eight.loader_seconds == pytest.approx(8 * NET.loader_seconds)
    assert eight.optimizer_seconds == NET.optimizer_seconds
    assert eight.layers[1].rows == 8 * 32
    assert eight.num_bytes == NET.num_bytes
    assert eight.accumulated(2) == NET.accumulated(2)
    assert eight.accumulated(1).layers == NET.layers
    with pytest.raises(ProfileError, match="cannot accumulate 0 passes of Net"):
        NET.accumulated(0)


def test_another_batch_scales_every_pass():
    device = NET.device.model_copy(update={"memory_bandwidth": 1e9})
    net = NET.model_copy(update={"device": device})
    assert net.accumulated(4).scaled_to_batch(4 * 64).seconds == pytest.approx(
        net.scaled_to_batch(64).accumulated(4).seconds
    )
    table = linear("table", 40, 8, rows=30).model_copy(update={"structure": GradientStructure.ROWS})
    doubled = model([table]).accumulated(3).scaled_to_batch(3 * 64)
    assert doubled.layers[0].rows == 3 * 40, "a pass looks up no more rows than there are"


def test_one_pass_is_simulated_as_ever():
    plan = uniform_plan(NET, 4)
    assert simulate(NET.accumulated(1), plan, FOUR).timelines == simulate(NET, plan, FOUR).timelines


@pytest.mark.parametrize("num_passes", [2, 3, 7])
def test_all_passes_compute_and_one_sends(num_passes):
    fast = rates(4, bandwidth=1e15, flops_per_s=1e15)
    profile = NET.accumulated(num_passes)
    for scheme in (AllReduce(), SufficientFactor(), ShardedServer()):
        simulation = simulate(profile, uniform_plan(profile, 4, scheme), fast)
        saved = FC.weight_gradient_seconds if scheme == SufficientFactor() else 0.0
        per_pass = NET.seconds - saved + NET.loader_seconds
        shared = NET.optimizer_seconds * (0.25 if scheme == ShardedServer() else 1.0)
        assert simulation.step_seconds == pytest.approx(num_passes * per_pass + shared, rel=1e-3)
        assert len(transfers(simulation, "fc")) == (1 if scheme == AllReduce() else 2)


@pytest.mark.parametrize("scheme", [AllReduce(), SufficientFactor()])
def test_only_the_last_pass_hides_what_is_sent(scheme):
    slow = rates(4, bandwidth=4e7, flops_per_s=1e11)
    one, four = (simulate(p, uniform_plan(p, 4, scheme), slow) for p in (NET, NET.accumulated(4)))
    first = min(i.start for i in transfers(four, ""))
    computed = sum(i.seconds for i in four.step.intervals if i.activity is Activity.BACKWARD and i.end <= first)
    assert computed >= 3 * 0.9 * (CONV.backward_seconds + FC.backward_seconds), "earlier passes have nothing to send"
    if scheme == AllReduce():  # as many bytes behind as much of a backward pass
        assert four.parts.exposed == pytest.approx(one.parts.exposed, rel=0.02)
        assert four.step.bytes_sent == one.step.bytes_sent
    else:
        fc = sum(i.num_bytes for i in transfers(one, "fc"))
        assert sum(i.num_bytes for i in transfers(four, "fc")) == pytest.approx(4 * fc)


def test_what_was_deferred_is_needed_by_the_first_pass():
    profile = NET.accumulated(3)
    slow = rates(4, bandwidth=2e7, flops_per_s=1e11)
    plan = uniform_plan(profile, 4).model_copy(update={"deferred": ("conv",), "buckets": (("fc",), ("conv",))})
    simulation = simulate(profile, plan, slow)
    forward = min(i.start for i in simulation.step.intervals if i.activity is Activity.FORWARD)
    still = [i for i in simulation.step.intervals if i.activity is Activity.EXPOSED]
    assert [i.name for i in still if i.end <= forward] == ["conv"]


def test_accumulated_factors_give_way_to_the_accumulated_matrix():
    """At 32 rows factors are 13 times smaller than the matrix; at 32 times as many rows they are larger."""
    few, many = (search_plan(NET, FOUR, accumulate=num_passes) for num_passes in (1, 32))
    assert few.schemes["fc"] == SufficientFactor()
    assert many.schemes["fc"] == AllReduce()
    assert many.predicted.samples_per_s == pytest.approx(4 * 32 * 32 / many.predicted.step_seconds)
    assert "32 backward passes to one exchange" in what_it_does(many)
    assert "backward passes" not in what_it_does(few)
    assert Plan.parse(many.to_json()).profile.accumulate == 32
    assert search_plan(NET.accumulated(32), FOUR).schemes == many.schemes


def test_factors_of_earlier_passes_wait_in_memory():
    table = linear("table", 40, 8, rows=16).model_copy(update={"structure": GradientStructure.ROWS})
    net = model([table, FC])
    for scheme, waiting in (
        (SufficientFactor(), 3 * 32 * (1000 + 1000) * 4),
        (SparseRows(), 3 * SparseRows().bytes_sent(table, 2)),
        (AllReduce(), 0),
    ):
        four = net.accumulated(4)
        plan = uniform_plan(four, 4, scheme)
        own = sum(
            round(sum(m.num_bytes for m in s.cost(four.layers[i], FOUR).messages))
            for i, s in enumerate(plan.schemes.values())
            if s.kind != "all_reduce"
        )
        assert memory_of(plan, FOUR).buffers - own == waiting


def test_a_batch_is_divided_by_samples():
    batch = (torch.arange(10).view(5, 2), torch.arange(5))
    parts = split(batch, 5, 3)
    assert [size for _, size in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part[0] for part, _ in parts]), batch[0])
    assert torch.equal(torch.cat([part[1] for part, _ in parts]), batch[1])
    assert split(batch, 5, 1) == [(batch, 5)]
    with pytest.raises(ConfigError, match=r"5 samples among 2 backward passes: it has a tensor of shape \(3,\)"):
        split((*batch, torch.zeros(3)), 5, 2)
