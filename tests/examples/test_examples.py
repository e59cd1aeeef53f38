"""What we show works: the examples, as a reader would start them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poseidon.tasks import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.multiprocess


def environment():
    path = [str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def test_your_own_loop_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "your_own_loop.py")], capture_output=True, text=True, timeout=55, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1: loss") == 1
    assert "of the bytes of plain all-reduce" in done.stdout


def test_your_own_loop_alone():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "your_own_loop.py")],
        capture_output=True,
        text=True,
        timeout=55,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss" in done.stdout


def test_my_task_learns():
    task = load_task(f"{EXAMPLES / 'my_task.py'}:spirals")
    torch.manual_seed(0)
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters())
    data = task.make_train_data()
    batch = task.collate([data[index] for index in range(256)])
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
