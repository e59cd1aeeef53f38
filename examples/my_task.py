"""A task of your own for the command line: a small network that tells two spirals apart.

poseidon train examples/my_task.py:spirals --hosts 2 --link 1Gbit/s --out runs/spirals
"""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

from poseidon.tasks import CLASSIFICATION, Task, TaskData


def spirals(batch_size: int = 32) -> Task:
    return Task(
        name="spirals",
        note="synthetic points on two interleaved spirals",
        make_model=lambda: nn.Sequential(
            nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2)
        ),
        make_optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        objective=CLASSIFICATION,
        data=TaskData(make_train=lambda: points(1024, seed=1), make_test=lambda: points(256, seed=2)),
        batch_size=batch_size,
        epochs=10,
    )


def points(count: int, *, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    turns = torch.rand(count, generator=generator) * 1.5
    angles = 2 * math.pi * turns + math.pi * labels
    noise = 0.02 * torch.randn(count, 2, generator=generator)
    return TensorDataset(turns.unsqueeze(1) * torch.stack([angles.cos(), angles.sin()], dim=1) + noise, labels)
