"""Who is to blame for a departure, in words: ranks whose own time changed, or hosts whose links did."""

from collections.abc import Mapping, Sequence
from math import sqrt

from poseidon.comm.link_probe import LinkSpeed
from poseidon.runtime.departure import Suspect
from poseidon.units import format_bandwidth, format_seconds

Hosts = Mapping[str, Sequence[int]]
"""The ranks of each host by its name, in the order of ranks."""

CHANGED_RATIO = 1.4
"""A short probe of a link that is as it was may be off by less than this."""
MOST_NAMED = 3
_SPENT_ON = {"computing": "computing", "loader": "waiting for samples", "other": "outside forward, backward and update"}


def blame_ranks(hosts: Hosts, suspect: Suspect) -> str:
    """Which ranks need more time by themselves, or less, and what they spend it on."""
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    names = [f"{host_of[rank]} ({_ranks([rank])})" for rank in suspect.ranks]
    who = "all ranks" if len(names) == len(host_of) > 1 else _join(names)
    spend = "spends" if len(names) == 1 else "spend"
    now, before = format_seconds(suspect.now), format_seconds(suspect.before)
    return f"{who} {spend} {now} a step {_SPENT_ON[suspect.part]} instead of {before}"


def blame_links(hosts: Hosts, before: Sequence[LinkSpeed], now: Sequence[LinkSpeed], *, slower: bool) -> str:
    """Which links move less than they did, or more; empty where none has changed by much.

    Where one has changed far more than the others, it alone is named: it may have held them up.

    Args:
        hosts: In the same order as the speeds.
        before: What the links moved, host by host.
        now: What they move.
        slower: Whether to look for links that move less, or for such that move more.
    """
    changed = {}
    for (host, ranks), there, here in zip(hosts.items(), before, now, strict=True):
        changes = {"sends": (there.send, here.send), "receives": (there.receive, here.receive)}
        if found := {verb: pair for verb, pair in changes.items() if _ratio(pair, slower) > CHANGED_RATIO}:
            verb, pair = max(found.items(), key=lambda item: _ratio(item[1], slower))
            changed[f"{host} ({_ranks(ranks)})"] = (verb if len(found) == 1 else "moves", pair)
    if not changed:
        return ""
    ratios = {name: _ratio(pair, slower) for name, (_, pair) in changed.items()}
    worst = max(ratios.values())
    names = sorted((name for name in ratios if ratios[name] >= sqrt(worst)), key=lambda name: -ratios[name])
    verb, (speed_before, speed_now) = changed[names[0]]
    speeds = f"{format_bandwidth(speed_now)} instead of {format_bandwidth(speed_before)}"
    if len(names) == len(hosts) == 2:  # both are at the ends of whatever has changed
        return f"the link between {' and '.join(hosts)} moves {speeds}"
    if len(names) == 1:
        return f"the link of {names[0]} {verb} {speeds}"
    return f"the links of {_join(names)} move {speeds}"


def _ratio(pair: tuple[float, float], slower: bool) -> float:
    before, now = pair
    return before / now if slower else now / before


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _join(names: Sequence[str]) -> str:
    shown, left = list(names[:MOST_NAMED]), len(names) - MOST_NAMED
    if left > 0:
        shown.append(f"{left} more")
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
