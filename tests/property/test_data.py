"""Laws of dealing samples to ranks: each once, in step, and the same as one process with the whole batch."""

from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from poseidon.runtime.data import Share, Shares
from support.loaders import Numbers, SizedStream, flat, loader_of, make, numbers


@st.composite
def shares_of_rank_0(draw: st.DrawFn) -> Shares:
    world_size = draw(st.integers(1, 12))
    portion = st.floats(0.01, 100.0)
    return Shares(
        num_samples=draw(st.integers(1, 200)),
        rank=0,
        world_size=world_size,
        local_batch_size=draw(st.integers(1, 20)),
        seed=draw(st.none() | st.integers(0, 2**63)),
        portions=draw(st.none() | st.tuples(*[portion] * world_size)),
        drop_last=draw(st.booleans()),
    )


epochs = st.integers(0, 1000)


def deal(shares: Shares, epoch: int, start: int = 0) -> list[list[Share]]:
    """The shares of an epoch, rank by rank."""
    return [list(replace(shares, rank=rank).epoch(epoch, start=start)) for rank in range(shares.world_size)]


def seen(ranks: list[list[Share]]) -> list[int]:
    """What all ranks together see, step by step."""
    return [index for step in zip(*ranks, strict=True) for share in step for index in share.indices]


ONE_FOR_MANY = Shares(num_samples=1, rank=0, world_size=12, local_batch_size=20, seed=0)


@given(shares_of_rank_0(), epochs)
@example(ONE_FOR_MANY, 0)
@example(Shares(num_samples=7, rank=0, world_size=8, local_batch_size=1), 0)
def test_each_sample_is_seen_once(shares: Shares, epoch: int) -> None:
    dealt = seen(deal(shares, epoch))
    assert len(set(dealt)) == len(dealt)
    dropped = shares.num_samples % shares.global_batch_size if shares.drop_last else 0
    assert len(dealt) == shares.num_samples - dropped
    assert set(dealt) <= set(range(shares.num_samples))


@given(shares_of_rank_0(), epochs)
@example(ONE_FOR_MANY, 0)
def test_ranks_go_in_step(shares: Shares, epoch: int) -> None:
    ranks = deal(shares, epoch)
    assert {len(rank) for rank in ranks} == {shares.num_steps}
    for number, step in enumerate(zip(*ranks, strict=True)):
        counts = [len(share.indices) for share in step]
        assert {share.global_count for share in step} == {sum(counts)}
        assert {share.start for share in step} == {number * shares.global_batch_size}
        assert min(counts) > 0 or max(counts) <= 1
        if shares.portions is None:
            assert max(counts) - min(counts) <= 1
            assert max(counts) <= shares.local_batch_size


@given(shares_of_rank_0(), epochs)
@example(Shares(num_samples=5, rank=0, world_size=12, local_batch_size=1, seed=0), 0)
def test_the_ranks_together_see_what_one_process_would(shares: Shares, epoch: int) -> None:
    alone = replace(shares, world_size=1, local_batch_size=shares.global_batch_size, portions=None)
    assert seen(deal(shares, epoch)) == seen(deal(alone, epoch))


@given(shares_of_rank_0(), epochs, st.integers(0, 250), st.integers(1, 12))
def test_a_resumed_epoch_goes_on_as_it_would_have(shares: Shares, epoch: int, num_steps: int, world_size: int) -> None:
    whole = deal(shares, epoch)
    start = num_steps * shares.global_batch_size
    assert deal(shares, epoch, start) == [rank[num_steps:] for rank in whole]
    others = replace(shares, world_size=world_size, portions=None, drop_last=False)
    everything = seen(deal(replace(shares, drop_last=False), epoch))
    assert seen(deal(others, epoch, start)) == everything[start:]


@given(shares_of_rank_0(), st.integers(0, 30), st.integers(1, 6))
@settings(max_examples=40)
def test_loaders_resume_on_any_number_of_ranks(shares: Shares, num_steps: int, world_size: int) -> None:
    seed = shares.seed or 0
    options: dict[str, Any] = {"batch_size": shares.local_batch_size, "seed": seed, "shuffle": shares.seed is not None}

    def take(loaders: list[Any], most: int | None) -> list[int]:
        """Step by step, what all see; a loader that has fewer steps has come to its end."""
        taken: list[int] = []
        passes = [iter(loader) for loader in loaders]
        while most is None or most > 0:
            batches = [batch for one in passes if (batch := next(one, None)) is not None]
            if not batches:
                break
            taken += [number for batch in batches for number in numbers(batch)]
            most = None if most is None else most - 1
        return taken

    def loaders_on(ranks: int) -> list[Any]:
        return [make(Numbers(shares.num_samples), rank, ranks, **options) for rank in range(ranks)]

    first = loaders_on(shares.world_size)
    before = take(first, min(num_steps, shares.num_steps - 1))
    second = loaders_on(world_size)
    if before:
        for loader in second:
            loader.load_state_dict(first[0].state_dict())
    after = take(second, None)
    (alone,) = loaders_on(1)
    assert (before if before else []) + after == take([alone], None)
    assert {loader.epoch for loader in second} == {1}


@given(
    count=st.integers(0, 60),
    world_size=st.integers(1, 6),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_each_element_of_a_stream_is_seen_once(count: int, world_size: int, batch_size: int, drop_last: bool) -> None:
    loaders = [
        make(loader_of(SizedStream(count), batch_size, drop_last=drop_last), rank, world_size)
        for rank in range(world_size)
    ]
    ranks = [[numbers(batch) for batch in loader] for loader in loaders]
    assert [len(batches) for batches in ranks] == [len(loader) for loader in loaders]
    dealt = flat(ranks)
    assert len(set(dealt)) == len(dealt)
    if drop_last:
        assert {len(batch) for batches in ranks for batch in batches} <= {batch_size}
    else:
        assert sorted(dealt) == list(range(count))
