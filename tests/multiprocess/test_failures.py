"""A rank that dies, ends by an error, goes ahead or fell behind: the others say who and why, soon, and none hangs."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from poseidon.comm import SCHEMES
from poseidon.comm import liveness as liveness_module
from poseidon.errors import CommError, PeerLostError
from poseidon.runtime import join
from poseidon.runtime.attach import attach
from support.ranks import run_ranks
from support.steps import plan_for, rows

pytestmark = pytest.mark.multiprocess

MOST_SECONDS = 15.0


def square(model, x):
    return model(x).square().mean()


def data(rank, step):
    return rows(rank, step, 5, 64)


def make_run(world_size, kind):
    group = join.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_for(model, world_size, SCHEMES[kind](), lambda: square(model, data(0, 0)))
    return model, optimizer, attach(model, optimizer, plan, group)


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        square(model, data(rank, step)).backward()
        optimizer.step()


def lose(rank, world_size, kind, victim, how):
    """Trains until a rank is lost; what the others saw, and after how many seconds."""
    model, optimizer, run = make_run(world_size, kind)
    train(model, optimizer, rank, range(2))
    run.group.barrier()
    start = time.monotonic()
    if rank == victim:
        if how == "kill":
            square(model, data(rank, 2))
            os.kill(os.getpid(), signal.SIGKILL)
        join.shutdown("ValueError: the loss is not a number")
        return None
    try:
        train(model, optimizer, rank, range(2, 50))
    except PeerLostError as error:
        seconds = time.monotonic() - start
        with pytest.raises(PeerLostError):  # and it stays so
            train(model, optimizer, rank, range(50, 51))
        before = {thread.name for thread in threading.enumerate()}
        assert {"poseidon-issue", "poseidon-complete"} <= before
        try:
            run.detach()
        except CommError:
            assert kind == "sharded_server", "only there the others are needed to undo what was done"
        join.shutdown(str(error))
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("poseidon-")]
        return str(error), seconds
    return None


@pytest.mark.parametrize("kind", ["all_reduce", "sufficient_factor", "sharded_server"])
def test_a_killed_rank_is_named(kind):
    found = run_ranks(3, lose, kind, 2, "kill", init=False, expect_dead=[2])
    for message, seconds in found[:2]:
        assert "rank 2 is gone: the process ended" in message
        assert seconds < MOST_SECONDS


def test_rank_0_killed():
    found = run_ranks(3, lose, "all_reduce", 0, "kill", init=False, expect_dead=[0])
    for message, seconds in found[1:]:
        assert "rank 0 is gone" in message
        assert seconds < MOST_SECONDS


@pytest.mark.parametrize("kind", ["all_reduce", "sharded_server"])
def test_a_rank_that_ends_by_an_error_says_why(kind):
    found = run_ranks(3, lose, kind, 1, "error", init=False)
    for rank in (0, 2):
        message, seconds = found[rank]
        assert "rank 1 ended with: ValueError: the loss is not a number" in message
        assert seconds < MOST_SECONDS


def ahead(rank, world_size, kind):
    """Rank 1 has a batch more than the others, which wait for it at the end."""
    liveness_module.PATIENCE_SECONDS = 2.0
    model, optimizer, run = make_run(world_size, kind)
    train(model, optimizer, rank, range(3))
    start = time.monotonic()
    go_on = square(model, data(rank, 3)).backward if rank == 1 else run.check_replicas
    with pytest.raises(CommError) as caught:
        go_on()
    message = str(caught.value)
    join.shutdown(message)
    return message, time.monotonic() - start


@pytest.mark.parametrize("kind", ["all_reduce", "sufficient_factor", "sharded_server"])
def test_a_rank_that_is_ahead_is_told(kind):
    found = run_ranks(3, ahead, kind, init=False)
    assert "exchange 3" in found[1][0]
    assert "every rank must run backward equally often" in found[1][0]
    assert "comparing replicas" in found[1][0]
    for rank in (0, 2):
        assert "rank 1 ended with" in found[rank][0]
    assert max(seconds for _, seconds in found) < MOST_SECONDS


def slow(rank, world_size):
    """A rank that takes its time is waited for, whatever the others wait in."""
    liveness_module.PATIENCE_SECONDS = 0.5
    model, optimizer, run = make_run(world_size, "sharded_server")
    for step in range(2):
        if rank == step:
            time.sleep(1.5)
        train(model, optimizer, rank, [step])
    if rank == 0:
        time.sleep(1.5)
    run.check_replicas()
    run.detach()
    join.shutdown()


def test_a_slow_rank_is_waited_for():
    run_ranks(2, slow, init=False)


def stopped(rank, world_size):
    """A process that stands still, its connections open, counts as gone after a while."""
    liveness_module.LOST_SECONDS = 4.0
    model, optimizer, run = make_run(world_size, "all_reduce")
    train(model, optimizer, rank, range(2))
    processes = run.group.all_gather_text(str(os.getpid()))
    start = time.monotonic()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(PeerLostError, match="rank 2 is gone: no sign of life for") as caught:
        train(model, optimizer, rank, range(2, 4))
    seconds = time.monotonic() - start
    run.detach()
    if rank == 0:
        os.kill(int(processes[2]), signal.SIGKILL)
    join.shutdown(str(caught.value))
    return seconds


def test_a_rank_that_stands_still_is_named():
    assert max(run_ranks(3, stopped, init=False, expect_dead=[2])[:2]) < MOST_SECONDS
