"""Statistics of a union of batches from those of each."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from poseidon.runtime.batch_norm import Statistics

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(sum)


@given(sizes=SIZES, shape=st.sampled_from([(3,), (3, 4), (3, 2, 2)]), offset=st.sampled_from([0.0, 1.0, 1e4]))
def test_of_the_union_as_of_one_batch(sizes: list[int], shape: tuple[int, ...], offset: float) -> None:
    batches = [
        torch.randn(size, *shape, generator=torch.Generator().manual_seed(rank)).double() * (rank + 1) + offset
        for rank, size in enumerate(sizes)
    ]
    union = Statistics.union({rank: Statistics.of(batch).as_part() for rank, batch in enumerate(batches)})
    whole = Statistics.of(torch.cat(batches))
    assert union.count == whole.count
    torch.testing.assert_close(union.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(union.squares, whole.squares, rtol=1e-9, atol=1e-9 * max(1.0, offset**2 * 1e-6))


@given(sizes=SIZES)
def test_ranks_that_say_nothing_or_zeros_change_nothing(sizes: list[int]) -> None:
    parts = {rank: Statistics.of(torch.randn(size, 2).double()).as_part() for rank, size in enumerate(sizes)}
    some = {rank: part for rank, part in parts.items() if part[0]}
    union, of_some = Statistics.union(parts), Statistics.union(some)
    assert torch.equal(union.as_part(), of_some.as_part())
