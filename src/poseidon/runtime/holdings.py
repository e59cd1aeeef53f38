"""Which host keeps which parts of a state, and the newest state of which every part is still kept by somebody.

Comes in: what each host finds, in memory and on disk. Goes out: the state that training goes on from, and who sends
which part to whom. Nothing here reads a file or sends anything.
"""

import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from poseidon.comm.group import Layout

Tier = Literal["memory", "disk"]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Tells a state from all others of a job: parts of two are never mixed."""

    step: int
    """Updates that lie behind it."""
    tier: Tier
    attempt: int
    """Which start of the job has made it, counted from zero: a step that was lost is made again, a little differently
    where ranks are others."""
    world_size: int
    """Ranks that made it."""
    mark: str = ""
    """From `new_mark`, the same on all hosts; empty where a state has none."""

    @property
    def order(self) -> tuple[int, bool, int, int, str]:
        """Larger for those to be preferred: the newest step, memory before disk, the latest attempt, made last."""
        return self.step, self.tier == "memory", self.attempt, self.world_size, self.mark


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one host has of one state."""

    host: int
    """Its number in the layout."""
    identity: Identity
    parts: frozenset[str]
    """Whose files are here."""
    all_parts: frozenset[str]
    """Of the whole state, wherever they are."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A state that is complete over all hosts."""

    identity: Identity
    hosts: Mapping[str, tuple[int, ...]]
    """Which hosts have a part, for each part."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One part that goes from one host to another."""

    part: str
    source: int
    target: int


def new_mark() -> str:
    """Of one state that is kept, on one rank for all: of two states the one that was begun later has the larger."""
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


def keepers(layout: Layout, rank: int) -> tuple[int, ...]:
    """Which hosts keep what is one rank's own: its host and, where there is one, the next."""
    number = layout.hosts.index(layout.host_of(rank))
    return tuple(dict.fromkeys((number, (number + 1) % len(layout.hosts))))


def receiver_of(layout: Layout, rank: int) -> int | None:
    """The rank of another host that keeps what is this rank's own, too; None where there is one host."""
    _, *others = keepers(layout, rank)
    if not others:
        return None
    ranks = layout.hosts[others[0]]
    return ranks[layout.place(rank) % len(ranks)]


def senders_to(layout: Layout, rank: int) -> list[int]:
    """The ranks of other hosts that this rank keeps copies for."""
    return [other for other in range(sum(map(len, layout.hosts))) if receiver_of(layout, other) == rank]


def newest_complete(holdings: Iterable[Holding]) -> Choice | None:
    """The state to go on from: the newest of which each part is held by some host; None where there is none."""
    return max(complete(holdings), key=lambda choice: choice.identity.order, default=None)


def complete(holdings: Iterable[Holding]) -> list[Choice]:
    """All states of which each part is held by some host."""
    found: dict[Identity, list[Holding]] = {}
    for holding in holdings:
        found.setdefault(holding.identity, []).append(holding)
    choices = []
    for identity, held in found.items():
        parts = sorted(frozenset().union(*(one.all_parts for one in held)))
        hosts = {part: tuple(sorted(one.host for one in held if part in one.parts)) for part in parts}
        if parts and all(hosts.values()):
            choices.append(Choice(identity=identity, hosts=hosts))
    return choices


def deliveries(choice: Choice, needs: Sequence[Collection[str]]) -> list[Delivery]:
    """Who sends what to whom, so that every host has what it needs; whoever has a part takes turns in sending it.

    Args:
        choice: Who has what.
        needs: The parts that each host needs, by host.
    """
    num_sent = dict.fromkeys(range(len(needs)), 0)
    found = []
    for target, parts in enumerate(needs):
        for part in sorted(parts):
            if target not in choice.hosts[part]:
                source = min(choice.hosts[part], key=lambda host: (num_sent[host], host))
                num_sent[source] += 1
                found.append(Delivery(part=part, source=source, target=target))
    return found
