"""Where gradients and factors come out of autograd.

`on_gradient` tells when a parameter's gradient is complete. `replace_forward` gives a module instance another forward,
so that a scheme can see what goes in and comes back without the weight gradient being computed; the module's class,
its parameters and its `state_dict` stay as they are.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node

from poseidon.errors import CommError
from poseidon.profile.hook import GradientHook
from poseidon.profile.hook import ModuleHook as ModuleHook
from poseidon.profile.hook import inside_backward as inside_backward


class Removable(Protocol):
    """Something put into a model that can be taken out again."""

    def remove(self) -> None:
        """Takes it out."""


def on_gradient(parameter: nn.Parameter, callback: Callable[[nn.Parameter], None]) -> Removable:
    """Calls back each time autograd has added to `parameter.grad`, which may be frozen for now."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch puts no hook on what is frozen, but leaves it there
    handle: Removable = parameter.register_post_accumulate_grad_hook(GradientHook(callback))  # type: ignore[arg-type]
    parameter.requires_grad_(trains)
    return handle


class Additions:
    """Which gradients of the present step are complete.

    Autograd adds to each gradient once in a backward pass, and under reentrant checkpointing perhaps more often. How
    often is learned in the first step, in which nothing counts as complete before its end.
    """

    def __init__(self, count: int) -> None:
        self._seen = [0] * count
        self.missing = set(range(count))
        self._expected = [0] * count

    def add(self, index: int) -> bool:
        """Notes that autograd added to a gradient; whether that completed it."""
        self._seen[index] += 1
        if self._seen[index] != self._expected[index]:
            return False
        self.missing.discard(index)
        return True

    def reset(self) -> None:
        """Learns, and waits for all of them again."""
        self._expected = [max(1, seen) for seen in self._seen]
        self._seen = [0] * len(self._seen)
        self.missing = set(range(len(self._seen)))


class Accumulated:
    """Something that was added up beside `p.grad`, in which it is to be forgotten when the loop zeroes gradients.

    A gradient of zeros stands for it there, so that `zero_grad` finds something: it is gone then, or written to.
    """

    def __init__(self, parameter: nn.Parameter, zeros: Callable[[], torch.Tensor]) -> None:
        self._parameter = parameter
        if parameter.grad is None:
            parameter.grad = zeros()
        self._gradient = parameter.grad
        self._version = self._gradient._version

    @property
    def is_forgotten(self) -> bool:
        """Whether the gradients have been zeroed since."""
        if self._parameter.grad is not self._gradient:
            return True
        return self._gradient._version != self._version and not bool(self._gradient.to_dense().any())


LATE_ADDITION = (
    "this happens when a part of the model runs a varying number of times under reentrant checkpointing: "
    "pass use_reentrant=False to torch.utils.checkpoint"
)
"""What messages about it end with."""


class ReplacedForward:
    """A module instance whose `forward` is another function until `remove` is called.

    A copy of the module, be it by `copy.deepcopy` or by pickle, has the forward of its class. `torch.compile` does not
    look into the function: it does more than compute, and does it anew at every call.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], owner: object = None) -> None:
        self._module = module
        self.owner = owner
        """Whose forward it is."""
        self._forward = torch.compiler.disable(forward)
        self._had = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own `__call__` calls."""
        return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._module,)

    def remove(self) -> None:
        """Gives the module its own forward back."""
        if self._had is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._had


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return MethodType(type(module).forward, module)


def accumulates(node: Node) -> bool:
    """Inside a backward pass: whether it will add to the gradient of the parameter that `node` accumulates.

    `torch.autograd.grad` for inputs passes by the layers as well, but leaves `p.grad` of their parameters alone.

    Raises:
        CommError: It is `torch.autograd.grad` for this very parameter.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        raise CommError("torch.autograd.grad() was asked for the gradient of a parameter") from error


def graph_is_kept() -> bool:
    """Inside a backward pass: whether another one may go through the same graph (`retain_graph=True`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
