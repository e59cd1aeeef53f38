"""Poseidon in a script of Hugging Face Accelerate: the class below stands where `Accelerator` stood.

python examples/with_accelerate.py                                     # one process
torchrun --nproc-per-node 2 examples/with_accelerate.py                # two, the same losses
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import poseidon


class PoseidonAccelerator(Accelerator):
    """Accelerate with Poseidon in the place of DDP, for one model and its optimizer; `run` is theirs."""

    run: poseidon.Run

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, *_: Any, **__: Any) -> nn.Module:
        """Puts it on its device and does not wrap it."""
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Model and optimizer come in one call."""
        prepared = super().prepare(*args, **kwargs)
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, Optimizer)]
        if models and optimizers:
            self.run = poseidon.distribute(*models, *optimizers)
        return prepared

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Called by `accumulate`."""
        return self.run.no_sync()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Of the whole gradient, whichever way its layers travel."""
        self.unscale_gradients()
        return self.run.clip_grad_norm_(max_norm, norm_type)


def make_data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 64, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(64, 10, generator=torch.Generator().manual_seed(0))).argmax(1))


def main(num_epochs: int = 3) -> None:
    poseidon.init()  # before Accelerate joins the ranks itself, so that a lost one is named
    loading = DataLoaderConfiguration(split_batches=True, even_batches=False, use_seedable_sampler=True)
    accelerator = PoseidonAccelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=loading)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8 * num_epochs)
    loader = DataLoader(make_data(920, seed=1), batch_size=64, shuffle=True)
    test_loader = DataLoader(make_data(256, seed=2), batch_size=64)
    model, optimizer, scheduler, loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, loader, test_loader
    )

    def update() -> None:
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    for epoch in range(num_epochs):
        total = torch.zeros(2)
        with accelerator.run.join(update):  # 920 samples: the last batch is of 24, all on the first rank
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    update()
                total += torch.tensor([loss.item() * len(y), len(y)])
        loss_sum, count = accelerator.reduce(total).tolist()
        model.eval()
        with torch.no_grad():
            hits = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in test_loader]
        model.train()
        accelerator.print(f"epoch {epoch}: loss {loss_sum / count:.6f}, accuracy {torch.cat(hits).float().mean():.4f}")

    accelerator.run.check_replicas()
    if accelerator.is_main_process:
        print(accelerator.run.plan.summary())
    poseidon.shutdown()


if __name__ == "__main__":
    main()
