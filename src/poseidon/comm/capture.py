"""Where gradients and factors come out of autograd.

`on_gradient` tells when a parameter's gradient is complete. `replace_forward` gives a module instance another forward,
so that a scheme can see what goes in and comes back without the weight gradient being computed; the module's class,
its parameters and its `state_dict` stay as they are.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn


class Removable(Protocol):
    """Something put into a model that can be taken out again."""

    def remove(self) -> None:
        """Takes it out."""


def on_gradient(parameter: nn.Parameter, callback: Callable[[nn.Parameter], None]) -> Removable:
    """Calls back each time autograd has added to `parameter.grad`."""
    return parameter.register_post_accumulate_grad_hook(callback)  # type: ignore[no-any-return]


class ReplacedForward:
    """A module instance whose `forward` is another function until `remove` is called."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._had = module.__dict__.get("forward")
        module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Gives the module its own forward back."""
        if self._had is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._had


def has_replaced_forward(module: nn.Module) -> bool:
    """Whether somebody gave this instance a forward of its own."""
    return "forward" in module.__dict__


def inside_backward() -> bool:
    """Whether autograd is running on this thread: a forward in here is a recomputation."""
    return torch._C._current_graph_task_id() != -1
