"""`poseidon lab`: any command on emulated hosts."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from poseidon.cli.hosts import AtOption, CpuOption, MinHostsOption, RestartsOption
from poseidon.cli.terminal import make_console
from poseidon.cluster.emulated import EmulatedCluster, enter_user_namespace
from poseidon.cluster.link_meter import LinkRates
from poseidon.cluster.spec import ClusterSpec, LinkChange, limit_cpus, parse_links
from poseidon.errors import ClusterError
from poseidon.launch.local import GRACE_S, LabEngine
from poseidon.reading import printable
from poseidon.units import format_bandwidth, parse_seconds

TOLERANCE = 0.05
"""A link that is measured further than this from its rate fails the check."""
_TRIES = 3
"""A busy machine can spoil one measurement; the best of these counts."""


def lab(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command, the same on every host; after `--`.", metavar="-- COMMAND…")
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Number of hosts, named host0, host1, …; 2 if not given.")] = None,
    procs_per_host: Annotated[int, typer.Option(help="Ranks on each host; they share its link.")] = 1,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="Rate of every link, such as 1Gbit/s, or of one host's, such as host3=100Mbit/s. Repeatable."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="A TOML file with hosts and links, or a preset, instead of the options above and --cpu."),
    ] = None,
    cpu: CpuOption = None,
    at: AtOption = None,
    restarts: RestartsOption = 0,
    min_hosts: MinHostsOption = None,
    check: Annotated[bool, typer.Option("--check", help="Measure every link first, in both directions.")] = False,
    grace: Annotated[
        str, typer.Option(help="After a failure, how long the other ranks may go on before they are ended.")
    ] = f"{GRACE_S:g}s",
) -> None:
    """Run a command on emulated hosts: each in its own network namespace, with a link of a chosen rate.

    Every rank gets the variables that torchrun sets, so that a script for torchrun runs unchanged:
    poseidon lab --hosts 4 --link 1Gbit/s -- python train.py
    """
    if not command and not check:
        raise typer.BadParameter("give a command after --, or --check", param_hint="COMMAND")
    if cluster is not None and (hosts is not None or link or cpu or procs_per_host != 1):
        raise typer.BadParameter("the file says hosts, ranks, links and processors already", param_hint="--cluster")
    if cluster is not None:
        spec = ClusterSpec.find(cluster)
    else:
        spec = parse_links(link or [], num_hosts=2 if hosts is None else hosts, num_ranks=procs_per_host)
        spec = limit_cpus(spec, cpu or [])
    changes = [LinkChange.parse(text) for text in at or []]
    grace_s = parse_seconds(grace)
    engine = LabEngine(spec, changes=changes, grace_s=grace_s, restarts=restarts, min_hosts=min_hosts)
    enter_user_namespace()
    with engine:
        if check:
            check_links(engine.cluster)
        if command:
            engine.start(command, on_line=_show)
            engine.wait()


def _show(label: str, line: str) -> None:
    print(f"[{label}] {printable(line, colors=True)}", flush=True)


def check_links(cluster: EmulatedCluster) -> None:
    """Measures every link and prints what is set against what is measured.

    Raises:
        ClusterError: A link is further from its rate than 5 %.
    """
    found = [_measure(cluster, host.name) for host in cluster.spec.hosts]
    table = Table("host", "direction", "set", "measured payload", "deviation")
    for rates in found:
        for direction, wanted, measured in (("up", rates.set_up, rates.up), ("down", rates.set_down, rates.down)):
            deviation = f"{measured / wanted - 1:+.1%}"
            table.add_row(rates.host, direction, format_bandwidth(wanted), format_bandwidth(measured), deviation)
    make_console().print(table)
    worst = max(found, key=lambda rates: rates.deviation)
    if worst.deviation > TOLERANCE:
        raise ClusterError(
            f"the link of {worst} is more than {TOLERANCE:.0%} off: this machine is too busy or too slow for that rate"
        )


def _measure(cluster: EmulatedCluster, host: str) -> LinkRates:
    """The best of a few measurements; the first that is good enough ends them."""
    best = cluster.measure(host)
    for _ in range(_TRIES - 1):
        if best.deviation > TOLERANCE:
            best = min(best, cluster.measure(host), key=lambda rates: rates.deviation)
    return best
