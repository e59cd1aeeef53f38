"""A rank that dies, ends by an error, goes ahead or fell behind: the others say who and why, soon, and none hangs."""

import logging
import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from poseidon.comm import SCHEMES, lateness
from poseidon.comm import liveness as liveness_module
from poseidon.errors import CommError, PeerLostError
from poseidon.runtime import join
from poseidon.runtime.attach import attach
from support.faults import RAISED, Injection, Injector
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


@pytest.mark.parametrize(
    "kind",
    [
        "all_reduce",
        pytest.param("sufficient_factor", marks=pytest.mark.thorough),
        pytest.param("sharded_server", marks=pytest.mark.thorough),
    ],
)
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


@pytest.mark.thorough
def test_a_slow_rank_is_waited_for():
    run_ranks(2, slow, init=False)


def meet(rank, world_size, kind, injection, folder):
    """Trains until a rank has met its fault; what this rank then saw, and after how many seconds."""
    liveness_module.LOST_SECONDS = 4.0
    model, optimizer, run = make_run(world_size, kind)
    injector = Injector([injection], rank, Path(folder))
    injector.watch_transfers()

    def watch(module, inputs, found):
        found.register_hook(lambda _: injector.reach_end_of_backward())

    model[0].register_forward_hook(watch)
    train(model, optimizer, rank, range(2))
    processes = run.group.all_gather_text(str(os.getpid()))
    start = time.monotonic()
    try:
        for step in range(2, 20):
            injector.step = step
            train(model, optimizer, rank, [step])
            injector.reach("evaluation")
            run.mean(1.0)
    except PeerLostError as error:
        seconds = time.monotonic() - start
        if injection.fault == "SIGSTOP" and rank == 0:
            os.kill(int(processes[injection.rank]), signal.SIGKILL)
        with suppress(CommError):
            run.detach()
        join.shutdown(str(error))
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("poseidon-")]
        return str(error), seconds
    except (KeyboardInterrupt, ValueError, MemoryError) as error:  # as a program that ends by it would
        join.shutdown(f"{type(error).__name__}: {error}")
    return None


WORDS = {
    "SIGTERM": "is gone: the process ended",
    "SIGKILL": "is gone: the process ended",
    "SIGSTOP": "is gone: no sign of life for",
    "SIGINT": "ended with: KeyboardInterrupt",
    "exception": "ended with: ValueError: the loss is not a number",
    "out_of_memory": "ended with: MemoryError",
}
"""How the others speak of it."""
IN_TRANSFERS = {
    "all_reduce": "all-reduce",
    "sufficient_factor": "factor gather",
    "sharded_server": "server push",
}
USUAL = [
    ("SIGTERM", "all_reduce", "all-reduce"),
    ("SIGINT", "sufficient_factor", "factor gather"),
    ("SIGKILL", "sharded_server", "server push"),
    ("out_of_memory", "sharded_server", "server push"),
    ("SIGSTOP", "all_reduce", "evaluation"),
]
"""Of all combinations a few, in which each fault, each kind of transfer and a call outside any exchange occur."""
OTHERS = [
    (fault, kind, phase)
    for fault in WORDS
    for kind, own in IN_TRANSFERS.items()
    for phase in (own, "evaluation")
    if (fault, kind, phase) not in USUAL and not (fault in RAISED and phase == "all-reduce")
]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("fault", "kind", "phase"), USUAL + [pytest.param(*one, marks=pytest.mark.thorough) for one in OTHERS]
)
def test_whatever_ends_a_rank_the_others_say_who(fault, kind, phase, tmp_path):
    """The same outcome for each of them, in the middle of a transfer and in a call outside any exchange."""
    victim = 1
    injection = Injection(fault=fault, phase=phase, rank=victim, step=3)
    dies = fault in ("SIGTERM", "SIGKILL", "SIGSTOP")
    found = run_ranks(3, meet, kind, injection, str(tmp_path), init=False, expect_dead=[victim] if dies else [])
    for rank in (0, 2):
        message, seconds = found[rank]
        assert f"rank {victim} {WORDS[fault]}" in message
        assert "on host " in message
        assert seconds < MOST_SECONDS


def late(rank, world_size, waits_in, seconds):
    """Rank 1 takes its time; what the other rank's log says meanwhile."""
    lateness.FIRST_REMINDER_SECONDS = 0.5
    liveness_module.LOST_SECONDS = liveness_module.LEAST_SILENCE_SECONDS = seconds / 3
    said: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelno, record.getMessage()))
    logging.getLogger("poseidon").addHandler(handler)
    model, optimizer, run = make_run(world_size, "all_reduce")
    train(model, optimizer, rank, range(2))
    if rank == 1:
        time.sleep(seconds)
    if waits_in == "a mean":
        run.mean(1.0)
    else:
        train(model, optimizer, rank, [2])
    run.detach()
    join.shutdown()
    return [text for level, text in said if level >= logging.WARNING]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("waits_in", "words"),
    [
        ("an exchange", "in counts of exchange 2"),
        pytest.param("a mean", "in taking a mean over the ranks", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_takes_three_times_the_deadline_is_waited_for_and_named(waits_in, words):
    first, second = run_ranks(2, late, waits_in, 6.0, init=False)
    assert re.fullmatch(rf"rank 0: waiting \d+s for rank 1 \(\S+\), which is alive, {words}", first[0])
    assert len(first) >= 2  # and again, at growing intervals
    assert second == []
