"""What stands around a step in the loop: clipping, averages, schedulers, optimizers, copies and saved states."""

import copy
import pickle
from typing import Any, ClassVar

import torch
from tests.equivalence.situation import Side, Situation, numbers
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

ON_THE_SERVER = "there `p.grad` belongs to the optimizer; `run.clip_grad_norm_` sees it"


class ClipGradNorm(Situation):
    """`torch.nn.utils.clip_grad_norm_`, the norm logged."""

    left_out: ClassVar = {"sharded_server": ON_THE_SERVER, "mix": ON_THE_SERVER}

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward()
        norm = nn.utils.clip_grad_norm_(side.model.parameters(), 0.01)
        side.note("norm", {"norm": norm})
        side.note_gradients()
        side.optimizer.step()


class RunClipsGradNorm(Situation):
    """`run.clip_grad_norm_`, the norm logged."""

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward()
        side.note("norm", {"norm": side.clip_grad_norm_(0.01)})
        side.note_gradients()
        side.optimizer.step()


class GradNormLogged(Situation):
    """The norm of each gradient is logged, none is changed."""

    left_out: ClassVar = {"sharded_server": ON_THE_SERVER, "mix": ON_THE_SERVER}

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward()
        side.note("norms", {n: p.grad.norm() for n, p in side.model.named_parameters() if p.grad is not None})
        side.optimizer.step()


class ZeroGrad(Situation):
    """Gradients zeroed in place, and by the model."""

    num_steps = 4

    def step(self, side: Side) -> None:
        if side.index % 2:
            side.optimizer.zero_grad(set_to_none=False)
        else:
            side.model.zero_grad()
        side.backward()
        side.note_gradients()
        side.optimizer.step()


class NeverZeroed(Situation):
    """Gradients that are never zeroed: each step adds to those of all steps before."""

    left_out: ClassVar = {
        "sharded_server": "there a gradient counts for one `optimizer.step()`",
        "mix": "there a gradient counts for one `optimizer.step()`",
    }

    def step(self, side: Side) -> None:
        side.backward()
        side.note_gradients()
        side.optimizer.step()


class MovingAverage(Situation):
    """An exponential moving average of the parameters, in `AveragedModel` and by hand, that also computes."""

    def begin(self, side: Side) -> None:
        self.average = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.by_hand = {name: p.detach().clone() for name, p in side.model.named_parameters()}

    def step(self, side: Side) -> None:
        super().step(side)
        self.average.update_parameters(side.model)
        with torch.no_grad():
            for name, parameter in side.model.named_parameters():
                self.by_hand[name].lerp_(parameter, 0.1)
            side.note("outputs", {"y": self.average(self.batch(0, 99))})

    def end(self, side: Side) -> None:
        side.note("average", dict(self.average.named_parameters()))
        side.note("average by hand", dict(self.by_hand))


class WeightAveraging(Situation):
    """Stochastic weight averaging with its scheduler, the copy trained batch statistics of its own."""

    num_steps = 5
    joins_batches = False

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    def batch(self, rank: int, step: int) -> Any:
        return numbers(rank, step, 4, 6)

    def begin(self, side: Side) -> None:
        self.average = AveragedModel(side.model)
        self.scheduler = SWALR(side.optimizer, swa_lr=0.05, anneal_epochs=2)

    def step(self, side: Side) -> None:
        super().step(side)
        if side.index >= 2:
            self.average.update_parameters(side.model)
            self.scheduler.step()

    def end(self, side: Side) -> None:
        update_bn([self.batch(rank, 50) for rank in range(2)], self.average)
        side.note("average", dict(self.average.named_parameters()) | dict(self.average.named_buffers()))


class Scheduler(Situation):
    """A scheduler that changes learning rate and momentum in each step."""

    num_steps = 5

    def begin(self, side: Side) -> None:
        self.scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(side.optimizer, max_lr=0.3, total_steps=8)

    def step(self, side: Side) -> None:
        super().step(side)
        self.scheduler.step()


class SchedulerWarmup(Scheduler):
    """Warm-up and then a plateau scheduler that looks at the loss."""

    def begin(self, side: Side) -> None:
        self.scheduler = torch.optim.lr_scheduler.LinearLR(side.optimizer, 0.1, total_iters=3)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(side.optimizer, patience=0)

    def step(self, side: Side) -> None:
        super().step(side)
        self.plateau.step(1.0)


class Foreach(Situation):
    """An optimizer with `foreach=True`."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


class Fused(Situation):
    """An optimizer with `fused=True`."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


class ForLoop(Situation):
    """An optimizer with `foreach=False`, `amsgrad` and groups with settings of their own."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "lr": 0.02},
        ]
        return torch.optim.AdamW(groups, lr=0.01, amsgrad=True, foreach=False)


class TwoOptimizers(Situation):
    """The model's parameters are shared between two optimizers, of which `distribute` is given one."""

    left_out: ClassVar = {
        "sharded_server": "it runs the optimizer that it was given",
        "mix": "it runs the optimizer that it was given",
    }

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.1, momentum=0.9)

    def begin(self, side: Side) -> None:
        self.other = torch.optim.Adam([*side.model.table.parameters(), *side.model.last.parameters()], lr=0.02)

    def step(self, side: Side) -> None:
        side.model.zero_grad()
        side.backward()
        side.note_gradients()
        side.optimizer.step()
        self.other.step()


class Copied(Situation):
    """The model is copied by `deepcopy` while it trains; the copy computes and trains alone."""

    def step(self, side: Side) -> None:
        super().step(side)
        twin = copy.deepcopy(side.model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        optimizer.zero_grad()
        self.loss(twin, self.batch(0, 70 + side.index)).backward()
        optimizer.step()
        side.note("copy", dict(twin.named_parameters()))


class StateSaved(Situation):
    """States of model and optimizer are saved after two steps and loaded again after four."""

    num_steps = 6

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(self, side: Side) -> None:
        super().step(side)
        if side.index == 1:
            self.states = copy.deepcopy((side.model.state_dict(), side.optimizer.state_dict()))
        if side.index == 3:
            side.model.load_state_dict(self.states[0])
            side.optimizer.load_state_dict(self.states[1])
        side.note("state", {k: v for k, v in side.model.state_dict().items() if isinstance(v, torch.Tensor)})


class StateFromOneProcess(Situation):
    """A checkpoint that one process wrote is loaded after two steps."""

    num_steps = 4

    def model_and_state(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        return self.model().state_dict()

    def step(self, side: Side) -> None:
        if side.index == 2:
            side.model.load_state_dict(self.model_and_state())
        super().step(side)


class Pickled(Situation):
    """After `detach` the model is pickled, and goes on training alone as what was loaded."""

    def afterwards(self, side: Side) -> None:
        side.model = pickle.loads(pickle.dumps(side.model))
        optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1)
        optimizer.zero_grad()
        self.loss(side.model, self.batch(0, 80)).backward()
        optimizer.step()


class GoesOnAlone(Situation):
    """After `detach` model and optimizer go on training as they are."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def afterwards(self, side: Side) -> None:
        for _ in range(2):
            side.optimizer.zero_grad()
            self.loss(side.model, self.batch(0, 90)).backward()
            side.optimizer.step()


class ParametersSet(Situation):
    """The loop writes into parameters between steps: clamped, and copied from elsewhere."""

    @torch.no_grad()
    def change(self, side: Side) -> None:
        for parameter in side.model.parameters():
            parameter.clamp_(-0.5, 0.5)
        side.model.norm.weight.data.fill_(0.9)

    def step(self, side: Side) -> None:
        super().step(side)
        self.change(side)
