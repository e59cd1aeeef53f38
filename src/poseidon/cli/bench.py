"""`poseidon bench`: Poseidon against others on the same hosts, in turns, so that what changes meanwhile hits all."""

import json
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Annotated

import psutil
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import HashStore

from poseidon import __version__
from poseidon.artifact import write_whole
from poseidon.cli.contenders import ALONE, CONTENDERS, OURS, Racer, Start, check_names
from poseidon.cli.hosts import (
    ClusterOption,
    CpuOption,
    HostsOption,
    LinkOption,
    ProcsPerHostOption,
    describe_links,
    is_worker,
    joined,
    launch,
    prepare,
    read_hosts,
)
from poseidon.cli.terminal import make_console
from poseidon.cli.virtual import VirtualOption, as_virtual
from poseidon.comm.group import Group
from poseidon.errors import ConfigError
from poseidon.plan import Plan
from poseidon.report.compare import (
    Comparison,
    Measured,
    RankTurn,
    Turn,
    combine_ranks,
    describe,
    draw,
    fewest_steps,
    speedup,
)
from poseidon.runtime.surroundings import Surroundings, device_of_rank, survey
from poseidon.tasks import Task, load_task
from poseidon.units import format_seconds

log = logging.getLogger(__name__)

FEWEST_WARM_UP_STEPS = 3
"""DDP makes its buckets anew after its first step."""
MOST_WARM_UP_STEPS = 60
SWITCH_STEPS = 1
"""At the start of a turn, not counted: caches and connections belonged to somebody else."""


def bench(
    task: Annotated[str, typer.Argument(help="A built-in task's name, or path/to/file.py:function.", metavar="TASK")],
    hosts: HostsOption = None,
    procs_per_host: ProcsPerHostOption = 1,
    link: LinkOption = None,
    cpu: CpuOption = None,
    cluster: ClusterOption = None,
    against: Annotated[
        str, typer.Option(help="Others, with commas: ddp, or a scheme for every layer that can use it.")
    ] = "ddp",
    alone: Annotated[
        bool, typer.Option("--alone", help="Add a plain loop without Poseidon; for a race on one rank.")
    ] = False,
    virtual: VirtualOption = None,
    rounds: Annotated[int, typer.Option(help="Turns of each contender.", min=1)] = 5,
    steps: Annotated[int, typer.Option(help="Steps of a turn that count; one more comes before them.", min=1)] = 3,
    batch: Annotated[
        int | None, typer.Option(help="Samples per rank and step; the task's own if not given.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the samples.", min=0)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures into this file too.")] = None,
) -> None:
    """Race Poseidon's plan against DDP or single schemes, on the same hosts, in turns.

    poseidon bench fashion-mnist --hosts 4 --link 1Gbit/s --against ddp,all_reduce --json out.json

    torchrun --nnodes 2 … -m poseidon bench fashion-mnist
    """
    spec = read_hosts(hosts, procs_per_host, link, cluster, cpu)
    names = check_names([name.strip() for name in against.split(",") if name.strip()])
    if alone and spec is not None and spec.num_ranks > 1:
        raise ConfigError(f"cannot race one process on {spec.num_ranks} ranks: --alone goes with one host")
    if not names and not alone:
        raise typer.BadParameter("name at least one contender", param_hint="--against")
    launcher = spec is not None and not is_worker()
    if launcher:
        prepare()
    chosen = load_task(task)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {json_file}: there is no folder {json_file.absolute().parent}")
    if launcher:
        assert spec is not None
        launch(spec)
        return
    if not is_worker():  # DDP wants a process group also where there is one rank
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with joined() as group:
            if alone and group.world_size > 1:
                raise ConfigError(f"cannot race one process on {group.world_size} ranks: --alone goes with one")
            batch_size = batch or chosen.batch_size
            chosen = as_virtual(chosen, virtual, batch_size)
            race = Race(chosen, group, batch_size, seed, describe_links(spec))
            comparison = race.run([OURS, *names, *([ALONE] if alone else [])], rounds=rounds, steps=steps)
            if group.rank == 0:
                race.show(comparison)
                if json_file is not None:
                    write_whole(json_file, comparison.to_text())
            group.barrier()
    finally:
        if not is_worker():
            dist.destroy_process_group()


class Race:
    """The same race on every rank.

    Args:
        task: What is trained.
        group: All ranks.
        batch_size: Samples per rank and step.
        seed: Of weights and order.
        link: The rate of the links as it was asked for.
    """

    def __init__(self, task: Task, group: Group, batch_size: int, seed: int, link: str | None) -> None:
        device = device_of_rank()
        self._group = group
        self._surroundings: Surroundings = survey(group, device, link)
        self._console = make_console(quiet=group.rank != 0)
        self._start = Start(
            task=task, data=task.make_train_data(), batch_size=batch_size, seed=seed, device=device, group=group
        )
        self._plan: Plan | None = None

    def run(self, names: list[str], *, rounds: int, steps: int) -> Comparison:
        """Lets the contenders warm up one after the other, then take turns.

        Returns:
            The comparison, the same on every rank.
        """
        self._say(f"{self._start.task.name}: {self._start.task.note}\n{self._surroundings.sentence()}")
        racers = [self._warmed_up(name) for name in names]
        measured = [Measured(name=racer.name) for racer in racers]
        for number in range(1, rounds + 1):
            for racer, notes in zip(racers, measured, strict=True):
                notes.turns.append(self._turn(racer, steps))
            times = [f"{one.name} {format_seconds(statistics.median(one.turns[-1].step_seconds))}" for one in measured]
            self._say(f"round {number} of {rounds}: {', '.join(times)}")
        for racer, notes in zip(racers, measured, strict=True):
            notes.losses = self._mean_over_ranks(racer.losses)
        plan = self._plan
        for racer in racers:
            racer.leave()
        return self._compare(measured, plan.summary() if plan else "", rounds=rounds, steps=steps)

    def show(self, comparison: Comparison) -> None:
        """The table, and what to know with it."""
        self._say("")
        self._console.print(draw(comparison))
        self._say(f"\nlosses after {comparison.compared_at_step} steps; sent and on wire: per host and step")
        rounds = f"{comparison.rounds} round{'' if comparison.rounds == 1 else 's'}"
        for name, ratio in comparison.speedup_over.items():
            self._say(
                f"poseidon's step is {ratio.median:.2f} times as fast as that of {name} "
                f"(p10 {ratio.p10:.2f}, p90 {ratio.p90:.2f} over {rounds})"
            )
        self._say(f"plan: {comparison.plan}")
        self._say(self._surroundings.sentence())

    def _warmed_up(self, name: str) -> Racer:
        """A contender that has settled; all ranks agree on it."""
        racer = CONTENDERS[name](self._start, self._plan)
        racer.begin_turn()
        settled = False
        while not settled and len(racer.losses) < MOST_WARM_UP_STEPS:
            racer.take_step()
            ready = racer.is_settled and len(racer.losses) >= FEWEST_WARM_UP_STEPS
            settled = all(map(json.loads, self._group.all_gather_text(json.dumps(ready), "warming up")))
        if not settled:
            log.warning("%s has not settled within %d steps and races as it is", name, MOST_WARM_UP_STEPS)
        if name == OURS:
            assert racer.run is not None
            self._plan = racer.run.plan
        self._say(f"{name} has warmed up in {len(racer.losses)} steps")
        return racer

    def _turn(self, racer: Racer, steps: int) -> Turn:
        racer.begin_turn()
        self._group.barrier()
        sent, wire = self._group.bytes_sent, _interface_bytes()
        seconds = []
        for _ in range(SWITCH_STEPS + steps):
            start = time.perf_counter()
            racer.take_step()
            seconds.append(time.perf_counter() - start)
        sent = self._group.bytes_sent - sent
        self._group.barrier()
        after = _interface_bytes()
        mine = RankTurn(
            step_seconds=tuple(seconds[SWITCH_STEPS:]),
            bytes_sent=racer.known_bytes_sent if racer.run is None else sent / len(seconds),
            wire_bytes=None if wire is None or after is None else (after - wire) / len(seconds),
            exposed_seconds=None if racer.run is None else tuple(racer.exposed[SWITCH_STEPS:]),
        )
        texts = self._group.all_gather_text(mine.model_dump_json(), "comparing a turn")
        return combine_ranks(list(map(RankTurn.model_validate_json, texts)), self._surroundings.hosts)

    def _mean_over_ranks(self, losses: list[float]) -> list[float]:
        """Every rank has as many samples in every step, so the plain mean is the mean over all samples."""
        everyone = [json.loads(text) for text in self._group.all_gather_text(json.dumps(losses), "gathering losses")]
        return [statistics.fmean(ranks) for ranks in zip(*everyone, strict=True)]

    def _compare(self, measured: list[Measured], plan: str, *, rounds: int, steps: int) -> Comparison:
        compared_at_step = fewest_steps(measured)
        around = self._surroundings
        return Comparison(
            task=self._start.task.name,
            note=self._start.task.note,
            hosts=around.hosts,
            cores_per_host=around.cores_per_host,
            link=around.link,
            shaped=around.shaped,
            world_size=around.world_size,
            threads=around.threads,
            device=around.device,
            torch=around.torch,
            poseidon=__version__,
            batch_size=self._start.batch_size,
            rounds=rounds,
            steps=steps,
            compared_at_step=compared_at_step,
            plan=plan,
            contenders=tuple(describe(one, compared_at_step) for one in measured),
            speedup_over={one.name: speedup(measured[0], one) for one in measured[1:]},
        )

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def _interface_bytes() -> int | None:
    """What this host's interface has sent so far, asked by one rank of each host; None on loopback."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if interface == "lo" or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    counters = psutil.net_io_counters(pernic=True, nowrap=False).get(interface)
    return None if counters is None else counters.bytes_sent
