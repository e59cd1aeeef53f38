"""`poseidon probe`: measures the hosts that torchrun started, or emulated ones, and writes them down."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from poseidon.cli.hosts import (
    ClusterOption,
    HostsOption,
    LinkOption,
    ProcsPerHostOption,
    is_worker,
    joined,
    launch,
    prepare,
    read_hosts,
)
from poseidon.cli.terminal import make_console
from poseidon.cluster.curve import Curve
from poseidon.cluster.measurements import Measurements, PairRate
from poseidon.cluster.spec import ClusterSpec, Device
from poseidon.cluster.topology import bottleneck
from poseidon.comm.cluster_probe import SIZES
from poseidon.errors import ClusterError, ConfigError
from poseidon.runtime.probing import MAX_CONNECTIONS, probe_cluster
from poseidon.runtime.surroundings import device_of_rank
from poseidon.units import (
    BITS_PER_BYTE,
    format_bandwidth,
    format_bytes,
    format_flops_per_s,
    format_seconds,
    format_traffic,
    parse_bandwidth,
)

MOST_SHOWN_HOSTS = 5
"""Beyond this, a table of all pairs is too wide for 80 columns; the slowest pairs are listed instead."""
SHOWN_PAIRS = 8
MEGABIT = parse_bandwidth("1Mbit/s")


def probe(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the cluster's description goes.", show_default=True)
    ] = Path("cluster.toml"),
    hosts: HostsOption = None,
    procs_per_host: ProcsPerHostOption = 1,
    link: LinkOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Measure computing, links and collectives of several hosts, in under a minute.

    torchrun --nnodes 2 … -m poseidon probe -o cluster.toml

    poseidon probe --hosts 4 --link 1Gbit/s -o lab.toml
    """
    spec = read_hosts(hosts, procs_per_host, link, cluster)
    if output.suffix not in (".toml", ".json"):
        raise typer.BadParameter("the name must end with .toml or .json", param_hint="--output")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {output}: there is no folder {output.absolute().parent}")
    if spec is None and not is_worker():
        raise ClusterError(
            "nothing to measure with one process: start `python -m poseidon probe` with torchrun on every host, "
            "or emulate hosts with --hosts 4 --link 1Gbit/s"
        )
    if spec is not None and not is_worker():
        prepare()
        launch(spec)
        return
    with joined(max_connections=MAX_CONNECTIONS) as group:
        show = _Shown(group.rank == 0)
        start = time.monotonic()
        with show.bar:
            found = probe_cluster(group, device=device_of_rank(), on_phase=show.phase)
        if group.rank == 0:
            found.save(output)
            console = make_console()
            draw(found, console)
            seconds = format_seconds(round(time.monotonic() - start, 1))
            console.print(f"measured in {seconds}, written to {output}", soft_wrap=True)


class _Shown:
    """Progress on rank 0: a bar on a terminal, a line for each phase elsewhere."""

    def __init__(self, speaks: bool) -> None:
        terminal = make_console(stderr=True)
        self._speaks = speaks
        self._has_bar = speaks and terminal.is_terminal
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=terminal, transient=True, disable=not self._has_bar)
        self._task = self.bar.add_task("starting", total=None)

    def phase(self, what: str, index: int, count: int) -> None:
        """Shows that the phase has begun."""
        self.bar.update(self._task, description=what, completed=index, total=count)
        if self._speaks and not self._has_bar and index < count:
            print(f"measuring {index + 1} of {count}: {what}", file=sys.stderr, flush=True)


def draw(cluster: ClusterSpec, console: Console) -> None:
    """What was found, for 80 columns."""
    console.print(_hosts(cluster))
    for host in cluster.hosts:
        if host.interface is not None:
            console.print(
                f"{host.name} talks over {host.interface.name} ({host.interface.address}): {host.interface.reason}",
                soft_wrap=True,
            )
    measured = cluster.measured
    if measured is None:
        return
    console.print()
    if measured.pairs:
        console.print(_pairs(cluster, measured))
        console.print()
    console.print(_curves(measured))
    for line in sentences(cluster, measured):
        console.print(line, soft_wrap=True)


def sentences(cluster: ClusterSpec, measured: Measurements) -> list[str]:
    """What the figures mean."""
    several = f"{measured.connections} connections to each peer are clearly faster than one for large tensors"
    lines = [
        several if measured.connections > 1 else "one connection to each peer is enough",
        f"beside transfers, computing takes {measured.compute_slowdown:.2f} times as long; "
        f"beside computing, transfers {measured.transfer_slowdown:.2f} times",
    ]
    if len(cluster.hosts) > 1:
        slowest = bottleneck(cluster)
        alike = f"the links are alike, the slowest {format_bandwidth(slowest.link.value)}"
        lines.append(slowest.sentence() if slowest.stands_out else alike)
    return lines + [f"note: {note}" for note in measured.notes]


def _hosts(cluster: ClusterSpec) -> Table:
    table = Table("host", "one rank", "all ranks", "copies", "up", "down", title="hosts", box=SIMPLE_HEAD)
    for host in cluster.hosts:
        link = ("", "") if len(cluster.hosts) == 1 else (_short(host.link.up), _short(host.link.down))
        name = host.name if host.num_ranks == 1 else f"{host.name} × {host.num_ranks}"
        table.add_row(name, *_computing(host.device, cluster.num_ranks), *link)
    return table


def _computing(device: Device | None, num_ranks: int) -> tuple[str, str, str]:
    if device is None:
        return "", "", ""
    alone, together = device.flops_per_s, device.flops_per_s_of(num_ranks)
    copies = device.memory_bandwidth_of(num_ranks)
    return (
        format_flops_per_s(_three_digits(alone)),
        format_flops_per_s(_three_digits(together)),
        f"{format_traffic(_three_digits(copies))}/s" if copies else "",
    )


def _short(bandwidth: float) -> str:
    return format_bandwidth(_three_digits(bandwidth * BITS_PER_BYTE) / BITS_PER_BYTE)


def _seconds(curve: Curve, size: int) -> str:
    """Marked where nothing so large was measured."""
    mark = "~" if size >= 2 * curve.num_bytes[-1] else ""
    return mark + format_seconds(_three_digits(curve.at(size)))


def _megabits(bandwidth: float) -> str:
    return f"{_three_digits(bandwidth / MEGABIT):g}"


def _three_digits(value: float) -> float:
    return float(f"{value:.2e}")


def _pairs(cluster: ClusterSpec, measured: Measurements) -> Table:
    """Every pair while the hosts are few, otherwise the slowest."""
    names = [host.name for host in cluster.hosts]
    if len(names) > MOST_SHOWN_HOSTS:
        table = Table(
            "from", "to", "rate", "latency", title=f"the {SHOWN_PAIRS} slowest of {len(measured.pairs)} pairs"
        )
        for pair in sorted(measured.pairs, key=lambda pair: pair.bandwidth)[:SHOWN_PAIRS]:
            table.add_row(pair.sender, pair.receiver, _short(pair.bandwidth), format_seconds(pair.latency))
        return table
    by_ends = {(pair.sender, pair.receiver): pair for pair in measured.pairs}
    table = Table("from \\ to", *names, title="pairs: rate and latency", box=SIMPLE_HEAD)
    for sender in names:
        table.add_row(sender, *(_pair(by_ends.get((sender, receiver))) for receiver in names))
    return table


def _pair(pair: PairRate | None) -> str:
    return "" if pair is None else f"{_short(pair.bandwidth)}\n{format_seconds(_three_digits(pair.latency))}"


def _curves(measured: Measurements) -> Table:
    """Seconds by bytes sent, one column for each collective."""
    columns: dict[str, Curve | None] = {
        f"{'all-reduce' if n == 1 else ''}\n{n} conn.": curve for n, curve in sorted(measured.all_reduce.items())
    }
    columns |= {"exchange": measured.exchange[1], "inside\nhosts": measured.inner, "between\nhosts": measured.outer}
    shown = {name: curve for name, curve in columns.items() if curve is not None}
    table = Table("sent by\na rank", *shown, title="seconds by size (~: by the slope)", box=SIMPLE_HEAD)
    largest = max(curve.num_bytes[-1] for curve in shown.values())
    for size in (size for size in SIZES if size < 2 * largest):
        table.add_row(format_bytes(size), *(_seconds(curve, size) for curve in shown.values()))
    table.add_section()
    table.add_row("Mbit/s", *(_megabits(curve.bandwidth) for curve in shown.values()))
    return table
