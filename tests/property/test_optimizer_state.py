"""However many ranks shared out the state of an optimizer, and however many do now: no number is lost or moved."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from poseidon.comm.bucket import stretches
from poseidon.comm.scheme import Place
from poseidon.runtime.optimizer_state import Parts, Saved, put_together, take_apart

RANKS = st.integers(1, 5)


def make(count: int, world_size: int, rank: int, *, sharded: bool) -> tuple[torch.optim.Adam, list[Place]]:
    """Adam over one parameter of so many numbers, of which this rank has its stretch, and over another one."""
    whole, other = nn.Parameter(torch.zeros(count)), nn.Parameter(torch.zeros(2, 3))
    where = tuple(stretches(count, world_size))
    start, end = where[rank]
    own = nn.Parameter(whole.detach()[start:end]) if sharded else whole
    return torch.optim.Adam([own, other]), [Place(whole, own, where)] if sharded else []


def saved_by(count: int, world_size: int, numbers: torch.Tensor, *, sharded: bool) -> list[Parts]:
    parts = []
    for rank in range(world_size):
        optimizer, places = make(count, world_size, rank, sharded=sharded)
        own, other = optimizer.param_groups[0]["params"]
        start, end = places[0].stretches[rank] if sharded else (0, count)
        optimizer.state[own] = {"step": torch.tensor(7.0), "exp_avg": numbers[start:end]}
        optimizer.state[other] = {"step": torch.tensor(7.0), "exp_avg": torch.ones(2, 3)}
        parts.append(take_apart(optimizer, places))
    return parts


@given(st.integers(1, 40), RANKS, RANKS, st.booleans(), st.booleans())
def test_what_some_ranks_shared_out_others_find_again(
    count: int, before: int, now: int, was_sharded: bool, is_sharded: bool
) -> None:
    numbers = torch.arange(count, dtype=torch.float32)
    parts = saved_by(count, before, numbers, sharded=was_sharded)
    saved = Saved(parts[0].alike, {}, parts[0].stretches, lambda rank: parts[rank].shard)
    found = torch.full((count,), -1.0)
    for rank in range(now):
        optimizer, places = make(count, now, rank, sharded=is_sharded)
        optimizer.load_state_dict(put_together(optimizer, places, saved, rank))
        own, other = optimizer.param_groups[0]["params"]
        start, end = places[0].stretches[rank] if is_sharded else (0, count)
        found[start:end] = optimizer.state[own]["exp_avg"]
        assert optimizer.state[own]["step"] == 7.0
        assert torch.equal(optimizer.state[other]["exp_avg"], torch.ones(2, 3))
    assert torch.equal(found, numbers)


def test_what_is_a_rank_s_own_is_kept_apart() -> None:
    optimizer, _ = make(3, 1, 0, sharded=False)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(parameter)}
    own = optimizer.param_groups[0]["params"][1]
    parts = take_apart(optimizer, [], ignored={id(own)})
    assert (list(parts.alike["state"]), list(parts.own)) == ([0], [1])
    saved = Saved(parts.alike, parts.own, {}, lambda rank: {})
    assert list(put_together(optimizer, [], saved, 0)["state"]) == [0, 1]
