"""How long a training loop waits for its data, the first epoch apart: nothing is cached then, and workers start.

Comes in: anything that gives an iterable of batches for an epoch, such as a torch `DataLoader` or a task's own batches.
Goes out: the wait for a batch, as the loop has it that computes for a while between two batches. What loads ahead
meanwhile is not waited for.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

NUM_BATCHES = 20
"""At most so many are taken from each epoch."""


@dataclass(frozen=True, kw_only=True)
class LoaderSeconds:
    """Waits for a batch, in seconds."""

    first_epoch: float
    """Median in the first epoch."""
    later: float
    """Median in the second epoch."""


def measure_loader(
    make_epoch: Callable[[int], Iterable[object]], *, step_seconds: float = 0.0, num_batches: int = NUM_BATCHES
) -> LoaderSeconds:
    """Goes through the beginning of two epochs as a training loop does.

    Args:
        make_epoch: Called with 0 and with 1; gives the batches of that epoch. For a DataLoader: `lambda epoch: loader`.
        step_seconds: What the loop does with each batch takes so long. It is slept, so workers have the processor to
            themselves meanwhile.
        num_batches: At most so many batches are taken from an epoch.
    """
    first, later = (_waits(make_epoch(epoch), step_seconds, num_batches) for epoch in range(2))
    return LoaderSeconds(
        first_epoch=median(first) if first else 0.0,
        later=median(later) if later else 0.0,
    )


def _waits(batches: Iterable[object], step_seconds: float, num_batches: int) -> list[float]:
    found: list[float] = []
    start = time.perf_counter()
    for _ in batches:
        found.append(time.perf_counter() - start)
        if len(found) == num_batches:
            break
        time.sleep(step_seconds)
        start = time.perf_counter()
    return found
