"""A job trains while a stranger attacks every port that it listens on; it has to end as if nobody had been there.

    python benchmarks/hostile.py --json hostile.json

Four ranks train on loopback, or with `--hosts` on emulated hosts, on one of which the stranger is. When they are under
way, all listening sockets of all processes of the job are looked up, and each is attacked: proofs of a wrong secret,
requests without one, thousands of random and nearly right frames, connections that stay silent, one that sends
gigabytes. Meanwhile the job goes on; at the end its parameters must be bit by bit those of the same number of steps
without an attack, no process may have grown beyond a bound, and the strangers must have been named.
"""

import argparse
import hashlib
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import poseidon  # noqa: E402
from poseidon.artifact import Artifact, Value  # noqa: E402
from poseidon.cluster.emulated import enter_user_namespace  # noqa: E402
from poseidon.cluster.spec import ClusterSpec  # noqa: E402
from poseidon.errors import PoseidonError  # noqa: E402
from poseidon.launch.local import LabEngine, LocalEngine, LoopbackEngine  # noqa: E402
from poseidon.units import GIB, MIB, format_bytes  # noqa: E402
from support import hostile  # noqa: E402
from support.hostile import ATTACKS, Port  # noqa: E402

T = TypeVar("T")

NUM_RANKS = 4
MOST_GROWTH = 64 * MIB
"""Of one process while it is attacked: a few buffers, whatever is sent."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Sums come out alike."""
MOST_STEPS = 10**6
PACE_S = 0.02
CHECK_STEPS = 25
LOOK_S = 0.1


class Result(Artifact):
    """What a training ended with."""

    steps: int
    digest: str
    """Of all parameters, SHA-256."""


class Row(Value):
    """One attack on one port."""

    port: str
    what: str
    attack: str
    connections: int
    outcome: str


@dataclass
class Story:
    """What was seen of a job from outside."""

    result: Result | None = None
    rows: list[Row] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    wildcards: list[Port] = field(default_factory=list)
    """Ports that are open on every address."""
    growth: Counter[str] = field(default_factory=Counter)
    """By process, the most bytes of memory beyond those at the beginning of the attack."""
    error: str = ""

    def note_line(self, label: str, line: str) -> None:
        """Keeps a line of the job's."""
        self.lines.append(f"[{label}] {line}")

    @property
    def num_named(self) -> int:
        """Lines that name a stranger."""
        return sum("dropped a stranger" in line or "is no rank" in line for line in self.lines)


def train(steps: int, out: Path | None = None, until: Path | None = None) -> Result:
    """What every rank does.

    Args:
        steps: How many.
        out: Where rank 0 writes the result, and beside it how far it is.
        until: Ends it earlier, once a file is there.
    """
    group = poseidon.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = poseidon.distribute(model, optimizer, plan="all_reduce")
    generator = torch.Generator().manual_seed(group.rank)
    done, goes_on = 0, True
    while done < steps and goes_on:
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        done += 1
        if until is not None and done % CHECK_STEPS == 0:
            out.with_suffix(".step").touch()
            goes_on = group.broadcast_text("" if until.exists() else "goes on") != ""
        elif until is not None:
            time.sleep(PACE_S)
    run.detach()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    result = Result(steps=done, digest=digest.hexdigest())
    if out is not None and group.rank == 0:
        result.save(out)
    return result


def play(frames: int, silent: int, flood_bytes: int, *, num_ranks: int = NUM_RANKS, on_hosts: bool = False) -> Story:
    """A job that is attacked.

    Args:
        frames: Fuzzed frames against each port.
        silent: Connections to each port that say nothing.
        flood_bytes: Sent over one connection to each port.
        num_ranks: Of the job.
        on_hosts: Each rank on an emulated host, and the stranger on the last of them; otherwise all on loopback.
    """
    hostile.allow_many_files()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        out, stop = Path(folder, "result.json"), Path(folder, "stop")
        story = Story()
        with _engine(num_ranks, on_hosts) as engine:
            engine.start(_command(out, MOST_STEPS, stop), on_line=story.note_line, env=ONE_THREAD)
            there = partial(engine.cluster.run, engine.cluster.spec.hosts[-1].name) if on_hosts else here
            stranger = Stranger(story, out, stop, there)
            attack = threading.Thread(target=stranger.attack, args=(frames, silent, flood_bytes))
            attack.start()
            try:
                engine.wait()
            except PoseidonError as error:
                story.error = str(error)
            stop.touch()
            attack.join()
        if out.exists():
            story.result = Result.load(out)
        return story


def play_undisturbed(steps: int, *, num_ranks: int = NUM_RANKS) -> Result:
    """What so many steps give."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        out = Path(folder, "result.json")
        LoopbackEngine(num_ranks).run(_command(out, steps), on_line=lambda label, line: None, env=ONE_THREAD)
        return Result.load(out)


def _engine(num_ranks: int, on_hosts: bool) -> LocalEngine:
    if on_hosts:
        return LabEngine(ClusterSpec.uniform(num_hosts=num_ranks, bandwidth="1Gbit/s"))
    return LoopbackEngine(num_ranks)


def _command(out: Path, steps: int, *until: Path) -> list[str]:
    return [sys.executable, __file__, "--rank", str(out), str(steps), *map(str, until)]


class Stranger:
    """Attacks every port of the job that this process has started, all at once, when it is under way.

    Args:
        story: Where it notes what it sees.
        out: Beside it the job says that it is under way.
        stop: A file that the job ends with; made when the attack is over.
        there: Runs a function where the stranger is.
        patience_s: How long a connection may be left open.
    """

    def __init__(
        self, story: Story, out: Path, stop: Path, there: Callable[..., Any], patience_s: float = hostile.PATIENCE_S
    ) -> None:
        self._story = story
        self._out = out
        self._stop = stop
        self._there = there
        self._patience_s = patience_s

    def attack(self, frames: int, silent: int, flood_bytes: int) -> None:
        """See `play`."""
        me = psutil.Process()
        try:
            while not self._out.with_suffix(".step").exists() and not self._stop.exists():
                time.sleep(LOOK_S)
            ports = hostile.find_ports(me)
            self._story.wildcards = [port for port in ports if port.address in ("0.0.0.0", "::")]
            with _Watch(me, self._story.growth):
                quiet = {port: self._there(hostile.stay_silent, port, silent) for port in ports}
                with ThreadPoolExecutor(max_workers=len(ports)) as threads:
                    list(threads.map(lambda port: self._attack_port(port, frames, flood_bytes), ports))
                for port, connections in quiet.items():
                    self._note(port, "stays silent", silent, str(hostile.fates_of_silent(connections)))
                    for connection in connections:
                        connection.close()
            for port in set(ports) - set(hostile.find_ports(me)):
                self._note(port, "all of them", 0, "the port is gone")
        finally:
            self._stop.touch()

    def _attack_port(self, port: Port, frames: int, flood_bytes: int) -> None:
        for kind in ATTACKS:
            count = frames if kind == "fuzzed" else max(10, frames // 100)
            tally = self._there(hostile.attack, port, kind, count, self._patience_s)
            self._note(port, kind, tally.tried, str(tally))
        sent, fate = self._there(hostile.flood, port, flood_bytes)
        fate = fate if fate == "not taken in" else f"{fate} after {format_bytes(sent)}"
        self._note(port, f"sends {format_bytes(flood_bytes)}", 1, fate)

    def _note(self, port: Port, attack: str, connections: int, outcome: str) -> None:
        row = Row(port=str(port), what=port.what, attack=attack, connections=connections, outcome=outcome)
        self._story.rows.append(row)


def here(function: Callable[..., T], *args: Any) -> T:
    """Runs a function in this process, on this host."""
    return function(*args)


class _Watch:
    """Looks at the memory of all children now and then."""

    def __init__(self, root: psutil.Process, growth: Counter[str]) -> None:
        self._root = root
        self._growth = growth
        self._done = threading.Event()
        self._first: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.is_set():
            for process in self._root.children(recursive=True):
                try:
                    rss, name = process.memory_info().rss, hostile.describe(process)
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                first = self._first.setdefault(process.pid, rss)
                self._growth[name] = max(self._growth[name], rss - first)
            self._done.wait(LOOK_S)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


class Report(Artifact):
    """What is written with --json."""

    rows: tuple[Row, ...]
    steps: int
    equal: bool
    num_named: int
    growth: dict[str, int]
    error: str


def verdicts(story: Story, plain: Result) -> dict[str, bool]:
    """What has to hold."""
    return {
        "the job came to its end": story.result is not None and not story.error,
        "its parameters are those without an attack": story.result == plain,
        f"no process grew by {format_bytes(MOST_GROWTH)}": max(story.growth.values(), default=0) < MOST_GROWTH,
        "strangers were named": story.num_named > 0,
        "no port is open on every address": not story.wildcards,
    }


def main() -> None:
    """Plays it and prints the table; exit code 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=10_000, help="fuzzed frames against each port")
    parser.add_argument("--silent", type=int, default=200, help="silent connections to each port")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="sent over one connection to each port")
    parser.add_argument("--hosts", action="store_true", help="emulate hosts, the stranger is on one of them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        out, steps, *until = arguments.rank
        train(int(steps), Path(out), Path(until[0]) if until else None)
        return
    if arguments.hosts:
        enter_user_namespace()
    flood_bytes = round(arguments.gigabytes * GIB)
    story = play(arguments.frames, arguments.silent, flood_bytes, on_hosts=arguments.hosts)
    plain = play_undisturbed(story.result.steps if story.result is not None else 1)
    console = Console(markup=False, highlight=False)
    table = Table("port", "whose", "attack", "connections", "outcome", box=None, pad_edge=False)
    for row in sorted(story.rows, key=lambda row: (row.what, row.port)):
        table.add_row(row.port, row.what, row.attack, f"{row.connections:,}", row.outcome)
    console.print(table)
    console.print()
    for name, num_bytes in sorted(story.growth.items()):
        console.print(f"{name} grew by {format_bytes(num_bytes)} at most")
    for line in [line for line in story.lines if "stranger" in line or "is no rank" in line][:8]:
        console.print(line, soft_wrap=True)
    held = verdicts(story, plain)
    for what, holds in held.items():
        console.print(f"{'yes' if holds else 'NO '}  {what}")
    if story.error:
        console.print(story.error)
    if arguments.json is not None:
        steps = story.result.steps if story.result is not None else 0
        report = Report(
            rows=tuple(story.rows),
            steps=steps,
            equal=story.result == plain,
            num_named=story.num_named,
            growth=dict(story.growth),
            error=story.error,
        )
        report.save(arguments.json)
    sys.exit(not all(held.values()))


if __name__ == "__main__":
    main()
