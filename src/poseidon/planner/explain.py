"""A plan in words and in tables: what it does, what a step waits for, what would help, and what came second."""

from collections.abc import Sequence

from rich.table import Table

from poseidon.breakdown import StepParts
from poseidon.cluster.rates import Rates
from poseidon.plan import Choice, Plan
from poseidon.planner.hosts import Scaling, format_rate
from poseidon.planner.shares import describe_shares, propose_shares
from poseidon.planner.space import label
from poseidon.planner.what_if import WhatIf, bottleneck, faster_resources, larger_batch
from poseidon.profile.graph import ModelProfile
from poseidon.profile.structure import COMPILED
from poseidon.simulator import Simulation, simulate
from poseidon.timeline import Activity
from poseidon.units import format_bandwidth, format_bytes, format_seconds, format_traffic

SHOWN_LAYERS = 20
"""Layers with a line of their own: those that cost most."""
NAME_WIDTH = 17
MOST_WIDE_COLUMNS = 7
"""Tables of more columns stand closer, to keep to 80 characters."""
SHORT_LABELS = {
    "all_reduce": "reduce",
    "sufficient_factor": "factors",
    "sparse_rows": "rows",
    "sharded_server": "server",
    "levels=2": "/2",
    "wire=bfloat16": "/16",
    "wire=float16": "/f16",
}
"""How tables call schemes and what is odd about them."""
LEGEND = {"/2": "in two levels, the ranks of a host first", "/16": "as bfloat16", "/f16": "as float16"}


def explain(profile: ModelProfile, plan: Plan, rates: Rates, scalings: Sequence[Scaling] = ()) -> list[str]:
    """A plan in sentences.

    Args:
        profile: The model.
        plan: With what was predicted for it.
        rates: Those for which it was predicted.
        scalings: Other numbers of hosts, of which the best one is named where it is better.
    """
    simulation = simulate(profile, plan, rates)
    sentences = [what_it_does(plan)]
    if plan.predicted is not None:
        sentences.append(_predicted(plan, rates))
    return [
        *sentences,
        what_it_waits_for(profile, plan, rates, simulation),
        *([f"a part of the model is compiled: {COMPILED}"] if profile.is_compiled and plan.world_size > 1 else []),
        *_what_shares_help(profile, plan, rates),
        *_what_helps(profile, plan, rates, scalings),
    ]


def what_it_does(plan: Plan) -> str:
    """Schemes, buckets, order and deferral in one sentence."""
    if plan.world_size == 1:
        return "one rank: nothing crosses a network"
    parts = [plan.summary()]
    if plan.profile.accumulate > 1:
        parts.append(f"{plan.profile.accumulate} backward passes to one exchange")
    if plan.buckets:
        parts.append(f"{_count(len(plan.buckets), 'bucket')}")
    if plan.deferred:
        names = _names(plan.deferred)
        parts.append(f"the transfers of {names} may end as late as the next forward pass")
    if plan.connections > 1:
        parts.append(f"{plan.connections} connections to each peer")
    if not plan.wait_free:
        parts.append("nothing is sent before backward has ended")
    return "; ".join(parts)


def what_it_waits_for(profile: ModelProfile, plan: Plan, rates: Rates, simulation: Simulation) -> str:
    """One sentence that names the bottleneck, with the time that goes to it."""
    name = bottleneck(profile, plan, rates)
    parts, step = simulation.parts, simulation.step
    rebuild = step.seconds_in(Activity.REBUILD)
    sent = sum(1 for interval in step.intervals if interval.activity is Activity.TRANSFER)
    of_step = f"of a step of {format_seconds(simulation.step_seconds)}"
    waits = parts.exposed + parts.waiting
    reasons = {
        "link": f"the ranks stand still for the network for {format_seconds(waits)} {of_step}",
        "latency": f"{_count(sent, 'transfer')}, for which the ranks stand still {format_seconds(waits)} {of_step}",
        "computing": f"{format_seconds(_computing(parts))} {of_step} are computing or hidden behind it",
        "rebuild": f"{format_seconds(rebuild)} {of_step} go to making gradients from factors and rows",
        "loader": f"the ranks wait {format_seconds(parts.loader)} {of_step} for samples",
    }
    return f"the bottleneck is {_the(name)}: {reasons[name]}"


def bottleneck_table(found: Sequence[WhatIf]) -> Table:
    """What-ifs, one a line."""
    table = _table("what if", "step", "samples/s", "gain")
    for one in found:
        table.add_row(one.change, format_seconds(one.step_seconds), format_rate(one.samples_per_s), f"{one.gain:.2f}")
    return table


def what_ifs(profile: ModelProfile, plan: Plan, rates: Rates, scalings: Sequence[Scaling] = ()) -> tuple[WhatIf, ...]:
    """What each change would give, the most helpful first: resources, the batch, another number of hosts."""
    found = [*faster_resources(profile, plan, rates), larger_batch(profile, plan, rates)]
    now = rates.world_size * profile.batch_size / simulate(profile, plan, rates).step_seconds
    found += [
        WhatIf(
            name="hosts",
            change="1 host" if one.num_hosts == 1 else f"{one.num_hosts} hosts",
            step_seconds=one.step_seconds,
            samples_per_s=one.samples_per_s,
            gain=one.samples_per_s / now,
        )
        for one in scalings
        if one.num_hosts != rates.num_hosts and one.batch_size == profile.batch_size
    ]
    return tuple(sorted(found, key=lambda one: -one.gain))


def layer_table(plan: Plan) -> Table:
    """Layer by layer: scheme, bytes, seconds alone, hidden and exposed seconds, the runner-up and the step with it."""
    table = _table("layer", "scheme", "bytes", "alone", "hidden", "exposed", "runner-up", "step")
    shown = sorted(plan.layers, key=lambda name: -_weight(plan.choices.get(name, Choice())))[:SHOWN_LAYERS]
    for name, layer in plan.layers.items():
        if name not in shown:
            continue
        scheme, choice = plan.schemes[name], plan.choices.get(name, Choice())
        alone = choice.seconds_by_scheme.get(label(scheme))
        table.add_row(
            _short_name(name),
            _short_label(label(scheme)),
            format_traffic(scheme.bytes_sent(layer, plan.world_size)),
            "" if alone is None else _seconds(alone),
            _seconds(choice.hidden_seconds),
            _seconds(choice.exposed_seconds),
            _short_label(choice.runner_up),
            _seconds(choice.runner_up_step_seconds) if choice.runner_up_step_seconds else "",
        )
    if rest := [name for name in plan.layers if name not in shown]:
        choices = [plan.choices.get(name, Choice()) for name in rest]
        sent = sum(plan.schemes[name].bytes_sent(plan.layers[name], plan.world_size) for name in rest)
        hidden, exposed = sum(c.hidden_seconds for c in choices), sum(c.exposed_seconds for c in choices)
        table.add_row(f"{len(rest)} others", "", format_traffic(sent), "", _seconds(hidden), _seconds(exposed))
    cells = {cell for column in ("scheme", "runner-up") for cell in _column(table, column)}
    legend = [f"{mark}: {text}" for mark, text in LEGEND.items() if any(mark in cell for cell in cells)]
    table.caption, table.caption_justify = "; ".join(legend) or None, "left"
    return table


def _column(table: Table, header: str) -> list[str]:
    return [str(cell) for column in table.columns if column.header == header for cell in column.cells]


def scaling_table(scalings: Sequence[Scaling]) -> Table:
    """Hosts, links and batches, one a line, with what each is predicted to give."""
    table = _table("hosts", "link", "batch", "step", "samples/s", "speed-up", "efficiency", "bottleneck")
    for one in scalings:
        table.add_row(
            str(one.num_hosts),
            format_bandwidth(one.link) if one.link else "as is",
            str(one.batch_size),
            format_seconds(one.step_seconds),
            format_rate(one.samples_per_s),
            f"{one.speed_up:.2f}",
            f"{one.efficiency:.0%}",
            one.bottleneck,
        )
    return table


def _predicted(plan: Plan, rates: Rates) -> str:
    predicted = plan.predicted
    assert predicted is not None
    text = f"a step takes {format_seconds(predicted.step_seconds)}, {format_rate(predicted.samples_per_s)} samples/s"
    if predicted.lower_bound_seconds:
        text += f"; no plan of this kind can take less than {format_seconds(predicted.lower_bound_seconds)}"
    if rates.world_size > 1 and not plan.is_plain:
        text += f"; {format_bytes(predicted.peak_num_bytes)} of memory a rank"
    return text


def _what_helps(profile: ModelProfile, plan: Plan, rates: Rates, scalings: Sequence[Scaling]) -> list[str]:
    helping = [one for one in what_ifs(profile, plan, rates, scalings) if one.pays]
    if not helping:
        return ["nothing of bandwidth, latency, processors, loader or batch alone would make it much faster"]
    best, *others = helping[:3]
    text = f"what would help most: {best.change}, {_gives(best)}"
    if others:
        text += "; then " + ", ".join(f"{one.change} ({_gives(one)})" for one in others)
    return [text]


def _what_shares_help(profile: ModelProfile, plan: Plan, rates: Rates) -> list[str]:
    """Nothing where hosts compute alike."""
    shares = propose_shares(profile, plan, rates)
    if shares is None:
        return []
    equal, shared = format_seconds(shares.equal_step_seconds), format_seconds(shares.step_seconds)
    return [
        f"hosts differ in speed: with equal shares a step takes {equal}; by speed, of {sum(shares.samples)} samples "
        f"{describe_shares(shares.samples, rates)}, it takes {shared}: {shares.gain:.2f} times as fast"
    ]


def _gives(one: WhatIf) -> str:
    return f"{format_seconds(one.step_seconds)} a step and {one.gain:.2f} times the samples/s"


def _computing(parts: StepParts) -> float:
    return parts.computing + parts.hidden


def _the(name: str) -> str:
    return name if name in ("latency", "computing") else f"the {name}"


def _weight(choice: Choice) -> float:
    return choice.exposed_seconds + max(choice.seconds_by_scheme.values(), default=0.0)


def _seconds(value: float) -> str:
    """Three digits, for a narrow column."""
    return format_seconds(float(f"{value:.3g}")) if value else "0"


def _short_name(name: str) -> str:
    """Parts of a long name become their first letters, from the left on; numbers stay, since they tell layers apart."""
    parts = (name or "(model)").split(".")
    for index in range(len(parts) - 1):
        if len(".".join(parts)) <= NAME_WIDTH:
            break
        parts[index] = parts[index] if parts[index].isdigit() else parts[index][:1]
    short = ".".join(parts)
    return short if len(short) <= NAME_WIDTH else short[: NAME_WIDTH - 1] + "…"


def _short_label(text: str) -> str:
    kind, _, odd = text.rstrip(")").partition("(")
    parts = [SHORT_LABELS.get(kind, kind), *(SHORT_LABELS.get(one, f" {one}") for one in odd.split(", ") if one)]
    return "".join(parts)


def _names(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names) if len(names) <= most else f"{names[0]} and {len(names) - 1} more layers"


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _table(*columns: str, left: Sequence[str] = ("scheme", "bottleneck", "runner-up")) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0) if len(columns) > MOST_WIDE_COLUMNS else (0, 1))
    for index, column in enumerate(columns):
        is_left = index == 0 or column in left
        table.add_column(column, justify="left" if is_left else "right", no_wrap=column not in ("scheme", "runner-up"))
    return table
