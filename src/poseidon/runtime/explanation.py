"""A run in a table: for each parameter how it travels, why not otherwise, and what each step sends for it.

Comes in: the model, the plan in force with what the planner knew about each layer, and how the plan is at work. Goes
out: text of at most `WIDTH` columns. Reasons that many parameters share stand below the table, by number. Parameters
whose names differ in numbers only, as in the blocks of a transformer, share a line unless the whole is asked for.
"""

import re
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from torch import nn

from poseidon.comm import SCHEMES, CommScheme
from poseidon.plan import Choice, Plan, label
from poseidon.profile.graph import LayerSpec, TensorSpec
from poseidon.runtime.options import BufferPolicy
from poseidon.units import format_seconds, format_traffic

WIDTH = 120
NAME_WIDTH = 40
TRAVEL_WIDTH = 34
GAP = "  "
HEADINGS = ("parameter", "travels by", "bytes a step", "why not otherwise")
NOT_AT_ALL = "not at all"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known about a run beside its model and plan."""

    buckets: Mapping[str, int] = field(default_factory=dict)
    """By parameter that is all-reduced, the number of its bucket, from 1."""
    ignored: Container[str] = ()
    """Names of what stays each rank's own."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """By parameter, what has been said about gradients that were not made."""
    buffers: BufferPolicy = "on_request"


@dataclass(frozen=True)
class _Line:
    """One line of the table: a parameter, or several that are alike."""

    name: str
    travel: str
    reasons: tuple[str, ...] = ()
    kind: str = "parameter"
    shape: tuple[int, ...] = ()
    bucket: int | None = None
    num_bytes: int | None = None
    seconds: tuple[tuple[str, float], ...] = ()
    """What the layer costs under each scheme, the layer alone; that of the scheme in force first."""
    runner_up: str = ""

    @property
    def travels(self) -> bool:
        return self.num_bytes is not None


def explain(model: nn.Module, plan: Plan, setting: Setting, *, full: bool = False) -> str:
    """The table as text.

    Args:
        model: The root module, under the plan.
        plan: The one in force.
        setting: How it is at work.
        full: A line for each parameter and buffer; else those that are alike share one.
    """
    lines = list(_lines(model, plan, setting))
    if not full:
        lines = [
            *_folded(line for line in lines if line.travels),
            *_gathered(line for line in lines if not line.travels),
        ]
    return "\n".join([_headline(plan), "", *_table(lines)])


def _headline(plan: Plan) -> str:
    if plan.world_size == 1:
        return "One rank: nothing crosses a network."
    connections = f" over {plan.connections} connections to each peer" if plan.connections > 1 else ""
    text = f"{plan.world_size} ranks{connections}. {plan.summary()}."
    if not plan.choices:
        text += " The plan was given as it is: nothing was compared."
    return "\n".join(textwrap.wrap(text, WIDTH))


# One line for each parameter


def _lines(model: nn.Module, plan: Plan, setting: Setting) -> Iterator[_Line]:
    planned = {
        _full_name(layer, tensor): (layer, tensor) for layer in plan.layers.values() for tensor in layer.parameters
    }
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := first_name.setdefault(id(parameter), name)) != name:
            yield _Line(name, f"as {first}", ("tied: both names are of one parameter",))
        elif name in setting.ignored:
            yield _Line(name, NOT_AT_ALL, ("ignored: it stays each rank's own",))
        elif name not in planned:
            yield _Line(name, NOT_AT_ALL, ("frozen: it stays as rank 0 had it",))
        else:
            line = _planned_line(name, *planned[name], plan, setting)
            frozen = () if parameter.requires_grad else ("frozen at present: counts as zero",)
            yield replace(line, reasons=(*line.reasons, *frozen))
    policy = "rank 0's" if setting.buffers == "on_request" else "rank 0's, after each step"
    why = "a buffer: sent in run.sync_buffers()" if setting.buffers == "on_request" else "a buffer"
    for name, _ in model.named_buffers():
        if name in setting.ignored:
            yield _Line(name, NOT_AT_ALL, ("ignored: it stays each rank's own",), "buffer")
        else:
            yield _Line(name, policy, (why,), "buffer")


def _planned_line(name: str, layer: LayerSpec, tensor: TensorSpec, plan: Plan, setting: Setting) -> _Line:
    scheme, choice = plan.schemes[layer.name], plan.choices.get(layer.name, Choice())
    if plan.world_size == 1:
        return _Line(name, NOT_AT_ALL, ("there is no other rank",))
    num_bytes = _num_bytes(scheme, layer, tensor, plan.world_size)
    travel = label(scheme)
    if not num_bytes and tensor is not layer.parameters[0]:
        travel += f", with {layer.parameters[0].name}"
    if layer.name in plan.deferred:
        travel += ", deferred"
    reasons = [_refusals(scheme, layer, choice), setting.unused.get(name, "")]
    is_first = tensor is layer.parameters[0]  # what is known about the layer as a whole is said once
    own = choice.seconds_by_scheme.get(label(scheme)) if is_first else None
    others = {kind: seconds for kind, seconds in choice.seconds_by_scheme.items() if kind != label(scheme)}
    return _Line(
        name,
        travel,
        tuple(filter(None, reasons)),
        shape=tensor.shape,
        bucket=setting.buckets.get(name),
        num_bytes=num_bytes,
        seconds=() if own is None else ((label(scheme), own), *others.items()),
        runner_up=_runner_up(choice, plan) if is_first else "",
    )


def _full_name(layer: LayerSpec, tensor: TensorSpec) -> str:
    return f"{layer.name}.{tensor.name}" if layer.name else tensor.name


def _num_bytes(scheme: CommScheme, layer: LayerSpec, tensor: TensorSpec, world_size: int) -> int:
    """What the layer sends with this parameter beyond what it sends with those before it alone."""
    place = layer.parameters.index(tensor)

    def sent(count: int) -> int:
        some = layer.model_copy(update={"parameters": layer.parameters[:count]})
        return scheme.bytes_sent(some, world_size) if count else 0

    return sent(place + 1) - sent(place)


def _refusals(scheme: CommScheme, layer: LayerSpec, choice: Choice) -> str:
    """Schemes that the layer cannot use, or that were not compared, each with the reason."""
    kinds_by_reason: dict[str, list[str]] = {}
    compared = {name.partition("(")[0] for name in choice.seconds_by_scheme}
    for kind, other in SCHEMES.items():
        if kind == scheme.kind or kind in compared:
            continue
        reason = other(kind=kind).refuse(layer)
        if reason is None and compared:
            reason = "it is used only where a plan asks for it"
        if reason is not None:
            kinds_by_reason.setdefault(reason, []).append(kind)
    return "; ".join(f"no {' or '.join(kinds)}: {reason}" for reason, kinds in kinds_by_reason.items())


def _runner_up(choice: Choice, plan: Plan) -> str:
    if not choice.runner_up or not choice.runner_up_step_seconds or plan.predicted is None:
        return ""
    steps = format_seconds(choice.runner_up_step_seconds), format_seconds(plan.predicted.step_seconds)
    return f"a step would take {steps[0]} with {choice.runner_up} instead of {steps[1]}"


# Lines that are alike


def _folded(lines: Iterable[_Line]) -> list[_Line]:
    """Those together whose names differ in numbers only, and which travel alike for the same reasons."""
    alike: dict[tuple[object, ...], list[_Line]] = {}
    for line in lines:
        schemes = tuple(name for name, _ in line.seconds)
        key = (_NUMBER.sub("*", line.name), line.travel, line.reasons, line.shape, line.bucket is None, schemes)
        alike.setdefault(key, []).append(line)
    return [some[0] if len(some) == 1 else _as_one(some) for some in alike.values()]


def _as_one(lines: Sequence[_Line]) -> _Line:
    buckets = sorted({line.bucket for line in lines if line.bucket is not None})
    travel = lines[0].travel + (f", buckets {_span(buckets)}" if len(buckets) > 1 else "")
    totals = tuple(
        (one[0][0], sum(seconds for _, seconds in one)) for one in zip(*(line.seconds for line in lines), strict=True)
    )
    return replace(
        lines[0],
        name=f"{_common_name([line.name for line in lines])} ({len(lines)})",
        travel=travel,
        bucket=buckets[0] if len(buckets) == 1 else None,
        num_bytes=sum(line.num_bytes or 0 for line in lines),
        seconds=totals,
        runner_up="",
    )


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a name that is a number."""


def _common_name(names: Sequence[str]) -> str:
    """`h.0.mlp` and `h.1.mlp` as `h.0-1.mlp`."""
    by_place = zip(*(name.split(".") for name in names), strict=True)
    parts = [values[0] if len(set(values)) == 1 else _span(sorted(map(int, set(values)))) for values in by_place]
    return ".".join(parts)


def _span(numbers: Sequence[int]) -> str:
    """Numbers in ascending order; those in the middle left out where they follow one another."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers)) if len(numbers) <= 3 else "*"


def _gathered(lines: Iterable[_Line]) -> list[_Line]:
    """What does not travel: those of a kind that stay for one reason in one line."""
    alike: dict[tuple[object, ...], list[_Line]] = {}
    for line in lines:
        alike.setdefault((line.kind, line.travel, line.reasons), []).append(line)
    return [
        some[0] if len(some) == 1 else replace(some[0], name=f"{_beginning(some)}{len(some)} {some[0].kind}s")
        for some in alike.values()
    ]


def _beginning(lines: Sequence[_Line]) -> str:
    """The module that all of them are in."""
    by_place = zip(*(line.name.split(".")[:-1] for line in lines), strict=False)
    shared = [values[0] for values in takewhile(lambda values: len(set(values)) == 1, by_place)]
    return f"{'.'.join(shared)}: " if shared else ""


# The table


def _table(lines: Sequence[_Line]) -> Iterator[str]:
    numbers: dict[str, int] = {}
    for line in lines:
        for reason in line.reasons:
            numbers.setdefault(reason, len(numbers) + 1)
    cells = [HEADINGS, *(_cells(line, numbers) for line in lines)]
    widths = _widths(cells)
    for row in cells:
        columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for index in range(max(map(len, columns))):
            parts = [column[index] if index < len(column) else "" for column in columns]
            name, travel, num_bytes, why = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
            yield GAP.join([name, travel, num_bytes.strip().rjust(widths[2]), why]).rstrip()
    if numbers:
        yield ""
    for reason, number in numbers.items():
        yield from textwrap.wrap(f"[{number}] {reason}", WIDTH, subsequent_indent=" " * 4)


def _cells(line: _Line, numbers: Mapping[str, int]) -> tuple[str, str, str, str]:
    travel = line.travel if line.bucket is None else f"{line.travel}, bucket {line.bucket}"
    why = [_compared(line.seconds), line.runner_up, " ".join(f"[{numbers[reason]}]" for reason in line.reasons)]
    num_bytes = "" if line.num_bytes is None else format_traffic(line.num_bytes)
    return line.name, travel, num_bytes, "; ".join(filter(None, why))


def _compared(seconds: Sequence[tuple[str, float]]) -> str:
    if len(seconds) < 2:
        return ""
    others = ", ".join(f"{format_seconds(cost)} by {name}" for name, cost in seconds[1:])
    return f"{format_seconds(seconds[0][1])} alone, {others}"


def _widths(rows: Sequence[tuple[str, str, str, str]]) -> list[int]:
    longest = [max(len(row[column]) for row in rows) for column in range(4)]
    name, travel, num_bytes = min(longest[0], NAME_WIDTH), min(longest[1], TRAVEL_WIDTH), longest[2]
    return [name, travel, num_bytes, WIDTH - name - travel - num_bytes - 3 * len(GAP)]
