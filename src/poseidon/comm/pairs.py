"""Latency and rate from every host to every other, in rounds in which no host is in two pairs.

Every round is short messages there and back, then large ones in each direction, the fastest of which counts: a busy
processor can only make a link look slower than it is.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from poseidon.cluster.measurements import PairRate, rounded
from poseidon.comm.group import Group
from poseidon.comm.timing import PROBE_TAG
from poseidon.units import BYTES_PER_FLOAT32, KIB, MIB

PINGS = 21
FIRST_BYTES = 256 * KIB
MOST_BYTES = 32 * MIB
TARGET_SECONDS = 0.15
"""How long the large message should take: long enough for the link's own pace, not that of its buffers."""
TRIES = 2
_WHAT = "measuring a pair of hosts"


def measure_pairs(group: Group, leaders: Mapping[str, int]) -> list[PairRate]:
    """Every ordered pair, the same on every rank; called on all ranks together.

    Args:
        group: All ranks.
        leaders: The rank that sends and receives for each host, by the host's name.
    """
    names = {rank: name for name, rank in leaders.items()}
    found: list[PairRate] = []
    for pairs in rounds(list(leaders.values())):
        mine = [pair for pair in pairs if group.rank in pair]
        rates = [rate for one, other in mine for rate in _Pair(group, one, other).measure(names)]
        texts = group.all_gather_text(json.dumps([rate.model_dump() for rate in rates]), _WHAT)
        found += [PairRate.model_validate(rate) for text in texts for rate in json.loads(text)]
    place = {name: index for index, name in enumerate(leaders)}
    return sorted(found, key=lambda pair: (place[pair.sender], place[pair.receiver]))


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair once, in as few rounds as can be, each member in at most one pair of a round: a round robin."""
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


class _Pair:
    """This rank and its peer of the round; `one` goes first."""

    def __init__(self, group: Group, one: int, other: int) -> None:
        self._group = group
        self._first = group.rank == one
        self._peer = other if self._first else one

    def measure(self, names: Mapping[int, str]) -> list[PairRate]:
        """The direction away from this rank."""
        latency = self._latency()
        rate = 0.0
        for sends in (self._first, not self._first):
            if sends:
                rate = self._send_large(latency)
            else:
                self._receive_large()
        sender, receiver = names[self._group.rank], names[self._peer]
        return [PairRate(sender=sender, receiver=receiver, latency=rounded(latency), bandwidth=rounded(rate))]

    def _latency(self) -> float:
        one = torch.zeros(1)
        trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            if self._first:
                self._send(one)
                self._receive(one)
            else:
                self._receive(one)
                self._send(one)
            trips.append(time.perf_counter() - start)
        return statistics.median(trips) / 2

    def _send_large(self, latency: float) -> float:
        """Bytes per second: a first message finds out how large the others should be."""
        rate = self._send_timed(FIRST_BYTES // BYTES_PER_FLOAT32, latency)
        num_bytes = min(max(rate * TARGET_SECONDS, FIRST_BYTES), MOST_BYTES)
        return max(self._send_timed(int(num_bytes) // BYTES_PER_FLOAT32, latency) for _ in range(TRIES))

    def _send_timed(self, count: int, latency: float) -> float:
        """Bytes per second of one message, which its size precedes and an answer follows."""
        data, answer = torch.zeros(count), torch.zeros(1)
        self._send(torch.tensor([float(count)]))
        self._receive(answer)
        start = time.perf_counter()
        self._send(data)
        self._receive(answer)
        seconds = time.perf_counter() - start
        return count * BYTES_PER_FLOAT32 / max(seconds - 2 * latency, seconds / 2)

    def _receive_large(self) -> None:
        size, answer = torch.zeros(1), torch.zeros(1)
        for _ in range(1 + TRIES):
            self._receive(size)
            data = torch.empty(int(size))
            self._send(answer)
            self._receive(data)
            self._send(answer)

    def _send(self, tensor: torch.Tensor) -> None:
        self._group.exchange([(self._peer, tensor)], [], tag=PROBE_TAG, what=_WHAT).wait()

    def _receive(self, tensor: torch.Tensor) -> None:
        self._group.exchange([], [(self._peer, tensor)], tag=PROBE_TAG, what=_WHAT).wait()
