"""A second of measuring, all ranks together: what the links move and how fast a rank rebuilds a gradient.

Everything is measured while every rank does the same, as it will be in training, and the slowest rank's figure counts.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch

from poseidon.cluster.rates import UNLIMITED, Rates
from poseidon.comm.group import Group
from poseidon.units import BYTES_PER_FLOAT32, MIB

TARGET_SECONDS = 0.15
"""How long one measured transfer should last: long enough for the link's own pace, not that of its buffers."""
FIRST_BYTES = MIB // 4
MOST_BYTES = 16 * MIB
LATENCY_ROUNDS = 7
PROBE_TAG = 2
CLEARLY_FASTER = 1.1
"""Further connections must win by this much to be used."""


def measure_rates(group: Group, rebuild: Callable[[], int] | None = None) -> Rates:
    """Measures links and computing; called on all ranks together.

    Args:
        group: The ranks.
        rebuild: Rebuilds a gradient as the largest fully connected layer will, and returns its FLOPs; None if there is
            no such layer.

    Returns:
        The same rates on every rank.
    """
    if group.world_size == 1:
        return Rates.equal(world_size=1, bandwidth=UNLIMITED)
    sent = group.bytes_sent
    latency = statistics.median(_time_exchange(group, 1) for _ in range(LATENCY_ROUNDS))
    exchange = _bandwidth(group, lambda count: _time_exchange(group, count), group.world_size - 1)
    share = 2 * (group.world_size - 1) / group.world_size
    by_connections: dict[int, float] = {}
    for connections in range(1, group.max_connections + 1):
        group.connections = connections
        by_connections[connections] = _bandwidth(group, lambda count: _time_all_reduce(group, count), share)
    flops_per_s = _flops_per_s(rebuild)
    group.bytes_sent = sent
    everyone = [json.loads(t) for t in group.all_gather_text(json.dumps([latency, flops_per_s]), "measuring the links")]
    connections = max(by_connections, key=lambda c: by_connections[c])
    if by_connections[connections] < CLEARLY_FASTER * by_connections[1]:
        connections = 1
    group.connections = connections
    return Rates.of(
        world_size=group.world_size,
        all_reduce_bandwidth=by_connections[connections],
        exchange_bandwidth=exchange,
        latency=max(latency for latency, _ in everyone),
        flops_per_s=min(flops for _, flops in everyone),
        connections=connections,
    )


def _bandwidth(group: Group, measure: Callable[[int], float], share: float) -> float:
    """Bytes per second that a rank sends: one short transfer to find the size, then the median of three long ones.

    Args:
        group: The ranks.
        measure: Seconds for a tensor of so many float32.
        share: Bytes sent per byte of the tensor.
    """
    count = FIRST_BYTES // BYTES_PER_FLOAT32
    measure(count)
    seconds = _slowest(group, measure(count))
    count = min(int(count * max(1.0, TARGET_SECONDS / seconds)), MOST_BYTES // BYTES_PER_FLOAT32)
    median = statistics.median(_slowest(group, measure(count)) for _ in range(3))
    return count * BYTES_PER_FLOAT32 * share / median


def _slowest(group: Group, seconds: float) -> float:
    return max(float(text) for text in group.all_gather_text(repr(seconds), "measuring the links"))


def _time_all_reduce(group: Group, count: int) -> float:
    data = torch.zeros(count)
    group.barrier()
    start = time.perf_counter()
    group.all_reduce(data, "measuring all-reduce").wait()
    return time.perf_counter() - start


def _time_exchange(group: Group, count: int) -> float:
    data = torch.zeros(count)
    parts = [(peer, torch.empty(count)) for peer in group.peers]
    group.barrier()
    start = time.perf_counter()
    group.exchange([(peer, data) for peer in group.peers], parts, tag=PROBE_TAG, what="measuring the links").wait()
    return time.perf_counter() - start


def _flops_per_s(rebuild: Callable[[], int] | None) -> float:
    if rebuild is None:
        return UNLIMITED
    rebuild()
    start = time.perf_counter()
    flops = rebuild()
    return flops / (time.perf_counter() - start)
