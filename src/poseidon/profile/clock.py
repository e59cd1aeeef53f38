"""What a stop watch reads: the processor's time, or the place in a GPU's stream of work."""

import time
from typing import Any, Protocol

import torch

MILLISECONDS_PER_SECOND = 1000.0


class Clock(Protocol):
    """Gives readings, and says how far two of them are apart."""

    def read(self) -> Any:
        """Now."""

    def settle(self) -> None:
        """Waits until all readings so far can be compared."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two readings."""


class ProcessorClock:
    """For what is computed where it is called."""

    def read(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing to wait for."""

    def seconds(self, start: float, end: float) -> float:
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

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """As the GPU counted them."""
        return float(start.elapsed_time(end)) / MILLISECONDS_PER_SECOND


def clock_of(device: torch.device) -> Clock:
    """The clock for what is computed on a device."""
    return StreamClock(device) if device.type == "cuda" else ProcessorClock()
