"""The script of ddp_script.py under Poseidon: the five marked lines are others.

torchrun --nproc-per-node 2 examples/ddp_script_migrated.py --out /tmp/model.pt
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import poseidon  # 1


def make_data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    shapes = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    return TensorDataset(shapes[labels] + 2.0 * torch.randn(count, 1, 28, 28, generator=generator), labels)


def make_model() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(features, nn.Linear(576, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", default="model.pt")
    options = parser.parse_args()

    poseidon.init()  # 2
    torch.manual_seed(dist.get_rank())
    data, test_data = make_data(2048, seed=1), make_data(512, seed=2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    test_loader = DataLoader(test_data, batch_size=64, sampler=DistributedSampler(test_data, shuffle=False))

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    poseidon.distribute(model, optimizer)  # 3
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(loader))

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.detach()
        dist.all_reduce(total)
        accuracy = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            mean = total.item() / len(loader) / dist.get_world_size()
            print(f"epoch {epoch}: loss {mean:.6f}, accuracy {accuracy:.4f}")
            torch.save(model.state_dict(), options.out)  # 4
    poseidon.shutdown()  # 5


if __name__ == "__main__":
    main()
