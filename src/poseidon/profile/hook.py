"""What every observer of a model needs: hooks that copies of a module do not have, and whether autograd is running."""

import functools
from collections.abc import Callable
from typing import Any

import torch


class ModuleHook:
    """A hook of a module that a copy of the module does not have.

    `torch.compile` does not look into it: what a hook notes at one call is no constant of the next.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        _hide_from_compiler()
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        """What the module calls."""
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_do_nothing,)


@functools.cache
def _hide_from_compiler() -> None:
    """Not before there is a hook: it takes the import of the compiler."""
    ModuleHook.__call__ = torch.compiler.disable(ModuleHook.__call__)  # type: ignore[method-assign]


class GradientHook:
    """A hook of ours that is told when autograd has added to a parameter's gradient."""

    def __init__(self, hook: Callable[[torch.Tensor], None]) -> None:
        self._hook = hook

    def __call__(self, parameter: torch.Tensor) -> None:
        """What autograd calls."""
        self._hook(parameter)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody else has asked to be told of a parameter's gradient."""
    added: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return bool(parameter._backward_hooks) or not all(isinstance(hook, GradientHook) for hook in added.values())


def _do_nothing(*_: Any) -> None:
    pass


def inside_backward() -> bool:
    """Whether autograd is running on this thread: a forward in here is a recomputation."""
    return torch._C._current_graph_task_id() != -1
