"""Where a training step begins and ends, as autograd shows it.

The model's forward is seen by its own hooks. Backward begins when the gradient of the model's output arrives, or the
first gradient of a parameter, and its end is a callback of the autograd engine: it runs inside `backward()`, so that
all is done when that returns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from poseidon.comm.capture import ModuleHook, Removable, accumulates, inside_backward
from poseidon.errors import CommError


class PassHooks:
    """Calls back around the forward and the backward passes of a model.

    Args:
        model: The root module.
        on_forward: Called with True before and with False after each forward that builds a graph.
        on_backward_start: Called once when a backward pass begins.
        on_backward_end: Called inside `backward()` when autograd has finished.
        on_backward_broken: Called at the next forward if an exception ended the backward pass before that.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        on_forward: Callable[[bool], None],
        on_backward_start: Callable[[], None],
        on_backward_end: Callable[[], None],
        on_backward_broken: Callable[[], None],
    ) -> None:
        self._model = model
        self._on_forward = on_forward
        self._on_start = on_backward_start
        self._on_end = on_backward_end
        self._on_broken = on_backward_broken
        self.in_backward = False
        """Whether a backward pass is under way, or broke off with an exception."""
        self._handles: list[Removable] = [
            model.register_forward_pre_hook(ModuleHook(self._before_forward)),
            model.register_forward_hook(ModuleHook(self._after_forward)),
        ]

    def _before_forward(self, *_: Any) -> None:
        if self.in_backward and not inside_backward():
            self.in_backward = False
            self._on_broken()
        if torch.is_grad_enabled():
            self._on_forward(True)

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._on_forward(False)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_output_gradient)

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
        if self.in_backward:
            return
        self.in_backward = True
        self._on_start()
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.in_backward = False
        self._on_end()

    def remove(self) -> None:
        """Takes the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
