"""Two networks against each other, each under a run, with batch normalization over all ranks.

python examples/gan.py                                                     # one process
torchrun --nproc-per-node 2 examples/gan.py                                # two, on this machine
poseidon lab --hosts 4 --link 1Gbit/s -- python examples/gan.py            # four emulated hosts
"""

import torch
import torch.nn.functional as F
from torch import nn

import poseidon

BATCH = 64


def ring(count: int) -> torch.Tensor:
    """What is to be imitated: points near a circle."""
    angles = torch.rand(count) * 2 * torch.pi
    return torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def score(discriminator: nn.Module, points: torch.Tensor, target: float) -> torch.Tensor:
    output = discriminator(points)
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, target))


def main(num_steps: int = 400) -> float:
    group = poseidon.init()
    torch.manual_seed(0)
    hidden = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    generator = nn.Sequential(*hidden, nn.Linear(64, 2))
    hidden = [nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    discriminator = nn.Sequential(*hidden, nn.Linear(64, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))

    runs = [poseidon.distribute(generator, of_generator), poseidon.distribute(discriminator, of_discriminator)]
    runs[0].sync_batch_norm()  # as one process with a batch of BATCH times the number of ranks
    torch.manual_seed(1 + group.rank)  # other noise and other points on every rank

    for _ in range(num_steps):
        fake = generator(torch.randn(BATCH, 8))
        of_discriminator.zero_grad()
        (score(discriminator, ring(BATCH), 1.0) + score(discriminator, fake.detach(), 0.0)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        score(discriminator, fake, 1.0).backward()  # both runs exchange gradients in here
        of_generator.step()

    for run in runs:
        run.check_replicas()
    generator.eval()
    with torch.no_grad():
        radius = generator(torch.randn(1000, 8)).norm(dim=1)
    near = float(((radius - 1).abs() < 0.3).float().mean())
    if group.rank == 0:
        print(f"{near:.0%} of the points lie near the ring")
    poseidon.shutdown()
    return near


if __name__ == "__main__":
    main()
