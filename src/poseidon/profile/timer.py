"""A stop watch with laps: which layer of a model the time of a training step goes to, forward and backward.

Hooks stand where a layer begins and where it ends: around its forward, and in backward on the tensors that it gave out
(their gradients are there: its backward begins), on those that it was given (its backward has ended) and on its
parameters. The time since the hook before goes to the layer that has ended, or to what is computed outside of layers if
one begins. So every moment of a step belongs to somebody. What the hooks themselves take is not counted.

The values that pass are left alone, and so is the graph: no view, no copy, no wrapper comes between.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from poseidon.profile.clock import Clock
from poseidon.profile.flops import forward_flops
from poseidon.profile.hook import GradientHook, ModuleHook, inside_backward
from poseidon.profile.structure import compiled_blocks, visible_layers, visible_parameters

LOSS = "loss"
"""The name of what follows the last layer."""

MOST_LAP_OVERHEAD = 5e-6
"""Seconds that calling the hooks between two laps may take, 2 to 3 being usual; a larger difference is not theirs."""

Edge = tuple[Node | None, int]
"""Where a tensor came from: the node of the graph that made it, and as which of its outputs."""


def outside_name(layer: str) -> str:
    """The name of what is computed outside of layers before this one."""
    return f"before {layer or 'the model'}"


class AroundCalls:
    """Calls back before and after each call of a module, until `remove`.

    A module that was compiled in place (`module.compile()`) would compile its hooks as well; there, what it calls is
    wrapped instead.
    """

    def __init__(
        self, module: nn.Module, before: Callable[..., None], after: Callable[..., None], *, first: bool = False
    ) -> None:
        self._module, self._before, self._after = module, before, after
        self._compiled = module._compiled_call_impl
        self._handles: list[Any] = []
        if self._compiled is not None:
            module._compiled_call_impl = self._call
            return
        self._handles = [
            module.register_forward_pre_hook(ModuleHook(before), with_kwargs=True, prepend=first),
            module.register_forward_hook(ModuleHook(after), with_kwargs=True),
        ]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled is not None
        self._before(self._module, args, kwargs)
        output = self._compiled(*args, **kwargs)
        self._after(self._module, args, kwargs, output)
        return output

    def remove(self) -> None:
        """Leaves the module as it was."""
        if self._compiled is not None:
            self._module._compiled_call_impl = self._compiled
        for handle in self._handles:
            handle.remove()


class Laps:
    """The laps of one pass, and of several: seconds by name, forward and backward, one entry per kept pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: list[tuple[str, bool, Any, Any]] = []
        self.passes: list[dict[tuple[str, bool], float]] = []
        """Of each kept pass, seconds by name and whether in backward."""
        self.counts: dict[tuple[str, bool], int] = {}
        """Of the pass kept last, how many laps the seconds are made of."""

    def add(self, name: str, backward: bool, start: Any, end: Any) -> None:
        """One lap, between two readings of the clock."""
        self._running.append((name, backward, start, end))

    def close(self, *, keep: bool) -> None:
        """Ends the pass."""
        laps, self._running = self._running, []
        if not keep:
            return
        self._clock.settle()
        seconds: dict[tuple[str, bool], float] = {}
        self.counts = {}
        for name, backward, start, end in laps:
            seconds[name, backward] = seconds.get((name, backward), 0.0) + self._clock.between(start, end)
            self.counts[name, backward] = self.counts.get((name, backward), 0) + 1
        self.passes.append(seconds)

    def of(self, name: str, *, backward: bool, lap_overhead: float = 0.0) -> list[float]:
        """Seconds in each kept pass, less those that each lap costs by being looked at."""
        overhead = lap_overhead * self.counts.get((name, backward), 0)
        return [max(0.0, seconds.get((name, backward), 0.0) - overhead) for seconds in self.passes]

    @property
    def totals(self) -> list[float]:
        """Seconds of each kept pass, all laps together."""
        return [sum(seconds.values()) for seconds in self.passes]

    def typical_seconds(self, neighbors: Sequence[float] = ()) -> float:
        """Of a pass: the median, or the median ratio to neighbors that were not looked at, times theirs."""
        if not self.passes:
            return 0.0
        if not neighbors:
            return median(self.totals)
        ratios = [total / other for total, other in zip(self.totals, neighbors, strict=True)]
        return median(ratios) * median(neighbors)

    @property
    def num_laps(self) -> int:
        """Of one pass."""
        return sum(self.counts.values())

    def overhead(self, fastest_seconds: float) -> float:
        """What a lap costs by being looked at: a few microseconds.

        Args:
            fastest_seconds: Of the fastest pass that was not looked at. The fastest of either kind was disturbed least.
        """
        difference = max(0.0, min(self.totals, default=0.0) - fastest_seconds)
        return min(difference / max(1, self.num_laps), MOST_LAP_OVERHEAD)


class Facts:
    """What one pass shows of the layers besides their seconds."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        """The layers that were called, in the order in which forward reached them."""
        self.calls: dict[str, int] = {}
        self.flops: dict[str, int] = {}
        self.activation_num_bytes: dict[str, int] = {}
        self.fed: set[str] = set()
        """Layers that were given something that needs a gradient: all but those at the bottom."""

    def began(self, name: str, module: nn.Module, given: list[torch.Tensor]) -> None:
        """A layer is called."""
        self.modules.setdefault(name, module)
        if any(t.requires_grad for t in given):
            self.fed.add(name)

    def ended(self, name: str, module: nn.Module, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """A layer's call returns."""
        self.calls[name] = self.calls.get(name, 0) + 1
        if given and made:
            self.flops[name] = self.flops.get(name, 0) + forward_flops(module, given, made[0])
        memory = {_memory(t) for t in given}
        num_bytes = sum(t.numel() * t.element_size() for t in made if _memory(t) not in memory)
        self.activation_num_bytes[name] = self.activation_num_bytes.get(name, 0) + num_bytes


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list | dict):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _edge(tensor: torch.Tensor) -> Edge:
    """A leaf stands for itself: it has no node."""
    return (tensor.grad_fn, tensor.output_nr) if tensor.grad_fn is not None else (None, id(tensor))


def _memory(tensor: torch.Tensor) -> int:
    """What two views of the same memory have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _nothing(*_: Any) -> None:
    pass


class LapWatch:
    """The hooks of a stop watch, and its state.

    Args:
        model: Its layers are those of `visible_layers`.
        clock: What is read at each lap.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self.laps = Laps(clock)
        self.facts = Facts()
        self.compiled = compiled_blocks(model)
        self.running = False
        self._paused = False
        self._has_facts = False
        self._handles: list[Any] = []
        self._leaf_handles: list[Any] = []
        """Of tensors that outlive the step."""
        self._given: dict[str, list[torch.Tensor]] = {}
        self._edges: dict[str, list[Edge]] = {}
        self._made: list[Edge] = []
        """What the layer that ended last in forward gave out; a layer around it may give out the same."""
        self._forget()

    def _forget(self) -> None:
        self._last: Any = None
        self._backward = False
        self._open: str | None = None
        """The layer whose backward began last, until it is known to have ended."""
        self._is_settled = False
        """Whether a gradient of the open layer's parameters is there: what follows may be outside of it."""
        self._ended: str | None = None
        """The layer whose backward ended last."""

    def install(self) -> None:
        """Puts the hooks in place."""
        for name, module in visible_layers(self._model).items():
            self._handles.append(AroundCalls(module, partial(self._before, name), partial(self._after, name)))
        for name, parameter in visible_parameters(self._model):
            hook = GradientHook(partial(self._accumulated, name))
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Takes them out; laps and facts stay."""
        self.running = self._paused = False
        for handle in self._handles + self._leaf_handles:
            handle.remove()
        self._handles.clear()
        self._leaf_handles.clear()

    # The pass as a whole

    @property
    def is_after_backward(self) -> bool:
        """Whether some gradient has come back since the pass began."""
        return self._backward

    def start(self) -> None:
        """A forward pass begins."""
        self._forget()
        self.laps.close(keep=False)  # what an exception may have left
        self.running = True
        self._last = self._clock.read()

    def turn(self) -> None:
        """The loss is there; backward begins."""
        self._lap(LOSS, self._clock.read())
        self._backward = True
        self._last = self._clock.read()

    def go_on(self) -> None:
        """What happened since the last lap is nobody's."""
        self._backward = False
        self._open = self._ended = None
        self._last = self._clock.read()

    def pause(self) -> None:
        """What follows, until `resume`, is nobody's."""
        self._paused, self.running = self.running, False
        if self._paused:
            self._lap(self._in_backward() if self._backward else LOSS, self._clock.read())

    def resume(self) -> None:
        """Goes on if it ran before the pause."""
        self.running, self._paused = self._paused, False
        self._last = self._clock.read()

    def stop(self, *, keep: bool = True) -> None:
        """The backward pass has ended."""
        self._lap(self._in_backward() if self._backward else LOSS, self._clock.read())
        self.running = False
        self._has_facts = True
        self._given.clear()
        self._edges.clear()
        self._made.clear()
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()
        self.laps.close(keep=keep)

    def _lap(self, name: str, now: Any) -> None:
        self.laps.add(name, self._backward, self._last, now)

    # Forward, and what is recomputed in backward

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.running:
            return
        now = self._clock.read()
        self._lap(self._in_backward() if inside_backward() else outside_name(name), now)
        given = list(_tensors(args, kwargs))
        if torch.is_grad_enabled():
            self._edges[name] = [_edge(t) for t in given]
            for tensor in given:
                if tensor.requires_grad:
                    self._hook(tensor, partial(self._backward_ended, name))
        if not self._has_facts:
            self.facts.began(name, module, given)
            self._given[name] = given
        self._last = self._clock.read()

    def _after(self, name: str, module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if not self.running:
            return
        now = self._clock.read()
        self._lap(name, now)
        made = list(_tensors(output))
        if torch.is_grad_enabled():
            known = self._edges.pop(name, []) + self._made
            self._made = [_edge(tensor) for tensor in made if tensor.requires_grad]
            for tensor in made:
                if tensor.requires_grad and _edge(tensor) not in known:
                    self._hook(tensor, partial(self._backward_began, name))
        if not self._has_facts and not inside_backward():  # a recomputation is no further call
            self.facts.ended(name, module, self._given.pop(name, []), made)
        self._last = self._clock.read()

    def _hook(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        handle = tensor.register_hook(hook)
        if tensor.grad_fn is None:
            self._leaf_handles.append(handle)

    # Backward

    def _in_backward(self) -> str:
        """Whose the time is that has just passed, in backward."""
        if self._open is not None and not self._is_settled:
            return self._open
        return LOSS if self._ended is None else outside_name(self._ended)

    def _backward_began(self, name: str, _gradient: torch.Tensor) -> None:
        if not self.running:
            return
        self._lap(self._in_backward(), self._clock.read())
        self._backward = True
        self._open, self._is_settled = name, False
        self._last = self._clock.read()

    def _backward_ended(self, name: str, _gradient: torch.Tensor) -> None:
        if not self.running or name != self._open:
            return
        self._lap(name, self._clock.read())
        self._open, self._ended = None, name
        self._last = self._clock.read()

    def _accumulated(self, name: str, _parameter: nn.Parameter) -> None:
        if not self.running:
            return
        now = self._clock.read()
        self._backward = True
        if self._open is None or self._open == name:
            self._lap(name, now)
            self._ended = name
            self._is_settled = True
        else:
            self._lap(self._open, now)
        self._last = self._clock.read()
