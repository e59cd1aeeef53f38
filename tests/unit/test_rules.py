"""Poseidon's rule against the paper's own numbers, and what the rule adds to the paper."""

import pytest

from poseidon.cluster.rates import Rates
from poseidon.comm import AllReduce, ShardedServer, SparseRows, SufficientFactor
from poseidon.planner.rules import best_scheme, choose_plan, paper_prefers_factors
from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile, TensorSpec


def linear(out_features, in_features, rows, name="fc"):
    weight = TensorSpec(name="weight", shape=(out_features, in_features), num_bytes=4 * out_features * in_features)
    return LayerSpec(
        name=name, kind="Linear", parameters=(weight,), structure=GradientStructure.OUTER_PRODUCT, rows=rows
    )


def conv(name="conv"):
    weight = TensorSpec(name="weight", shape=(512, 512, 3, 3), num_bytes=4 * 512 * 512 * 9)
    return LayerSpec(name=name, kind="Conv2d", parameters=(weight,))


def embedding(count, width, rows, name="embedding"):
    weight = TensorSpec(name="weight", shape=(count, width), num_bytes=4 * count * width)
    return LayerSpec(name=name, kind="Embedding", parameters=(weight,), structure=GradientStructure.ROWS, rows=rows)


def test_worked_example_of_the_paper():
    # 4096 x 4096, K = 32, 8 workers that are servers too: 58.7 million numbers sent and received by the server,
    # 3.7 million by sufficient factors (ATC'17, section 3.2). We count what is sent, which is half, in bytes.
    layer = linear(4096, 4096, 32)
    numbers = {
        kind: 2 * scheme.bytes_sent(layer, 8) / 4
        for kind, scheme in (("server", ShardedServer()), ("factors", SufficientFactor()))
    }
    assert numbers["server"] / 1e6 == pytest.approx(58.7, abs=0.05)
    assert numbers["factors"] / 1e6 == pytest.approx(3.7, abs=0.05)


@pytest.mark.parametrize(
    ("out_features", "in_features", "rows", "crossover"),
    [
        (4096, 25088, 32, 220.06),
        (4096, 25088, 128, 55.01),
        (4096, 4096, 32, 128.0),
        (4096, 4096, 128, 32.0),
        (21841, 4096, 32, 215.57),
        (21841, 4096, 128, 53.89),
        (1000, 4096, 32, 50.24),
        (1000, 4096, 128, 12.56),
        (1000, 2048, 32, 41.98),
    ],
)
def test_factors_win_up_to_the_papers_crossover(out_features, in_features, rows, crossover):
    # P <= 2MN / (K(M+N)) with as many servers as workers, all colocated.
    layer = linear(out_features, in_features, rows)
    for ranks in range(2, 300):
        paper = paper_prefers_factors(
            rows=rows, out_features=out_features, in_features=in_features, workers=ranks, servers=ranks
        )
        assert paper == (ranks <= 2 * out_features * in_features / (rows * (out_features + in_features)))
        assert paper == (ranks <= crossover + 0.01)
        chosen, _ = best_scheme(layer, Rates.equal(world_size=ranks, bandwidth=1e9))
        at_the_tie = SufficientFactor().bytes_sent(layer, ranks) == AllReduce().bytes_sent(layer, ranks)
        assert (chosen.kind == "sufficient_factor") == paper or at_the_tie


def test_the_rebuild_is_charged():
    layer = linear(4096, 4096, 32)
    fast = best_scheme(layer, Rates.equal(world_size=4, bandwidth=125e6, flops_per_s=100e9))
    slow = best_scheme(layer, Rates.equal(world_size=4, bandwidth=125e6, flops_per_s=1e9))
    assert fast[0].kind == "sufficient_factor"
    assert slow[0].kind == "all_reduce"
    # 2 * 4 * 32 * 4096 * 4096 operations to rebuild instead of a quarter of that for the local gradient
    cost = SufficientFactor().cost(layer, Rates.equal(world_size=4, bandwidth=125e6, flops_per_s=1e9))
    assert cost.compute_seconds == pytest.approx(4 * 2 * 32 * 4096 * 4096 / 1e9)
    assert cost.wire_seconds == pytest.approx(3 * 32 * 8192 * 4 / 125e6)


def test_measured_bandwidths_count_each_for_its_own():
    layer = linear(256, 256, 32)
    rates = {"world_size": 4, "latency": 0.0, "flops_per_s": 1e30}
    equal = best_scheme(layer, Rates.of(all_reduce_bandwidth=1e8, exchange_bandwidth=1e8, **rates))
    slow_exchange = best_scheme(layer, Rates.of(all_reduce_bandwidth=1e8, exchange_bandwidth=0.3e8, **rates))
    assert equal[0].kind == "sufficient_factor"
    assert slow_exchange[0].kind == "all_reduce"


def test_latency_keeps_small_layers_on_all_reduce():
    layer = linear(64, 64, 8)
    assert best_scheme(layer, Rates.equal(world_size=2, bandwidth=125e6))[0].kind == "sufficient_factor"
    assert best_scheme(layer, Rates.equal(world_size=2, bandwidth=125e6, latency=2e-4))[0].kind == "all_reduce"


def test_hybrid_bytes_are_never_more_than_either_pure_plan():
    for rows in (1, 8, 64, 512, 4096):
        for ranks in (2, 3, 8, 32, 200):
            profile = ModelProfile(
                model="m", batch_size=rows, layers=(conv(), linear(4096, 1000, rows, "a"), linear(100, 50, rows, "b"))
            )
            plan = choose_plan(profile, Rates.equal(world_size=ranks, bandwidth=1e9))
            plain = sum(AllReduce().bytes_sent(layer, ranks) for layer in profile.layers)
            factors = sum(
                (SufficientFactor() if layer.name != "conv" else AllReduce()).bytes_sent(layer, ranks)
                for layer in profile.layers
            )
            assert plan.bytes_sent <= min(plain, factors)


def test_vgg19_on_32_nodes_sends_every_fully_connected_layer_as_factors():
    layers = (conv(), linear(4096, 25088, 32, "fc6"), linear(4096, 4096, 32, "fc7"), linear(21841, 4096, 32, "fc8"))
    plan = choose_plan(
        ModelProfile(model="vgg", batch_size=32, layers=layers), Rates.equal(world_size=32, bandwidth=1.25e9)
    )
    assert {name: scheme.kind for name, scheme in plan.schemes.items()} == {
        "conv": "all_reduce",
        "fc6": "sufficient_factor",
        "fc7": "sufficient_factor",
        "fc8": "sufficient_factor",
    }
    assert set(plan.choices["fc6"].seconds_by_scheme) == {"all_reduce", "sufficient_factor"}


def test_embeddings_go_by_touched_rows_where_few_are_touched():
    rates = Rates.equal(world_size=4, bandwidth=125e6)
    assert best_scheme(embedding(100_000, 32, 512), rates)[0] == SparseRows()
    assert best_scheme(embedding(100, 32, 90), rates)[0] == AllReduce()


def test_a_layer_with_sparse_gradients_always_goes_by_rows():
    profile = ModelProfile(model="m", batch_size=1, layers=(embedding(100, 32, 90),))
    plan = choose_plan(profile, Rates.equal(world_size=4, bandwidth=125e6), sparse=["embedding"])
    assert plan.schemes["embedding"] == SparseRows()


def test_the_reason_of_a_tied_weight_is_in_the_plan():
    layer = linear(50, 20, 8).model_copy(
        update={"structure": GradientStructure.DENSE, "reason": "its weight is tied: another module uses it too"}
    )
    plan = choose_plan(ModelProfile(model="m", batch_size=8, layers=(layer,)), Rates.equal(world_size=4, bandwidth=1e9))
    assert plan.schemes["fc"] == AllReduce()
    assert "tied" in plan.choices["fc"].reason
