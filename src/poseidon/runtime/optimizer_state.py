"""The state of an optimizer taken apart into what all ranks have alike, what is sharded and what is each rank's own.

Parameters go by their number, counted over the optimizer's groups, as in `state_dict()`. Of a sharded parameter each
rank holds one stretch; any other division of its numbers is put together from the stretches that it touches, and of a
parameter that was not sharded a stretch is cut out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from poseidon.comm.scheme import Place
from poseidon.comm.sharded_server import is_kept_for_each_number
from poseidon.errors import CheckpointError

State = dict[str, Any]
"""Of one parameter."""
Stretches = list[tuple[int, int]]
"""By rank, start and end of what it holds of a parameter's numbers."""


class Parts(NamedTuple):
    """The state of one optimizer, taken apart; tensors are the optimizer's own."""

    alike: dict[str, Any]
    """As `state_dict()` has it, of what every rank has."""
    shard: dict[int, State]
    """By number, of what this rank holds a stretch of."""
    own: dict[int, State]
    """By number, of parameters that stay each rank's own."""
    stretches: dict[int, Stretches]
    """By number, where the shards of all ranks lie."""


class Saved(NamedTuple):
    """The state of one optimizer as it was saved; shards are read when they are needed."""

    alike: dict[str, Any]
    own: Mapping[int, State]
    stretches: Mapping[int, Stretches]
    shard_of: Callable[[int], Mapping[int, State]]
    """From a rank to what it held."""


def take_apart(
    optimizer: torch.optim.Optimizer,
    places: Sequence[Place],
    *,
    ignored: Collection[int] = (),
    without: Collection[int] = (),
) -> Parts:
    """Takes the state of an optimizer apart, between two steps.

    Args:
        optimizer: Which one.
        places: Of all parameters of the run that are sharded, perhaps of other optimizers.
        ignored: `id`s of the parameters that stay each rank's own.
        without: `id`s of parameters of the optimizer that are none of the model's and come last, such as an alarm's.
    """
    members = [parameter for parameter in _members(optimizer) if id(parameter) not in without]
    numbers = {id(parameter): number for number, parameter in enumerate(members)}
    sharded = {numbers[id(place.own)]: place for place in places if id(place.own) in numbers}
    alike = _state_dict(optimizer, numbers, sharded)
    own = {n for n, parameter in enumerate(members) if id(parameter) in ignored and n in alike["state"]}
    return Parts(
        alike={**alike, "state": {number: state for number, state in alike["state"].items() if number not in own}},
        shard={number: dict(optimizer.state.get(place.own, {})) for number, place in sharded.items()},
        own={number: alike["state"][number] for number in own},
        stretches={number: list(place.stretches) for number, place in sharded.items()},
    )


def put_together(optimizer: torch.optim.Optimizer, places: Sequence[Place], saved: Saved, rank: int) -> dict[str, Any]:
    """What `load_state_dict` of the optimizer takes, as it holds its parameters now: whole ones and stretches.

    Raises:
        CheckpointError: The optimizer has other groups than the one that was saved.
    """
    _check_groups(optimizer, saved)
    place_of = {id(place.own): place for place in places}
    state: dict[int, State] = {}
    for number, parameter in enumerate(_members(optimizer)):
        place = place_of.get(id(parameter))
        if found := _state_of(number, parameter, None if place is None else place.stretches[rank], saved, rank):
            state[number] = found
    return {**saved.alike, "state": state}


def _state_of(number: int, parameter: nn.Parameter, stretch: tuple[int, int] | None, saved: Saved, rank: int) -> State:
    """Of a stretch of a parameter, or of all of it."""
    if number in saved.stretches:
        found = _cut_from_shards(number, *(stretch or (0, parameter.numel())), saved, rank)
        return found if stretch is not None else _shaped(found, parameter)
    whole = saved.own.get(number) or saved.alike["state"].get(number, {})
    return dict(whole) if stretch is None else _cut(whole, *stretch)


def _cut_from_shards(number: int, start: int, end: int, saved: Saved, rank: int) -> State:
    if saved.stretches[number][rank : rank + 1] == [(start, end)]:  # as it was, be it empty: no other shard is read
        return dict(saved.shard_of(rank)[number])
    touched = [(rank, a, b) for rank, (a, b) in enumerate(saved.stretches[number]) if a < end and b > start]
    parts = [_cut(saved.shard_of(rank)[number], max(a, start) - a, min(b, end) - a) for rank, a, b in touched]
    if not parts:  # nothing of it lies here: what is kept once for a parameter is the same in each shard
        return _cut(saved.shard_of(_holder(saved.stretches[number]))[number], 0, 0)
    return {
        key: torch.cat([part[key] for part in parts]) if is_kept_for_each_number(key, value) else value
        for key, value in parts[0].items()
    }


def _holder(stretches: Stretches) -> int:
    return next((rank for rank, (start, end) in enumerate(stretches) if end > start), 0)


def _cut(state: Mapping[str, Any], start: int, end: int) -> State:
    return {
        key: value.reshape(-1)[start:end].clone() if is_kept_for_each_number(key, value) else value
        for key, value in state.items()
    }


def _shaped(state: State, parameter: nn.Parameter) -> State:
    return {
        key: value.view(parameter.shape) if is_kept_for_each_number(key, value) else value
        for key, value in state.items()
    }


def _check_groups(optimizer: torch.optim.Optimizer, saved: Saved) -> None:
    here = _sizes(group["params"] for group in optimizer.param_groups)
    there = _sizes(group["params"] for group in saved.alike["param_groups"])
    if here != there:
        raise CheckpointError(
            f"cannot resume {type(optimizer).__name__}: its groups have {here} parameters and had {there} when the "
            "state was saved; build it as it was built then"
        )


def _sizes(groups: Iterable[Sequence[Any]]) -> str:
    return ", ".join(str(len(group)) for group in groups)


def _members(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_dict(
    optimizer: torch.optim.Optimizer, numbers: Mapping[int, int], sharded: Collection[int]
) -> dict[str, Any]:
    """Of what is not sharded. An optimizer that has shards is one of torch's own, whose form is known."""
    if not sharded:
        return optimizer.state_dict()
    state = {numbers[id(p)]: dict(one) for p, one in optimizer.state.items() if id(p) in numbers}
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": _numbers_in(group, numbers)}
        for group in optimizer.param_groups
    ]
    return {"state": {n: one for n, one in sorted(state.items()) if n not in sharded}, "param_groups": groups}


def _numbers_in(group: Mapping[str, Any], numbers: Mapping[int, int]) -> list[int]:
    return [numbers[id(parameter)] for parameter in group["params"] if id(parameter) in numbers]
