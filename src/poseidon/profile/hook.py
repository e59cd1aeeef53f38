"""What every observer of a model needs: hooks that copies of a module do not have, and whether autograd is running."""

from collections.abc import Callable
from typing import Any

import torch


class ModuleHook:
    """A hook of a module that a copy of the module does not have.

    `torch.compile` does not look into it: what a hook notes at one call is no constant of the next.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = torch.compiler.disable(hook)

    def __call__(self, *args: Any) -> None:
        """What the module calls."""
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


def inside_backward() -> bool:
    """Whether autograd is running on this thread: a forward in here is a recomputation."""
    return torch._C._current_graph_task_id() != -1
