"""On which hosts a verb runs: the options that say so, and starting the same command there once more as every rank.

A process in which a launcher has set RANK and WORLD_SIZE, ours or torchrun, is a worker. Any other is the launcher if
it was given hosts, and a worker of its own if it was not.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from poseidon.cluster.emulated import enter_user_namespace
from poseidon.cluster.handover import LEAVING_CODE
from poseidon.cluster.spec import ClusterSpec, LinkChange, limit_cpus, parse_links
from poseidon.comm.group import Group
from poseidon.errors import ClusterError, PoseidonError
from poseidon.launch.local import engine_for
from poseidon.reading import printable
from poseidon.runtime import join
from poseidon.units import format_cores

HostsOption = Annotated[
    int | None, typer.Option(help="Emulated hosts on this machine, one rank on each.", min=1, show_default=False)
]
ProcsPerHostOption = Annotated[int, typer.Option(help="Ranks on each emulated host.", min=1)]
LinkOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Rate of every emulated host's link, such as 1Gbit/s, or of one, such as host3=100Mbit/s. Repeatable.",
        show_default=False,
    ),
]
CpuOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Part of a core that every emulated host may use, such as 40%, or one, such as host3=10%. Repeatable.",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        help="A TOML file with hosts and links, or a preset's name, instead of hosts, ranks, links and processors.",
        show_default=False,
    ),
]
AtOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Change a host's link meanwhile: 5s:host2=10Mbit/s, 9s:host2=cut (cut-up, cut-down: one direction), "
        "12s:host2=restore. Repeatable.",
        show_default=False,
    ),
]
RestartsOption = Annotated[
    int, typer.Option(help="Start all ranks again after a failure, so many times at most.", min=0)
]
MinHostsOption = Annotated[
    int | None,
    typer.Option(
        help="With fewer hosts it is not started again; half of those before if not given.", min=1, show_default=False
    ),
]


def is_worker() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def read_hosts(
    hosts: int | None,
    procs_per_host: int,
    link: list[str] | None,
    cluster: Path | None,
    cpu: list[str] | None = None,
) -> ClusterSpec | None:
    """The emulated hosts that the options ask for; None where they ask for none.

    Raises:
        ConfigError: A rate, a share of a core or the file cannot be used.
        ClusterError: An option names a host that is not there.
    """
    if cluster is not None:
        if hosts is not None or link or cpu or procs_per_host != 1:
            raise typer.BadParameter("the file says hosts, ranks, links and processors already", param_hint="--cluster")
        return ClusterSpec.find(cluster)
    if hosts is None:
        if link:
            raise typer.BadParameter("a link needs emulated hosts: add --hosts", param_hint="--link")
        if cpu:
            raise typer.BadParameter("a part of a core needs emulated hosts: add --hosts", param_hint="--cpu")
        if procs_per_host != 1:
            raise typer.BadParameter("ranks need emulated hosts: add --hosts", param_hint="--procs-per-host")
        return None
    return limit_cpus(parse_links(link or [], num_hosts=hosts, num_ranks=procs_per_host), cpu or [])


def describe_links(spec: ClusterSpec | None) -> str | None:
    """The rates as they were asked for, and the limits of processor time if there are any, in one text."""
    if spec is None:
        return None
    parts = _usual_and_odd(spec, [str(host.link) for host in spec.hosts])
    if any(host.cpu for host in spec.hosts):
        parts += _usual_and_odd(spec, [_describe_cpu(host.cpu) for host in spec.hosts])
    return ", ".join(parts)


def _usual_and_odd(spec: ClusterSpec, texts: Sequence[str]) -> list[str]:
    """What most hosts have, then by name the hosts that have something else."""
    usual = max(texts, key=texts.count)
    return [usual, *(f"{host.name} {text}" for host, text in zip(spec.hosts, texts, strict=True) if text != usual)]


def _describe_cpu(cores: float | None) -> str:
    return "all cores" if cores is None else f"{format_cores(cores)} of a core"


def prepare() -> None:
    """What a launcher does before anything else: takes the rights to emulate hosts, if it can get them."""
    try:
        enter_user_namespace()
    except ClusterError:
        return  # `launch` says what that means


def launch(
    spec: ClusterSpec, changes: Sequence[LinkChange] = (), *, restarts: int = 0, min_hosts: int | None = None
) -> None:
    """Runs this very command once more as every rank of the hosts, and shows what the ranks say.

    Args:
        spec: The hosts.
        changes: What happens to their links meanwhile.
        restarts: Failures after which all ranks are started again.
        min_hosts: With fewer hosts the command does not go on; None for half of those that it had before.

    Raises:
        ClusterError: A change is for a host that is not there.
        LaunchError: A rank failed: which one first, and its last lines.
    """
    engine, warning = engine_for(
        num_ranks=spec.num_ranks, cluster=spec, changes=changes, restarts=restarts, min_hosts=min_hosts
    )
    if warning is not None:
        print(f"poseidon: warning: the link was not limited: {warning}", file=sys.stderr)
    first = spec.hosts[0].name
    speakers = {"rank0", first, f"{first}:0"}

    def show(label: str, line: str) -> None:
        text = printable(line, colors=True)
        print(text if label in speakers else f"[{label}] {text}", flush=True)

    engine.run([sys.executable, *sys.orig_argv[1:]], on_line=show)


@contextmanager
def joined(*, max_connections: int = 2) -> Iterator[Group]:
    """The group of all ranks, with so many connections to each peer; whatever ends this rank early is told to all."""
    if os.environ.get("RANK", "0") != "0" and not logging.getLogger("poseidon").isEnabledFor(logging.DEBUG):
        logging.getLogger("poseidon").setLevel(logging.WARNING)  # rank 0 says it for all
    try:
        yield join.init(max_connections=max_connections)
    except PoseidonError as error:
        join.shutdown(str(error))
        raise
    except SystemExit as end:
        if end.code != LEAVING_CODE:
            join.shutdown("it was told to end")
        raise
    except BaseException as error:
        told = isinstance(error, KeyboardInterrupt)
        join.shutdown("it was told to end" if told else f"{type(error).__name__}: {error}")
        raise
    join.shutdown()
