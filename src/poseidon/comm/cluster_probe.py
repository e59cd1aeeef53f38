"""Measures a whole cluster, all ranks together: computing, every pair of hosts, every collective by size.

Comes in: a `Group` that does nothing else meanwhile, and which ranks are on which host. Goes out: a `ClusterSpec` with
measurements, the same on every rank. Slowest figures count, medians of several, on an otherwise idle network.
"""

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist

from poseidon.cluster.curve import Curve
from poseidon.cluster.link_meter import measure_rate
from poseidon.cluster.measurements import Interface, Measurements, PairRate, rounded
from poseidon.cluster.rates import UNLIMITED
from poseidon.cluster.spec import ClusterSpec, Device, Host, Link
from poseidon.cluster.topology import slow_links
from poseidon.comm import timing
from poseidon.comm.group import Group
from poseidon.comm.pairs import measure_pairs
from poseidon.comm.probe import fastest
from poseidon.profile.device import measure_compute
from poseidon.profile.graph import ComputeRates
from poseidon.units import BYTES_PER_FLOAT32, KIB, MIB

CONNECTIONS = (1, 2, 4)
SIZES = tuple(KIB * 4**power for power in range(9))
"""1 KiB to 64 MiB, as a rank sends it."""
SPLIT_SIZES = tuple(size for size in SIZES if size >= MIB)
"""Sizes at which several connections are used."""
RECORD_SIZES = tuple(KIB * 16**power for power in range(5))
"""Fewer, for collectives that no scheme uses."""
BATCH_SECONDS = 0.04
MOST_SECONDS = 0.9
"""Of a single transfer; larger sizes go on by the curve's slope."""
DISTURBED_SECONDS = 0.6
"""How long computing and transfers are measured beside each other."""
MATRIX_SIZE = 512
"""Of the products that are computed beside transfers: a few milliseconds each."""
ENDPOINT_SECONDS = 0.2
IDLE_SECONDS = 0.3
MOST_BUSY = 0.2
"""A machine whose processors were used for more than this share beforehand is named."""
_HERE = "127.0.0.1"

OnPhase = Callable[[str, int, int], None]
"""Takes what is measured now, its number and how many there are."""


def measure_cluster(
    group: Group,
    hosts: Mapping[str, Sequence[int]],
    machines: Sequence[str],
    *,
    device: torch.device | None = None,
    interface: Interface | None = None,
    on_phase: OnPhase = lambda what, index, count: None,
) -> ClusterSpec:
    """Measures everything; called on all ranks together.

    Args:
        group: All ranks, with as many connections as are to be tried.
        hosts: The ranks of each host by its name, in order; each rank once.
        machines: By rank: the same text for ranks that share cores, as those of emulated hosts do.
        device: What this rank computes on; the processor if None.
        interface: Over which this rank talks to the others.
        on_phase: Told how far it is.

    Raises:
        CommError: A rank is gone, or an exchange failed.
    """
    probe = _Probe(group, {name: list(ranks) for name, ranks in hosts.items()}, list(machines), device, interface)
    phases: list[tuple[str, Callable[[], None]]] = [
        ("computing, one rank and several at once", probe.computing),
        ("every pair of hosts", probe.pairs),
        *((f"all-reduce, {n} connection{'s' * (n > 1)}", probe.all_reduce_over(n)) for n in probe.connections),
        ("exchange, every rank to every other", probe.exchange),
        ("broadcast and all-gather", probe.for_the_record),
        ("inside the hosts and between them", probe.levels),
        ("computing and transfers beside each other", probe.disturbance),
    ]
    sent, before = group.bytes_sent, group.connections
    try:
        for index, (what, measure) in enumerate(phases):
            on_phase(what, index, len(phases))
            measure()
    finally:
        group.bytes_sent, group.connections = sent, before
    on_phase("done", len(phases), len(phases))
    return probe.spec()


class _Probe:
    """What has been found so far; every method is called on all ranks together."""

    def __init__(
        self,
        group: Group,
        hosts: Mapping[str, list[int]],
        machines: list[str],
        device: torch.device | None,
        interface: Interface | None,
    ) -> None:
        self.group = group
        self.hosts = hosts
        self.machines = machines
        self.device = device
        self.interface = interface
        self.connections = [n for n in CONNECTIONS if n <= group.max_connections] if group.world_size > 1 else []
        self.compute: dict[int, list[ComputeRates | None]] = {}
        """By the number of ranks that were busy: what each rank reached, None where it was not among them."""
        self.facts: list[dict[str, Any]] = []
        self.pair_rates: list[PairRate] = []
        self.all_reduce: dict[int, Curve] = {}
        self.found: dict[str, Curve] = {}
        self.slowdowns = (1.0, 1.0)
        self.endpoint: float | None = None

    def computing(self) -> None:
        """One rank of each machine alone, then 2, 4, … and all; only as far as ranks share a machine."""
        self.group.barrier()
        mine = {
            "busy": psutil.cpu_percent(IDLE_SECONDS) / 100,  # while every rank of the machine waits here
            "interface": self.interface and self.interface.model_dump(),
            "memory": _memory(self.device, self.machines.count(self.machines[self.group.rank])),
        }
        self.facts = self._gather(mine)
        firsts = [self.machines.index(machine) for machine in self.machines]
        alone = self._compute_at_once(set(firsts))
        self.compute[1] = [alone[first] for first in firsts]
        if len(set(self.machines)) < self.group.world_size:
            for count in _doubling(self.group.world_size):
                self.compute[count] = self._compute_at_once(set(range(count)))

    def _compute_at_once(self, busy: set[int]) -> list[ComputeRates | None]:
        self.group.barrier()
        mine = None
        if self.group.rank in busy:
            mine = measure_compute(self.device)
            if len(busy) > 1:
                measure_compute(self.device)  # keeps this rank busy until the others have measured
        everyone = self._gather(mine and mine.model_dump())
        return [one and ComputeRates.model_validate(one) for one in everyone]

    def pairs(self) -> None:
        """Latency and rate of each direction; and what a rank moves where no link limits it."""
        self.pair_rates = measure_pairs(self.group, {name: ranks[0] for name, ranks in self.hosts.items()})
        if self.device is None or self.device.type == "cpu":
            self.group.barrier()
            self.endpoint = statistics.median(self._gather(measure_rate(_call, _call, _HERE, ENDPOINT_SECONDS)))

    def all_reduce_over(self, connections: int) -> Callable[[], None]:
        """Measures with so many connections."""

        def measure() -> None:
            self.group.connections = connections
            share = timing.all_reduce_share(self.group.world_size)
            sizes = SIZES if connections == 1 else SPLIT_SIZES
            curve = self._curve(timing.all_reduce(self.group), share, sizes)
            one = self.all_reduce.get(1, curve)
            self.all_reduce[connections] = curve if connections == 1 else _joined(one, curve)
            self.group.connections = 1

        return measure

    def exchange(self) -> None:
        """Over one connection, which is the one that exchanges use."""
        if self.connections:
            share = timing.exchange_share(self.group.world_size)
            self.found["exchange"] = self._curve(timing.exchange(self.group), share, SIZES)

    def for_the_record(self) -> None:
        """What no scheme uses, at fewer sizes."""
        if self.connections:
            self.found["broadcast"] = self._curve(timing.broadcast(self.group), 1.0, RECORD_SIZES)
            share = self.group.world_size - 1
            self.found["all_gather"] = self._curve(timing.all_gather(self.group), share, RECORD_SIZES)

    def levels(self) -> None:
        """All-reduce among the ranks of each host, all hosts at once; then among the first ranks of the hosts."""
        members = list(self.hosts.values())
        if max(map(len, members)) == 1 or len(members) == 1:
            return
        with self._subgroups([ranks for ranks in members if len(ranks) > 1]) as mine:
            share = timing.all_reduce_share(max(map(len, members)))
            self.found["inner"] = self._curve(_if_member(mine), share, SIZES)
        with self._subgroups([[ranks[0] for ranks in members]]) as mine:
            self.found["outer"] = self._curve(_if_member(mine), timing.all_reduce_share(len(members)), SIZES)

    def disturbance(self) -> None:
        """Products alone, all-reduces alone, then both: how many times as long each takes."""
        if not self.connections:
            return
        work = _Products(self.device)
        tensor, count = self._about(DISTURBED_SECONDS)
        once = timing.all_reduce(self.group)
        self.group.barrier()
        products_alone = work.rate(lambda seconds: seconds >= DISTURBED_SECONDS)
        transfers_alone = timing.time_batch(self.group, lambda: once(tensor), count, self.device)
        transfers = _InBackground(lambda: timing.time_batch(self.group, lambda: once(tensor), count, self.device))
        products = work.rate(lambda _: transfers.done)
        everyone = self._gather([products_alone / products, transfers_alone, transfers.result()])
        slowdown = statistics.median(ratio for ratio, _, _ in everyone)
        beside, alone = max(beside for _, _, beside in everyone), max(alone for _, alone, _ in everyone)
        self.slowdowns = (max(1.0, slowdown), max(1.0, beside / alone))

    def _about(self, seconds: float) -> tuple[torch.Tensor, int]:
        """A tensor whose all-reduce takes a third of that time at most, and how many of them fill it."""
        curve = self.all_reduce[1]
        sizes = [n for n, s in zip(curve.num_bytes, curve.seconds, strict=True) if s <= seconds / 3]
        size = max(sizes, default=curve.num_bytes[0])
        count = round(size / timing.all_reduce_share(self.group.world_size) / BYTES_PER_FLOAT32)
        return torch.zeros(max(1, count), device=self.device), max(2, min(1000, round(seconds / curve.at(size))))

    def _curve(self, transfer: timing.Transfer, share: float, sizes: Sequence[int]) -> Curve:
        return timing.measure_curve(
            self.group,
            transfer,
            share,
            sizes=sizes,
            batch_seconds=BATCH_SECONDS,
            most_seconds=MOST_SECONDS,
            device=self.device,
        )

    @contextmanager
    def _subgroups(self, members: Sequence[Sequence[int]]) -> Iterator[Group | None]:
        """The one of several new groups that this rank is in, or None; made by all ranks, in the same order."""
        made = [dist.new_group(list(ranks)) for ranks in members]
        mine = [g for g, ranks in zip(made, members, strict=True) if self.group.rank in ranks]
        yield Group([mine[0]]) if mine and mine[0] is not None else None
        for one in mine:
            dist.destroy_process_group(one)

    def _gather(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self.group.all_gather_text(json.dumps(value), "gathering measurements")]

    def spec(self) -> ClusterSpec:
        """Everything in its file form."""
        spec = ClusterSpec(hosts=tuple(self._host(name, ranks) for name, ranks in self.hosts.items()))
        if not self.connections:
            return spec
        exchange = _rounded_curve(self.found.pop("exchange"))
        measured = Measurements(
            all_reduce={n: _rounded_curve(curve) for n, curve in self.all_reduce.items()},
            exchange=dict.fromkeys(self.all_reduce, exchange),
            **{name: _rounded_curve(curve) for name, curve in self.found.items()},
            connections=fastest(self.all_reduce),
            compute_slowdown=rounded(self.slowdowns[0]),
            transfer_slowdown=rounded(self.slowdowns[1]),
            endpoint_bandwidth=self.endpoint and rounded(self.endpoint),
            pairs=tuple(self.pair_rates),
        )
        spec = spec.model_copy(update={"measured": measured})
        notes = (*self._busy_machines(), *slow_links(spec))
        return spec.model_copy(update={"measured": measured.model_copy(update={"notes": notes})})

    def _busy_machines(self) -> list[str]:
        """In words, a machine once."""
        said: dict[str, str] = {}
        for name, ranks in self.hosts.items():
            if (busy := self.facts[ranks[0]]["busy"]) > MOST_BUSY:
                said.setdefault(
                    self.machines[ranks[0]],
                    f"the machine of {name} was {busy:.0%} busy with something else: figures may be too low",
                )
        return list(said.values())

    def _host(self, name: str, ranks: Sequence[int]) -> Host:
        facts = self.facts[ranks[0]]
        return Host(
            name=name,
            link=self._link(name),
            num_ranks=len(ranks),
            device=self._device(ranks),
            interface=facts["interface"] and Interface.model_validate(facts["interface"]),
        )

    def _link(self, name: str) -> Link:
        """A link moves what it moved with its fastest peer; the others had a slower link themselves."""
        up = [pair for pair in self.pair_rates if pair.sender == name]
        down = [pair for pair in self.pair_rates if pair.receiver == name]
        if not up or not down:
            return Link.symmetric(rounded(self.endpoint or UNLIMITED))
        latency = min(pair.latency for pair in (*up, *down))
        return Link(up=max(p.bandwidth for p in up), down=max(p.bandwidth for p in down), latency=latency)

    def _device(self, ranks: Sequence[int]) -> Device:
        """Medians over the ranks that share the machine: they share its cores, and what differs is chance."""
        sharers = [rank for rank, one in enumerate(self.machines) if one == self.machines[ranks[0]]]
        by_busy = {
            count: [rates for rank in sharers if (rates := everyone[rank]) is not None]
            for count, everyone in self.compute.items()
        }
        by_busy = {count: found for count, found in by_busy.items() if found}
        flops = {n: rounded(statistics.median(r.flops_per_s for r in found)) for n, found in by_busy.items()}
        copies = {n: rounded(statistics.median(r.memory_bandwidth for r in found)) for n, found in by_busy.items()}
        alone = by_busy[1][0]
        return Device(
            name=alone.name,
            threads=alone.threads,
            flops_per_s=flops.pop(1),
            memory_bandwidth=copies.pop(1),
            memory_num_bytes=min(self.facts[rank]["memory"] for rank in ranks),
            flops_per_s_by_busy=flops,
            memory_bandwidth_by_busy=copies,
        )


class _Products:
    """Matrix products, one after the other."""

    def __init__(self, device: torch.device | None) -> None:
        self._left, self._right, self._into = (torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device) for _ in range(3))

    def rate(self, is_over: Callable[[float], bool]) -> float:
        """Products per second until it is over, by the seconds that have passed."""
        start, count, passed = time.perf_counter(), 0, 0.0
        while not count or not is_over(passed):
            torch.mm(self._left, self._right, out=self._into)
            if self._into.is_cuda:
                torch.cuda.synchronize(self._into.device)
            count += 1
            passed = time.perf_counter() - start
        return count / passed


class _InBackground:
    """Work in a thread of its own, begun when this is built."""

    def __init__(self, work: Callable[[], float]) -> None:
        self._outcome: float | BaseException = 0.0
        self._thread = threading.Thread(target=self._run, args=(work,), name="poseidon-probe")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def result(self) -> float:
        """What it returned, once it has ended."""
        self._thread.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _run(self, work: Callable[[], float]) -> None:
        try:
            self._outcome = work()
        except BaseException as error:  # noqa: BLE001  # raised again by whoever asks for the result
            self._outcome = error


def _if_member(group: Group | None) -> timing.Transfer:
    return (lambda tensor: None) if group is None else timing.all_reduce(group)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _doubling(most: int) -> list[int]:
    """2, 4, 8, … below `most`, then `most`."""
    counts = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return [*counts, most]


def _memory(device: torch.device | None, sharers: int) -> int:
    """Bytes that one rank may use."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // sharers


def _joined(small: Curve, large: Curve) -> Curve:
    """One curve's points below the other's first, then the other's."""
    points = dict(zip(small.num_bytes, small.seconds, strict=True))
    points = {n: s for n, s in points.items() if n < large.num_bytes[0] and s <= large.seconds[0]}
    points |= dict(zip(large.num_bytes, large.seconds, strict=True))
    return Curve(num_bytes=tuple(points), seconds=tuple(points.values()))


def _rounded_curve(curve: Curve) -> Curve:
    return Curve(num_bytes=curve.num_bytes, seconds=tuple(map(rounded, curve.seconds)))
