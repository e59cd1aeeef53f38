"""The cost faces against numbers worked by hand."""

import pytest

from poseidon.cluster.curve import Curve
from poseidon.cluster.rates import HostRates, Rates
from poseidon.comm import AllReduce, ShardedServer, SparseRows, SufficientFactor
from poseidon.profile.graph import GradientStructure, LayerSpec, TensorSpec


def layer(shape, rows, structure, factor_num_bytes=4, bias=0):
    tensors = [TensorSpec(name="weight", shape=shape, num_bytes=4 * shape[0] * shape[1])]
    if bias:
        tensors.append(TensorSpec(name="bias", shape=(bias,), num_bytes=4 * bias))
    return LayerSpec(
        name="layer",
        kind="Layer",
        parameters=tuple(tensors),
        structure=structure,
        rows=rows,
        factor_num_bytes=factor_num_bytes,
    )


FC = layer((1000, 500), 10, GradientStructure.OUTER_PRODUCT, bias=1000)
HALF = layer((1000, 500), 10, GradientStructure.OUTER_PRODUCT, factor_num_bytes=2)
TABLE = layer((10_000, 16), 100, GradientStructure.ROWS)


@pytest.mark.parametrize(
    ("scheme", "spec", "world_size", "expected"),
    [
        (AllReduce(), FC, 4, 2 * 3 * 4 * 501_000 // 4),
        (AllReduce(), FC, 2, 4 * 501_000),
        (ShardedServer(), FC, 4, 2 * 3 * 4 * 501_000 // 4),
        (SufficientFactor(), FC, 4, 3 * 10 * 1500 * 4),
        (SufficientFactor(), HALF, 4, 3 * 10 * 1500 * 2),
        (SparseRows(), TABLE, 4, 3 * 100 * (16 * 4 + 8)),
    ],
)
def test_bytes(scheme, spec, world_size, expected):
    assert scheme.bytes_sent(spec, world_size) == expected


def test_seconds():
    rates = Rates.of(world_size=4, all_reduce_bandwidth=1e6, exchange_bandwidth=0.5e6, latency=0.001, flops_per_s=1e9)
    assert AllReduce().cost(FC, rates).seconds == pytest.approx(3.006 + 2 * 10 * 1000 * 500 / 1e9)
    assert ShardedServer().cost(FC, rates).seconds == pytest.approx(6.012 + 0.002 + 2 * 10 * 1000 * 500 / 1e9)
    factors = SufficientFactor().cost(FC, rates)
    assert factors.wire_seconds == pytest.approx(0.36 + 0.002)
    assert factors.compute_seconds == pytest.approx(4 * 2 * 10 * 1000 * 500 / 1e9)
    assert SparseRows().cost(TABLE, rates).seconds == pytest.approx(21_600 / 0.5e6 + 0.002)


TWO_BY_FOUR = Rates(
    world_size=8,
    hosts=tuple(HostRates(name=name, num_ranks=4) for name in "ab"),
    all_reduce={1: Curve.line(latency=0.002, bandwidth=1e6)},
    exchange={1: Curve.line(latency=0.001, bandwidth=0.5e6)},
    inner=Curve.line(latency=0.0001, bandwidth=8e6),
    outer=Curve.line(latency=0.001, bandwidth=2e6),
)


def sent(cost):
    return [(message.when, message.pattern, message.num_bytes) for message in cost.messages]


def test_two_levels_of_a_sum():
    """Inside a host a rank sends 3/4 of the tensor twice; across its link a host sends 2 * 1/2 of it."""
    cost = AllReduce(levels=2).cost(FC, TWO_BY_FOUR)
    size = 4 * 501_000
    inside, across = size * 3 / 4, size
    assert sent(cost) == [
        ("backward", "inner", inside),
        ("backward", "outer", across),
        ("backward", "inner", inside),
    ]
    assert cost.wire_seconds == pytest.approx(2 * inside / 8e6 + across / 2e6)
    assert AllReduce(levels=2).bytes_sent(FC, 8) == AllReduce().bytes_sent(FC, 8)


def test_two_levels_of_factors():
    """A host sends the rows of its four ranks once to the other host; inside, all rows go to three neighbors."""
    cost = SufficientFactor(levels=2).cost(FC, TWO_BY_FOUR)
    assert sent(cost) == [
        ("forward", "outer", 4 * 10 * 500 * 4),
        ("forward", "inner", 3 * 2 * 10 * 500 * 4),
        ("backward", "outer", 4 * 10 * 1000 * 4),
        ("backward", "inner", 3 * 2 * 10 * 1000 * 4),
    ]
    assert cost.wire_seconds == pytest.approx(4 * 60_000 / 2e6 + 6 * 60_000 / 8e6 + 2 * 0.0011)
    flat = SufficientFactor().cost(FC, TWO_BY_FOUR)
    assert cost.finish_seconds == flat.finish_seconds, "every rank rebuilds from all rows, however they came"


@pytest.mark.parametrize("scheme", [AllReduce, SufficientFactor])
def test_two_levels_cost_as_one_where_only_that_was_measured(scheme):
    rates = Rates.equal(world_size=4, bandwidth=1e6)
    assert scheme(levels=2).cost(FC, rates) == scheme().cost(FC, rates)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("scheme", [AllReduce, SufficientFactor])
def test_half_the_bits_are_half_the_bytes(scheme, levels, wire):
    whole, narrow = scheme(levels=levels), scheme(levels=levels, wire=wire)
    assert (whole.exactness, narrow.exactness) == ("exact", "rounded")
    assert narrow.bytes_sent(FC, 8) == whole.bytes_sent(FC, 8) // 2
    for mine, theirs in zip(narrow.cost(FC, TWO_BY_FOUR).messages, whole.cost(FC, TWO_BY_FOUR).messages, strict=True):
        assert mine.num_bytes == theirs.num_bytes / 2
    assert SufficientFactor(wire=wire).bytes_sent(HALF, 8) == SufficientFactor().bytes_sent(HALF, 8)


def test_another_format_is_a_copy_before_and_one_after():
    """Each reads the one and writes the other."""
    rates = Rates.equal(world_size=4, bandwidth=1e6).model_copy(update={"memory_bandwidth": 1e7})
    plain, narrow = AllReduce().cost(FC, rates), AllReduce(wire="bfloat16").cost(FC, rates)
    copying = 6 * 501_000 / 1e7
    assert narrow.prepare_seconds == pytest.approx(plain.prepare_seconds + copying)
    assert narrow.finish_seconds == pytest.approx(copying)
