"""Laws of dealing samples to ranks: each once, in step, and the same as one process with the whole batch."""

from hypothesis import example, given
from hypothesis import strategies as st

from poseidon.runtime.data import Share, Shares

sizes = {
    "num_samples": st.integers(1, 200),
    "world_size": st.integers(1, 12),
    "local_batch_size": st.integers(1, 20),
    "seed": st.none() | st.integers(0, 2**63),
    "epoch": st.integers(0, 1000),
}


def deal(num_samples: int, world_size: int, local_batch_size: int, seed: int | None, epoch: int) -> list[list[Share]]:
    """The shares of an epoch, rank by rank."""
    return [
        list(
            Shares(
                num_samples=num_samples,
                rank=rank,
                world_size=world_size,
                local_batch_size=local_batch_size,
                seed=seed,
            ).epoch(epoch)
        )
        for rank in range(world_size)
    ]


@given(**sizes)
@example(num_samples=1, world_size=12, local_batch_size=20, seed=0, epoch=0)
@example(num_samples=7, world_size=8, local_batch_size=1, seed=None, epoch=0)
def test_each_sample_is_seen_once(
    num_samples: int, world_size: int, local_batch_size: int, seed: int | None, epoch: int
) -> None:
    ranks = deal(num_samples, world_size, local_batch_size, seed, epoch)
    seen = [index for shares in ranks for share in shares for index in share.indices]
    assert sorted(seen) == list(range(num_samples))


@given(**sizes)
@example(num_samples=1, world_size=12, local_batch_size=20, seed=0, epoch=0)
def test_ranks_go_in_step_and_differ_by_one_sample_at_most(
    num_samples: int, world_size: int, local_batch_size: int, seed: int | None, epoch: int
) -> None:
    ranks = deal(num_samples, world_size, local_batch_size, seed, epoch)
    assert len({len(shares) for shares in ranks}) == 1
    for step, shares in enumerate(zip(*ranks, strict=True)):
        counts = [len(share.indices) for share in shares]
        assert max(counts) - min(counts) <= 1
        assert max(counts) <= local_batch_size
        assert {share.global_count for share in shares} == {sum(counts)}
        assert {share.step for share in shares} == {step}
        assert abs(sum(share.weight for share in shares) - world_size) < 1e-9


@given(**sizes)
@example(num_samples=5, world_size=12, local_batch_size=1, seed=0, epoch=0)
def test_the_ranks_together_see_what_one_process_would(
    num_samples: int, world_size: int, local_batch_size: int, seed: int | None, epoch: int
) -> None:
    ranks = deal(num_samples, world_size, local_batch_size, seed, epoch)
    (alone,) = deal(num_samples, 1, world_size * local_batch_size, seed, epoch)
    together = [[index for share in shares for index in share.indices] for shares in zip(*ranks, strict=True)]
    assert together == [list(share.indices) for share in alone]


@given(**sizes, start=st.integers(0, 250), rank=st.integers(0, 11))
def test_a_resumed_epoch_goes_on_as_it_would_have(
    num_samples: int, world_size: int, local_batch_size: int, seed: int | None, epoch: int, start: int, rank: int
) -> None:
    shares = Shares(
        num_samples=num_samples,
        rank=rank % world_size,
        world_size=world_size,
        local_batch_size=local_batch_size,
        seed=seed,
    )
    assert list(shares.epoch(epoch, start=start)) == list(shares.epoch(epoch))[start:]
    assert len(list(shares.epoch(epoch))) == shares.num_steps
