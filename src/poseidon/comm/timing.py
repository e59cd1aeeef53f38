"""How long transfers take by size, all ranks together: the one way in which Poseidon measures its links.

A size is measured in batches of transfers that follow each other at once, as those of a step do; a batch counts as long
as its slowest rank took, and the median of the batches counts.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from poseidon.cluster.curve import Curve
from poseidon.comm.group import Group
from poseidon.units import BYTES_PER_FLOAT32

PROBE_TAG = 2
BATCHES = 5
FEWEST_BATCHES = 2
MOST_IN_BATCH = 200

Transfer = Callable[[torch.Tensor], object]
"""Makes one transfer of a float32 tensor and returns when it is over."""


def all_reduce_share(world_size: int) -> float:
    """Bytes that a rank sends for each byte of a tensor that is all-reduced."""
    return 2 * (world_size - 1) / world_size


def exchange_share(world_size: int) -> float:
    """Bytes that a rank sends for each byte that it sends to one peer."""
    return world_size - 1


def all_reduce(group: Group) -> Transfer:
    """One all-reduce over the connections in use."""
    return lambda tensor: group.all_reduce(tensor, "measuring all-reduce").wait()


def exchange(group: Group) -> Transfer:
    """One tensor from every rank to every other."""

    def once(tensor: torch.Tensor) -> None:
        receives = [(peer, torch.empty_like(tensor)) for peer in group.peers]
        sends = [(peer, tensor) for peer in group.peers]
        group.exchange(sends, receives, tag=PROBE_TAG, what="measuring exchanges").wait()

    return once


def broadcast(group: Group) -> Transfer:
    """Rank 0's tensor to all."""
    return lambda tensor: group.broadcast(tensor, "measuring broadcast")


def all_gather(group: Group) -> Transfer:
    """Every rank's tensor to all."""
    return lambda tensor: group.all_gather(tensor, "measuring all-gather")


def measure_curve(
    group: Group,
    transfer: Transfer,
    share: float,
    *,
    sizes: Sequence[int],
    batch_seconds: float,
    most_seconds: float,
    device: torch.device | None = None,
) -> Curve:
    """Seconds of a transfer by size; called on all ranks together.

    Args:
        group: Those that agree on the figures; the transfer may be among fewer.
        transfer: What is measured.
        share: Bytes that a rank sends for each byte of the tensor.
        sizes: Bytes that a rank sends, rising.
        batch_seconds: How long a batch should take.
        most_seconds: Larger sizes are left out once a single transfer would take longer than this.
        device: Where the tensors are; the processor's memory if None.

    Returns:
        The same curve on every rank; the two smallest sizes are always in it.
    """
    points: dict[int, float] = {}
    for size in sizes:
        count = max(1, round(size / share / BYTES_PER_FLOAT32))
        # The first size is mostly latency, from which nothing follows for larger ones.
        if len(points) > 1 and points[max(points)] * size / max(points) > most_seconds:
            break
        tensor = torch.zeros(count, device=device)
        seconds = time_transfer(group, lambda tensor=tensor: transfer(tensor), batch_seconds, device)  # type: ignore[misc]
        points[round(count * BYTES_PER_FLOAT32 * share)] = seconds
    return Curve(num_bytes=tuple(points), seconds=tuple(_rising(list(points.values()))))


def time_transfer(
    group: Group, once: Callable[[], object], batch_seconds: float, device: torch.device | None = None
) -> float:
    """Seconds of one transfer; called on all ranks together, and the same on each."""
    once()  # buffers and connections that are made at first use
    first = slowest(group, time_batch(group, once, 1, device))
    count = max(1, min(MOST_IN_BATCH, round(batch_seconds / first)))
    batches = BATCHES if first < batch_seconds else FEWEST_BATCHES
    mine = [time_batch(group, once, count, device) / count for _ in range(batches)]
    texts = group.all_gather_text(json.dumps(mine), "measuring the links")
    everyone: list[list[float]] = [json.loads(text) for text in texts]
    longest: list[float] = [max(times) for times in zip(*everyone, strict=True)]
    return statistics.median(longest)


def time_batch(group: Group, once: Callable[[], object], count: int, device: torch.device | None = None) -> float:
    """Seconds that this rank takes for so many transfers one after the other, all ranks starting together."""
    group.barrier()
    start = time.perf_counter()
    for _ in range(count):
        once()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def slowest(group: Group, seconds: float) -> float:
    """The longest of all ranks' seconds; called on all ranks together."""
    return max(float(text) for text in group.all_gather_text(repr(seconds), "measuring the links"))


def _rising(seconds: Sequence[float]) -> list[float]:
    """A larger transfer never takes less; where it seemed so, both take the mean of the two."""
    kept: list[tuple[float, int]] = []
    for value in seconds:
        kept.append((value, 1))
        while len(kept) > 1 and kept[-2][0] > kept[-1][0]:
            (a, n), (b, m) = kept[-2:]
            kept[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [mean for mean, n in kept for _ in range(n)]
