"""N ranks against one process on the union of their batches: models, a plan for each scheme, and the comparison."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from poseidon.comm import SCHEMES, CommScheme
from poseidon.comm.group import Group
from poseidon.plan import Plan, uniform_plan
from poseidon.profile.structure import StepWatch
from poseidon.runtime.attach import attach

STEPS = 20
SCHEME_CHOICES = (*SCHEMES, "mix")


class TiedGpt(nn.Module):
    """A tiny language model whose output head is the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Embedding(6, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = x + self.mlp(x)
        return self.head(self.norm(x))


class Embeddings(nn.Module):
    """An embedding, a bag and a sparse embedding under a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(50, 4)
        self.bag = nn.EmbeddingBag(60, 4, mode="mean")
        self.top = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.items(x[:, 0]), self.bag(x[:, 1:])], dim=1))


def make_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(inplace=True), nn.Linear(32, 16, bias=False), nn.Tanh(), nn.Linear(16, 5)
    )


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 5)
    )


def _classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def _tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Callable[[int], tuple[torch.Tensor, torch.Tensor]]]
] = {
    "mlp": (make_mlp, _classes, lambda n: (torch.randn(n, 12), torch.randint(0, 5, (n,)))),
    "cnn": (make_cnn, _classes, lambda n: (torch.randn(n, 1, 8, 8), torch.randint(0, 5, (n,)))),
    "embeddings": (Embeddings, _classes, lambda n: (torch.randint(0, 50, (n, 4)), torch.randint(0, 3, (n,)))),
    "tied_gpt": (TiedGpt, _tokens, lambda n: (torch.randint(0, 11, (n, 6)), torch.randint(0, 11, (n, 6)))),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def make_batches(model: str, count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The union batches; the last one does not divide."""
    torch.manual_seed(1)
    make = MODELS[model][2]
    return [make(size if index < count - 1 else size - 3) for index in range(count)]


def make_plan(model: nn.Module, choice: str, world_size: int, rows: int, sample: Callable[[], torch.Tensor]) -> Plan:
    """The scheme wherever it can be used; `mix` gives each layer its most particular one."""
    watch = StepWatch(model)
    sample().backward()
    profile = watch.profile(rows)
    model.zero_grad()
    if choice != "mix":
        return uniform_plan(profile, world_size, SCHEMES[choice]())  # type: ignore[call-arg]
    order = ("sufficient_factor", "sparse_rows", "sharded_server")
    schemes: dict[str, CommScheme] = {}
    for index, layer in enumerate(profile.layers):
        usable = [SCHEMES[kind]() for kind in order if SCHEMES[kind]().refuse(layer) is None]  # type: ignore[call-arg]
        schemes[layer.name] = usable[0] if index % 3 < 2 else SCHEMES["all_reduce"]()  # type: ignore[call-arg]
    return uniform_plan(profile, world_size, schemes)


def train_alone(
    model_name: str, optimizer_name: str, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """One process on whole batches."""
    make, loss, _ = MODELS[model_name]
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_share(
    rank: int,
    world_size: int,
    model_name: str,
    optimizer_name: str,
    choice: str,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """One rank on its share of each batch, the mean weighted by samples."""
    make, loss, _ = MODELS[model_name]
    torch.manual_seed(rank)  # replicas start different; attaching makes them equal
    if rank == 0:
        torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    x, y = batches[0]
    size = len(x) // world_size
    plan = make_plan(model, choice, world_size, size, lambda: loss(model, x[:size], y[:size]))
    run = attach(model, optimizer, plan, Group.of_default())
    for x, y in batches:
        mine = torch.arange(len(x)).tensor_split(world_size)[rank]
        optimizer.zero_grad()
        if len(mine):
            (loss(model, x[mine], y[mine]) * (len(mine) * world_size / len(x))).backward()
        else:
            run.empty_step()
        optimizer.step()
    run.check_replicas()
    run.detach()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Relative to each tensor's own length."""
    for name, value in expected.items():
        error = torch.linalg.vector_norm(found[name] - value) / torch.linalg.vector_norm(value)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"
