"""The cost faces against numbers worked by hand."""

import pytest

from poseidon.cluster.rates import Rates
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
