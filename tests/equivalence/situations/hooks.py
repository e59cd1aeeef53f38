"""Hooks of the user on parameters, modules and the optimizer."""

from typing import Any, ClassVar

import torch
from tests.equivalence.situation import Side, Situation
from torch import nn

NO_LOCAL_GRADIENT = "has gradient hooks"


class ParameterHooks(Situation):
    """`register_hook` on every parameter before `distribute` scales its gradient."""

    def model(self) -> nn.Module:
        model = super().model()
        for number, parameter in enumerate(model.parameters()):
            parameter.register_hook(lambda gradient, n=number: gradient * (1.0 + n / 8))
        return model


class ParameterHooksLater(Situation):
    """`register_hook` on every parameter after `distribute`."""

    refused: ClassVar = dict.fromkeys(
        ("sufficient_factor", "sparse_rows", "mix", "deferred", "two_level"), "gradient hooks"
    )

    def begin(self, side: Side) -> None:
        for number, parameter in enumerate(side.model.parameters()):
            parameter.register_hook(lambda gradient, n=number: gradient * (1.0 + n / 8))


class AccumulateHooks(Situation):
    """`register_post_accumulate_grad_hook` on every parameter before `distribute` counts its calls."""

    def model(self) -> nn.Module:
        model = super().model()
        self.calls = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, n=name: self._count(n))
        return model

    def _count(self, name: str) -> None:
        self.calls[name] += 1

    def end(self, side: Side) -> None:
        side.note("calls", {name: torch.tensor(float(count)) for name, count in self.calls.items()})


class ModuleHooks(Situation):
    """Forward and backward hooks on modules, before `distribute`, that change what passes."""

    def model(self) -> nn.Module:
        model = super().model()
        self.register(model)
        return model

    def register(self, model: nn.Module) -> None:
        for module in (model.first, model.last):
            module.register_forward_pre_hook(lambda _module, args: (args[0] * 1.5,))
            module.register_forward_hook(lambda _module, _args, output: output * 0.5)
            module.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 0.75,))
            module.register_full_backward_pre_hook(lambda _module, outputs: (outputs[0] * 1.25,))
        model.table.register_forward_hook(lambda _module, _args, output: output + 0.1)


class ModuleHooksLater(ModuleHooks):
    """Forward and backward hooks on modules, after `distribute`, that change what passes."""

    def model(self) -> nn.Module:
        return Situation.model(self)

    def begin(self, side: Side) -> None:
        self.register(side.model)


class RootHooks(Situation):
    """Forward and backward hooks on the model itself, and on the output by the loop."""

    def begin(self, side: Side) -> None:
        side.model.register_forward_pre_hook(lambda _module, args: args)
        side.model.register_forward_hook(lambda _module, _args, output: output * 2.0)
        side.model.register_full_backward_hook(lambda *_: None)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 0.5)
        return output.square().mean()


class OptimizerHooks(Situation):
    """Hooks before and after `optimizer.step()` that clamp gradients and shrink parameters."""

    def begin(self, side: Side) -> None:
        side.optimizer.register_step_pre_hook(self.clamp)
        side.optimizer.register_step_post_hook(self.shrink)

    @staticmethod
    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)

    @staticmethod
    @torch.no_grad()
    def shrink(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.mul_(0.99)


class GradientsReplaced(Situation):
    """The loop puts a gradient of its own into `p.grad` before the step, and drops another."""

    left_out: ClassVar = {
        "sharded_server": "`p.grad` belongs to the optimizer there",
        "mix": "`p.grad` belongs to the optimizer there",
    }

    def step(self, side: Side) -> None:
        side.optimizer.zero_grad()
        side.backward()
        side.note_gradients()
        first: Any = side.model.first.weight
        first.grad = first.grad.sign() * 0.01
        side.model.norm.bias.grad = None
        side.optimizer.step()
