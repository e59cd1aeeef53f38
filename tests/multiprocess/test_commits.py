"""Commits in memory: all ranks die, and training goes on bit for bit; one host's memory may be lost or damaged."""

import itertools
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from poseidon.comm import SCHEMES
from poseidon.comm.group import Group
from poseidon.errors import CheckpointError
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime import commits
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.checkpoint import Draft, Shelf
from poseidon.runtime.options import RunOptions
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

NUM_STEPS = 12
COMMITTED = 7
DIED = 9


def emulate_hosts(folder: Path, host: int, attempt: int) -> None:
    """Memory for each host, as a launcher that starts again gives it."""
    os.environ["GROUP_RANK"] = str(host)
    os.environ["POSEIDON_MEMORY"] = str(folder / f"host{host}")
    os.environ["POSEIDON_MAX_RESTARTS"] = "3"
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)


def train(rank, world_size, folder, scheme, attempt, dies):
    """Adam, dropout and shuffled data; returns the losses of the steps made here and a digest of the parameters."""
    emulate_hosts(folder, rank, attempt)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    group = Group.of_default()
    plan = uniform_plan(profile_structure(model), world_size, SCHEMES[scheme]())
    run = attach(model, optimizer, plan, group, RunOptions(mean="samples"))
    torch.manual_seed(100 + rank)
    data = torch.utils.data.TensorDataset(
        torch.randn(37, 6, generator=torch.Generator().manual_seed(2)), torch.arange(37) % 3
    )
    loader = run.shard(data, batch_size=4, seed=5)
    made = run.resume()
    losses = []
    while made < NUM_STEPS:
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((made, float(loss.detach())))
            made += 1
            if made in (3, COMMITTED):
                assert run.commit()
            if dies and made == DIED:
                run._commits.finish()
                group.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            if made == NUM_STEPS:
                break
    resumption = run.resumption
    parameters = [parameter.detach().tolist() for parameter in model.parameters()]
    run.detach()
    return losses, parameters, resumption


@pytest.mark.parametrize("scheme", [pytest.param("all_reduce", marks=pytest.mark.thorough), "sharded_server"])
def test_all_ranks_die_and_training_goes_on_bit_for_bit(tmp_path: Path, scheme: str) -> None:
    undisturbed = run_ranks(2, train, tmp_path / "undisturbed", scheme, 0, False)
    run_ranks(2, train, tmp_path / "memory", scheme, 0, True, expect_dead=(0, 1))
    shutil.rmtree(tmp_path / "memory" / "host1")  # with all that was on it
    again = run_ranks(2, train, tmp_path / "memory", scheme, 1, False)
    for (losses, parameters, _), (losses_again, parameters_again, resumption) in zip(undisturbed, again, strict=True):
        assert resumption.step == COMMITTED
        assert resumption.place == "memory"
        assert resumption.lost_steps == DIED - COMMITTED
        assert losses_again == losses[COMMITTED:]
        assert parameters_again == parameters


# What does not need ranks that die: two runs, one after the other, in the same processes


def begin(group: Group, attempt: int, scheme: str = "all_reduce") -> Run:
    """A run as in a new process."""
    commits._numbers = itertools.count()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    plan = uniform_plan(profile_structure(model), group.world_size, SCHEMES[scheme]())
    return attach(model, torch.optim.Adam(model.parameters()), plan, group)


def make_steps(run: Run, count: int) -> None:
    assert run.optimizer is not None
    for _ in range(count):
        run.optimizer.zero_grad()
        run.model(torch.ones(2, 6)).square().mean().backward()
        run.optimizer.step()


def values(run: Run) -> list[float]:
    """Of the model, and of all that Adam has for its weight."""
    assert run.optimizer is not None
    tensors = [*run.model.parameters(), *run.optimizer.state[next(run.model.parameters())].values()]
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()


def resume_beside_damage(rank: int, world_size: int, folder: Path) -> list[tuple[int, bool]]:
    """A copy in memory is damaged on host 1, in its content and then in its size."""
    emulate_hosts(folder, rank, 0)
    group = Group.of_default()
    outcomes = []
    for damage in (lambda content: content[:-1] + bytes([content[-1] ^ 1]), lambda content: content[:-1]):
        run = begin(group, 0)
        run.resume()
        make_steps(run, 3)
        assert run.commit()
        expected = values(run)
        run.detach()
        if rank == 1:
            path = Shelf(folder / "host1" / "commits0").found()[0].file("model")
            path.write_bytes(damage(path.read_bytes()))
        group.barrier()
        run = begin(group, 1)
        outcomes.append((run.resume(), values(run) == expected if run.step else False))
        run.detach()
    return outcomes


def test_a_damaged_copy_is_replaced_by_that_of_another_host(tmp_path: Path) -> None:
    assert run_ranks(2, resume_beside_damage, tmp_path) == [[(3, True)] * 2] * 2


def resume_unsettled(rank: int, world_size: int, folder: Path) -> list[tuple[int, int]]:
    """What was kept while schemes were tried out goes on under the plan that a run begins with: with no shards."""
    emulate_hosts(folder, rank, 0)
    group = Group.of_default()
    run = begin(group, 0, "sharded_server")
    run.settled = False
    make_steps(run, 3)
    run.save(folder / f"disk{rank}", wait=True)
    assert run.commit()
    run.detach()
    outcomes = []
    for attempt, disk in ((1, None), (0, folder / f"disk{rank}")):
        run = begin(group, attempt)
        outcomes.append((run.resume(disk), len(values(run))))
        run.detach()
    return outcomes


def test_shards_of_a_plan_that_was_tried_out_are_put_together(tmp_path: Path) -> None:
    whole = 24 + 4 + 1 + 24 + 24
    assert run_ranks(2, resume_unsettled, tmp_path) == [[(3, whole)] * 2] * 2


def fail_on_one_rank(rank: int, world_size: int, folder: Path) -> tuple[list[bool], str]:
    """Rank 0 cannot tell the size of the first state; in a second run rank 1 cannot write."""
    emulate_hosts(folder, rank, 0)
    group = Group.of_default()
    committed, said = [], ""
    for failing_rank, owner, name, count in ((0, commits, "_sizes", 1), (1, Draft, "write", 2)):
        run = begin(group, 0)
        make_steps(run, 1)
        with patch.object(owner, name, side_effect=ValueError("odd")) if rank == failing_rank else nullcontext():
            committed += [run.commit() for _ in range(count)]  # what fails on a thread is known at the next one
        said += str(run.events)
        run.detach()
    return committed, said


def test_what_fails_on_one_rank_ends_commits_on_all(tmp_path: Path) -> None:
    for committed, said in run_ranks(2, fail_on_one_rank, tmp_path):
        assert committed == [False, True, False]
        assert "rank 0: ValueError: odd" in said
        assert "rank 1: ValueError: odd" in said


def go_on_from_two_trainings(rank: int, world_size: int, folder: Path) -> tuple[int, str]:
    """Each host's disk has the same step, of another training."""
    emulate_hosts(folder, rank, 0)
    group = Group.of_default()
    for number in range(2):
        run = begin(group, 0)
        make_steps(run, 2)
        run.save(folder / f"disk{number}{rank}", wait=True)
        run.detach()
    run = begin(group, 0)
    problem = ""
    try:
        run.load(folder / f"disk{rank}{rank}")
    except CheckpointError as error:
        problem = str(error)
    made = run.resume(folder / f"disk{rank}{rank}")
    run.detach()
    return made, problem


def test_a_step_of_two_trainings_is_never_put_together(tmp_path: Path) -> None:
    for made, problem in run_ranks(2, go_on_from_two_trainings, tmp_path):
        assert made == 0
        assert "there is no complete checkpoint that all ranks see" in problem
