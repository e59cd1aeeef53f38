"""From a profile, a plan and rates to the operations of a few steps, as the runtime carries them out.

The training thread of a rank is a chain: loader, forward layer by layer, backward layer by layer, as many times as
passes are accumulated, then for each exchange the wait for its transfers and its rebuild, then the optimizer. Factors
of all passes leave in the last one. Transfers are issued in the plan's fixed order, none before the one ahead of it,
each when its data is ready; a collective starts when every rank has issued it, and ends are noticed in the order of
issue, because one thread waits for them. Ranks that are equal in every respect are simulated once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from poseidon.cluster.rates import UNLIMITED, HostRates, Rates
from poseidon.comm import AllReduce, CommScheme, Cost, Message
from poseidon.comm.bucket import split_into_buckets
from poseidon.comm.scheme import curve_of, local_gradient_seconds
from poseidon.plan import Plan
from poseidon.profile.graph import LayerSpec, ModelProfile
from poseidon.simulator.ops import NOWHERE, Machine, Op, TransferOp
from poseidon.timeline import Activity

MOST_PIECES = 6
"""Rounds of a collective that are simulated one by one; those of larger groups are put together."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Ranks that are equal in every respect."""

    host: HostRates
    rank: int
    """The first of them."""
    processor: int
    """Which computes the model."""
    copier: int
    """Which copies gradients into buffers: the same, unless the device only stands in for a real one."""
    links: tuple[int, int]
    """Sending and receiving side of its host's link."""
    load: float = 1.0
    """How many times the profile's samples it takes in a step."""


@dataclass
class Planned:
    """One exchange of the plan: a bucket, or a layer."""

    name: str
    layers: list[LayerSpec]
    scheme: CommScheme
    costs: list[Cost]
    messages: list[Message] = field(default_factory=list)
    """Those of its layers, together: what is sent at one moment is one message."""
    deferred: bool = False

    @property
    def prepare_seconds(self) -> float:
        """Of all layers."""
        return sum(cost.prepare_seconds for cost in self.costs)

    @property
    def finish_seconds(self) -> float:
        """Of all layers."""
        return sum(cost.finish_seconds for cost in self.costs)


@dataclass
class StepOps:
    """What is kept of one simulated step, by kind of rank."""

    last: list[Op] = field(default_factory=list)
    """At whose end the exchange of gradients is over, by kind."""


@dataclass
class Program:
    """All operations, and where the steps are."""

    kinds: list[Kind]
    machine: Machine
    ops: list[Op] = field(default_factory=list)
    steps: list[StepOps] = field(default_factory=list)
    training: list[list[Op]] = field(default_factory=list)
    """By kind of rank, what its training thread does, in order."""
    issues: list[dict[Op, Op]] = field(default_factory=list)
    """By kind of rank: of each transfer, when this kind issues it."""
    transfers: list[TransferOp] = field(default_factory=list)


def kinds_of(rates: Rates, loads: Sequence[float], *, copies_aside: bool) -> list[Kind]:
    """One for each sort of host; hosts with unequal speed, load, link or number of ranks are of another sort.

    Args:
        rates: The hosts.
        loads: By rank, how many times the profile's samples it takes; of a host's ranks the most loaded counts.
        copies_aside: Whether gradients are copied beside the computing.
    """
    kinds: dict[tuple[float, float, int, float, float], Kind] = {}
    rank = 0
    for host in rates.hosts:
        load = max(loads[rank : rank + host.num_ranks])
        key = (load, host.compute_scale, host.num_ranks, host.send_bandwidth, host.receive_bandwidth)
        if key not in kinds:
            number = len(kinds)
            kinds[key] = Kind(
                host=host,
                rank=rank,
                processor=2 * number,
                copier=2 * number + (1 if copies_aside else 0),
                links=(2 * number, 2 * number + 1),
                load=load,
            )
        rank += host.num_ranks
    return list(kinds.values())


def planned_exchanges(profile: ModelProfile, plan: Plan, rates: Rates) -> list[Planned]:
    """The plan's exchanges in the order in which their last transfers are issued."""
    layers = plan.layers
    if rates.world_size == 1:
        return []
    place = {name: index for index, name in enumerate(plan.order or plan.arrival)}
    together: dict[CommScheme, list[str]] = {}
    for name in plan.arrival:
        together.setdefault(plan.schemes[name], []).append(name)
    bucket_of = {name: index for index, bucket in enumerate(plan.buckets) for name in bucket}
    exchanges: list[Planned] = []
    for scheme, names in together.items():
        for group in _groups(scheme, names, layers, bucket_of):
            members = [layers[name] for name in group]
            exchanges.append(_planned(scheme, members, rates, deferred=all(n in plan.deferred for n in group)))
    return sorted(exchanges, key=lambda e: max(place[layer.name] for layer in e.layers))


def _groups(
    scheme: CommScheme, names: Sequence[str], layers: dict[str, LayerSpec], bucket_of: dict[str, int]
) -> list[list[str]]:
    if not isinstance(scheme, AllReduce):
        return [[name] for name in names]
    if bucket_of:
        by_bucket: dict[int, list[str]] = {}
        for name in names:
            by_bucket.setdefault(bucket_of[name], []).append(name)
        return list(by_bucket.values())
    # By size, parameter by parameter as the runtime does; a layer belongs to the bucket in which its last one is.
    owners = [name for name in names for _ in layers[name].parameters]
    sizes = [tensor.num_bytes for name in names for tensor in layers[name].parameters]
    split = split_into_buckets(sizes, first_bytes=scheme.first_bytes, bucket_bytes=scheme.bucket_bytes)
    last_bucket = {owners[index]: number for number, bucket in enumerate(split) for index in bucket}
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(last_bucket[name], []).append(name)
    return list(groups.values())


def _planned(scheme: CommScheme, layers: list[LayerSpec], rates: Rates, *, deferred: bool) -> Planned:
    costs = [scheme.cost(layer, rates) for layer in layers]
    merged = [
        first.model_copy(
            update={
                "num_bytes": sum(message.num_bytes for message in same),
                "work_seconds": sum(message.work_seconds for message in same),
            }
        )
        for first, *rest in zip(*(cost.messages for cost in costs), strict=True)
        for same in [(first, *rest)]
    ]
    name = layers[0].name if len(layers) == 1 else f"{layers[0].name}..{layers[-1].name}"
    return Planned(name=name, layers=layers, scheme=scheme, costs=costs, messages=merged, deferred=deferred)


def build(profile: ModelProfile, plan: Plan, rates: Rates, num_steps: int) -> Program:
    """The operations of `num_steps` steps.

    Args:
        profile: The model; its layers' seconds count, those in the plan's own copy do not.
        plan: For `rates.world_size` ranks.
        rates: The ranks.
        num_steps: One or more.
    """
    virtual = profile.device is None
    kinds = kinds_of(rates, plan.loads, copies_aside=virtual)
    machine = Machine(
        num_processors=2 * len(kinds),
        num_links=2 * len(kinds),
        num_channels=1,
        compute_slowdown=(1.0 if virtual else rates.compute_slowdown,) * (2 * len(kinds)),
        transfer_slowdown=1.0 if virtual else rates.transfer_slowdown,
    )
    program = Program(kinds=kinds, machine=machine, training=[[] for _ in kinds], issues=[{} for _ in kinds])
    rates = rates.with_connections(plan.connections) if plan.connections in rates.all_reduce else rates
    _Builder(profile, plan, rates, program).build(num_steps)
    return program


def passes_of(accumulate: int) -> list[tuple[float, bool]]:
    """The passes of a step: of all that it computes the share of each, and whether it is the last, which sends.

    The first one finds what the step before has deferred; those between are put together.
    """
    between = [(accumulate - 2) / accumulate] if accumulate > 2 else []
    earlier = [1 / accumulate] if accumulate > 1 else []
    return [*((share, False) for share in (*earlier, *between)), (1 / accumulate, True)]


class _Builder:
    """Lays out step after step; all chains go on from one step to the next."""

    def __init__(self, profile: ModelProfile, plan: Plan, rates: Rates, program: Program) -> None:
        self._profile = profile
        self._plan = plan
        self._rates = rates
        self._program = program
        self._kinds = program.kinds
        self._slowest = max(host.compute_scale for host in rates.hosts)
        curves = (*rates.all_reduce.values(), *rates.exchange.values())
        self._ceiling = max(curve.bandwidth for curve in curves)
        """Of a link whose own rate nobody knows: the best that any transfer reaches."""
        self._exchanges = planned_exchanges(profile, plan, rates)
        self._of_layer = {layer.name: e for e in self._exchanges for layer in e.layers}
        forward_place = {layer.name: index for index, layer in enumerate(profile.layers)}
        self._early = sorted(
            (e for e in self._exchanges if e.messages[0].when == "forward"),
            key=lambda e: min(forward_place[layer.name] for layer in e.layers),
        )
        self._tail: list[Op | None] = [None for _ in self._kinds]
        """The last operation of each kind's training thread."""
        self._copied: list[Op | None] = [None for _ in self._kinds]
        self._last_issue: list[Op | None] = [None for _ in self._kinds]
        self._last_done: Op | None = None
        self._num_bytes = profile.num_bytes
        self._deferred: dict[str, tuple[Planned, list[Op]]] = {}
        """By layer, its exchange of the step before that may still be under way, with what says that it has ended."""

    def build(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    # One step

    def _step(self) -> None:
        step = StepOps()
        self._program.steps.append(step)
        self._ready: dict[tuple[int, str, str], Op] = {}
        """By kind, layer and when: what makes the layer's message ready."""
        for share, is_last in passes_of(self._profile.accumulate):
            self._train(Activity.LOADER, "", share * self._profile.loader_seconds, scaled=False)
            self._forward(share)
            self._backward(share, is_last=is_last)
        starts = list(self._tail) if not self._plan.wait_free else None
        done = self._transfer_all(starts)
        waiting = [e for e in self._exchanges if not e.deferred]
        for exchange in waiting:
            self._finish(exchange, done[id(exchange)])
        self._deferred = {layer.name: (e, done[id(e)]) for e in self._exchanges if e.deferred for layer in e.layers}
        for k, tail in enumerate(self._tail):
            step.last.append(self._point(k) if tail is None else tail)
        self._optimizer()

    def _forward(self, share: float) -> None:
        for layer in self._profile.layers:
            self._finish_deferred(layer.name)
            self._train(Activity.FORWARD, layer.name, share * layer.forward_seconds, by_samples=True)
            self._note_ready(layer.name, "forward")

    def _backward(self, share: float, *, is_last: bool) -> None:
        for layer in reversed(self._profile.layers):
            exchange = self._of_layer.get(layer.name)
            is_pair = exchange is not None and len(exchange.messages) > 1 and exchange.messages[0].when == "forward"
            if is_pair:  # the gradient of its output is there before the layer's own backward
                self._note_ready(layer.name, "backward")
            gradient = 0.0 if is_pair else self._local_gradient(layer)
            seconds = share * (layer.backward_seconds + gradient)
            self._train(Activity.BACKWARD, layer.name, seconds, by_samples=True)
            if exchange is not None and not is_pair and is_last:
                cost = exchange.costs[exchange.layers.index(layer)]
                self._copy(layer.name, cost.prepare_seconds)

    def _local_gradient(self, layer: LayerSpec) -> float:
        """Of the rank on which the profile was measured."""
        return local_gradient_seconds(layer, self._rates) / (self._slowest if layer.weight_gradient_seconds else 1.0)

    def _transfer_all(self, starts: list[Op | None] | None) -> dict[int, list[Op]]:
        """The step's schedule: early messages in forward order, then the others in the plan's order."""
        done: dict[int, list[Op]] = {}
        for exchange in self._early:
            done.setdefault(id(exchange), []).append(self._transfer(exchange, exchange.messages[0], starts))
        for exchange in self._exchanges:
            for message in exchange.messages:
                if message.when == "backward":
                    done.setdefault(id(exchange), []).append(self._transfer(exchange, message, starts))
        return done

    def _optimizer(self) -> None:
        now = [e for e in self._exchanges if not e.deferred]
        if self._exchanges:
            share = sum(
                self._share([layer]) * c.update_share for e in now for layer, c in zip(e.layers, e.costs, strict=True)
            )
        else:
            share = 1.0
        self._train(Activity.OPTIMIZER, "", self._profile.optimizer_seconds * share)
        updates = [(e, message) for e in self._exchanges for message in e.messages if message.when == "update"]
        for exchange, _ in updates:
            for layer in exchange.layers:
                self._note_ready(layer.name, "update")
        for exchange, done in [(e, self._transfer(e, message, None, label="gather")) for e, message in updates]:
            self._wait(exchange.name, done)

    def _share(self, layers: Sequence[LayerSpec]) -> float:
        return sum(layer.num_bytes for layer in layers) / self._num_bytes if self._num_bytes else 0.0

    # Parts of a step

    def _finish_deferred(self, layer: str) -> None:
        if layer not in self._deferred:
            return
        exchange, done = self._deferred[layer]
        self._finish(exchange, done)
        share = self._share(exchange.layers)
        self._train(Activity.OPTIMIZER, exchange.name, self._profile.optimizer_seconds * share)
        for one in exchange.layers:
            del self._deferred[one.name]

    def _finish(self, exchange: Planned, done: Sequence[Op]) -> None:
        for op in done:
            self._wait(exchange.name, op)
        if exchange.finish_seconds:
            self._train(Activity.REBUILD, exchange.name, exchange.finish_seconds, scaled=False)

    def _wait(self, name: str, done: Op) -> None:
        for k in range(len(self._kinds)):
            self._append(k, Op(done.name or name, Activity.EXPOSED, 0.0, (*self._after(k), done)))

    def _train(
        self, activity: Activity, name: str, seconds: float, *, scaled: bool = True, by_samples: bool = False
    ) -> None:
        if seconds <= 0.0:
            return
        for k, kind in enumerate(self._kinds):
            scale = (kind.host.compute_scale if scaled else 1.0) * (kind.load if by_samples else 1.0)
            self._append(k, Op(name, activity, seconds * scale, self._after(k), kind.processor))

    def _copy(self, layer: str, seconds: float) -> None:
        """Into the buffer: on the training thread, or beside a device that only stands in for a real one."""
        for k, kind in enumerate(self._kinds):
            if kind.copier == kind.processor:
                op = Op(layer, Activity.BACKWARD, seconds, self._after(k), kind.processor)
                self._append(k, op)
            else:
                copied = self._copied[k]
                before = self._after(k) if copied is None else (*self._after(k), copied)
                op = Op(layer, Activity.BACKWARD, seconds, before, kind.copier)
                self._program.ops.append(op)
                self._copied[k] = op
            self._ready[k, layer, "backward"] = op

    def _note_ready(self, layer: str, when: str) -> None:
        if layer in self._of_layer:
            for k in range(len(self._kinds)):
                self._ready[k, layer, when] = self._end_of(k)

    # Transfers

    def _transfer(self, exchange: Planned, message: Message, starts: list[Op | None] | None, label: str = "") -> Op:
        """Issues a message on every kind of rank; returns what says that its end was noticed."""
        name = exchange.name if len(exchange.messages) == 1 else f"{exchange.name} ({label or message.when})"
        issues = []
        for k in range(len(self._kinds)):
            ready = [self._ready[k, layer.name, message.when] for layer in exchange.layers]
            if starts is not None and (start := starts[k]) is not None:
                ready.append(start)
            if (previous := self._last_issue[k]) is not None:
                ready.append(previous)
            issue = Op(name, Activity.TRANSFER, 0.0, dict.fromkeys(ready))
            self._program.ops.append(issue)
            self._last_issue[k] = issue
            issues.append(issue)
        curve = curve_of(message, self._rates)
        seconds = curve.at(message.num_bytes)
        latency = min(curve.latency, seconds)
        transfer = TransferOp(
            name,
            seconds - latency,
            issues,
            latency_seconds=latency + message.work_seconds,
            pieces=1 if message.pattern == "exchange" else min(MOST_PIECES, 2 * (self._rates.world_size - 1)),
            shares=self._shares(message, seconds - latency),
            processors=tuple(kind.processor for kind in self._kinds),
            channel=NOWHERE if message.pattern == "exchange" else 0,
            num_bytes=message.num_bytes,
        )
        self._program.ops.append(transfer)
        self._program.transfers.append(transfer)
        for k, issue in enumerate(issues):
            self._program.issues[k][transfer] = issue
        done = Op(name, Activity.TRANSFER, 0.0, (transfer,) if self._last_done is None else (transfer, self._last_done))
        self._program.ops.append(done)
        self._last_done = done
        return done

    def _shares(self, message: Message, seconds: float) -> tuple[tuple[int, float], ...]:
        """How much of each link side the message takes while it is on the wire."""
        if seconds <= 0.0 or message.pattern == "inner":
            return ()
        shares = []
        for kind in self._kinds:
            crossing = self._crossing_bytes(message, kind.host)
            for side, bandwidth in zip(
                kind.links, (kind.host.send_bandwidth, kind.host.receive_bandwidth), strict=True
            ):
                capacity = bandwidth if bandwidth < UNLIMITED else self._ceiling
                shares.append((side, min(1.0, crossing / seconds / capacity)))
        return tuple(shares)

    def _crossing_bytes(self, message: Message, host: HostRates) -> float:
        """Bytes that leave a host, and that come in: a ring crosses its link once, an exchange from each rank."""
        if message.pattern != "exchange":
            return message.num_bytes
        away = self._rates.world_size - host.num_ranks
        return message.num_bytes * host.num_ranks * away / max(1, self._rates.world_size - 1)

    # Chains

    def _after(self, k: int) -> tuple[Op, ...]:
        tail = self._tail[k]
        return () if tail is None else (tail,)

    def _append(self, k: int, op: Op) -> None:
        self._program.ops.append(op)
        self._program.training[k].append(op)
        self._tail[k] = op

    def _end_of(self, k: int) -> Op:
        tail = self._tail[k]
        return self._point(k) if tail is None else tail

    def _point(self, k: int) -> Op:
        """A mere point in time, where the chain has not begun."""
        op = Op("", Activity.FORWARD, 0.0)
        self._append(k, op)
        return op
