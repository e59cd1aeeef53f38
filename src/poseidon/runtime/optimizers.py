"""The optimizers of a run: which one updates a layer, which cannot be used over several ranks, hooks around steps."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from poseidon.errors import ConfigError, InfeasibleError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""As a caller gives them."""


def listed(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """One after the other.

    Raises:
        ConfigError: Something else than an optimizer is among them.
    """
    several = () if optimizers is None else optimizers if isinstance(optimizers, Sequence) else (optimizers,)
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(
                f"cannot use {type(one).__name__} as an optimizer: give a torch.optim optimizer, several in a list, or "
                "None; of one that wraps another give the inner one"
            )
    return tuple(several)


def optimizer_of(
    parameters: Iterable[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> torch.optim.Optimizer | None:
    """The first that updates some of these parameters; None where there is none."""
    wanted = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
            return optimizer
    return None


def check_no_closure(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises InfeasibleError where an optimizer evaluates the loss itself, as often as that loss makes it."""
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise InfeasibleError(
                f"cannot train with {type(optimizer).__name__} on several ranks: its step() calls a closure as often "
                "as the loss that it returns demands, and each rank has a loss of its own, so ranks would run "
                "backward differently often; use an optimizer whose step() needs no closure"
            )


class StepHooks:
    """What a run does around the step of one optimizer, in its place among the hooks of others.

    Args:
        optimizer: Which one.
        before: Called just before the step, after all other hooks, if they were registered before the last step.
        after: Called just after it, before all other hooks.
        last: Called after all other hooks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[..., None],
        after: Callable[..., None],
        last: Callable[..., None],
    ) -> None:
        hooks: Any = optimizer
        self._pre_hooks, self._post_hooks = hooks._optimizer_step_pre_hooks, hooks._optimizer_step_post_hooks
        self._before = optimizer.register_step_pre_hook(before)
        self._after = optimizer.register_step_post_hook(after)
        self._last = optimizer.register_step_post_hook(last)
        self._post_hooks.move_to_end(self._after.id, last=False)

    @property
    def is_last_before(self) -> bool:
        """Whether no other hook comes between `before` and the step."""
        return bool(next(reversed(self._pre_hooks)) == self._before.id)

    def begin(self) -> None:
        """In `before`: `last` goes behind what was registered meanwhile."""
        self._post_hooks.move_to_end(self._last.id)

    def end(self) -> None:
        """In `after`: `before` goes behind what was registered meanwhile."""
        self._pre_hooks.move_to_end(self._before.id)

    def remove(self) -> None:
        """Takes them out."""
        for handle in (self._before, self._after, self._last):
            handle.remove()
