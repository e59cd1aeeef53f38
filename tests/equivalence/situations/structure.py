"""What models look like, and what changes in them while they train."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.equivalence.situation import Branches, Net, Side, Situation, numbers, tokens
from torch import nn


class Plain(Situation):
    """Nothing particular."""

    steps_under_auto = 16


class TiedWeights(Situation):
    """The output head is the embedding's own weight."""

    def model(self) -> nn.Module:
        model = Net()
        model.first, model.norm, model.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 20, bias=False)
        model.last.weight = model.table.weight
        return model


class ReusedModule(Situation):
    """One module stands at two places of the model."""

    class Reused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Linear(8, 8)
            self.chain = nn.Sequential(self.middle, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), self.middle)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.chain(self.norm(self.first(self.table(x)))))

    def model(self) -> nn.Module:
        return self.Reused()


class CalledSeveralTimes(Situation):
    """A layer is called once in the first step, twice in the second, and so on."""

    num_steps = 4

    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            x = self.norm(self.first(self.table(x)))
            for _ in range(times):
                x = torch.tanh(self.again(x)) + x
            return self.last(x)

    def model(self) -> nn.Module:
        return self.Recurrent()

    def sample(self, models: Any) -> None:
        self.loss(models[""], (self.batch(0, 0), 1)).backward()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, times = batch
        return model(x, times).square().mean()

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward(lambda x: self.loss(side.model, (x, side.index + 1)))
        side.note_gradients()
        side.optimizer.step()


class UnusedInSomeSteps(Situation):
    """Layers take turns: all ranks leave out the same ones in a step, sometimes all of them."""

    num_steps = 5

    def model(self) -> nn.Module:
        return Branches()

    def sample(self, models: Any) -> None:
        for way in range(2):
            models[""](self.batch(0, 0), way).square().mean().backward()

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward(lambda x: side.model(x, (0, 1, None, 1, 0)[side.index]).square().mean())
        side.note_gradients()
        side.optimizer.step()


class UnusedOnSomeRanks(UnusedInSomeSteps):
    """Each rank leaves out other layers, another set in each step."""

    steps_under_auto = 16

    joins_batches = False

    def batch(self, rank: int, step: int) -> Any:
        return tokens(rank, step, 4), (0, 1, None)[(rank + step) % 3]

    def sample(self, models: Any) -> None:
        for way in range(2):
            models[""](tokens(0, 0, 4), way).square().mean().backward()

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward(lambda batch: side.model(*batch).square().mean())
        side.note_gradients()
        side.optimizer.step()


class NeverUsed(Situation):
    """Layers that no step uses on any rank."""

    def model(self) -> nn.Module:
        return Branches()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch, None).square().mean()


class BranchOnData(UnusedOnSomeRanks):
    """Which way a rank goes depends on the numbers in its batch."""

    def batch(self, rank: int, step: int) -> Any:
        x = tokens(rank, step, 4)
        return x, int(x.sum()) % 2


class Frozen(Situation):
    """The embedding and a weight are not trained."""

    def model(self) -> nn.Module:
        model = Branches()
        model.table.requires_grad_(False)
        model.ways[1].weight.requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch, 1).square().mean()


class FrozenLater(Situation):
    """A layer is frozen after two steps, and trained again after four."""

    num_steps = 6

    def step(self, side: Side) -> None:
        if side.index in (2, 4):
            side.model.first.requires_grad_(side.index == 4)
        super().step(side)


class UnfrozenLater(Situation):
    """Layers that are frozen at first are trained from the third step on."""

    num_steps = 5

    def model(self) -> nn.Module:
        model = Net()
        model.table.requires_grad_(False)
        model.first.requires_grad_(False)
        return model

    def step(self, side: Side) -> None:
        if side.index == 2:
            side.model.requires_grad_(True)
        super().step(side)


class AddedLater(Situation):
    """A layer is built and given to the optimizer by `add_param_group` after two steps."""

    num_steps = 5

    def step(self, side: Side) -> None:
        if side.index == 2:
            torch.manual_seed(7)
            side.model.last = nn.Sequential(side.model.last, nn.Tanh(), nn.Linear(5, 4))
            side.optimizer.add_param_group({"params": side.model.last[2].parameters(), "lr": 0.05})
        super().step(side)


class GivenToTheOptimizerLater(Situation):
    """A layer of the model is not updated until the optimizer is given it by `add_param_group`."""

    refused: ClassVar = {"sharded_server": "given none that updates it"}

    num_steps = 5

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        first = {id(parameter) for parameter in model.first.parameters()}
        return torch.optim.SGD([p for p in model.parameters() if id(p) not in first], lr=0.1, momentum=0.9)

    def step(self, side: Side) -> None:
        if side.index == 2:
            side.optimizer.add_param_group({"params": side.model.first.parameters(), "lr": 0.05})
        side.model.zero_grad()
        side.backward()
        side.note_gradients()
        side.optimizer.step()


class OrderChanges(Situation):
    """Backward reaches the layers in another order from the third step on, and so buckets are made anew."""

    num_steps = 9

    class Ordered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor, backwards: bool) -> torch.Tensor:
            x = self.norm(self.first(self.table(x)))
            for part in reversed(self.parts) if backwards else self.parts:
                x = torch.tanh(part(x)) + x
            return self.last(x)

    def model(self) -> nn.Module:
        return self.Ordered()

    def sample(self, models: Any) -> None:
        models[""](self.batch(0, 0), False).square().mean().backward()

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward(lambda x: side.model(x, side.index >= 2).square().mean())
        side.note_gradients()
        side.optimizer.step()


class OrderDiffers(OrderChanges):
    """Backward reaches the layers in another order on every rank and in every step."""

    num_steps = 5
    joins_batches = False

    def batch(self, rank: int, step: int) -> Any:
        return tokens(rank, step, 4), (rank + step) % 2 == 1

    def sample(self, models: Any) -> None:
        models[""](tokens(0, 0, 4), False).square().mean().backward()

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward(lambda batch: side.model(*batch).square().mean())
        side.note_gradients()
        side.optimizer.step()


class MixedDtypes(Situation):
    """Layers in float64, float32 and bfloat16 in one model."""

    tolerance = 0.03

    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Linear(8, 8).float()
            self.narrow = nn.Linear(8, 8).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.middle(self.norm(self.first(self.table(x))).float())
            return self.last(self.narrow(torch.tanh(x).bfloat16()).double())

    def model(self) -> nn.Module:
        return self.Mixed()


class ChannelsLast(Situation):
    """Convolutions whose weights and inputs lie in memory with the channels last."""

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.Tanh(),
            nn.Conv2d(4, 3, 2),
            nn.Flatten(),
            nn.Linear(27, 6),
            nn.Tanh(),
            nn.Linear(6, 4),
        )
        return model.to(memory_format=torch.channels_last)

    refused: ClassVar = {"sharded_server": "not contiguous", "mix": "not contiguous"}

    def batch(self, rank: int, step: int) -> Any:
        return numbers(rank, step, 4, 2, 6, 6).contiguous(memory_format=torch.channels_last)


class GradientsNotContiguous(Situation):
    """Autograd makes gradients that are transposed, expanded or lie in a larger tensor."""

    class Strided(Net):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(5, 4))
            self.wide = nn.Parameter(torch.randn(3, 4))
            self.cut = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x) @ self.turned
            y = y * self.wide.expand(2, 3, 4).sum() + torch.einsum("bsi,ij->bsj", y, self.cut[:, ::2][:, :1])
            return y + self.turned.t().sum() + torch.as_strided(self.cut, (2,), (6,)).sum()

    def model(self) -> nn.Module:
        return self.Strided()


class ParameterNotContiguous(Situation):
    """A parameter that is a transposed view."""

    refused: ClassVar = {"sharded_server": "not contiguous", "mix": "not contiguous"}

    class Turned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(4, 5).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ self.turned

    def model(self) -> nn.Module:
        return self.Turned()


class ComplexParameters(Situation):
    """A parameter of complex numbers."""

    refused: ClassVar = dict.fromkeys(
        ("all_reduce", "sufficient_factor", "sparse_rows", "sharded_server", "mix", "deferred", "two_level"),
        "complex gradients cannot be exchanged",
    )

    class Complex(Net):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.ifft(torch.fft.fft(super().forward(x)) * self.filter).real

    def model(self) -> nn.Module:
        return self.Complex()


class Lstm(Situation):
    """An LSTM of two layers, both directions."""

    class Recurrent(Net):
        kind: ClassVar[type[nn.RNNBase]] = nn.LSTM

        def __init__(self) -> None:
            super().__init__()
            self.recurrent = self.kind(6, 4, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.recurrent(self.table(x))[0]))

    def model(self) -> nn.Module:
        return self.Recurrent()


class Gru(Lstm):
    """A GRU of two layers, both directions."""

    class Recurrent(Lstm.Recurrent):
        kind = nn.GRU


class ParametersAlone(Situation):
    """Parameters that belong to the root module and to lists, used without a module's forward."""

    left_out: ClassVar = {"sufficient_factor": "no weight is used by its own module's forward"}

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(2)])
            self.linear = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = torch.tanh(x @ weight)
            return F.linear(x * self.scale, self.linear.weight, self.linear.bias)

    def model(self) -> nn.Module:
        return self.Root()

    def batch(self, rank: int, step: int) -> Any:
        return numbers(rank, step, 4, 6)


class BatchNorm(Situation):
    """Batch normalization by each rank's own samples, as DDP has it."""

    joins_batches = False

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(64, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 4)),
        )

    def batch(self, rank: int, step: int) -> Any:
        return numbers(rank, step, 4, 2, 6, 6)


class EmptyAndScalar(Situation):
    """Parameters without elements, with one, and without dimensions."""

    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.randn(0, 5))
            self.one = nn.Parameter(torch.randn(1))
            self.scalar = nn.Parameter(torch.randn(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([super().forward(x).flatten(0, 1) * self.one, self.empty]) * self.scalar

    def model(self) -> nn.Module:
        return self.Odd()


class ModelsDiffer(Situation):
    """One rank has a layer more than the others; the first difference is named."""

    refused: ClassVar = dict.fromkeys(
        ("all_reduce", "sufficient_factor", "sparse_rows", "sharded_server", "mix", "deferred", "two_level"),
        "the models differ between ranks",
    )
    num_steps = 0

    def model(self) -> nn.Module:
        model = Net()
        if dist.is_initialized() and dist.get_rank() == 1:
            model.extra = nn.Linear(2, 2)
        return model
