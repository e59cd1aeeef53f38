"""How often and how forward and backward go through a model."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from tests.equivalence.situation import Net, Side, Situation, numbers, scaled
from torch import nn
from torch.utils.checkpoint import checkpoint


class SeveralLosses(Situation):
    """Three losses of one forward, added up before one backward."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        y = model(batch)
        return y.square().mean() + 0.5 * y.abs().mean() - 0.1 * y[..., 0].mean()


class BackwardForEachLoss(Situation):
    """Two losses of one forward, each with a backward of its own, the graph retained."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        for batch, share in side.work():
            y = side.model(batch)
            scaled(y.square().mean(), share).backward(retain_graph=True)
            scaled(y.abs().mean(), share).backward()
        side.note_gradients()
        side.optimizer.step()


class SeveralBackwards(Situation):
    """Three forwards and backwards before a step of the optimizer, each exchanged."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        for part in range(3):
            side.backward(step=10 * side.index + part)
        side.note_gradients()
        side.optimizer.step()


class ForwardsThenBackwards(Situation):
    """Two forwards, then their two backwards."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        works = [side.work(10 * side.index + part) for part in range(2)]
        losses = [scaled(self.loss(side.model, batch), share) for work in works for batch, share in work]
        for loss in losses:
            loss.backward()
        side.note_gradients()
        side.optimizer.step()


class RetainGraph(Situation):
    """The same graph backwards twice."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        for batch, share in side.work():
            loss = scaled(self.loss(side.model, batch), share)
            loss.backward(retain_graph=True)
            loss.backward()
        side.note_gradients()
        side.optimizer.step()


class ForwardAlone(Situation):
    """Forwards that no backward follows: an evaluation in between, and a loss that is thrown away."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        for batch, _ in side.work(step=50 + side.index):
            side.model(batch)
            with torch.no_grad():
                side.model(batch)
            side.model.eval()
            side.model(batch[:2])
            side.model.train()
        super().step(side)


class InputGradients(Situation):
    """`torch.autograd.grad` for an inner tensor before the backward: a gradient penalty's first half."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        for batch, share in side.work():
            x = side.model.table(batch)
            y = side.model.last(torch.tanh(side.model.norm(side.model.first(x))))
            (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            scaled((y + slope.detach().mean(-1, keepdim=True)).square().mean(), share).backward()
        side.note_gradients()
        side.optimizer.step()


class SubmoduleCalled(Situation):
    """The loop calls parts of the model, never the model itself."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model.last(torch.tanh(model.norm(model.first(model.table(batch))))).square().mean()


class Gan(Situation):
    """Two models, two optimizers, batch normalization, two forwards of the critic before one backward."""

    joins_batches = False

    def models(self) -> dict[str, nn.Module]:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        critic = nn.Sequential(
            *(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)),
            *(nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        )
        return {"generator": generator, "critic": critic}

    def batch(self, rank: int, step: int) -> Any:
        return numbers(rank, step, 4, 4), numbers(rank, 100 + step, 4, 3)

    def critic_loss(self, models: Any, batch: Any) -> torch.Tensor:
        real, noise = batch
        judged_real = models["critic"](real)
        judged_fake = models["critic"](models["generator"](noise).detach())
        return F.softplus(-judged_real).mean() + F.softplus(judged_fake).mean()

    def generator_loss(self, models: Any, batch: Any) -> torch.Tensor:
        return F.softplus(-models["critic"](models["generator"](batch[1]))).mean()

    def sample(self, models: Any) -> None:
        batch = self.batch(0, 0)
        (self.critic_loss(models, batch) + self.generator_loss(models, batch)).backward()

    def step(self, side: Side) -> None:
        side.optimizers["critic"].zero_grad()
        side.backward(lambda batch: self.critic_loss(side.models, batch))
        side.optimizers["critic"].step()
        side.models["critic"].requires_grad_(False)
        side.optimizers["generator"].zero_grad()
        side.backward(lambda batch: self.generator_loss(side.models, batch))
        side.optimizers["generator"].step()
        side.models["critic"].requires_grad_(True)
        side.note_parameters()


class GanWithoutFreezing(Gan):
    """A GAN whose generator's backward adds to the critic's gradients as well, which are zeroed later."""

    def step(self, side: Side) -> None:
        side.optimizers["critic"].zero_grad()
        side.backward(lambda batch: self.critic_loss(side.models, batch))
        side.optimizers["critic"].step()
        side.optimizers["generator"].zero_grad()
        side.backward(lambda batch: self.generator_loss(side.models, batch))
        side.note_gradients()
        side.optimizers["generator"].step()


class Checkpointed(Situation):
    """Activation checkpointing that is not reentrant, around most of the model."""

    class Recomputed(Net):
        reentrant = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.inner, self.table(x), use_reentrant=self.reentrant)
            return self.last(x)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.norm(self.first(x)))

    def model(self) -> nn.Module:
        return self.Recomputed()


class CheckpointedReentrant(Checkpointed):
    """Reentrant activation checkpointing around most of the model."""

    class Recomputed(Checkpointed.Recomputed):
        reentrant = True


class GradientPenalty(Situation):
    """The backward goes through a gradient that was itself computed."""

    left_out: ClassVar = dict.fromkeys(
        ("sufficient_factor", "mix"), "the layers' second derivatives are no outer products"
    )

    def batch(self, rank: int, step: int) -> Any:
        return numbers(rank, step, 4, 6)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + (slope.square().sum(-1) - 1).square().mean()


class Outputs(Situation):
    """A model whose outputs are in nested containers, some without a gradient."""

    class Nested(Net):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return {"logits": y, "more": [(y[..., 0], x), {"last": y[..., -1]}], "none": None}

    def model(self) -> nn.Module:
        return self.Nested()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch)
        return outputs["logits"].square().mean() + outputs["more"][0][0].mean() + outputs["more"][1]["last"].mean()


class ClosureStep(Situation):
    """`optimizer.step(closure)` computes the loss itself."""

    def step(self, side: Side) -> None:
        def closure() -> float:
            side.optimizer.zero_grad()
            side.backward()
            side.note_gradients()
            return 0.0

        side.optimizer.step(closure)
