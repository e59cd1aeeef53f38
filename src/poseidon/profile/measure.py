"""What each layer of a model costs: operations, and seconds forward and backward on the device where it lives.

Comes in: a model, a batch and a loss. Goes out: a `ModelProfile`. On the meta device, where nothing is computed, all is
known but the seconds; `scale_to` then spreads a published step time over the layers. `LayerTimer` does the same for a
training that is under way.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from poseidon.errors import ProfileError
from poseidon.profile.clock import OperationClock, clock_of
from poseidon.profile.composition import compose
from poseidon.profile.device import measure_compute
from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile
from poseidon.profile.hook import inside_backward
from poseidon.profile.products import Products
from poseidon.profile.structure import StepWatch
from poseidon.profile.timer import AroundCalls, Laps, LapWatch

Loss = Callable[[nn.Module, Any], torch.Tensor]
"""Calls the model on a batch and gives a scalar, as a task's `loss` does."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""As a task has it."""

NUM_PASSES = 10
"""Timed forward and backward passes, of which the median counts; as many again without hooks."""
WARM_UP_PASSES = 1
"""Of either kind, before those that count; what is compiled is compiled then."""


def profile_model(
    model: nn.Module,
    sample: Any,
    loss: Loss,
    *,
    batch_size: int | None = None,
    num_passes: int = NUM_PASSES,
    optimizer: MakeOptimizer | None = None,
    on_pass: Callable[[int, int], None] | None = None,
) -> ModelProfile:
    """Runs a few training passes of a model and tells what each layer costs.

    The gradients, buffers and random numbers of the model are afterwards what they were; so are its parameters, which
    only an optimizer changes.

    A layer is a module that owns trainable parameters, a leaf module without any, or what is computed outside of these
    and takes a thousandth of the step or of its operations: `before <layer>`, and `loss` after the last one.

    Passes with hooks, which time the layers, take turns with passes without, of which only beginning and end are timed:
    these are `step_seconds`. The time that hooks take is not counted; what calling them adds to a pass is left out of
    each lap, so the layers add up to `step_seconds` but for noise. Of a fully connected layer's backward, the weight
    gradient's part is found by computing both of its products alone.

    Args:
        model: Where it lives is where it is measured. A compiled part is one block.
        sample: One rank's batch, on the same device.
        loss: Called with the model and the sample.
        batch_size: Samples in the batch; the length of the first tensor in it if left out.
        num_passes: How many passes of either kind are timed.
        optimizer: Makes the optimizer whose step is to be timed as well.
        on_pass: Told how many passes are done and how many there are.

    Returns:
        The layers in forward order. On the meta device their seconds are zero, and of what is computed outside of
        modules only matrix products are known.

    Raises:
        ProfileError: The model owns no trainable parameters, or the loss has no gradient.
    """
    device = _device_of(model)
    if batch_size is None:
        batch_size = next((t.shape[0] for t in tree_leaves(sample) if isinstance(t, torch.Tensor) and t.dim()), 1)
    training = _Training(model, sample, loss, device, optimizer)
    with _left_as_it_was(model, sample, device, parameters_too=optimizer is not None):
        observer = StepWatch(model)
        try:
            training.check()
        finally:
            structure = observer.profile(batch_size)
        operations = training.operations()
        watch = LapWatch(model, clock_of(device))
        if device.type == "meta":
            training.timed_by_layers(watch, keep=False)
            profile = compose(structure, watch, lambda layer, module: 0.5, operations=operations)
            source = "counted on the meta device, not measured"
            return profile.model_copy(update={"source": source, **training.of_optimizer()})
        for number in range(total := WARM_UP_PASSES + num_passes):
            training.timed_by_layers(watch, keep=number >= WARM_UP_PASSES)
            training.timed_from_outside(keep=number >= WARM_UP_PASSES)
            if on_pass is not None:
                on_pass(number + 1, total)
        share = Products(device).weight_gradient_share
        profile = compose(structure, watch, share, step_seconds=training.step_seconds, operations=operations)
    rates = measure_compute(device)
    threads = "1 thread" if rates.threads == 1 else f"{rates.threads} threads"
    where = rates.name if device.type == "cuda" else f"{threads} of {rates.name}"
    return profile.model_copy(
        update={
            "source": f"measured on {where}, median of {num_passes} passes",
            "device": rates,
            "step_seconds": median(training.step_seconds),
            **training.of_optimizer(),
        }
    )


@dataclass
class _Training:
    """Passes over one batch, timed in two ways."""

    model: nn.Module
    sample: Any
    loss: Loss
    device: torch.device
    make_optimizer: MakeOptimizer | None
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.make_optimizer(parameters) if self.make_optimizer else None

    def check(self) -> None:
        """One pass that is not timed."""
        value = self.loss(self.model, self.sample)
        if not value.requires_grad:
            name = type(self.model).__name__
            raise ProfileError(f"cannot profile {name}: the loss does not depend on a trainable parameter")
        value.backward()
        self.model.zero_grad(set_to_none=True)

    def operations(self) -> Laps | None:
        """One forward pass whose laps are counted in operations; None where something is compiled."""
        with OperationClock() as clock:
            watch = LapWatch(self.model, clock)
            if watch.compiled:
                return None
            watch.install()
            try:
                watch.start()
                self.loss(self.model, self.sample)
                watch.stop()
            finally:
                watch.remove()
        return watch.laps

    def timed_by_layers(self, watch: LapWatch, *, keep: bool) -> None:
        """With hooks."""
        watch.install()
        try:
            watch.start()
            value = self.loss(self.model, self.sample)
            watch.turn()
            value.backward()
            watch.stop(keep=keep)
        finally:
            watch.remove()
        self._update(keep=keep)

    def timed_from_outside(self, *, keep: bool) -> None:
        """Without hooks."""
        start = self._now()
        value = self.loss(self.model, self.sample)
        value.backward()
        if keep:
            self.step_seconds.append(self._now() - start)
        self._update(keep=keep)

    def _update(self, *, keep: bool) -> None:
        """What a training loop does after backward, either way, so that the next pass finds the caches as it would."""
        start = self._now()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        if keep:
            self.optimizer_seconds.append(self._now() - start)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def of_optimizer(self) -> dict[str, Any]:
        """What a profile says of it."""
        if self.optimizer is None:
            return {}
        state = [t for t in tree_leaves(dict(self.optimizer.state)) if isinstance(t, torch.Tensor)]
        return {
            "optimizer": type(self.optimizer).__name__,
            "optimizer_seconds": median(self.optimizer_seconds) if self.optimizer_seconds else 0.0,
            "optimizer_state_num_bytes": sum(t.numel() * t.element_size() for t in state),
        }


class LayerTimer:
    """Times the layers while somebody else's loop trains the model.

    A step begins with the model's forward and ends when `end_step` is called; several forwards and backwards in
    between belong to one step. What runs without gradients between steps is not looked at. The first step only warms up
    if there are more.

    Args:
        model: As it is trained, its gradients travelling dense: where a scheme keeps backward from computing a layer's
            weight gradient, that is missing in its seconds.

    Example:
        >>> timer = LayerTimer(model)
        >>> for batch in loader:
        ...     loss(model, batch).backward()
        ...     timer.end_step()
        >>> profile = timer.apply(profile)
    """

    def __init__(self, model: nn.Module) -> None:
        self._device = _device_of(model)
        self._watch = LapWatch(model, clock_of(self._device))
        self._watch.install()
        self._root = AroundCalls(model, self._before_model, self._after_model, first=True)

    @property
    def num_steps(self) -> int:
        """Steps that were timed so far, the one that warms up included."""
        return len(self._watch.laps.passes)

    def _before_model(self, *_: Any) -> None:
        if inside_backward():
            return
        if not torch.is_grad_enabled():
            self._watch.pause()
        elif not self._watch.running:
            self._watch.start()
        elif self._watch.is_after_backward:
            self._watch.go_on()

    def _after_model(self, *_: Any) -> None:
        if not inside_backward() and not torch.is_grad_enabled():
            self._watch.resume()

    def end_step(self) -> None:
        """The backward pass of a step has ended; also to be told between a step's last backward and its evaluation."""
        if self._watch.running:
            self._watch.stop()

    def apply(self, profile: ModelProfile) -> ModelProfile:
        """The profile with seconds and with the layers that own no parameters; takes the hooks out.

        Args:
            profile: Of this model, with the structure and the rows of its layers.

        Raises:
            ProfileError: No step was timed.
        """
        self.remove()
        laps = self._watch.laps
        if not laps.passes:
            raise ProfileError(f"cannot say what the layers of {profile.model} take: no training step was timed")
        if len(laps.passes) > 1:
            del laps.passes[0]
        timed = compose(profile, self._watch, Products(self._device).weight_gradient_share)
        return timed.model_copy(
            update={
                "source": f"measured while training, median of {len(laps.passes)} steps",
                "step_seconds": laps.typical_seconds(),
            }
        )

    def remove(self) -> None:
        """Takes the hooks out."""
        self._root.remove()
        self._watch.remove()


def scale_to(profile: ModelProfile, total_seconds: float, *, source: str) -> ModelProfile:
    """Spreads the seconds of one rank's step over the layers by their operations, a third forward, the rest backward.

    Of a fully connected layer, a third is the local weight gradient.

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
            "step_seconds": total_seconds,
            "device": None,
        }
    )


def _with_share(layer: LayerSpec, seconds: float) -> LayerSpec:
    third = seconds / 3
    if layer.structure is GradientStructure.OUTER_PRODUCT:
        parts = {"forward_seconds": third, "backward_seconds": third, "weight_gradient_seconds": third}
    else:
        parts = {"forward_seconds": third, "backward_seconds": 2 * third}
    return layer.model_copy(update=parts)


def _device_of(model: nn.Module) -> torch.device:
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise ProfileError(f"cannot profile {type(model).__name__}: it owns no trainable parameters")
    return parameter.device


@contextmanager
def _left_as_it_was(model: nn.Module, sample: Any, device: torch.device, *, parameters_too: bool) -> Iterator[None]:
    leaves = [t for t in tree_leaves(sample) if isinstance(t, torch.Tensor) and t.requires_grad]
    gradients = [(t, t.grad) for t in (*model.parameters(), *leaves)]
    kept = [*model.buffers(), *(model.parameters() if parameters_too else ())]
    values = [(t, t.detach().clone()) for t in kept]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            for tensor, _ in gradients:
                tensor.grad = None
            yield
        finally:
            for tensor, gradient in gradients:
                tensor.grad = gradient
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
