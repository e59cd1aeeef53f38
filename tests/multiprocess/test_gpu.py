"""What only devices show: the schemes over NCCL, one rank on each of two GPUs, against one process."""

import os

import pytest
import torch

from poseidon.runtime import join
from poseidon.runtime.attach import attach
from support.exactness import MODELS, OPTIMIZERS, assert_close, make_batches, make_plan, train_alone
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def train_on_gpu(rank, world_size, choice, batches):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    group = join.init()
    make, loss, _ = MODELS["mlp"]
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    batches = [(x.cuda(), y.cuda()) for x, y in batches]
    x, y = batches[0]
    size = len(x) // world_size
    plan = make_plan(model, choice, world_size, size, lambda: loss(model, x[:size], y[:size]))
    run = attach(model, optimizer, plan, group)
    for x, y in batches:
        mine = torch.arange(len(x)).tensor_split(world_size)[rank]
        optimizer.zero_grad()
        (loss(model, x[mine], y[mine]) * (len(mine) * world_size / len(x))).backward()
        optimizer.step()
    run.check_replicas()
    run.detach()
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    join.shutdown()
    return parameters


@pytest.mark.parametrize("choice", ["all_reduce", "sufficient_factor", "sharded_server", "mix"])
def test_two_gpus_equal_one_process(choice):
    batches = make_batches("mlp", 20, 12)
    expected = train_alone("mlp", "sgd", batches)
    results = run_ranks(2, train_on_gpu, choice, batches, init=False)
    assert_close(results[0], expected)
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value)
