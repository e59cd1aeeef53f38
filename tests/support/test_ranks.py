"""The test support itself: what `run_ranks` promises to the tests that stand on it."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from poseidon.errors import PeerLostError
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


def sum_of_ranks(rank: int, world_size: int, start: float) -> tuple[float, int, int]:
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return total.item(), dist.get_rank(), torch.get_num_threads()


def variables(rank: int, world_size: int) -> str:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    seen = os.environ["LOCAL_RANK"]
    dist.destroy_process_group()
    return seen


def lose_peer(rank: int, world_size: int) -> None:
    if rank == 1:
        raise PeerLostError("rank 0 is gone at step 3")
    dist.barrier()


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} is not {second}")


def raise_unpicklable(rank: int, world_size: int) -> None:
    raise UnpicklableError(1, 2)


def die(rank: int, world_size: int, victim: int) -> int:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def sleep_in_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(3, sum_of_ranks, 10.0) == [(33.0, 0, 1), (33.0, 1, 1), (33.0, 2, 1)]


def test_without_init_the_variables_lead_to_a_store() -> None:
    assert run_ranks(2, variables, init=False) == ["0", "1"]


def test_exception_keeps_its_class_and_names_the_rank() -> None:
    with pytest.raises(PeerLostError, match="rank 0 is gone at step 3") as caught:
        run_ranks(2, lose_peer)
    assert caught.value.__notes__[0].startswith("rank 1 raised:\nTraceback")
    assert "in lose_peer" in caught.value.__notes__[0]
    assert caught.value.__notes__[1].startswith("rank 0 ")


def test_exception_that_cannot_be_pickled_is_still_told() -> None:
    with pytest.raises(RuntimeError, match="UnpicklableError: 1 is not 2"):
        run_ranks(1, raise_unpicklable, init=False)


def test_dead_rank_is_named() -> None:
    with pytest.raises(ChildProcessError, match="rank 1 of 2 died") as caught:
        run_ranks(2, die, 1)
    assert "rank 1 died: SIGKILL" in caught.value.__notes__


def test_expected_death_gives_none() -> None:
    assert run_ranks(3, die, 2, expect_dead={2}) == [0, 1, None]


def test_expected_death_that_does_not_come_fails() -> None:
    with pytest.raises(ChildProcessError, match="expected to die, but did not: rank 0 of 2"):
        run_ranks(2, die, 1, expect_dead={0, 1})


def test_late_rank_is_named_with_its_stack() -> None:
    with pytest.raises(TimeoutError, match="late after 1 s: rank 1 of 2") as caught:
        run_ranks(2, sleep_in_rank_1, timeout=1.0)
    assert "in sleep_in_rank_1" in caught.value.__notes__[1]
