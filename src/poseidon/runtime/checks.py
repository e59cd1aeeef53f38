"""What can be wrong with hosts and their network before a training starts, and what to do about each.

Every rank collects facts about its host. They come together and are judged here, as the plain data that they are.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from poseidon.artifact import Value
from poseidon.cluster.measurements import PairRate
from poseidon.comm.group import Group
from poseidon.comm.pairs import measure_pairs
from poseidon.comm.ports import VARIABLE as PORTS
from poseidon.comm.reach import is_loopback
from poseidon.runtime.clocks import ClockOffset, measure_offsets
from poseidon.runtime.host_facts import SHARED_MEMORY, Facts
from poseidon.runtime.interfaces import PATTERNS, interface_of_process
from poseidon.runtime.surroundings import counted, find_hosts
from poseidon.units import GIB, MIB, format_bandwidth, format_bytes, format_seconds

MOST_FILES_OF_ITSELF = 256
"""Open files of a rank beside those for its peers: torch's libraries, epoll, the data set."""
FILES_FOR_A_PEER = 8
"""Connections to it, over all groups that a run makes."""
PORTS_OF_A_RANK = 8
"""Listeners of a rank, over all groups that a run makes, and the one with which pairs are tried."""
LEAST_FREE_BYTES = GIB
LEAST_SHARED_BYTES = 256 * MIB
LEAST_MEMORY_BYTES = GIB
LARGEST_OFFSET_SECONDS = 1.0
"""Clocks further apart than this make logs hard to read; nothing else depends on them."""
OWN_NAME = "own name"
SLOW_PAIR = 0.5
"""A pair below this part of the median pair is pointed out."""


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    TROUBLE = "trouble"


class Finding(Value):
    """One thing that was looked at."""

    host: str
    """Empty where it concerns all of them."""
    subject: str
    level: Level
    said: str
    """What was found."""
    advice: str = ""
    """What to do; empty where nothing is to be done."""


def judge(facts: Facts, num_ranks: int) -> list[Finding]:
    """What the facts about one host mean.

    Args:
        facts: Of one rank on it.
        num_ranks: Of the whole job.
    """
    checks: Sequence[tuple[str, Callable[[Facts, int], tuple[Level, str, str]]]] = (
        ("python", _judge_python),
        ("torch", _judge_torch),
        ("interface", _judge_interface),
        (OWN_NAME, _judge_name),
        ("open files", _judge_open_files),
        ("folder", _judge_folder),
        ("shared memory", _judge_shared_memory),
        ("memory", _judge_memory),
        ("threads", _judge_threads),
        ("ports", _judge_ports),
        ("secret", _judge_secret),
    )
    found = []
    for subject, check in checks:
        level, said, advice = check(facts, num_ranks)
        found.append(Finding(host=facts.host, subject=subject, level=level, said=said, advice=advice))
    return found


def compare(everyone: Sequence[Facts]) -> Finding:
    """Whether all hosts have the same versions."""
    odd = []
    for what in ("poseidon", "torch", "python"):
        hosts: dict[str, list[str]] = {}
        for facts in everyone:
            hosts.setdefault(getattr(facts, what), []).append(facts.host)
        if len(hosts) > 1:
            odd.append(f"{what} " + ", ".join(f"{version} on {_names(names)}" for version, names in hosts.items()))
    if odd:
        return Finding(
            host="",
            subject="versions",
            level=Level.TROUBLE,
            said="; ".join(odd),
            advice="install the same versions everywhere: ranks of different versions may not understand each other",
        )
    return Finding(host="", subject="versions", level=Level.OK, said=f"the same on {counted(len(everyone), 'host')}")


def judge_clocks(names: Sequence[str], offsets: Sequence[ClockOffset]) -> Finding:
    """Whether the clocks of all ranks agree; `names` says on which host each rank is."""
    furthest = max(range(len(offsets)), key=lambda rank: abs(offsets[rank].offset_seconds))
    most = abs(offsets[furthest].offset_seconds)
    said = f"apart by {format_seconds(float(f'{most:.2g}'))} at most"
    if most <= LARGEST_OFFSET_SECONDS:
        return Finding(host="", subject="clocks", level=Level.OK, said=said)
    return Finding(
        host=names[furthest],
        subject="clocks",
        level=Level.WARNING,
        said=f"{said}, against {names[0]}",
        advice="let the hosts set their clocks by NTP; only the times in logs and reports depend on it",
    )


def judge_pairs(pairs: Sequence[PairRate]) -> list[Finding]:
    """What each pair of hosts moves, the slow ones singled out."""
    rates = sorted(pair.bandwidth for pair in pairs)
    median = rates[len(rates) // 2]
    slow = [pair for pair in pairs if pair.bandwidth < SLOW_PAIR * median]
    found = [
        Finding(
            host="",
            subject="links",
            level=Level.OK,
            said=f"{counted(len(pairs), 'direction')}, {_rate(rates[0])} to {_rate(rates[-1])}, "
            f"{format_seconds(float(f'{max(pair.latency for pair in pairs):.2g}'))} at most",
        )
    ]
    return found + [
        Finding(
            host=pair.sender,
            subject="links",
            level=Level.WARNING,
            said=f"{pair.sender} to {pair.receiver}: {_rate(pair.bandwidth)}, where others have {_rate(median)}",
            advice="look at its cable, its port of the switch and who else uses them; `poseidon probe` says more",
        )
        for pair in slow
    ]


def examine(group: Group, mine: Facts) -> list[Finding]:
    """Judges all hosts and the network between them; called on all ranks together.

    Args:
        group: The ranks.
        mine: About this rank's host, collected before the ranks joined.

    Returns:
        What was found, the same on every rank: hosts first, then what is between them.
    """
    mine = mine.model_copy(update={"interface": interface_of_process() or mine.interface})
    texts = group.all_gather_text(mine.model_dump_json(), "looking at the hosts")
    hosts = find_hosts(group)
    leaders = {name: ranks[0] for name, ranks in hosts.items()}
    everyone = [
        Facts.model_validate_json(texts[rank]).model_copy(update={"host": name}) for name, rank in leaders.items()
    ]
    found = [finding for facts in everyone for finding in judge(facts, group.world_size)]
    if len({facts.own_name for facts in everyone}) < len(everyone):  # emulated hosts have their machine's name
        found = [finding for finding in found if finding.subject != OWN_NAME]
    found.append(compare(everyone))
    if group.world_size > 1:
        pairs = group.world_size * (group.world_size - 1)
        found.append(Finding(host="", subject="pairs", level=Level.OK, said=f"all {pairs} connections between ranks"))
        found.append(judge_clocks(_by_rank(hosts), measure_offsets(group)))
    if len(leaders) > 1:
        found += judge_pairs(measure_pairs(group, leaders))
    return found


def _by_rank(hosts: Mapping[str, Sequence[int]]) -> list[str]:
    names = {rank: name for name, ranks in hosts.items() for rank in ranks}
    return [names[rank] for rank in sorted(names)]


def _judge_python(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    return Level.OK, facts.python, ""


def _judge_torch(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    if not facts.has_gloo:
        return Level.TROUBLE, f"{facts.torch} without gloo", "install a torch that has torch.distributed with gloo"
    tls = "with" if facts.has_gloo_tls else "without"
    return Level.OK, f"{facts.torch}, gloo {tls} TLS, {'NCCL' if facts.has_nccl else 'no NCCL'}", ""


def _judge_interface(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    known = ", ".join(f"{card.name} ({card.address})" for card in facts.interfaces)
    if facts.interface is None:
        advice = f"check the network, or name an interface in {PATTERNS}; this host has {known}"
        return Level.TROUBLE, facts.interface_error, advice
    return Level.OK, f"{facts.interface.name} ({facts.interface.address}): {facts.interface.reason}", ""


def _judge_name(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    name = facts.own_name
    if not facts.own_addresses:
        return Level.WARNING, f"{name} has no address", f"add {name} to /etc/hosts or the name service"
    if facts.loopback_entry or all(map(is_loopback, facts.own_addresses)):
        why = facts.loopback_entry or f"the name service says {', '.join(facts.own_addresses)}"
        advice = (
            f"take {name} from the loopback line of /etc/hosts; the others are told the interface's address instead"
        )
        return Level.WARNING, f"{name} leads to loopback: {why}", advice
    return Level.OK, f"{name} is {', '.join(facts.own_addresses)}", ""


def _judge_open_files(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    needed = MOST_FILES_OF_ITSELF + FILES_FOR_A_PEER * (num_ranks - 1)
    if 0 <= facts.open_files < needed:
        said = f"{facts.open_files} at most, {counted(num_ranks, 'rank')} may need {needed}"
        return Level.TROUBLE, said, f"raise the limit: `ulimit -n {2 * needed}`, or nofile in limits.conf"
    return Level.OK, "no limit" if facts.open_files < 0 else f"{facts.open_files} at most, {needed} needed", ""


def _judge_folder(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    if facts.folder_free is None:
        return Level.TROUBLE, f"{facts.folder} cannot be written", "give --out a folder that this user may write to"
    said = f"{format_bytes(facts.folder_free // MIB * MIB)} free for {facts.folder}"
    if facts.folder_free < LEAST_FREE_BYTES:
        return (
            Level.WARNING,
            said,
            "make room, or give --out a folder elsewhere: checkpoints take three times the model",
        )
    return Level.OK, said, ""


def _judge_shared_memory(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    if facts.shared_memory is None:
        return Level.WARNING, f"there is no {SHARED_MEMORY}", "commits in memory need a tmpfs: mount one there"
    said = f"{format_bytes(facts.shared_memory // MIB * MIB)} free in {SHARED_MEMORY}"
    if facts.shared_memory < LEAST_SHARED_BYTES:
        return Level.WARNING, said, "make it larger: in a container --shm-size=4g, elsewhere mount -o remount,size=4G"
    return Level.OK, said, ""


def _judge_memory(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    said = f"{format_bytes(facts.memory // MIB * MIB)} free"
    if facts.memory < LEAST_MEMORY_BYTES:
        return Level.WARNING, said, "end what else uses the memory of this host"
    return Level.OK, said, ""


def _judge_threads(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    said = f"torch computes with {facts.threads} of {counted(facts.cores, 'core')}"
    if facts.threads > facts.cores:
        return Level.WARNING, said, "set OMP_NUM_THREADS lower, or not at all: poseidon.init() shares out the cores"
    return Level.OK, said, ""


def _judge_ports(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    if facts.ports_error:
        return Level.TROUBLE, facts.ports_error, f"correct {PORTS}"
    if facts.ports_free is None:
        return Level.OK, "any, as no range is set", ""
    said = f"{facts.ports_free} of {facts.ports} are free"
    if facts.ports_free < PORTS_OF_A_RANK:
        return Level.TROUBLE, said, f"widen {PORTS}: a rank takes up to {PORTS_OF_A_RANK}"
    return Level.OK, said, ""


def _judge_secret(facts: Facts, num_ranks: int) -> tuple[Level, str, str]:
    if facts.secret_error:
        return Level.TROUBLE, facts.secret_error, "correct POSEIDON_SECRET or POSEIDON_SECRET_FILE"
    if facts.has_secret:
        return Level.OK, "set", ""
    return Level.OK, "none set: a launcher of Poseidon makes one", ""


def _rate(bandwidth: float) -> str:
    return format_bandwidth(float(f"{bandwidth:.3g}"))


def _names(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")


def to_json(found: Sequence[Finding]) -> str:
    """All of it, for programs."""
    return json.dumps([finding.model_dump(mode="json") for finding in found], indent=2)
