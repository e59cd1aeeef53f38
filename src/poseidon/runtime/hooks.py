"""Where a training step begins and ends, as autograd shows it.

The model's forward is seen by its own hooks. Backward begins when the gradient of the model's output arrives, or the
first gradient of a parameter, and its end is a callback of the autograd engine: it runs inside `backward()`, so that
all is done when that returns.

A loop may also call the model's parts and never the model: `loss = model.training_step(batch)`. Then the outputs of
those parts tell that backward begins, or what reentrant checkpointing computes once more: both are before it runs a
backward pass of its own inside, whose end must not be taken for the end.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from poseidon.comm.capture import ModuleHook, Removable, accumulates, inside_backward
from poseidon.errors import CommError
from poseidon.profile.structure import compiled_blocks


class PassHooks:
    """Calls back around the forward and the backward passes of a model.

    Args:
        model: The root module.
        on_forward: Called with True before and with False after each forward that builds a graph.
        on_rows: Called before that with the length of the first tensor that the model is given; where the model itself
            is not called, once before each backward pass with that of its part that is called first.
        on_backward_start: Called once when a backward pass begins.
        on_backward_end: Called inside `backward()` when autograd has finished.
        on_all_ended: Called inside `backward()` when all that listen to this pass have been told that it has ended.
        on_backward_broken: Called at the next forward or backward if an exception ended the backward pass before that.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        on_forward: Callable[[bool], None],
        on_rows: Callable[[int], None],
        on_backward_start: Callable[[], None],
        on_backward_end: Callable[[], None],
        on_all_ended: Callable[[], None],
        on_backward_broken: Callable[[], None],
    ) -> None:
        self._model = model
        self._on_forward = on_forward
        self._on_rows = on_rows
        self._has_rows = False
        """Whether they have been counted since the last backward pass."""
        self._on_start = on_backward_start
        self._on_end = on_backward_end
        self._on_all_ended = on_all_ended
        self._on_broken = on_backward_broken
        self._end: weakref.ref[_PassEnd] | None = None
        """Of the backward pass under way. Autograd holds it, and lets go of it when an exception ends the pass."""
        self._handles: list[Removable] = [
            model.register_forward_pre_hook(ModuleHook(self._before_forward), with_kwargs=True),
            model.register_forward_hook(ModuleHook(self._after_forward)),
        ]
        for part in _parts(model):
            self._handles.append(part.register_forward_pre_hook(ModuleHook(self._before_part), with_kwargs=True))
            self._handles.append(part.register_forward_hook(ModuleHook(self._after_part)))

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is under way, or broke off with an exception."""
        return self._end is not None

    def _before_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not inside_backward():
            self._check_broken()
        if torch.is_grad_enabled():
            self._count_rows(args, kwargs)
            self._on_forward(True)

    def _before_part(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._has_rows and torch.is_grad_enabled():
            self._count_rows(args, kwargs)

    def _count_rows(self, args: Any, kwargs: Any) -> None:
        if inside_backward():
            return
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim())
        if (first := next(tensors, None)) is not None:
            self._has_rows = True
            self._on_rows(len(first))

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._on_forward(False)
        self._watch(output)

    def _after_part(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._watch(output)

    def _watch(self, output: Any) -> None:
        if inside_backward() and Variable._execution_engine.is_checkpoint_valid():
            self.backward_is_under_way()
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_output_gradient)

    def _check_broken(self) -> None:
        if self._end is not None and self._end() is None:
            self._end = None
            self._on_broken()

    def _on_output_gradient(self, _: torch.Tensor) -> None:
        if not self.in_backward and self._accumulates():
            self.backward_is_under_way()

    def _accumulates(self) -> bool:
        """Whether autograd is on its way to some parameter: `torch.autograd.grad` is not."""
        try:
            return any(accumulates(get_gradient_edge(p).node) for p in self._model.parameters() if p.requires_grad)
        except CommError:
            return False

    def backward_is_under_way(self) -> None:
        """Told by whatever notices first."""
        self._check_broken()
        if self._end is not None or not self._handles:  # graphs of before the hooks were removed may live on
            return
        end = _PassEnd(self._finish)
        self._end = weakref.ref(end)
        self._has_rows = False
        self._on_start()
        Variable._execution_engine.queue_callback(end)

    def _finish(self) -> None:
        self._end = None
        self._on_end()
        Variable._execution_engine.queue_callback(self._on_all_ended)

    def remove(self) -> None:
        """Takes the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _PassEnd:
    """What autograd calls at the end of a backward pass, and holds until then."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


def _parts(model: nn.Module) -> list[nn.Module]:
    """What a loop may call in place of the model: its children, those in lists and dictionaries too; none compiled."""
    compiled = {model.get_submodule(name) for name in compiled_blocks(model)}
    return [] if model in compiled else [part for part in _children(model) if part not in compiled]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child)
        else:
            yield child
