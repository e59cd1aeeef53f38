"""What belongs to the state of a run beside model and optimizer: the loaders that it made, and what a loop names.

A loop names its own by `run.track(scheduler=scheduler)`: objects with `state_dict` and `load_state_dict`, generators of
random numbers, or a pair of functions that give and take a value.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from poseidon.errors import CheckpointError, ConfigError
from poseidon.runtime.loading import ShardedLoader


@dataclass(frozen=True)
class Tracked:
    """One thing that a loop has named."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]
    each_rank: bool
    """Whether each rank has its own; else rank 0's counts for all."""


class Belongings:
    """The loaders and the tracked things of one run."""

    def __init__(self) -> None:
        self._tracked: dict[str, Tracked] = {}
        self._loaders: list[weakref.ref[ShardedLoader]] = []
        self._waiting_loaders: list[dict[str, Any]] = []
        """States of loaders that have not been made yet."""
        self._waiting: dict[str, Any] = {}
        """States of what has not been named yet."""

    # What the loop says

    def track(self, things: Mapping[str, Any], *, each_rank: bool) -> None:
        """See `Run.track`; what is named after a state was loaded gets its part of that at once."""
        for name, thing in things.items():
            if name in self._tracked:
                raise ConfigError(f"cannot track another thing as {name!r}: the name is taken")
            self._tracked[name] = _tracked(name, thing, each_rank=each_rank)
        for name in [name for name in things if name in self._waiting]:
            self._tracked[name].put(self._waiting.pop(name))

    def add_loader(self, loader: ShardedLoader) -> None:
        """One more, made on all ranks in the same order; gets its part of a state that was loaded before."""
        if not loader.trains:
            return
        self._loaders.append(weakref.ref(loader))
        if self._waiting_loaders:
            loader.load_state_dict(self._waiting_loaders.pop(0))

    # Its state

    def of_all_ranks(self) -> dict[str, Any]:
        """What is the same on every rank."""
        return {name: one.get() for name, one in self._tracked.items() if not one.each_rank}

    def of_rank(self) -> dict[str, Any]:
        """What this rank has as its own."""
        loaders = [loader for loader in (there() for there in self._loaders) if loader is not None]
        return {
            "tracked": {name: one.get() for name, one in self._tracked.items() if one.each_rank},
            "loaders": [*(loader.state_dict() for loader in loaders), *self._waiting_loaders],
        }

    def load(self, of_all_ranks: Mapping[str, Any], of_rank: Mapping[str, Any]) -> None:
        """Goes on from there; what is not there yet gets its part when it comes.

        Raises:
            CheckpointError: Something does not take its state.
        """
        states = {**of_all_ranks, **of_rank["tracked"]}
        for name, state in states.items():
            if name in self._tracked:
                _put(name, self._tracked[name], state)
        self._waiting = {name: state for name, state in states.items() if name not in self._tracked}
        loaders = [loader for loader in (there() for there in self._loaders) if loader is not None]
        for loader, state in zip(loaders, of_rank["loaders"], strict=False):
            loader.load_state_dict(state)
        self._waiting_loaders = list(of_rank["loaders"][len(loaders) :])

    def missing(self, of_all_ranks: Mapping[str, Any], of_rank: Mapping[str, Any]) -> list[str]:
        """Names of what is tracked now and not in a state."""
        return sorted(set(self._tracked) - set(of_all_ranks) - set(of_rank["tracked"]))


def _put(name: str, tracked: Tracked, state: Any) -> None:
    try:
        tracked.put(state)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot give {name!r} its state of the checkpoint: {error}; track what was tracked when it was saved"
        ) from error


def _tracked(name: str, thing: Any, *, each_rank: bool) -> Tracked:
    if isinstance(thing, torch.Generator):
        return Tracked(thing.get_state, lambda state: thing.set_state(state), each_rank)
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return Tracked(lambda: bits.state, lambda state: setattr(bits, "state", state), each_rank)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return Tracked(thing.state_dict, thing.load_state_dict, each_rank)
    if isinstance(thing, Sequence) and len(thing) == 2 and all(map(callable, thing)):
        return Tracked(thing[0], thing[1], each_rank)
    raise ConfigError(
        f"cannot track {name!r}, a {type(thing).__name__}: give something with state_dict and load_state_dict, a "
        "generator of random numbers, or a pair of functions (get, set)"
    )
