"""On what a run runs: versions, hosts, cores, threads and link, which belong next to every number."""

import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from pydantic import Field

from poseidon.artifact import MOST_RANKS, Value
from poseidon.comm.group import Group

_HOSTS_FILE = Path("/etc/hosts")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Surroundings(Value):
    """What a run ran on."""

    torch: str = torch.__version__
    python: str = platform.python_version()
    world_size: int = Field(ge=1, le=MOST_RANKS)
    hosts: int = Field(ge=1, le=MOST_RANKS)
    """As the launcher counts them; emulated ones count too."""
    cores: int
    """Of all machines that the hosts are on."""
    threads: int
    """With which torch computes on each rank."""
    device: str
    link: str | None = None
    """As the options say."""
    shaped: bool = False
    """Whether the links really have that rate: ranks that had to go to loopback have not."""
    loopback: bool = False
    """Whether all ranks talk over this machine's loopback."""
    interface: str | None = None
    """Over which rank 0 talks to the others."""

    @property
    def cores_per_host(self) -> float:
        """Below one where emulated hosts share fewer cores."""
        return self.cores / self.hosts

    def sentence(self) -> str:
        """Hosts, cores and link, as in `4 hosts on 2 cores, 1Gbit/s, shaped`."""
        ranks = "" if self.world_size == self.hosts else f"{counted(self.world_size, 'rank')} on "
        where = f"{ranks}{counted(self.hosts, 'host')} on {counted(self.cores, 'core')}"
        if self.world_size == 1:
            return where
        if self.shaped:
            return f"{where}, {self.link}, shaped"
        if self.loopback:
            return f"{where}, over loopback{': the link was not limited' if self.link else ''}"
        return f"{where}, over their own network"


def survey(group: Group, device: torch.device, link: str | None = None) -> Surroundings:
    """Asks every rank where it is.

    Args:
        group: All ranks call this together.
        device: What this rank computes on.
        link: The rate that emulated links were asked to have.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    mine = {"host": _host(), "machine": machine(), "cores": _cores(), "interface": interface}
    everyone = [json.loads(text) for text in group.all_gather_text(json.dumps(mine), "asking where the ranks are")]
    on_loopback = group.world_size > 1 and all(one["interface"] == "lo" for one in everyone)
    return Surroundings(
        world_size=group.world_size,
        hosts=len({one["host"] for one in everyone}),
        cores=sum({one["machine"]: int(one["cores"]) for one in everyone}.values()),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        link=link,
        shaped=link is not None and not on_loopback,
        loopback=on_loopback,
        interface=everyone[0]["interface"] if group.world_size > 1 else None,
    )


def device_of_rank() -> torch.device:
    """The GPU of this rank, by its number among the ranks of its host, or the processor."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def find_hosts(group: Group) -> dict[str, list[int]]:
    """The ranks of each host, by a name that tells it from the others; all ranks call this together.

    Emulated hosts share their machine's name: they are called as the hosts file calls their address, or by their
    number where it does not.
    """
    mine = {"node": _host(), "name": socket.gethostname(), "listed": listed_name()}
    everyone = [json.loads(text) for text in group.all_gather_text(json.dumps(mine), "asking for the hosts' names")]
    return name_hosts(everyone)


def name_hosts(everyone: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """The ranks by host, from what each rank says.

    Args:
        everyone: By rank: `node`, the same on all ranks of a host and no other; `name`, what the host calls itself;
            `listed`, what the hosts file calls its address, if it does.
    """
    nodes = {one["node"]: one for one in everyone}
    names = {node: f"host{node}" for node in nodes}
    for key in ("name", "listed"):
        if len({one[key] for one in nodes.values()} - {""}) == len(nodes):
            names = {node: one[key] for node, one in nodes.items()}
            break
    hosts: dict[str, list[int]] = {name: [] for name in names.values()}
    for rank, one in enumerate(everyone):
        hosts[names[one["node"]]].append(rank)
    return hosts


def listed_name() -> str:
    """What the hosts file calls the address on which this rank talks to the others; empty where it calls it nothing."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    addresses = {entry.address for entry in psutil.net_if_addrs().get(interface, ())}
    with suppress(OSError):
        for line in _HOSTS_FILE.read_text(encoding="utf-8", errors="replace").splitlines():
            address, *names = line.partition("#")[0].split() or [""]
            if names and address in addresses:
                return names[0]
    return ""


def _host() -> str:
    for name in ("GROUP_RANK", "NODE_RANK"):
        if name in os.environ:
            return os.environ[name]
    return socket.gethostname()


def machine() -> str:
    """Emulated hosts are on one machine: they have its kernel's boot in common."""
    with suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return socket.gethostname()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def counted(number: int, what: str) -> str:
    """As in `1 rank` and `2 ranks`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
