"""What one rank knows about its host, collected and not judged."""

import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from poseidon.artifact import Value
from poseidon.cluster.measurements import Interface
from poseidon.comm.dialing import resolve
from poseidon.comm.ports import PortRange, listen
from poseidon.comm.reach import interface_to, interfaces, is_loopback, loopback_entry
from poseidon.comm.secret import Secret
from poseidon.errors import PoseidonError
from poseidon.runtime.interfaces import PATTERNS, select

SHARED_MEMORY = Path("/dev/shm")
T = TypeVar("T")


class Facts(Value):
    """What one rank knows about its host."""

    host: str
    python: str
    torch: str
    poseidon: str
    has_gloo: bool
    has_gloo_tls: bool
    has_nccl: bool
    interface: Interface | None
    interface_error: str = ""
    interfaces: tuple[Interface, ...]
    own_name: str
    own_addresses: tuple[str, ...]
    loopback_entry: str
    open_files: int
    """How many a process may have."""
    cores: int
    threads: int
    memory: int
    """Bytes that are free."""
    shared_memory: int | None
    """Bytes that are free on the file system in memory; None where there is none."""
    folder: str
    folder_free: int | None
    """Bytes that are free where runs are written; None where that cannot be written."""
    ports: str
    ports_free: int | None
    """How many ports of the range can be bound; None where no range is set."""
    ports_error: str = ""
    has_secret: bool
    secret_error: str = ""


def collect(folder: Path, coordinator: str | None) -> Facts:
    """Looks at this host, before this process uses gloo.

    Args:
        folder: Where runs are to be written.
        coordinator: A name or an address that leads to the other hosts; None where there are none.
    """
    interface, interface_error = _tried(lambda: _interface(coordinator))
    ports, ports_error = _tried(PortRange.find)
    secret, secret_error = _tried(Secret.find)
    own_name = socket.gethostname()
    return Facts(
        host=own_name,
        python=platform.python_version(),
        torch=torch.__version__,
        poseidon=version("poseidon-dl"),
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        has_gloo_tls=_has_gloo_tls(),
        has_nccl=dist.is_available() and dist.is_nccl_available(),
        interface=interface,
        interface_error=interface_error,
        interfaces=tuple(interfaces()),
        own_name=own_name,
        own_addresses=_addresses_of(own_name),
        loopback_entry=loopback_entry(own_name) or "",
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory=int(psutil.virtual_memory().available),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        folder=str(folder),
        folder_free=_free(folder),
        ports=str(ports or ""),
        ports_free=None if ports is None or interface is None else _free_ports(ports, interface.address),
        ports_error=ports_error,
        has_secret=secret is not None,
        secret_error=secret_error,
    )


def _interface(coordinator: str | None) -> Interface | None:
    routed = interface_to(coordinator) if coordinator else None
    if patterns := os.environ.get(PATTERNS, ""):
        return select(patterns, interfaces(), preferred=routed)
    if routed is not None:
        return routed
    cards = sorted(interfaces(), key=lambda card: is_loopback(card.address))
    return (
        cards[0].model_copy(update={"reason": "the first; there is no coordinator to find a route to"})
        if cards
        else None
    )


def _tried(look: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return look(), ""
    except PoseidonError as error:
        return None, str(error)


def _has_gloo_tls() -> bool:
    """Whether this torch was built with gloo's TLS transport; the wheels of the Python index are not.

    Only making a device tells, and torch then stays with that transport: so a copy of this process makes it.
    """
    child = os.fork()
    if child == 0:
        try:
            os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
            ProcessGroupGloo.create_device(hostname="127.0.0.1")
            os._exit(0)
        except RuntimeError as error:
            os._exit(int("unsupported gloo device" in str(error)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _addresses_of(name: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(address[0] for _, address in resolve(name, 1)))
    except OSError:
        return ()


def _free(folder: Path) -> int | None:
    """Free bytes in a folder, or where it would be made."""
    there = folder.absolute()
    while not os.path.exists(there):  # `Path.exists` raises where a folder above is closed to this user
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        return None
    return shutil.disk_usage(there).free


def _free_ports(ports: PortRange, address: str) -> int:
    count = 0
    for port in ports.numbers:
        try:
            listen(address, ports=PortRange(first=port, last=port)).close()
        except PoseidonError:
            continue
        count += 1
    return count
