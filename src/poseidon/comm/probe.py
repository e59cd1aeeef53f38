"""A second of measuring in a running job, all ranks together: what the links move and how fast a rank rebuilds.

Everything is measured while every rank does the same, as it will be in training, and the slowest rank's figure counts.
The curves are the same as those of `poseidon probe`, at fewer sizes.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping

from poseidon.cluster.curve import Curve
from poseidon.cluster.rates import UNLIMITED, Rates
from poseidon.comm import timing
from poseidon.comm.group import Group
from poseidon.profile.device import measure_compute
from poseidon.units import KIB, MIB

SIZES = (4 * KIB, 256 * KIB, MIB, 8 * MIB, 32 * MIB)
"""The larger ones are far apart, so that a busy processor does not bend the slope between two of them."""
BATCH_SECONDS = 0.02
MOST_SECONDS = 0.15
"""A larger transfer is left out: this one shows the link's own pace already."""
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
    exchange = _curve(group, timing.exchange(group), timing.exchange_share(group.world_size))
    all_reduce: dict[int, Curve] = {}
    for connections in range(1, group.max_connections + 1):
        group.connections = connections
        all_reduce[connections] = _curve(group, timing.all_reduce(group), timing.all_reduce_share(group.world_size))
    group.connections = fastest(all_reduce)
    group.bytes_sent = sent
    group.barrier()
    mine = json.dumps([_flops_per_s(rebuild), measure_compute().memory_bandwidth])
    everyone = [json.loads(text) for text in group.all_gather_text(mine, "measuring how ranks compute")]
    return Rates(
        world_size=group.world_size,
        all_reduce=all_reduce,
        exchange=dict.fromkeys(all_reduce, exchange),
        flops_per_s=min(flops for flops, _ in everyone),
        memory_bandwidth=min(memory for _, memory in everyone),
        connections=group.connections,
    )


def fastest(all_reduce: Mapping[int, Curve]) -> int:
    """The number of connections that carries large all-reduces clearly faster than fewer would; one where none does."""
    best = min(all_reduce)
    for connections in sorted(all_reduce):
        if all_reduce[connections].bandwidth > CLEARLY_FASTER * all_reduce[best].bandwidth:
            best = connections
    return best


def _curve(group: Group, transfer: timing.Transfer, share: float) -> Curve:
    return timing.measure_curve(
        group, transfer, share, sizes=SIZES, batch_seconds=BATCH_SECONDS, most_seconds=MOST_SECONDS
    )


def _flops_per_s(rebuild: Callable[[], int] | None) -> float:
    if rebuild is None:
        return UNLIMITED
    rebuild()
    return statistics.median(_one_rebuild(rebuild) for _ in range(3))


def _one_rebuild(rebuild: Callable[[], int]) -> float:
    start = time.perf_counter()
    flops = rebuild()
    return flops / (time.perf_counter() - start)
