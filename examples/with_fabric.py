"""Poseidon in a script of Lightning Fabric: a strategy of a few lines.

python examples/with_fabric.py                                         # one process
torchrun --nproc-per-node 2 examples/with_fabric.py                    # two, the same losses
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poseidon


class PoseidonStrategy(DDPStrategy):
    """Fabric with Poseidon in the place of DDP, for one model and its optimizer; `run` is theirs."""

    run: poseidon.Run

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._backward_sync_control = self  # where `no_backward_sync` is looked for

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Does not wrap it."""
        return module

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, *scheduler: Any) -> Any:
        """Called by `fabric.setup`."""
        self.run = poseidon.distribute(module, *optimizers)
        return super().setup_module_and_optimizers(module, optimizers, *scheduler)

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Called by `fabric.no_backward_sync`."""
        return self.run.no_sync() if enabled else nullcontext()

    def clip_gradients_norm(self, module: nn.Module, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of the whole gradient, whichever way its layers travel."""
        self.precision.unscale_gradients(optimizer)
        return self.run.clip_grad_norm_(*args, **kwargs)


def make_data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 64, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(64, 10, generator=torch.Generator().manual_seed(0))).argmax(1))


def main(num_epochs: int = 3, accumulate: int = 2) -> None:
    poseidon.init()  # before Fabric joins the ranks itself, so that a lost one is named
    strategy = PoseidonStrategy()
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(make_data(1024, seed=1), batch_size=64 // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)

    for epoch in range(num_epochs):
        total = torch.zeros(())
        for index, (x, y) in enumerate(loader, start=1):
            is_accumulating = index % accumulate != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss / accumulate)
            total += loss.detach()
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {fabric.all_reduce(total).item() / len(loader):.6f}")

    strategy.run.check_replicas()
    if fabric.is_global_zero:
        print(strategy.run.plan.summary())
    poseidon.shutdown()


if __name__ == "__main__":
    main()
