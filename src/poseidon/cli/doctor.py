"""`poseidon doctor`: what is wrong with hosts and the network between them, and what to do about it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
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
from poseidon.errors import CommError, ConfigError
from poseidon.runtime.checks import Finding, Level, examine, judge, to_json
from poseidon.runtime.host_facts import Facts, collect
from poseidon.runtime.surroundings import counted


def doctor(
    out: Annotated[
        Path, typer.Option("--out", help="Where runs are to be written: its free space is looked at.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Write what was found as JSON.")] = False,
    hosts: HostsOption = None,
    procs_per_host: ProcsPerHostOption = 1,
    link: LinkOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Check this host, or several hosts and every pair of them; exit code 1 where something is wrong.

    poseidon doctor

    torchrun --nnodes 2 … -m poseidon doctor

    poseidon doctor --hosts 4 --link 1Gbit/s
    """
    spec = read_hosts(hosts, procs_per_host, link, cluster)
    if spec is not None and not is_worker():
        prepare()
        launch(spec)
        return
    here = collect(out, os.environ.get("MASTER_ADDR"))
    found = _several(here) if is_worker() else judge(here, num_ranks=1)
    if os.environ.get("RANK", "0") == "0":
        if as_json:
            print(to_json(found))
        else:
            draw(found, make_console())
    if any(one.level is Level.TROUBLE for one in found):
        raise SystemExit(1)


def _several(here: Facts) -> list[Finding]:
    """All hosts; this one alone where the ranks do not find to each other, which is trouble then."""
    try:
        with joined(max_connections=1) as group:
            return examine(group, here)
    except (CommError, ConfigError) as error:
        said, _, advice = str(error).rpartition("; ")
        trouble = Finding(host="", subject="pairs", level=Level.TROUBLE, said=said or advice, advice=advice)
        return [*judge(here, num_ranks=int(os.environ.get("WORLD_SIZE", "1"))), trouble]


def draw(found: Sequence[Finding], console: Console) -> None:
    """A table of everything, then a line for each thing to do."""
    several = len({one.host for one in found if one.host}) > 1
    table = Table(*(("host",) if several else ()), "checked", "", "found", box=SIMPLE_HEAD)
    table.columns[-1].overflow = "fold"
    for hosts, one in merged(found):
        table.add_row(*((hosts,) if several else ()), one.subject, one.level.value, one.said)
    console.print(table)
    for one in found:
        if one.level is not Level.OK:
            where = f"{one.host}: " if one.host and several else ""
            console.print(f"{one.level.value}: {where}{one.subject}: {one.said}", soft_wrap=True)
            console.print(f"    {one.advice}", soft_wrap=True)
    counts = [sum(one.level is level for one in found) for level in (Level.TROUBLE, Level.WARNING)]
    console.print(f"{len(found)} checks: {counted(counts[0], 'trouble')}, {counted(counts[1], 'warning')}")


def merged(found: Sequence[Finding]) -> list[tuple[str, Finding]]:
    """Each thing that was found once, with the hosts of which it is true."""
    everywhere = dict.fromkeys(one.host for one in found if one.host)
    rows: dict[tuple[str, Level, str], list[Finding]] = {}
    for one in found:
        rows.setdefault((one.subject, one.level, one.said), []).append(one)
    return [
        ("all" if not ones[0].host or len(ones) == len(everywhere) else ", ".join(one.host for one in ones), ones[0])
        for ones in rows.values()
    ]
