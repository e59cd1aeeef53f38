"""What each layer of a model costs: operations, and seconds forward and backward on the device where it lives.

Comes in: a model, a batch and a loss. Goes out: a `ModelProfile`. On the meta device, where nothing is computed, all is
known but the seconds; `scale_to` then spreads a published step time over the layers.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from poseidon.errors import ProfileError
from poseidon.profile.flops import forward_flops
from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile
from poseidon.profile.structure import StepWatch, owned_parameters

Loss = Callable[[nn.Module, Any], torch.Tensor]
"""Calls the model on a batch and gives a scalar, as a task's `loss` does."""

NUM_PASSES = 5
"""Timed forward and backward passes, of which the median counts."""


def profile_model(
    model: nn.Module, sample: Any, loss: Loss, *, batch_size: int | None = None, num_passes: int = NUM_PASSES
) -> ModelProfile:
    """Runs a few training passes of a model and tells what each layer costs.

    The gradients, buffers and random numbers of the model are afterwards what they were.

    The seconds of all layers add up to the pass that was measured, with two approximations. What happens between layers
    that own parameters (activations, pooling, the loss) counts with the layer that follows it, in forward as in
    backward. And of a fully connected layer's backward, half is taken to be its weight gradient, which the profile
    leaves out, because the two products of its backward have equally many operations.

    Args:
        model: Where it lives is where it is measured.
        sample: One rank's batch, on the same device.
        loss: Called with the model and the sample.
        batch_size: Samples in the batch; the length of the first tensor in it if left out.
        num_passes: How many passes are timed.

    Returns:
        The layers in forward order. On the meta device their seconds are zero.

    Raises:
        ProfileError: The model owns no trainable parameters, or the loss has no gradient.
    """
    device = _device_of(model)
    if batch_size is None:
        batch_size = next((t.shape[0] for t in tree_leaves(sample) if isinstance(t, torch.Tensor) and t.dim()), 1)
    with _left_as_it_was(model, device):
        counter = _FlopCounter(model)
        watch = StepWatch(model)
        _pass(model, sample, loss)
        counter.remove()
        profile = watch.profile(batch_size)
        timer = _PassTimer(model, device)
        if device.type != "meta":
            for number in range(num_passes + 1):
                timer.run(lambda: loss(model, sample), keep=number > 0)
                model.zero_grad(set_to_none=True)
        timer.remove()
    layers = tuple(
        layer.model_copy(update={"flops": counter.flops.get(layer.name, 0), **timer.seconds(layer, counter.fed)})
        for layer in profile.layers
    )
    return profile.model_copy(update={"layers": layers, "source": _source(device, num_passes)})


def scale_to(profile: ModelProfile, total_seconds: float, *, source: str) -> ModelProfile:
    """Spreads the seconds of one rank's step over the layers by their operations, a third forward, the rest backward.

    A fully connected layer's weight gradient, another third of that layer's share, is not in its backward seconds (see
    `LayerSpec`): `ModelProfile.seconds` of the result is smaller than `total_seconds` by so much.

    Args:
        profile: With operations.
        total_seconds: Forward and backward pass over `profile.batch_size` samples.
        source: Where this figure was published.

    Raises:
        ProfileError: No layer has operations.
    """
    total_flops = sum(layer.flops for layer in profile.layers)
    if not total_flops:
        raise ProfileError(f"cannot spread {total_seconds}s over the layers of {profile.model}: none has operations")
    return profile.model_copy(
        update={
            "layers": tuple(_with_share(layer, total_seconds * layer.flops / total_flops) for layer in profile.layers),
            "source": source,
        }
    )


def _with_share(layer: LayerSpec, seconds: float) -> LayerSpec:
    products = 1 if layer.structure is GradientStructure.OUTER_PRODUCT else 2
    return layer.model_copy(update={"forward_seconds": seconds / 3, "backward_seconds": products * seconds / 3})


def _device_of(model: nn.Module) -> torch.device:
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise ProfileError(f"cannot profile {type(model).__name__}: it owns no trainable parameters")
    return parameter.device


def _source(device: torch.device, num_passes: int) -> str:
    if device.type == "meta":
        return "counted on the meta device, not measured"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return f"measured on {where}, median of {num_passes} passes"


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _pass(model: nn.Module, sample: Any, loss: Loss) -> None:
    value = loss(model, sample)
    if not value.requires_grad:
        raise ProfileError(f"cannot profile {type(model).__name__}: the loss does not depend on a trainable parameter")
    value.backward()
    model.zero_grad(set_to_none=True)


class _FlopCounter:
    """Adds up the operations of each layer over the calls of one pass."""

    def __init__(self, model: nn.Module) -> None:
        self.flops: dict[str, int] = {}
        self.fed: set[str] = set()
        """Layers whose input needs a gradient: all but those at the bottom."""
        self._handles = [
            model.get_submodule(name).register_forward_hook(
                lambda m, a, k, y, n=name: self._count(n, m, a, k, y), with_kwargs=True
            )
            for name in owned_parameters(model)
        ]

    def _count(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        if given and made:
            self.flops[name] = self.flops.get(name, 0) + forward_flops(module, given[0], made[0])
        if any(t.requires_grad for t in given):
            self.fed.add(name)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass
class _Laps:
    """Seconds of one layer, one entry per pass."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


class _PassTimer:
    """A stop watch with laps: whichever layer has just ended gets the time since the one before it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        owned = owned_parameters(model)
        self._laps = {name: _Laps() for name in owned}
        self._current: dict[str, float] = {}
        self._last_name = ""
        self._last = 0.0
        self._handles: list[Any] = []
        for name, parameters in owned.items():
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_hook(lambda *_, n=name: self._lap(n)))
            for parameter in parameters.values():
                hook = parameter.register_post_accumulate_grad_hook
                self._handles.append(hook(lambda _, n=name: self._lap(n)))

    def run(self, compute: Callable[[], torch.Tensor], *, keep: bool) -> None:
        """Times one forward and one backward pass; the first one of all only warms up."""
        self._start()
        value = compute()
        forward = self._stop()
        self._start()
        value.backward()
        backward = self._stop()
        if keep:
            for name, laps in self._laps.items():
                laps.forward.append(forward.get(name, 0.0))
                laps.backward.append(backward.get(name, 0.0))

    def _start(self) -> None:
        self._current, self._last_name, self._last = {}, "", self._now()

    def _stop(self) -> dict[str, float]:
        if self._last_name:
            self._lap(self._last_name)  # what follows the last layer
        return self._current

    def _lap(self, name: str) -> None:
        now = self._now()
        self._current[name] = self._current.get(name, 0.0) + now - self._last
        self._last, self._last_name = now, name

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self, layer: LayerSpec, fed: set[str]) -> dict[str, float]:
        laps = self._laps[layer.name]
        if not laps.forward:
            return {}
        backward = median(laps.backward)
        if layer.structure is GradientStructure.OUTER_PRODUCT:
            backward = backward / 2 if layer.name in fed else 0.0
        return {"forward_seconds": median(laps.forward), "backward_seconds": backward}

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
