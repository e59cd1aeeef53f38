"""What a stop watch reads: the processor's time, the place in a GPU's stream of work, or the operations so far."""

import time
from typing import Any, Protocol, Self

import torch
from torch.utils.flop_counter import FlopCounterMode

from poseidon.units import MILLISECONDS


class Clock(Protocol):
    """Gives readings, and says how far two of them are apart."""

    def read(self) -> Any:
        """Now."""

    def settle(self) -> None:
        """Waits until all readings so far can be compared."""

    def between(self, start: Any, end: Any) -> float:
        """From one reading to another, in seconds unless the clock counts something else."""


class ProcessorClock:
    """For what is computed where it is called."""

    def read(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing to wait for."""

    def between(self, start: float, end: float) -> float:
        """Their difference."""
        return end - start


class StreamClock:
    """For a GPU: events in the stream of work, so that watching does not hold it up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> torch.cuda.Event:
        """An event behind all the work that was given to the current stream so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize(self._device)

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """As the GPU counted them."""
        return float(start.elapsed_time(end)) / MILLISECONDS


class OperationClock:
    """Counts the operations of matrix products, convolutions and attention, two for each multiply-add.

    A context manager: what is computed inside counts, on any device. Not for what is compiled.
    """

    def __init__(self) -> None:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        self._counter = FlopCounterMode(display=False, custom_mapping={attention: _attention_flops})

    def __enter__(self) -> Self:
        """Begins to count."""
        self._counter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends counting."""
        self._counter.__exit__(*error)

    def read(self) -> int:
        """Operations so far."""
        return self._counter.get_total_flops()

    def settle(self) -> None:
        """Nothing to wait for."""

    def between(self, start: int, end: int) -> float:
        """Their difference."""
        return end - start


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Scores of every query for every key, and the values weighed by them.

    Args:
        query: Shape `(batch, heads, queries, width)`; shapes, not tensors, is what the counter gives.
        key: Shape `(batch, heads, keys, width)`.
        value: Shape `(batch, heads, keys, value width)`.
    """
    batch, heads, num_queries, width = query
    return int(2 * batch * heads * num_queries * key[2] * (width + value[3]))


def clock_of(device: torch.device) -> Clock:
    """The clock for what is computed on a device."""
    return StreamClock(device) if device.type == "cuda" else ProcessorClock()
