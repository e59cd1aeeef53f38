"""What each host's link moves right now: a few short messages, all hosts at once, without telling anybody beforehand.

One rank of each host sends to the next host and receives from the one before, then to the next but one, and so on. A
host whose link is slow is slow with every peer; one that met a slow peer is not slow with the others. So the best
figure of each host counts.
"""

import json
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

import torch

from poseidon.comm.group import Group
from poseidon.units import KIB, MIB

ROUNDS = 3
"""Each with another peer, as long as there are others."""
TARGET_SECONDS = 0.03
"""How long one message should take: well above the latency, well below a step."""
FEWEST_BYTES = 256 * KIB
MOST_BYTES = 8 * MIB
LINK_PROBE_TAG = 4


class LinkSpeed(NamedTuple):
    """Payload per second that one host's link moved."""

    send: float
    receive: float

    @property
    def slowest(self) -> float:
        """Of the two directions."""
        return min(self.send, self.receive)


def probe_links(group: Group, leaders: Sequence[int], expected: Sequence[LinkSpeed] = ()) -> list[LinkSpeed]:
    """Measures every host's link; called on all ranks together, outside any exchange.

    Args:
        group: The ranks.
        leaders: One rank of each host, which sends and receives for it; at least two.
        expected: What was measured before, host by host: how much is sent follows from it. A first message finds out
            where it is left out.

    Returns:
        One figure for each of `leaders`, the same on every rank.
    """
    sent = group.bytes_sent
    if not expected:
        expected = _measure(group, leaders, FEWEST_BYTES, rounds=1)
    fastest = max(link.slowest for link in expected)
    found = _measure(group, leaders, round(min(max(fastest * TARGET_SECONDS, FEWEST_BYTES), MOST_BYTES)), rounds=ROUNDS)
    group.bytes_sent = sent
    return found


def _measure(group: Group, leaders: Sequence[int], num_bytes: int, *, rounds: int) -> list[LinkSpeed]:
    offsets = list(islice(cycle(range(1, len(leaders))), rounds))
    seconds = [_time_message(group, leaders, offset, num_bytes) for offset in offsets]
    everyone = [json.loads(text) for text in group.all_gather_text(json.dumps(seconds), "probing the links")]
    best_of_receiver = [min(everyone[rank]) for rank in leaders]
    best_of_sender = [
        min(everyone[leaders[(place + offset) % len(leaders)]][index] for index, offset in enumerate(offsets))
        for place in range(len(leaders))
    ]
    return [
        LinkSpeed(send=num_bytes / there, receive=num_bytes / here)
        for there, here in zip(best_of_sender, best_of_receiver, strict=True)
    ]


def _time_message(group: Group, leaders: Sequence[int], offset: int, num_bytes: int) -> float:
    """Seconds until the message from the host `offset` places before has come; 0 on a rank that leads no host."""
    if group.rank not in leaders:
        group.barrier()
        return 0.0
    place = leaders.index(group.rank)
    receiver, sender = leaders[(place + offset) % len(leaders)], leaders[place - offset]
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    group.barrier()
    start = time.perf_counter()
    what = "probing the links"
    received = group.exchange([], [(sender, incoming)], tag=LINK_PROBE_TAG, what=what)
    sending = group.exchange([(receiver, outgoing)], [], tag=LINK_PROBE_TAG, what=what)
    received.wait()
    seconds = time.perf_counter() - start
    sending.wait()
    return seconds
