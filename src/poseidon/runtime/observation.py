"""The first steps of a run, as plain all-reduce: what its gradients are made of and where its seconds go.

The first step shows the structure of each gradient and the number of rows, those after it the seconds of each layer.
Transfers wait for the end of backward meanwhile, so that computing is seen by itself. A step ends with an exchange:
where the loop accumulates, it is all passes since the one before. What the ranks saw becomes one profile, and one
factor for each rank: how many times the profile's seconds it needs.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from poseidon.profile.graph import LayerSpec, ModelProfile
from poseidon.profile.measure import LayerTimer
from poseidon.profile.structure import StepWatch, merge
from poseidon.profile.timer import AroundCalls
from poseidon.runtime.attach import Run
from poseidon.runtime.departure import Reading, passes_in
from poseidon.timeline import Activity, Step

OBSERVED_STEPS = 4
"""The first shows structure and warms up, the others are timed."""
ALIKE = 0.1
"""Ranks whose seconds differ by less than this share compute alike: what is left is noise."""

_SECONDS = ("forward_seconds", "backward_seconds", "weight_gradient_seconds")


class Observed(NamedTuple):
    """What all ranks saw together."""

    profile: ModelProfile
    compute_scales: list[float]
    """By rank, how many times the profile's seconds it needs."""


class Observation:
    """Watches a run from its first step on.

    Args:
        run: Just attached.
        watch: Installed before that.
    """

    def __init__(self, run: Run, watch: StepWatch) -> None:
        self._run = run
        self._watch: StepWatch | None = watch
        self._structure: ModelProfile | None = None
        self._batch_size = 0
        self._steps: list[Step] = []
        self._timer = LayerTimer(run.model)
        self._root = AroundCalls(run.model, self._note_batch, lambda *_: None)
        run.on_computed = self._timer.end_step
        run.recorder.on_step.append(self._note_step)
        run.on_detach = self.close

    def is_over(self) -> bool:
        """After each exchange: whether enough was seen."""
        if self._watch is not None:
            num_passes = max(1, passes_in(self._steps[0]))
            structure = self._watch.profile(num_passes * self._batch_size)
            self._structure, self._watch = structure.model_copy(update={"accumulate": num_passes}), None
            self._root.remove()
        return len(self._steps) >= OBSERVED_STEPS

    def close(self) -> None:
        """Takes everything out."""
        if self._watch is not None:
            self._watch.profile()
            self._watch = None
        self._root.remove()
        self._timer.remove()
        self._run.recorder.on_step.remove(self._note_step)
        self._run.on_computed = self._run.on_detach = lambda: None

    def gather(self) -> Observed:
        """What was seen, combined over the ranks, who call this together; ends the watching."""
        self.close()
        group, structure = self._run.group, self._structure
        assert structure is not None
        texts = group.all_gather_text(structure.to_json(), "gathering what was observed")
        profile = merge([ModelProfile.parse(text, source="what a rank observed") for text in texts])
        mine = _of_one_pass(self._timer.apply(profile)) if self._timer.num_steps > 1 else profile
        mine = mine.model_copy(update=self._between_passes())
        texts = group.all_gather_text(mine.to_json(), "gathering the layers' seconds")
        return combine([ModelProfile.parse(text, source="what a rank timed") for text in texts])

    def _between_passes(self) -> dict[str, Any]:
        """Seconds of the optimizer, and of all else that the loop does between two passes."""
        steps = self._steps[1:]
        optimizers = self._run.optimizers
        return {
            "optimizer": type(optimizers[0]).__name__ if len(optimizers) == 1 else "",
            "optimizer_seconds": median(step.seconds_in(Activity.OPTIMIZER) for step in steps),
            "optimizer_state_num_bytes": sum(map(_state_num_bytes, optimizers)),
            "loader_seconds": max(0.0, median(_outside_seconds(step) for step in steps)),
        }

    def _note_step(self, step: Step) -> None:
        self._steps.append(step)

    def _note_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()]
        if tensors and not self._batch_size:
            self._batch_size = tensors[0].shape[0]


def combine(profiles: Sequence[ModelProfile]) -> Observed:
    """One profile from those that the ranks timed, each second the median over the ranks.

    The longest wait between two passes counts, because everybody waits for it.

    Args:
        profiles: By rank, with the same structure; without seconds where a rank had no samples.
    """
    timed = [profile for profile in profiles if profile.seconds]
    if not timed:
        return Observed(profiles[0], [1.0] * len(profiles))
    by_name = [{layer.name: layer for layer in profile.layers} for profile in timed]
    layers = tuple(
        _median_layer([layers[layer.name] for layers in by_name if layer.name in layers]) for layer in timed[0].layers
    )
    profile = timed[0].model_copy(
        update={
            "layers": layers,
            "batch_size": max(profile.batch_size for profile in timed),
            "step_seconds": median(profile.step_seconds for profile in timed),
            "optimizer_seconds": median(profile.optimizer_seconds for profile in timed),
            "loader_seconds": max(profile.loader_seconds for profile in timed),
        }
    )
    scales = [one.seconds / profile.seconds if one.seconds else 1.0 for one in profiles]
    return Observed(profile, [1.0 if abs(scale - 1) < ALIKE else scale for scale in scales])


def _median_layer(layers: Sequence[LayerSpec]) -> LayerSpec:
    return layers[0].model_copy(update={name: median(getattr(layer, name) for layer in layers) for name in _SECONDS})


def _of_one_pass(profile: ModelProfile) -> ModelProfile:
    """With the activations of one of the passes that were seen."""
    layers = [
        layer.model_copy(update={"activation_num_bytes": layer.activation_num_bytes // profile.accumulate})
        for layer in profile.layers
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def _outside_seconds(step: Step) -> float:
    parts = Reading.of_step(step).parts
    return parts["loader"] + parts["other"]


def _state_num_bytes(optimizer: torch.optim.Optimizer) -> int:
    state = tree_leaves(dict(optimizer.state))
    return sum(leaf.numel() * leaf.element_size() for leaf in state if isinstance(leaf, torch.Tensor))
