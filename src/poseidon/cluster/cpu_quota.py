"""A limit on the processor time of an emulated host: a control group of the kernel, with a quota.

Comes in: how many cores the host may use. Goes out: the folder of a control group in which its processes run; whoever
made it sees to it that the folder is removed. Both versions of control groups will do, whichever has the controller
`cpu` here and can be written to.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from poseidon.errors import ClusterError
from poseidon.units import MICROSECONDS, format_cores

_MOUNTS = Path("/proc/self/mounts")
_OWN_GROUPS = Path("/proc/self/cgroup")
_PERIOD_S = 10e-3
"""In each the quota is granted anew. Short, so that a slow host is slow evenly and does not stop for long."""
_SMALLEST_QUOTA_S = 1e-3
"""The kernel takes none below."""
_LONGEST_PERIOD_S = 1.0
"""Nor a period above."""
_NEEDS = (
    "a host with a part of a core takes control groups (version 1 or 2) with the controller cpu, mounted and writable: "
    "be root, in a container with access to /sys/fs/cgroup, or leave the limit out"
)


class Hierarchy(NamedTuple):
    """Where control groups for processor time can be made."""

    version: int
    """Of control groups."""
    folders: tuple[Path, ...]
    """In which to try, in this order: this process's own group, then those around it."""


def make_cpu_group(host: str, cores: float) -> Path:
    """Makes a control group whose processes together use so many cores at most.

    Groups that a killed process has left behind, and its keeper too, are removed on the way.

    Args:
        host: For its name.
        cores: A part of one core, or several.

    Returns:
        Its folder, to be removed once no process is in it.

    Raises:
        ClusterError: The system has no such groups or does not let this process make one; what it answers is said.
    """
    quota, period = quota_and_period(cores)
    hierarchy = find_hierarchy(_MOUNTS.read_text(encoding="utf-8"), _OWN_GROUPS.read_text(encoding="utf-8"))
    if hierarchy is None:
        raise ClusterError(f"cannot limit {host} to {format_cores(cores)} of a core: no group is mounted; {_NEEDS}")
    limit = {1: _limit_version_1, 2: _limit_version_2}[hierarchy.version]
    reasons = []
    for parent in hierarchy.folders:
        _remove_stale(parent)
        try:
            return _make(parent, host, lambda folder: limit(folder, quota, period))
        except OSError as error:
            reasons.append(f"{error.filename or parent}: {error.strerror}")
    raise ClusterError(f"cannot limit {host} to {format_cores(cores)} of a core: {reasons[0]}; {_NEEDS}")


def quota_and_period(cores: float) -> tuple[int, int]:
    """Microseconds of processor time in so many microseconds of wall time.

    Raises:
        ClusterError: It is less than the kernel can grant.
    """
    period = max(_PERIOD_S, _SMALLEST_QUOTA_S / cores)
    if period > _LONGEST_PERIOD_S:
        least = format_cores(_SMALLEST_QUOTA_S / _LONGEST_PERIOD_S)
        raise ClusterError(f"cannot limit a host to {format_cores(cores)} of a core: the kernel grants {least} or more")
    return round(cores * period * MICROSECONDS), round(period * MICROSECONDS)


def find_hierarchy(mounts: str, own_groups: str) -> Hierarchy | None:
    """Where to make groups, by what `/proc/self/mounts` and `/proc/self/cgroup` say; None where nothing is mounted."""
    mounted = [line.split() for line in mounts.splitlines()]
    own = {tuple(controllers.split(",")): path for _, controllers, path in _split(own_groups)}
    for _, folder, kind, options, *_ in mounted:
        if kind == "cgroup" and "cpu" in options.split(","):
            path = next((path for controllers, path in own.items() if "cpu" in controllers), "/")
            return Hierarchy(1, _existing(folder, path))
    for _, folder, kind, *_ in mounted:
        if kind == "cgroup2":
            return Hierarchy(2, _existing(folder, own.get(("",), "/")))
    return None


def _split(own_groups: str) -> Iterator[list[str]]:
    for line in own_groups.splitlines():
        yield line.split(":", 2)


def _existing(mounted: str, path: str) -> tuple[Path, ...]:
    """A group and those around it; in a container only some of them can be seen, under the mount itself."""
    inside = PurePosixPath(path.lstrip("/"))
    folders = [Path(mounted) / one for one in (inside, *inside.parents)]
    return tuple(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _make(parent: Path, host: str, limit: Callable[[Path], None]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"poseidon-{os.getpid()}-{host}-", dir=parent))
    try:
        limit(folder)
    except OSError:
        folder.rmdir()
        raise
    return folder


def _limit_version_1(folder: Path, quota: int, period: int) -> None:
    _write(folder / "cpu.cfs_period_us", str(period))
    _write(folder / "cpu.cfs_quota_us", str(quota))


def _limit_version_2(folder: Path, quota: int, period: int) -> None:
    if not (folder / "cpu.max").exists():
        _write(folder.parent / "cgroup.subtree_control", "+cpu")
    _write(folder / "cpu.max", f"{quota} {period}")


def _write(file: Path, text: str) -> None:
    """In one call, as the kernel wants it, and never into a new file."""
    try:
        fd = os.open(file, os.O_WRONLY)
        try:
            os.write(fd, text.encode("ascii"))
        finally:
            os.close(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"writing {text!r} to {file}") from error


def _remove_stale(parent: Path) -> None:
    """Groups of processes that are gone, unless something still runs in them."""
    for folder in parent.glob("poseidon-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with suppress(OSError):
                folder.rmdir()
