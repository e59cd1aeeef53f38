"""What every scheme is: a value that says what it costs, and that can bind itself to real layers on real ranks.

`CommScheme` is the cost face and lives in a plan. `Exchange` is the run face: one scheme at work on one or more layers.
An exchange owns one or two `Transfer`s, each a place in the plan's fixed schedule, issued once in every step.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import nn

from poseidon.artifact import Value
from poseidon.cluster.curve import Curve
from poseidon.cluster.rates import Rates
from poseidon.comm.alarm import Alarm
from poseidon.comm.capture import Removable
from poseidon.comm.group import Group, Pending
from poseidon.comm.weighing import Weighing
from poseidon.errors import InfeasibleError
from poseidon.profile.graph import GradientStructure, LayerSpec

TAGS_PER_EXCHANGE = 16


class Message(Value):
    """One transfer of a layer in one step: a place in the schedule."""

    when: Literal["forward", "backward", "update"]
    """Ready when the layer's forward has been computed, when its backward has come by, or after `optimizer.step()`."""
    pattern: Literal["all_reduce", "exchange", "inner", "outer"]
    """Which of the measured curves it follows: over all ranks, among the ranks of a host, or from host to host."""
    num_bytes: float
    """Payload that one rank sends; in `outer`, that all ranks of one host together send across its link."""
    work_seconds: float = 0.0
    """What the thread that waits for transfers computes while taking it in."""


class Cost(Value):
    """What one layer costs a rank in one step under one scheme."""

    messages: tuple[Message, ...] = ()
    """In the order in which they leave."""
    wire_seconds: float
    """Seconds on the link, on an idle network, from all ranks ready to all ranks done."""
    backward_seconds: float = 0.0
    """What the layer's backward computes beside the gradient of its input: the local weight gradient, where it does."""
    prepare_seconds: float = 0.0
    """Of the training thread, before the last message can leave: copies into buffers."""
    finish_seconds: float = 0.0
    """Of the training thread, once all messages have come: rebuilds."""
    update_share: float = 1.0
    """Of the layer's update, what one rank computes."""

    @property
    def compute_seconds(self) -> float:
        """Seconds of a rank's computing that depend on the scheme."""
        taking_in = sum(message.work_seconds for message in self.messages)
        return self.backward_seconds + self.prepare_seconds + taking_in + self.finish_seconds

    @property
    def seconds(self) -> float:
        """Wire and computing together."""
        return self.wire_seconds + self.compute_seconds


def curve_of(message: Message, rates: Rates) -> Curve:
    """The measured curve that a message follows.

    Raises:
        InfeasibleError: Nothing is known about this level.
    """
    curves = {
        "all_reduce": rates.all_reduce[rates.connections],
        "exchange": rates.exchange[rates.connections],
        "inner": rates.inner,
        "outer": rates.outer,
    }
    curve = curves[message.pattern]
    if curve is None:
        raise InfeasibleError(f"cannot tell what two levels cost: no rates are known for the {message.pattern} one")
    return curve


def local_gradient_seconds(layer: LayerSpec, rates: Rates) -> float:
    """Seconds that the weight gradient of one rank's own batch takes, where a scheme could do without it.

    As measured, on the slowest host of the group; from the operations where nothing was measured.
    """
    if layer.structure is not GradientStructure.OUTER_PRODUCT:
        return 0.0
    if layer.weight_gradient_seconds:
        return layer.weight_gradient_seconds * max(host.compute_scale for host in rates.hosts)
    out_features, in_features = layer.matrix
    return 2 * layer.rows * out_features * in_features / rates.flops_per_s


Wire = Literal["", "bfloat16", "float16"]
"""The format in which numbers cross the network; empty for their own."""


def wire_dtype(wire: Wire, own: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of dtype `own` cross: the narrower one, and their own where they are no floats."""
    if not wire or not own.is_floating_point:
        return own
    dtype: torch.dtype = getattr(torch, wire)
    return dtype if dtype.itemsize < own.itemsize else own


def wire_num_bytes(wire: Wire, own: int) -> int:
    """Bytes of a floating-point number on the wire that has `own` bytes."""
    return min(own, getattr(torch, wire).itemsize) if wire else own


Exactness = Literal["exact", "rounded", "compressed", "relaxed"]


class CommScheme(Value, ABC):
    """One way for a layer's gradient to cross the network."""

    kind: str

    @property
    def exactness(self) -> Exactness:
        """What it does to the mathematics."""
        return "exact"

    @abstractmethod
    def refuse(self, layer: LayerSpec) -> str | None:
        """Why this layer cannot use the scheme; None if it can."""

    @abstractmethod
    def bytes_sent(self, layer: LayerSpec, world_size: int) -> int:
        """Payload that one rank sends in one step, the mean over the ranks, to peers on its own host included."""

    @abstractmethod
    def cost(self, layer: LayerSpec, rates: Rates) -> Cost:
        """What one step costs, message by message; this layer alone, on an idle network."""

    def check(self, layers: Sequence["BoundLayer"], group: Group) -> None:
        """Raises InfeasibleError if these layers, or their optimizer, cannot be bound on these ranks."""

    @abstractmethod
    def bind(self, layers: Sequence["BoundLayer"], group: Group, step: "StepState") -> "list[Exchange]":
        """Puts the scheme to work on these layers, given in the order in which backward reaches them."""


@dataclass(frozen=True, kw_only=True)
class BoundLayer:
    """A layer of a plan together with the module that it describes."""

    spec: LayerSpec
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    """The trainable ones that this layer owns, by their name in the module."""
    optimizer: torch.optim.Optimizer | None = None
    bucket: int | None = None
    """Which of the plan's buckets its gradients are in; None where buckets are made by size."""
    deferred: bool = False
    """Whether its transfers may end as late as its next forward."""

    @property
    def name(self) -> str:
        """The layer's name in `model.named_modules()`."""
        return self.spec.name


def check_levels(levels: int, kind: str, group: Group) -> None:
    """Raises InfeasibleError where two levels are asked for and there is only one."""
    if levels == 2 and not group.layout.has_two_levels:
        raise InfeasibleError(
            f"{kind} with levels = 2 joins the ranks of a host first and then the hosts, but here are {group.layout}: "
            "there is one level only; choose levels = 1"
        )


def check_dense(layer: BoundLayer, kind: str) -> None:
    """Raises InfeasibleError where autograd will make sparse gradients."""
    if getattr(layer.module, "sparse", False) is True:
        raise InfeasibleError(
            f"layer {layer.name!r} has sparse gradients, which {kind} cannot carry; choose sparse_rows for this layer, "
            "or build it with sparse=False"
        )


class StepState:
    """Where this rank is in the step; shared by all exchanges of a run."""

    def __init__(self) -> None:
        self.index = 0
        self.syncing = True
        """False inside `no_sync`: gradients accumulate and nothing is sent."""
        self.weighing = Weighing(1)
        """How much each rank counts in the present exchange; an exchange keeps it where it ends later."""
        self.alarms: dict[torch.optim.Optimizer, Alarm] = {}
        """By optimizer, where ranks hold parts of its parameters."""
        self.on_backward: Callable[[], None] = lambda: None
        """Called by whatever first notices that backward is under way."""
        self.arrivals: dict[str, None] = {}
        """Layers in the order in which the last of their gradients became ready in this step."""
        self.on_work: Callable[[str, str, float, float], None] = lambda activity, name, start, end: None

    def arrived(self, layer: str) -> None:
        """Notes that a gradient of a layer, or its output factor, is ready."""
        self.arrivals.pop(layer, None)
        self.arrivals[layer] = None

    @contextmanager
    def working(self, activity: str, name: str) -> Iterator[None]:
        """Stamps work of the training thread, such as a rebuild, into the timeline."""
        start = time.time()
        yield
        self.on_work(activity, name, start, time.time())


class Transfer:
    """One place in the schedule: made ready by the training thread, issued and completed by communication threads.

    Args:
        name: What the timeline calls it.
        issue: Starts the transfer; called by the communication thread when its turn has come.
        complete: Called on the last completing thread with what was started last; waits for it.
        between: What follows `issue`, one after the other, each on a completing thread of its own and in the order of
            the schedule: waits for what was started before, and starts something new.
    """

    def __init__(
        self,
        name: str,
        issue: Callable[[], Pending],
        complete: Callable[[Pending], None] = Pending.wait,
        *,
        between: Sequence[Callable[[Pending], Pending]] = (),
    ) -> None:
        self.name = name
        self._issue = issue
        self._between = tuple(between)
        self._complete = complete
        self.ready = threading.Event()
        """Whether its data has been there since the last reset."""
        self._go = threading.Event()
        """The same, until it is issued: what is handed over for the next step before its reset is not issued twice."""
        self.issued = threading.Event()
        self.done = threading.Event()
        self.start = 0.0
        self.end = 0.0
        self.num_bytes = 0
        self.scheduled = True
        """Whether it is part of an exchange, which every rank takes part in before it goes on."""
        self._pending: Pending | None = None
        self._event: torch.cuda.Event | None = None

    def mark_ready(self, device: torch.device | None = None) -> None:
        """Says that the data is there (on a GPU: will be, once the current stream has come this far)."""
        if device is not None and device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        self.ready.set()
        self._go.set()

    def withdraw(self) -> None:
        """Takes that back, if it has not been issued."""
        self.ready.clear()
        self._go.clear()

    def wait_ready(self, timeout: float) -> bool:
        """Blocks the communication thread until it may be issued; False if the time is over first."""
        return self._go.wait(timeout)

    @property
    def num_stages(self) -> int:
        """How many times something has to be waited for."""
        return len(self._between) + 1

    def issue(self) -> None:
        """Starts it."""
        self._go.clear()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self.start = time.time()
        self._pending = self._issue()
        self.num_bytes = self._pending.num_bytes
        self.issued.set()

    def advance(self, stage: int) -> None:
        """Waits for what was started last and starts what follows, or finishes."""
        assert self._pending is not None
        if stage < len(self._between):
            self._pending = self._between[stage](self._pending)
            self.num_bytes += self._pending.num_bytes
            return
        self._complete(self._pending)
        self.end = time.time()
        self._pending = None

    def reset(self) -> None:
        """Makes it ready for the next step."""
        self.ready.clear()
        self.issued.clear()
        self.done.clear()
        self.start = 0.0


class Place(NamedTuple):
    """Where the ranks hold the state of an optimizer for one parameter, of which each updates a stretch."""

    parameter: nn.Parameter
    own: nn.Parameter
    """What this rank's optimizer holds in its place, perhaps empty."""
    stretches: tuple[tuple[int, int], ...]
    """By rank, start and end of what it updates, counted in the numbers of the parameter laid end to end."""


@dataclass(eq=False)
class Exchange(ABC):
    """One scheme at work on one or more layers of one rank."""

    name: str
    layers: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    """Whose gradients it exchanges."""
    group: Group
    step: StepState
    transfers: tuple[Transfer, ...] = ()
    early: tuple[Transfer, ...] = ()
    """Those of `transfers` that are ready in the forward pass already."""
    held: tuple[nn.Parameter, ...] = ()
    """What this rank's optimizer holds in place of `parameters`, gradients included; none where it has these."""
    optimizer: torch.optim.Optimizer | None = None
    """The one that holds that."""
    handles: list[Removable] = field(default_factory=list)
    tag: int = 0
    """First of `TAGS_PER_EXCHANGE` message tags that only this exchange uses; the same on every rank."""
    num_rows: int = 0
    """Where rows travel: those of the rank that had most in the last exchange; the same on every rank."""
    made: Sequence[float] = ()
    """On how many ranks each parameter's gradient was made in the last exchange; the same on every rank."""

    def begin_backward(self) -> None:  # noqa: B027 - most schemes have nothing to do here
        """A backward pass begins: what the loop has done to the gradients since the last one shows now."""

    @abstractmethod
    def flush(self) -> None:
        """At the end of backward: fills what is missing with empty parts and makes every transfer ready."""

    def reweigh(self, factor: float) -> None:
        """Multiplies what has accumulated in `p.grad`: another backward pass adds to it in another unit."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @abstractmethod
    def finish(self) -> None:
        """On the training thread, transfers done: leaves the final gradient in `p.grad`."""

    def reset(self) -> None:
        """Prepares the next step."""
        for transfer in self.transfers:
            transfer.reset()

    def wants_new_order(self) -> bool:
        """Whether some rank has voted that gradients arrive in another order than planned."""
        return False

    def after_optimizer(self) -> Pending | None:
        """Called at the end of `optimizer.step()`: starts what has to follow the update."""
        return None

    def places(self) -> list[Place]:
        """Where the optimizer's state lies, of the parameters of which this rank updates a stretch only."""
        return []

    def show_whole(self, whole: bool) -> None:  # noqa: B027 - most schemes leave the optimizer as it is
        """Has the optimizer's groups hold whole parameters, or what this rank updates of them."""

    def end_unsynced(self) -> None:  # noqa: B027 - most schemes have nothing to do here
        """At the end of a backward pass inside `no_sync`."""

    def detach(self) -> None:
        """Takes back everything that binding changed in the model and the optimizer; called on all ranks together."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
