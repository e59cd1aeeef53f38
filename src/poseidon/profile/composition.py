"""From what a model is and the laps of a stop watch to the layers of a profile, in the order of the forward pass.

Comes in: a profile that knows structure and rows, and a watch that has seen a few passes. Goes out: the same profile
with everything that is computed, modules without parameters and what lies between modules included, and with seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from torch import nn

from poseidon.profile.graph import OUTSIDE, GradientStructure, LayerSpec, ModelProfile
from poseidon.profile.structure import block_of
from poseidon.profile.timer import LOSS, Laps, LapWatch, outside_name

SMALLEST_GAP = 0.001
"""What is computed between two modules is a layer of its own from this share of the step on."""

NOTED_OVERHEAD = 0.02
"""If calling the hooks takes at least this share of a pass, the profile says so."""

WeightGradientShare = Callable[[LayerSpec, nn.Module], float]
"""Of a fully connected layer's backward that computes both gradients, the part of the weight gradient."""


@dataclass
class _Times:
    """Seconds of one layer, one entry per pass."""

    forward: list[float]
    backward: list[float]

    @property
    def seconds(self) -> float:
        return median(self.forward) + median(self.backward) if self.forward else 0.0

    def add(self, other: "_Times") -> None:
        self.forward = [a + b for a, b in zip(self.forward, other.forward, strict=True)]
        self.backward = [a + b for a, b in zip(self.backward, other.backward, strict=True)]


def compose(
    structure: ModelProfile,
    watch: LapWatch,
    share: WeightGradientShare,
    *,
    step_seconds: Sequence[float] = (),
    operations: Laps | None = None,
) -> ModelProfile:
    """All that is computed in a step, with the medians over the passes that the watch has kept.

    The medians are scaled by one common factor, close to 1, so that they add up to the median pass: the median of a sum
    is not the sum of medians. Where passes without hooks are known, passes are compared with their neighbors, since a
    machine may be busier at one time than at another; and if the fastest took less, the difference is what calling the
    hooks takes (a few microseconds a lap): each lap bears the same part of it, and it is left out.

    Args:
        structure: The layers that own parameters, as `StepWatch` found them.
        watch: After one pass at least; without kept passes there are no seconds.
        share: Asked for fully connected layers that were given something that needs a gradient.
        step_seconds: Of passes without hooks, each right after a kept one.
        operations: Laps of one forward pass, counted in operations; where they count none, or are not known, a layer
            has those that `forward_flops` says.
    """
    order = _order(structure, watch)
    laps = watch.laps
    overhead = laps.overhead(min(step_seconds)) if step_seconds else 0.0
    total = laps.typical_seconds(step_seconds) - overhead * laps.num_laps
    times = {name: _times(watch, name, overhead) for name in (*order, LOSS)}
    gaps = {name: _times(watch, outside_name(name), overhead) for name in watch.facts.modules}
    flops = _flops(watch, operations)
    _fold(times, gaps, flops, total)
    summed = sum(one.seconds for one in (*times.values(), *gaps.values()))
    scale = total / summed if summed else 1.0
    known = {layer.name: layer for layer in structure.layers}
    layers: list[LayerSpec] = []
    for name in order:
        if name in gaps:
            gap = outside_name(name)
            layers.append(_timed(_outside(gap, flops), gaps[name], scale))
        layer = _noted(known.get(name) or _without_parameters(name, watch), watch, flops)
        layers.append(_split(_timed(layer, times[name], scale), watch, share))
    if times[LOSS].seconds:
        loss = _outside(LOSS, flops).model_copy(update={"name": LOSS if LOSS not in order else "after the model"})
        layers.append(_timed(loss, times[LOSS], scale))
    notes = [*_notes(known, watch), *_note_on_hooks(overhead * laps.num_laps, total)]
    return structure.model_copy(update={"layers": tuple(layers), "notes": (*structure.notes, *notes)})


def _order(structure: ModelProfile, watch: LapWatch) -> list[str]:
    """As forward reached them; what was not called comes with the layer that contains it, or else last.

    The gradients of what a layer contains are ready when the layer's backward has ended, so it comes after them here.
    """
    called = list(watch.facts.modules)
    within: dict[str | None, list[str]] = {}
    for layer in structure.layers:
        if layer.name not in watch.facts.modules:
            within.setdefault(_container(layer.name, called), []).append(layer.name)
    return [one for name in called for one in (*within.get(name, ()), name)] + within.get(None, [])


def _container(name: str, called: Sequence[str]) -> str | None:
    return max((one for one in called if block_of(name, [one]) is not None), key=len, default=None)


def _times(watch: LapWatch, name: str, lap_overhead: float) -> _Times:
    forward, backward = (watch.laps.of(name, backward=b, lap_overhead=lap_overhead) for b in (False, True))
    return _Times(forward, backward)


def _flops(watch: LapWatch, operations: Laps | None) -> dict[str, int]:
    """By name of a layer, or of what is computed outside."""
    counted = {}
    if operations is not None:
        names = [one for name in watch.facts.modules for one in (outside_name(name), name)]
        counted = {name: round(sum(operations.of(name, backward=False))) for name in (*names, LOSS)}
    return {**counted, **{name: counted.get(name) or flops for name, flops in watch.facts.flops.items()}}


def _fold(times: dict[str, _Times], gaps: dict[str, _Times], flops: dict[str, int], total: float) -> None:
    """Adds the gaps that cost next to nothing to the layers behind them."""
    most_flops = SMALLEST_GAP * sum(flops.values())
    for name, gap in list(gaps.items()):
        if gap.seconds <= SMALLEST_GAP * total and flops.get(outside_name(name), 0) <= most_flops:
            times[name].add(gaps.pop(name))


def _outside(name: str, flops: dict[str, int]) -> LayerSpec:
    return LayerSpec(name=name, kind=OUTSIDE, parameters=(), flops=flops.get(name, 0))


def _without_parameters(name: str, watch: LapWatch) -> LayerSpec:
    return LayerSpec(name=name, kind=type(watch.facts.modules[name]).__name__, parameters=())


def _noted(layer: LayerSpec, watch: LapWatch, flops: dict[str, int]) -> LayerSpec:
    facts = watch.facts
    return layer.model_copy(
        update={
            "calls": facts.calls.get(layer.name, 0),
            "flops": flops.get(layer.name, 0),
            "activation_num_bytes": facts.activation_num_bytes.get(layer.name, 0),
        }
    )


def _timed(layer: LayerSpec, times: _Times, scale: float) -> LayerSpec:
    if not times.forward:
        return layer
    return layer.model_copy(
        update={
            "forward_seconds": scale * median(times.forward),
            "backward_seconds": scale * median(times.backward),
            "forward_spread_seconds": _spread(times.forward),
            "backward_spread_seconds": _spread(times.backward),
        }
    )


def _spread(seconds: list[float]) -> float:
    """From the value below which one in ten lies to that above which one in ten lies."""
    if len(seconds) < 2:
        return 0.0
    tenths = quantiles(seconds, n=10, method="inclusive")
    return tenths[-1] - tenths[0]


def _split(layer: LayerSpec, watch: LapWatch, share: WeightGradientShare) -> LayerSpec:
    """Takes the local weight gradient out of a fully connected layer's backward."""
    if layer.structure is not GradientStructure.OUTER_PRODUCT or not layer.backward_seconds:
        return layer
    facts = watch.facts
    part = share(layer, facts.modules[layer.name]) if layer.name in facts.fed else 1.0
    seconds = part * layer.backward_seconds
    return layer.model_copy(
        update={"backward_seconds": layer.backward_seconds - seconds, "weight_gradient_seconds": seconds}
    )


def _notes(known: dict[str, LayerSpec], watch: LapWatch) -> list[str]:
    called = watch.facts.modules
    notes = [
        f"{name or 'the model'} is compiled and counts as one block; what it contains has no seconds of its own"
        for name in watch.compiled
        if name in called
    ]
    idle = [
        name
        for name in known
        if name not in called and not any(block_of(name, [b]) is not None for b in watch.compiled)
    ]
    if idle:
        notes.append(f"never called: {', '.join(idle)}; their parameters may be used by other modules")
    return notes


def _note_on_hooks(overhead: float, total: float) -> list[str]:
    if not total or overhead < NOTED_OVERHEAD * total:
        return []
    return [f"calling hooks made the passes {overhead / total:.0%} longer; that is left out, lap by lap"]
