"""Your own training loop on several hosts: the four lines that change are marked.

python examples/your_own_loop.py                                                     # one process
torchrun --nproc-per-node 2 examples/your_own_loop.py                                # two, on this machine
poseidon lab --hosts 4 --link 1Gbit/s -- python examples/your_own_loop.py            # four emulated hosts
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poseidon  # 1


def main(num_epochs: int = 2) -> float:
    group = poseidon.init()  # 2

    torch.manual_seed(0)
    inputs = torch.randn(2048, 256)
    labels = (inputs @ torch.randn(256, 10)).argmax(dim=1)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)

    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(inplace=True), nn.Linear(2048, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = poseidon.distribute(model, optimizer)  # 3
    loader = run.shard(loader)  # 4: each sample once per epoch over all ranks, in another order each time

    for epoch in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # when this returns, p.grad is the mean over all samples of all ranks
            optimizer.step()
        mean = run.mean(loss.item(), len(x))
        if group.rank == 0:
            print(f"epoch {epoch}: loss {mean:.3f}")

    run.check_replicas()  # every rank holds the same bits
    if group.rank == 0:
        print(run.plan.summary())
    poseidon.shutdown()
    return mean


if __name__ == "__main__":
    main()
