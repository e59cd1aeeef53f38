"""Commits in memory: all ranks die, and training goes on bit for bit; one host's memory may be lost."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from poseidon.comm import SCHEMES
from poseidon.comm.group import Group
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
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
