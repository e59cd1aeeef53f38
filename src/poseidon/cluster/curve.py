"""Seconds of a transfer by its size: measured points, and a line from each to the next."""

from bisect import bisect_left
from typing import Self

from pydantic import Field, model_validator

from poseidon.artifact import Value


class Curve(Value):
    """Seconds of one kind of transfer by the bytes that a rank sends in it, on an idle network."""

    num_bytes: tuple[int, ...] = Field(min_length=1)
    """Payload that one rank sends, rising from point to point."""
    seconds: tuple[float, ...]
    """From all ranks ready to all ranks done, one for each size."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.seconds) != len(self.num_bytes):
            raise ValueError(f"{len(self.num_bytes)} sizes but {len(self.seconds)} times")
        if any(b <= a for a, b in zip(self.num_bytes, self.num_bytes[1:], strict=False)):
            raise ValueError("the sizes do not rise")
        if any(s < 0 for s in self.seconds):
            raise ValueError("a time is below zero")
        return self

    @classmethod
    def line(cls, *, latency: float, bandwidth: float) -> Self:
        """What a link of so many bytes per second and a fixed latency in seconds would give."""
        return cls(num_bytes=(0, 2**30), seconds=(latency, latency + 2**30 / bandwidth))

    @property
    def latency(self) -> float:
        """Seconds of the smallest transfer."""
        return self.seconds[0]

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank sends in a large transfer.

        From the smallest point to the largest: the last two alone would double the error of both.
        """
        return 1.0 / self._seconds_per_byte

    def at(self, num_bytes: float) -> float:
        """Seconds of a transfer of this size; below the first point as the first, beyond the last by the bandwidth."""
        if num_bytes <= self.num_bytes[0]:
            return self.seconds[0]
        if num_bytes >= self.num_bytes[-1]:
            return self.seconds[-1] + (num_bytes - self.num_bytes[-1]) * self._seconds_per_byte
        above = bisect_left(self.num_bytes, num_bytes)
        below = above - 1
        share = (num_bytes - self.num_bytes[below]) / (self.num_bytes[above] - self.num_bytes[below])
        return (1.0 - share) * self.seconds[below] + share * self.seconds[above]

    def scaled(self, *, latency: float = 1.0, wire: float = 1.0) -> Self:
        """The same curve with its latency times `latency` and everything above that times `wire`."""
        first = self.seconds[0]
        return self.model_copy(
            # in this form a factor of one leaves every time as it is, to the bit
            update={"seconds": tuple(first * (latency - wire) + max(first, s) * wire for s in self.seconds)}
        )

    @property
    def _seconds_per_byte(self) -> float:
        """Beyond the last point, never so small that a byte costs nothing."""
        if len(self.num_bytes) == 1:
            return max(self.seconds[0] / max(1, self.num_bytes[0]), 1e-30)
        rise = self.seconds[-1] - self.seconds[0]
        return max(rise / (self.num_bytes[-1] - self.num_bytes[0]), 1e-30)
