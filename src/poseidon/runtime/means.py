"""Means over all ranks of what a loop logs: a loss, an accuracy, or several at once."""

import json
import math
from collections.abc import Mapping
from typing import overload

import torch

from poseidon.comm.group import Group
from poseidon.errors import ConfigError

Figure = float | torch.Tensor
"""A number, or a tensor with one element."""

_ONLY = ""
"""The name of a figure that came without one."""


@overload
def mean_over_ranks(group: Group, value: Figure, n: float = 1) -> float: ...
@overload
def mean_over_ranks(group: Group, value: Mapping[str, Figure], n: float = 1) -> dict[str, float]: ...
def mean_over_ranks(group: Group, value: Figure | Mapping[str, Figure], n: float = 1) -> float | dict[str, float]:
    """The mean over the samples of all ranks of what each rank has as its own mean; all ranks call this together.

    In float64, and the same bits on every rank.

    Args:
        group: The ranks.
        value: This rank's mean, or several by name. Where `n` is zero it is not looked at, and names may be missing.
        n: How many samples it is a mean over; zero on a rank that had none.

    Returns:
        As `value`; not a number where no rank had a sample.

    Raises:
        ConfigError: `n` is negative or not finite, a figure has several elements, or ranks give figures of other names.
    """
    if not 0 <= n < math.inf:
        raise ConfigError(f"rank {group.rank} cannot take a mean over {n} samples: a number of samples is zero or more")
    named = dict(value) if isinstance(value, Mapping) else {_ONLY: value}
    mine = {"n": float(n), "values": {name: _number(name, figure) for name, figure in named.items()} if n else {}}
    everyone = [json.loads(text) for text in group.all_gather_text(json.dumps(mine), "taking a mean over the ranks")]
    parts = {rank: one for rank, one in enumerate(everyone) if one["n"]}
    _check_names({rank: list(one["values"]) for rank, one in parts.items()})
    names = list(next(iter(parts.values()))["values"]) if parts else list(named)
    total = math.fsum(one["n"] for one in parts.values())
    means = {
        name: math.fsum(one["values"][name] * one["n"] for one in parts.values()) / total if total else math.nan
        for name in names
    }
    return means if isinstance(value, Mapping) else means.get(_ONLY, math.nan)


def _number(name: str, figure: Figure) -> float:
    if not isinstance(figure, torch.Tensor):
        return float(figure)
    if figure.numel() != 1:
        what = name or "a figure"
        raise ConfigError(
            f"cannot take a mean of {what} of shape {tuple(figure.shape)} over the ranks: give one number"
        )
    return float(figure.item())


def _check_names(names_by_rank: Mapping[int, list[str]]) -> None:
    if not names_by_rank:
        return
    first, expected = next(iter(names_by_rank.items()))
    for rank, names in names_by_rank.items():
        if sorted(names) != sorted(expected):
            raise ConfigError(
                f"cannot take a mean over the ranks: rank {first} gives {_in_words(expected)}, rank {rank} "
                f"{_in_words(names)}; give figures of the same names on every rank, with n=0 where there is none"
            )


def _in_words(names: list[str]) -> str:
    return ", ".join("one figure without a name" if name == _ONLY else repr(name) for name in names) or "none"
