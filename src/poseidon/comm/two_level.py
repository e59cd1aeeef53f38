"""Two levels: the ranks of a host, and the hosts. Sums and copies that cross a host's link as seldom as they can.

`TwoLevelSum` sums a tensor: within each host, then from host to host, then shared within each host. The tensor is cut
into one stretch for each lane. A lane is one rank of each host; there are as many as the smallest host has ranks. The
lane's rank adds up its stretch over its host, in the order of ranks; the lane sums it over the hosts; the lane's rank
gives it to the rest of its host. So all ranks of a host send and receive at the same time, and what crosses a host's
link is 2(G-1)/G of the tensor for G hosts. A flat ring over P ranks needs 2(P-1)/P, and more if neighbors in the ring
do not share a host.

`Routes` brings a message of every rank to every other: to the ranks of the own host and to one rank of each other host,
which passes it on to its host. Flat, each message would cross the link once for each rank of each other host.

Source: the hierarchical all-reduce of Goyal et al., "Accurate, large minibatch SGD", 2017, section 4.2. Deviation:
hosts may have different numbers of ranks; within a host pieces go point to point, so no order has to be kept there.
"""

import torch

from poseidon.comm.bucket import stretches
from poseidon.comm.group import Group, Pending


class TwoLevelSum:
    """Sums one flat tensor in place, again and again, in three stages.

    Args:
        flat: One dimension, contiguous.
        group: The ranks; their lanes are joined, so all ranks make this together.
        what: What messages of errors call it.
    """

    def __init__(self, flat: torch.Tensor, group: Group, what: str) -> None:
        group.join_lanes()
        self._flat = flat
        self._group = group
        self._what = what
        self._host = group.layout.host_of(group.rank)
        self._place = group.layout.place(group.rank)
        self._stretches = [flat[a:b] for a, b in stretches(flat.numel(), group.layout.num_lanes)]
        self._received: dict[int, torch.Tensor] = {}

    @property
    def _own(self) -> torch.Tensor:
        """The stretch that this rank adds up; empty where it is in no lane."""
        return self._stretches[self._place] if self._place < len(self._stretches) else self._flat[:0]

    @property
    def _neighbors(self) -> list[int]:
        return [rank for rank in self._host if rank != self._group.rank]

    def collect(self, tag: int) -> Pending:
        """First: starts to send each stretch to the rank of this host that adds it up."""
        sends = [
            (owner, stretch)
            for owner, stretch in zip(self._host, self._stretches, strict=False)
            if owner != self._group.rank
        ]
        self._received = {rank: torch.empty_like(self._own) for rank in self._neighbors}
        return self._group.exchange(sends, list(self._received.items()), tag=tag, what=f"{self._what} within the host")

    def cross(self, collected: Pending) -> Pending:
        """Second: adds up over the host and starts to sum over the hosts."""
        collected.wait()
        own, parts = self._own, self._received
        parts[self._group.rank] = own.clone()
        own.copy_(parts[self._host[0]])
        for rank in self._host[1:]:
            own.add_(parts[rank])
        self._received = {}
        return self._group.all_reduce_in_lane(own, f"{self._what} between hosts")

    def share(self, crossed: Pending, tag: int) -> Pending:
        """Third: starts to give the own stretch to the rest of the host, and to receive theirs."""
        crossed.wait()
        sends = [(rank, self._own) for rank in self._neighbors]
        receives = [
            (owner, stretch)
            for owner, stretch in zip(self._host, self._stretches, strict=False)
            if owner != self._group.rank
        ]
        return self._group.exchange(sends, receives, tag=tag, what=f"{self._what} within the host")


def inner_num_bytes(num_bytes: int, ranks: int) -> float:
    """What a rank sends in either of the two stages within a host, of a tensor of so many bytes."""
    return num_bytes * (ranks - 1) / ranks


def outer_num_bytes(num_bytes: int, hosts: int) -> float:
    """What a host sends across its link."""
    return 2 * num_bytes * (hosts - 1) / hosts


class Routes:
    """How messages of all ranks come to all others.

    Args:
        group: The ranks.
        levels: 1 for straight to every rank, 2 for once to each other host.
    """

    def __init__(self, group: Group, levels: int) -> None:
        layout, rank = group.layout, group.rank
        host = layout.host_of(rank) if levels == 2 else tuple(range(group.world_size))
        remote = [r for r in group.peers if r not in host]
        # Which rank of this host gets the message of a rank elsewhere first.
        porter = {source: host[layout.place(source) % len(host)] for source in remote}
        neighbors = [r for r in group.peers if r in host]
        place = layout.place(rank)
        self.sends_to = neighbors + [h[place % len(h)] for h in layout.hosts if remote and h != host]
        """Whom this rank sends its message."""
        self.receives_from = neighbors + [source for source in remote if porter[source] == rank]
        """Whose messages come straight."""
        passed_on = sorted(porter)
        self.forwards = [(source, n) for source in passed_on if porter[source] == rank for n in neighbors]
        """Whose messages this rank passes on, to whom."""
        self.forwarded = [(source, porter[source]) for source in passed_on if porter[source] != rank]
        """Whose messages are passed on to this rank, by whom."""
