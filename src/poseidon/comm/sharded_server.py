"""The parameter server with a shard on every rank: sums scattered, shards updated, parameters gathered.

A layer's gradients are laid end to end and cut into one stretch per rank, equal to within an element, so that one big
layer loads all shards alike. Stretches travel in pieces of `piece_bytes`, and the owner adds a piece as soon as every
rank's has come. The optimizer sees only the owner's stretch: its state is 1/P on each rank, and `p.grad` stays empty.
After `optimizer.step()` the owners send the new parameters to everybody. Hooks that come after the step find whole
parameters in the optimizer's groups. With the pieces travels whether any of a rank's numbers is not finite, so that a
`GradScaler` skips an update on every rank or on none.

gloo's own reduce-scatter leaves more than half of a link idle; pieces point to point do not, and so they are used.

Source: Zhang et al., "Poseidon", ATC 2017, sections 3.1 and 4.1 (key-value pairs of 2 MB, shards on the workers).
Deviation: a stretch is consecutive instead of scattered by a hash, which balances exactly and needs no table; the
optimizer is the user's own and runs when the user says so, not in the server when the last gradient has come.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from poseidon.cluster.rates import Rates
from poseidon.comm.alarm import Alarm, is_finite
from poseidon.comm.all_reduce import COPY_TRAFFIC
from poseidon.comm.bucket import pieces, stretches
from poseidon.comm.capture import LATE_ADDITION, Accumulated, Additions, on_gradient
from poseidon.comm.group import Group, Pending
from poseidon.comm.scheme import (
    BoundLayer,
    CommScheme,
    Cost,
    Exchange,
    Message,
    Place,
    StepState,
    Transfer,
    check_dense,
    local_gradient_seconds,
)
from poseidon.errors import CommError, InfeasibleError
from poseidon.profile.graph import LayerSpec
from poseidon.units import MIB, Bytes

_T = TypeVar("_T", bound=torch.Tensor)

PIECE_BYTES = 2 * MIB
LOOKING_TRAFFIC = 1
"""Bytes read per byte of a gradient that is looked through for numbers that are not finite."""
WINDOW = 8
"""Pieces from each peer that are on their way at a time."""

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers whose update of a number depends on that number's own gradient and state alone."""
COMMON_STATE = ("step", "eta", "mu", "mu_product")
"""What these optimizers keep once for a parameter; all else in their state is kept for each of its numbers."""


class ShardedServer(CommScheme):
    """A parameter server with a shard on every rank."""

    kind: Literal["sharded_server"] = "sharded_server"
    piece_bytes: Bytes = PIECE_BYTES
    """Size of a key-value piece: smaller pieces start adding earlier, larger ones are fewer messages."""

    def refuse(self, layer: LayerSpec) -> str | None:
        """Every dense gradient can be served."""
        del layer
        return None

    def bytes_sent(self, layer: LayerSpec, world_size: int) -> int:
        """(P-1)/P of the gradient pushed and as much of the parameters sent out: as an all-reduce."""
        return 2 * layer.num_bytes * (world_size - 1) // world_size

    def cost(self, layer: LayerSpec, rates: Rates) -> Cost:
        """Half of the bytes when the gradient is ready, half when the optimizer has run on a stretch; copies between.

        The whole gradient is laid out and looked through once; to the own stretch others' parts are added as they come.
        """
        world_size = rates.world_size
        half = layer.num_bytes * (world_size - 1) / world_size
        adding = COPY_TRAFFIC * layer.num_bytes / rates.memory_bandwidth if world_size > 1 else 0.0
        push = Message(when="backward", pattern="exchange", num_bytes=half, work_seconds=adding)
        gather = Message(when="update", pattern="exchange", num_bytes=half)
        curve = rates.exchange[rates.connections]
        return Cost(
            messages=(push, gather),
            wire_seconds=2 * (half / curve.bandwidth + curve.latency) if world_size > 1 else 0.0,
            backward_seconds=local_gradient_seconds(layer, rates),
            prepare_seconds=(COPY_TRAFFIC + LOOKING_TRAFFIC) * layer.num_bytes / rates.memory_bandwidth,
            finish_seconds=COPY_TRAFFIC * layer.num_bytes / world_size / rates.memory_bandwidth,
            update_share=1.0 / world_size,
        )

    def check(self, layers: Sequence[BoundLayer], group: Group) -> None:
        """Gradients have to be dense, and the optimizer has to be able to run on a shard alone."""
        del group
        for layer in layers:
            check_dense(layer, self.kind)
            check_optimizer(layer)

    def bind(self, layers: Sequence[BoundLayer], group: Group, step: StepState) -> list[Exchange]:
        """One exchange per layer."""
        return [ServerExchange(layer, group, step, self.piece_bytes) for layer in layers]


def check_optimizer(layer: BoundLayer) -> None:
    """Raises InfeasibleError where the optimizer could not run on a shard alone."""
    optimizer = layer.optimizer
    if optimizer is None:
        raise InfeasibleError(
            f"layer {layer.name}: sharded_server runs the optimizer on shards, but distribute() was given none that "
            "updates it; pass it, or choose all_reduce for this layer"
        )
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise InfeasibleError(
            f"layer {layer.name}: sharded_server cannot use {type(optimizer).__name__}: it is not known to update each "
            f"number from that number's own gradient and state alone; use one of {known}, or choose all_reduce"
        )
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in layer.parameters.items():
        if id(parameter) not in updated:
            raise InfeasibleError(
                f"layer {layer.name}: sharded_server runs the optimizer on shards of the whole layer, but "
                f"{type(optimizer).__name__} does not update its {name}; choose all_reduce for this layer"
            )
        if not parameter.is_contiguous():
            raise InfeasibleError(
                f"layer {layer.name}: sharded_server cuts parameters into stretches, but {name} is not contiguous "
                f"(strides {tuple(parameter.stride())}); choose all_reduce for this layer"
            )


class ServerExchange(Exchange):
    """The server at work for one layer.

    A layer with parameters of several dtypes has a stretch of each.
    """

    def __init__(self, layer: BoundLayer, group: Group, step: StepState, piece_bytes: int) -> None:
        super().__init__(
            name=layer.name,
            layers=(layer.name,),
            parameters=tuple(layer.parameters.values()),
            group=group,
            step=step,
        )
        assert layer.optimizer is not None
        self.optimizer = layer.optimizer
        alarm = step.alarms.setdefault(self.optimizer, Alarm(self.optimizer, self.parameters[0].device))
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in layer.parameters.values():
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._shards = [
            Shard(parameters, self.optimizer, alarm, group, piece_bytes) for parameters in by_dtype.values()
        ]
        self.held = tuple(own for shard in self._shards for own in shard.own)
        self._parameters = list(layer.parameters.values())
        self._weighing = step.weighing
        self._additions = Additions(len(self._parameters))
        self._transfer = Transfer(f"{self.name} (push)", self._push, self._add_up)
        self.transfers = (self._transfer,)
        for index, parameter in enumerate(self._parameters):
            self.handles.append(on_gradient(parameter, lambda p, i=index: self._on_gradient(i)))  # type: ignore[misc]

    def _on_gradient(self, index: int) -> None:
        self.step.on_backward()
        if not self.step.syncing:
            return
        self.step.arrived(self.name)
        if self._additions.add(index):
            if not self._additions.missing:
                self._take()
        elif index not in self._additions.missing:
            raise CommError(
                f"rank {self.group.rank}: autograd added to a gradient of {self.name} again after it had been "
                f"complete, at exchange {self.step.index}; {LATE_ADDITION}"
            )

    def _take(self) -> None:
        self._weighing = self.step.weighing
        for shard in self._shards:
            shard.take(self._weighing.own)
        self._transfer.mark_ready(self._parameters[0].device)

    def begin_backward(self) -> None:
        """What was accumulated on this rank and then zeroed by the optimizer, which does not know it, is forgotten."""
        for shard in self._shards:
            shard.forget_zeroed()

    def end_unsynced(self) -> None:
        """What has accumulated on this rank lies in the whole parameters' `p.grad`."""
        for shard in self._shards:
            shard.note_accumulated()

    def flush(self) -> None:
        """What backward did not reach counts as zero."""
        self.begin_backward()
        if not self._transfer.ready.is_set():
            self._take()

    def _push(self) -> Pending:
        what = f"push of {self.name} in step {self.step.index}"
        pendings = [shard.push(self.tag + i, what) for i, shard in enumerate(self._shards)]
        return _together(pendings)

    def _add_up(self, pushed: Pending) -> None:
        what = f"push of {self.name} in step {self.step.index}"
        for i, shard in enumerate(self._shards):
            shard.add_up(self.tag + i, what)
            shard.correct(self._weighing.correction)
        pushed.wait()  # a piece has left once its owner has asked for it: only after asking for our own

    def finish(self) -> None:
        """Gives each shard the mean of its stretch."""
        for shard in self._shards:
            shard.finish(self.step.index)
        made = {id(p): count for shard in self._shards for p, count in zip(shard.parameters, shard.made, strict=True)}
        self.made = [made[id(parameter)] for parameter in self._parameters]

    def after_optimizer(self) -> Pending | None:
        """Starts to send this rank's new parameters and to receive the others'."""
        what = f"parameters of {self.name} in step {self.step.index}"
        offset = len(self._shards)
        return _together([shard.gather(self.tag + offset + i, what) for i, shard in enumerate(self._shards)])

    def show_whole(self, whole: bool) -> None:
        """Has the optimizer's groups hold whole parameters, or this rank's stretch of them."""
        for shard in self._shards:
            shard.show_whole(whole)

    def places(self) -> list[Place]:
        """One for each parameter."""
        return [place for shard in self._shards for place in shard.places()]

    def reset(self) -> None:
        """Waits for all gradients again."""
        super().reset()
        self._additions.reset()

    def detach(self) -> None:
        """Gives the optimizer whole parameters and whole state back."""
        super().detach()
        offset = 2 * len(self._shards)
        for i, shard in enumerate(self._shards):
            shard.detach(self.tag + offset + i)


class Shard:
    """Parameters of one dtype laid end to end, and the stretch of them that this rank owns."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        alarm: Alarm,
        group: Group,
        piece_bytes: int,
    ) -> None:
        self._group = group
        self._optimizer = optimizer
        self._alarm = alarm
        self.parameters = list(parameters)
        self.made: list[float] = [0.0] * len(self.parameters)
        """On how many ranks each gradient was made in the last exchange."""
        first = self.parameters[0]
        self._flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        """This rank's share of the mean gradient; on the own stretch, after the push, the mean."""
        self._stretches = stretches(self._flat.numel(), group.world_size)
        self._piece = max(1, piece_bytes // first.element_size())
        self._facts = torch.zeros(len(self.parameters) + 1, device=first.device)
        """One number per parameter: on how many ranks its gradient was made. Then on how many ranks something in the
        gradients is not finite."""
        self._arriving: list[tuple[torch.Tensor, tuple[Pending, dict[int, torch.Tensor]]]] = []
        """Of the push under way: places in this rank's numbers, and what is being received to be added there."""
        self._to_come: list[torch.Tensor] = []
        """Pieces of the own stretch that are not being received yet."""
        start, end = self._stretches[group.rank]
        self._own = [nn.Parameter(p.detach().view(-1)[a:b]) for p, a, b in _intersections(parameters, start, end)]
        """Of each parameter the part inside the own stretch, perhaps empty; it shares the parameter's memory."""
        self._accumulated: dict[int, Accumulated] = {}
        """By a parameter's number: stands for what has accumulated on this rank in the gradient of its own stretch."""
        self._means: set[int] = set()
        """Numbers of the parameters of which the optimizer has a mean that it has not used yet; the same on all ranks,
        but for those that it has zeroed since."""
        self._hook = optimizer.register_step_post_hook(self._note_step)
        self._stepped = True
        self.show_whole(False)
        for index, (whole, own, (_, a, b)) in enumerate(
            zip(self.parameters, self._own, _intersections(parameters, start, end), strict=True)
        ):
            if whole.grad is not None:  # a mean that the optimizer has not used yet
                self._means.add(index)
                if not is_finite(whole.grad):
                    self._alarm.give()
                own.grad, whole.grad = whole.grad.reshape(-1)[a:b].clone(), None
                self._stepped = False
            if state := self._optimizer.state.pop(whole, None):
                self._optimizer.state[own] = {
                    key: value.reshape(-1)[a:b].clone() if is_kept_for_each_number(key, value) else value
                    for key, value in state.items()
                }

    @property
    def own(self) -> list[nn.Parameter]:
        """Of each parameter the part that this rank's optimizer holds, perhaps empty."""
        return self._own

    def places(self) -> list[Place]:
        """Where the ranks hold the optimizer's state for each parameter."""
        parts = [_intersections(self.parameters, start, end) for start, end in self._stretches]
        stretches_of = [tuple((a, b) for _, a, b in part) for part in zip(*parts, strict=True)]
        return [Place(*one) for one in zip(self.parameters, self._own, stretches_of, strict=True)]

    def _note_step(self, *_: Any) -> None:
        self._stepped = True
        self._means.clear()
        self._alarm.withdraw()

    def show_whole(self, whole: bool) -> None:
        """Has the optimizer's groups hold whole parameters, or the own stretch of them."""
        there, wanted = (self._own, self.parameters) if whole else (self.parameters, self._own)
        self._swap(dict(zip(there, wanted, strict=True)))

    def _swap(self, replacements: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [replacements.get(p, p) for p in group["params"]]

    def note_accumulated(self) -> None:
        """A backward pass has added to gradients of this rank that are not exchanged yet."""
        for index, (whole, own) in enumerate(zip(self.parameters, self._own, strict=True)):
            if whole.grad is not None and index not in self._accumulated:
                if own.grad is None:
                    self._means.discard(index)
                self._accumulated[index] = Accumulated(own, lambda own=own: torch.zeros_like(own))  # type: ignore[misc]

    def forget_zeroed(self) -> None:
        """What has been zeroed since it was noted."""
        for index in [index for index, noted in self._accumulated.items() if noted.is_forgotten]:
            del self._accumulated[index]
            self.parameters[index].grad = None

    def take(self, scale: float) -> None:
        """Lays this rank's gradients, scaled to their share of the mean, end to end, and frees them."""
        offset = 0
        for parameter in self.parameters:
            place = self._flat[offset : offset + parameter.numel()]
            if parameter.grad is None or not scale:
                place.zero_()
            else:
                torch.mul(parameter.grad.reshape(-1), scale, out=place)
            offset += parameter.numel()
        self._facts[:-1].copy_(torch.tensor([float(p.grad is not None) for p in self.parameters]))
        self._facts[-1] = is_finite(self._flat).logical_not()
        for parameter in self.parameters:
            parameter.grad = None
        self._accumulated.clear()

    def push(self, tag: int, what: str) -> Pending:
        """Starts to send each owner its pieces of this rank's gradient, and to receive the first of the own stretch.

        Receives come first: gloo tells a sender that its receiver is ready over the same connection on which the own
        pieces leave. Behind these, the word would wait, and the two directions would take turns.
        """
        own = [self._flat[a:b] for a, b in pieces(*self._stretches[self._group.rank], self._piece)]
        self._arriving = [(place, self._receive(place, tag, what)) for place in (self._facts, *own[:WINDOW])]
        self._to_come = own[WINDOW:]
        sends = []
        facts = self._facts.clone()  # the sum over the ranks is formed in place while this is on its way
        for peer in self._group.peers:
            sends.append((peer, facts))
            sends += [(peer, self._flat[a:b]) for a, b in pieces(*self._stretches[peer], self._piece)]
        return self._group.exchange(sends, [], tag=tag, what=what)

    def add_up(self, tag: int, what: str) -> None:
        """Adds the other ranks' pieces of the own stretch as they come, in the order of ranks; asks for more."""
        while self._arriving:
            place, received = self._arriving.pop(0)
            self._add_in_order(place, received)
            if self._to_come:
                piece = self._to_come.pop(0)
                self._arriving.append((piece, self._receive(piece, tag, what)))

    def correct(self, factor: float) -> None:
        """Multiplies the sum over the own stretch."""
        if factor != 1.0:
            start, end = self._stretches[self._group.rank]
            self._flat[start:end].mul_(factor)

    def _receive(self, like: torch.Tensor, tag: int, what: str) -> tuple[Pending, dict[int, torch.Tensor]]:
        parts = {peer: torch.empty_like(like) for peer in self._group.peers}
        return self._group.exchange([], list(parts.items()), tag=tag, what=what), parts

    def _add_in_order(self, own: torch.Tensor, received: tuple[Pending, dict[int, torch.Tensor]]) -> None:
        pending, parts = received
        pending.wait()
        parts[self._group.rank] = own.clone()
        own.copy_(parts[0])
        for rank in range(1, self._group.world_size):
            own.add_(parts[rank])

    def finish(self, exchange: int) -> None:
        """Gives the optimizer the mean over the own stretch; a gradient that no rank made stays away."""
        offset = self._stretches[self._group.rank][0]
        *self.made, not_finite = self._facts.tolist()
        was_left_out = self._alarm.begin(exchange)
        self._stepped = self._stepped or was_left_out
        self._means |= {index for index, made in enumerate(self.made) if made}
        for own, made in zip(self._own, self.made, strict=True):
            mean = self._flat[offset : offset + own.numel()]
            offset += own.numel()
            if not made:
                own.grad = None if self._stepped else own.grad
            elif own.grad is None:
                own.grad = mean.clone()
            elif self._stepped:
                own.grad.copy_(mean)
            else:
                own.grad.add_(mean)
        if not_finite:
            self._alarm.give()
        self._stepped = False

    def gather(self, tag: int, what: str) -> Pending:
        """Starts to exchange stretches of the parameters' own memory: owners send, the others receive in place."""
        return self._gather([p.detach().view(-1) for p in self.parameters], tag, what)

    def _gather(self, wholes: Sequence[torch.Tensor], tag: int, what: str) -> Pending:
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for owner, (start, end) in enumerate(self._stretches):
            parts = [
                whole[a:b]
                for whole, first, last in _intersections(wholes, start, end)
                for a, b in pieces(first, last, self._piece)
            ]
            if owner == self._group.rank:
                sends = [(peer, part) for part in parts for peer in self._group.peers]
            else:
                receives += [(owner, part) for part in parts]
        return self._group.exchange(sends, receives, tag=tag, what=what)

    def detach(self, tag: int) -> None:
        """Whole parameters in the optimizer's groups again, and whole state, gathered from its owners."""
        self._hook.remove()
        self._alarm.withdraw()
        self.show_whole(True)
        self._restore_gradients(tag)
        states = [self._optimizer.state.pop(own, {}) for own in self._own]
        for parameter, state in zip(self.parameters, states, strict=True):
            if state:  # a parameter that no gradient has reached yet has none
                self._optimizer.state[parameter] = state
        for key in sorted({key for state in states for key in state}):
            if any(is_kept_for_each_number(key, state.get(key)) for state in states):
                parts = [state.get(key, own.detach()) for state, own in zip(states, self._own, strict=True)]
                for state, whole in zip(states, self._whole(parts, tag, f"state {key!r}"), strict=True):
                    if key in state:
                        state[key] = whole

    def _restore_gradients(self, tag: int) -> None:
        """A mean that the optimizer has not used yet belongs into `p.grad` again."""
        unused = [index for index in self._means if self._own[index].grad is not None]
        if not unused:
            return
        gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in self._own]
        wholes = self._whole(gradients, tag, "gradients")
        for index in unused:
            self.parameters[index].grad = wholes[index]

    def _whole(self, values: Sequence[torch.Tensor], tag: int, what: str) -> list[torch.Tensor]:
        """From one value for each own stretch, gathered over the ranks, one for each whole parameter."""
        wholes = [
            torch.zeros(p.numel(), dtype=v.dtype, device=p.device) for p, v in zip(self.parameters, values, strict=True)
        ]
        start, end = self._stretches[self._group.rank]
        for (whole, a, b), value in zip(_intersections(wholes, start, end), values, strict=True):
            whole[a:b] = value
        self._gather(wholes, tag, f"{what} of sharded layers").wait()
        return [whole.view(p.shape) for p, whole in zip(self.parameters, wholes, strict=True)]


def _intersections(tensors: Sequence[_T], start: int, end: int) -> list[tuple[_T, int, int]]:
    """Of tensors laid end to end, each with the start and end, counted within it, of what lies in a stretch."""
    result = []
    offset = 0
    for tensor in tensors:
        count = tensor.numel()
        first = min(max(start - offset, 0), count)
        last = max(first, min(end - offset, count))
        result.append((tensor, first, last))
        offset += count
    return result


def is_kept_for_each_number(key: str, value: object) -> bool:
    """Whether an entry of the state of an optimizer has one number for each of the parameter's."""
    return isinstance(value, torch.Tensor) and key not in COMMON_STATE


def _together(pendings: Sequence[Pending]) -> Pending:
    first = pendings[0]
    return Pending(
        [work for p in pendings for work in p.works],
        sum(p.num_bytes for p in pendings),
        first.what,
        first.translate,
        [tensor for p in pendings for tensor in p.keep],
    )
