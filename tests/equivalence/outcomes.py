"""The outcomes of a family of situations, all in the same processes; one that fails is not the end of the others."""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tests.equivalence.harness import Combination, Outcome, default_dtype, run_combinations
from tests.equivalence.schemes import AUTO, SCHEMES, Maker
from tests.equivalence.situations import FAMILIES, SITUATIONS
from tests.support.ranks import run_ranks
from torch import nn

from poseidon.errors import InfeasibleError
from poseidon.profile.graph import ModelProfile
from poseidon.profile.structure import profile_structure

COLUMNS = (*SCHEMES, AUTO)
WORLD_SIZES = (1, 2, 3, 4)
FULL = WORLD_SIZES[-1]
"""Ranks on two hosts with two each."""
USUAL = {
    1: ("all_reduce",),
    2: ("all_reduce", AUTO),
    3: ("sharded_server", "mix", "deferred"),
    FULL: ("two_level",),
}
"""The schemes that are tried on so many ranks where nothing else is asked for; factors and rows are in the mix."""
FAMILY_SECONDS = 500.0
MOST_FAILURES = 5
"""Of one family; beyond that the rest is not run."""


class Verdict(NamedTuple):
    """Of one combination over all ranks."""

    error: float = 0.0
    where: str = ""
    same_bits: bool = True
    refusal: str = ""
    failure: str = ""
    """What went wrong, where the combination did not come to its end."""


def combinations(family: str, world_size: int, *, every: bool) -> tuple[Combination, ...]:
    """Those of a family in which the scheme carries a layer; without `every` the usual ones only."""
    return tuple(
        Combination(situation, scheme)
        for situation in FAMILIES[family]
        for scheme in columns(situation)
        if scheme != "two_level" or world_size == FULL
        if every or scheme in USUAL[world_size]
    )


@functools.cache
def columns(situation: str) -> tuple[str, ...]:
    """The schemes that some layer of each of the situation's models can use."""
    kind = SITUATIONS[situation]
    one = kind()
    with default_dtype(one.dtype):
        bound = [(model, one.optimizer(model), profile_structure(model)) for model in one.models().values()]
        carrying = [scheme for scheme, make in SCHEMES.items() if all(_carries(make, *models) for models in bound)]
    carrying += [AUTO] if kind.steps_under_auto else []
    return tuple(scheme for scheme in carrying if scheme not in kind.left_out)


def _carries(make: Maker, model: nn.Module, optimizer: torch.optim.Optimizer, profile: ModelProfile) -> bool:
    try:
        return make(profile, FULL, model, optimizer) is not None
    except InfeasibleError:
        return True  # it says so to the script, too


@functools.cache
def verdicts(family: str, world_size: int, *, every: bool) -> dict[Combination, Verdict]:
    """Of a family on so many ranks, once in a session."""
    return judge(combinations(family, world_size, every=every), world_size)


def judge(
    wanted: Sequence[Combination], world_size: int, most_failures: int = MOST_FAILURES
) -> dict[Combination, Verdict]:
    """Runs combinations in the same processes; after one that fails, the next ones in new processes."""
    found: dict[Combination, Verdict] = {}
    remaining = list(wanted)
    num_failures = 0
    while remaining and num_failures < most_failures:
        outcomes, failure = _run(world_size, remaining)
        found |= {c: _verdict(of_ranks) for c, of_ranks in zip(remaining, outcomes, strict=False)}
        remaining = remaining[len(outcomes) :]
        if remaining:
            num_failures += 1
            found[remaining.pop(0)] = Verdict(failure=failure)
    return found | {c: Verdict(failure=f"not run: {num_failures} others failed before it") for c in remaining}


def _run(world_size: int, remaining: Sequence[Combination]) -> tuple[list[list[Outcome]], str]:
    """The outcomes by rank of those that all ranks brought to an end, and what went wrong then."""
    failure = ""
    with tempfile.TemporaryDirectory(prefix="equivalence-") as folder:
        try:
            run_ranks(world_size, run_combinations, remaining, Path(folder), timeout=FAMILY_SECONDS, init=False)
        except Exception as error:  # noqa: BLE001  # whatever a rank raised becomes that combination's verdict
            failure = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        files = [Path(folder) / str(rank) for rank in range(world_size)]
        lines = [file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in files]
    return [[Outcome(*json.loads(line)) for line in of_ranks] for of_ranks in zip(*lines, strict=False)], failure


def _verdict(outcomes: Sequence[Outcome]) -> Verdict:
    first = outcomes[0]
    return Verdict(
        error=first.error,
        where=first.where,
        same_bits=len({outcome.digest for outcome in outcomes}) == 1,
        refusal=first.refusal,
        failure="" if len({bool(o.refusal) for o in outcomes}) == 1 else "only some ranks refused it",
    )


def problem(combination: Combination, world_size: int, verdict: Verdict) -> str:
    """What is wrong with it; nothing where it is equal, or refused as it is to be."""
    situation = SITUATIONS[combination.situation]
    refusal = situation.refused.get(combination.scheme)
    if verdict.failure:
        return verdict.failure
    if verdict.refusal:
        return "" if refusal is not None and refusal in verdict.refusal else verdict.refusal
    if refusal is not None and world_size > 1:
        return f"it was to be refused because of {refusal!r}"
    if not verdict.same_bits:
        return "the ranks differ"
    if not verdict.error <= situation.tolerance:
        return f"{verdict.where}: relative error {verdict.error:.1e}, beyond {situation.tolerance:g}"
    return ""
