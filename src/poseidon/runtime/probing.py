"""Probing a cluster from its ranks: who is on which host, then everything that can be measured between them."""

import socket

import torch

from poseidon.cluster.measurements import Measurements
from poseidon.cluster.spec import ClusterSpec
from poseidon.comm.cluster_probe import OnPhase, measure_cluster
from poseidon.comm.group import Group
from poseidon.comm.reach import loopback_entry
from poseidon.runtime.interfaces import interface_of_process
from poseidon.runtime.join import group_of_process
from poseidon.runtime.surroundings import find_hosts, machine

MAX_CONNECTIONS = 4
"""Connections to each peer that are made for probing."""


def probe_cluster(
    group: Group | None = None,
    *,
    device: torch.device | None = None,
    on_phase: OnPhase = lambda what, index, count: None,
) -> ClusterSpec:
    """Measures computing, links and collectives of all ranks, in under a minute; called on all ranks together.

    Nothing else may use the ranks or their network meanwhile.

    Args:
        group: The ranks; those that `poseidon.init()` has joined if left out. Only as many connections to each peer
            are tried as it has: `poseidon.init(max_connections=4)` makes four.
        device: What this rank computes on; the processor if left out.
        on_phase: Told what is measured now, its number and how many there are.

    Returns:
        The same cluster on every rank, to be saved with `save("cluster.toml")`.

    Raises:
        CommError: A rank is gone, or an exchange failed.

    Example:
        >>> poseidon.init(max_connections=4)
        >>> poseidon.probe_cluster().save("cluster.toml")
    """
    group = group or group_of_process()
    hosts = find_hosts(group)
    machines = group.all_gather_text(machine(), "asking who shares a machine")
    cluster = measure_cluster(
        group, hosts, machines, device=device, interface=interface_of_process(), on_phase=on_phase
    )
    notes = _misled(group, hosts, machines)
    if not notes or cluster.measured is None:
        return cluster
    measured: Measurements = cluster.measured
    return cluster.model_copy(update={"measured": measured.model_copy(update={"notes": (*measured.notes, *notes)})})


def _misled(group: Group, hosts: dict[str, list[int]], machines: list[str]) -> list[str]:
    """Hosts that take their own name for loopback; emulated ones share their machine's name and are left out."""
    entries = group.all_gather_text(loopback_entry(socket.gethostname()) or "", "asking for the hosts' own names")
    several = len(hosts) > 1 and len({machines[ranks[0]] for ranks in hosts.values()}) == len(hosts)
    return [
        f"{name} takes its own name for loopback ({entries[ranks[0]]}): programs that advertise it are not reached"
        for name, ranks in hosts.items()
        if several and entries[ranks[0]]
    ]
