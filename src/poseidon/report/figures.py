"""The figures of a run: what was achieved, what limits it, and whether the prediction held.

Comes in: a `RunRecord`. Goes out: `Figures`, from which the terminal, the page and programs take the same numbers.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from poseidon.artifact import Value
from poseidon.breakdown import StepParts, find_last_starts, split_step
from poseidon.comm import AllReduce
from poseidon.report.compare import Spread
from poseidon.report.record import RunRecord, exchange_of
from poseidon.report.summary import Summary, summarize
from poseidon.runtime.surroundings import counted
from poseidon.timeline import Activity, Step, Timeline
from poseidon.units import format_bandwidth, format_seconds, format_traffic

LIMITS_FROM = 0.1
"""What takes a smaller share of a step than this is not called what limits it."""
LINK_IS_FULL_FROM = 0.6
"""Payload over the link's rate while transfers are under way, from which on bandwidth is what they wait for."""
SLOWER_FROM = 1.1
"""Computing that takes this many times as long as on one rank alone is worth a word."""
HELD_WITHIN = 0.15
"""A prediction that is off by less has held."""


class Efficiency(Value):
    """Throughput against that of one rank alone."""

    share: float
    """Samples per second of all ranks over as many times what one rank alone has."""
    speedup: float
    """How many times as fast as one rank alone."""
    alone_samples_per_s: float
    note: str
    """Where the baseline comes from."""
    most: float = 1.0
    """No more can be reached where ranks have to share cores."""


class LinkUse(Value):
    """What the run makes of the link of a host."""

    bandwidth: float
    """Bytes per second of the slowest host's link."""
    source: str
    """Where the bandwidth is known from."""
    bytes_per_host: float
    """Payload per step."""
    of_step: float
    """Payload over what the link could carry in the time of a step."""
    of_transfers: float
    """Payload over what the link could carry while at least one transfer is under way."""

    @property
    def floor_seconds(self) -> float:
        """Bytes per step over bandwidth: no step can be faster than this without sending less."""
        return self.bytes_per_host / self.bandwidth


class Prediction(Value):
    """What was expected of a step."""

    step_seconds: float
    parts: StepParts
    off: float
    """Predicted over measured step, less one."""

    @property
    def held(self) -> bool:
        """Whether it was close enough to decide by."""
        return abs(self.off) <= HELD_WITHIN

    @property
    def in_words(self) -> str:
        """As in `5 % too long`."""
        percent = round(abs(self.off) * 100)
        return f"{percent} % too {'long' if self.off > 0 else 'short'}" if percent else "to the percent"


class ExchangeFigures(Value):
    """What is sent together: one layer, or a bucket of several."""

    layers: tuple[str, ...]
    scheme: str
    bytes_sent: float
    """Payload per rank and step, as counted."""
    plain_bytes: float
    """The same if it went by plain all-reduce."""
    transfer_seconds: float
    """While at least one of its transfers is under way, mean over steps and ranks."""
    exposed_seconds: float
    """While the training thread stands still for it, likewise."""
    predicted_transfer_seconds: float | None = None
    predicted_exposed_seconds: float | None = None

    @property
    def label(self) -> str:
        """The layer, or the first and how many there are."""
        first = self.layers[0] or "(model)"
        return first if len(self.layers) == 1 else f"{first} + {len(self.layers) - 1}"


class Bottleneck(Value):
    """What a step waits for most."""

    kind: Literal["computing", "network", "a slow rank", "uneven ranks", "loader", "unknown"]
    text: str
    """In a sentence or two, with what could be gained."""


class Figures(Value):
    """All that a report says in numbers."""

    samples_per_s: float
    """Over all ranks; median over steps."""
    step_seconds: Spread
    """On the slowest rank."""
    summary: Summary
    efficiency: Efficiency | None
    link: LinkUse | None
    overlap: float | None
    """Hidden over hidden and exposed communication; None where nothing is communicated."""
    prediction: Prediction | None
    exchanges: tuple[ExchangeFigures, ...]
    bottleneck: Bottleneck


def compute_figures(record: RunRecord, baseline: RunRecord | None = None) -> Figures:
    """The figures of a run.

    Args:
        record: The run.
        baseline: Another run, to be used as the baseline instead of what was measured before this one.
    """
    summary = summarize(record.timelines)
    results = record.settled_results
    seconds = [result.seconds for result in results] or [summary.median_step_seconds]
    figures = Figures(
        samples_per_s=statistics.median(result.samples_per_s for result in results) if results else 0.0,
        step_seconds=Spread.of(seconds),
        summary=summary,
        efficiency=None,
        link=_link_use(record, summary),
        overlap=_overlap(summary.parts),
        prediction=_prediction(record, summary),
        exchanges=tuple(_exchanges(record)),
        bottleneck=Bottleneck(kind="unknown", text=""),
    )
    figures = figures.model_copy(update={"efficiency": _efficiency(record, figures.samples_per_s, baseline)})
    return figures.model_copy(update={"bottleneck": name_bottleneck(figures, record)})


def _efficiency(record: RunRecord, samples_per_s: float, baseline: RunRecord | None) -> Efficiency | None:
    surroundings = record.facts.surroundings
    if baseline is not None:
        results = baseline.settled_results
        others = baseline.facts.surroundings
        total = statistics.median(result.samples_per_s for result in results) if results else 0.0
        alone, note = total / others.world_size, f"{baseline.folder}: {others.sentence()}"
    elif (measured := record.facts.baseline) is not None:
        alone, note = measured.samples_per_s, f"{measured.note}, {counted(measured.num_steps, 'step')} before the run"
    else:
        return None
    if not alone:
        return None
    return Efficiency(
        share=samples_per_s / (surroundings.world_size * alone),
        speedup=samples_per_s / alone,
        alone_samples_per_s=alone,
        note=note,
        most=_most_efficiency(record) if baseline is None else 1.0,
    )


def _most_efficiency(record: RunRecord) -> float:
    """Where ranks compute with more threads than there are cores, they cannot all be as fast as one alone."""
    here = record.facts.surroundings
    if record.facts.options.get("virtual") is not None or here.device != "cpu":
        return 1.0
    return min(1.0, here.cores / (here.world_size * here.threads))


def _link_use(record: RunRecord, summary: Summary) -> LinkUse | None:
    here = record.facts.surroundings
    if here.world_size == 1 or here.world_size != here.hosts or not summary.num_steps:
        return None  # with several ranks on a host, nobody counts what stays there
    if here.shaped and (rate := record.facts.options.get("link_bytes_per_s")):
        bandwidth, source = float(rate), "as it was set"
    elif record.facts.rates is not None:
        bandwidth = record.facts.rates.all_reduce_bandwidth
        source = "as all-reduce reached it when it was measured"
    else:
        return None
    sent = summary.bytes_sent_per_rank
    busy = statistics.fmean(_seconds_under_way(step) for t in record.timelines for step in t.steps)
    return LinkUse(
        bandwidth=bandwidth,
        source=source,
        bytes_per_host=sent,
        of_step=sent / bandwidth / summary.parts.total if summary.parts.total else 0.0,
        of_transfers=sent / bandwidth / busy if busy else 0.0,
    )


def _seconds_under_way(
    step: Step, names: frozenset[str] | None = None, activity: Activity = Activity.TRANSFER
) -> float:
    """While at least one of these intervals lasts."""
    total, until = 0.0, -math.inf
    for interval in sorted(step.intervals, key=lambda i: i.start):
        if interval.activity is activity and (names is None or interval.name in names):
            total += max(0.0, interval.end - max(interval.start, until))
            until = max(until, interval.end)
    return total


def _overlap(parts: StepParts) -> float | None:
    on_the_wire = parts.hidden + parts.exposed
    return parts.hidden / on_the_wire if on_the_wire else None


def _prediction(record: RunRecord, summary: Summary) -> Prediction | None:
    parts, seconds = None, 0.0
    if record.predicted:
        last = [timeline.steps[-1] for timeline in record.predicted]
        slowest = max(last, key=lambda step: (step.seconds, -step.exposed_seconds))
        parts, seconds = split_step(slowest, find_last_starts(last)), slowest.seconds
    elif record.plan is not None and record.plan.predicted is not None:
        parts, seconds = record.plan.predicted.parts, record.plan.predicted.step_seconds
    if parts is None or not summary.median_step_seconds:
        return None
    return Prediction(step_seconds=seconds, parts=parts, off=seconds / summary.median_step_seconds - 1.0)


def _exchanges(record: RunRecord) -> list[ExchangeFigures]:
    """In the order in which their last transfers start in the typical step."""
    index = record.typical_index()
    if index is None:
        return []
    transfers: dict[str, set[str]] = defaultdict(set)
    place: dict[str, float] = {}
    for interval in record.steps_at(index)[0].intervals:
        name = exchange_of(interval.name)
        if interval.activity is Activity.TRANSFER and name in record.facts.exchanges:
            transfers[name].add(interval.name)
            place[name] = max(place.get(name, 0.0), interval.start)
    order = sorted(place, key=place.__getitem__)
    return [_exchange(record, name, frozenset(transfers[name])) for name in order]


def _exchange(record: RunRecord, name: str, transfers: frozenset[str]) -> ExchangeFigures:
    layers = record.facts.exchanges[name]
    specs = record.plan.layers if record.plan is not None else {}
    schemes = {record.plan.schemes[one].kind for one in layers if one in specs} if record.plan is not None else set()
    world_size = record.facts.surroundings.world_size
    steps = [step for timeline in record.timelines for step in timeline.steps]
    predicted = _predicted_of(record.predicted, layers)
    return ExchangeFigures(
        layers=layers,
        scheme=", ".join(sorted(schemes)),
        bytes_sent=statistics.fmean(sum(i.num_bytes for i in s.intervals if i.name in transfers) for s in steps),
        plain_bytes=sum(AllReduce().bytes_sent(specs[one], world_size) for one in layers if one in specs),
        transfer_seconds=statistics.fmean(_seconds_under_way(s, transfers) for s in steps),
        exposed_seconds=statistics.fmean(_seconds_under_way(s, transfers, Activity.EXPOSED) for s in steps),
        predicted_transfer_seconds=predicted and predicted[0],
        predicted_exposed_seconds=predicted and predicted[1],
    )


def _predicted_of(predicted: Sequence[Timeline], layers: tuple[str, ...]) -> tuple[float, float] | None:
    """Seconds of the transfers of exactly these layers in the predicted step, and seconds that they are exposed."""
    step = predicted[0].steps[-1] if predicted and predicted[0].steps else None
    if step is None:
        return None
    own = {layers[0], f"{layers[0]}..{layers[-1]}"}
    names = frozenset(i.name for i in step.intervals if exchange_of(i.name) in own)
    if not names:
        return None
    return _seconds_under_way(step, names), _seconds_under_way(step, names, Activity.EXPOSED)


def name_bottleneck(figures: Figures, record: RunRecord) -> Bottleneck:
    """What a step loses most time to, and what could be gained there.

    Standing still counts whole. Of computing counts what it takes longer than on one rank alone, where that is known.
    """
    parts, alone = figures.summary.parts, record.facts.baseline
    if not figures.summary.num_steps:
        return Bottleneck(kind="unknown", text="No step was recorded on all ranks.")
    worst = max(("exposed", "waiting", "loader"), key=lambda part: float(getattr(parts, part)))
    seconds = float(getattr(parts, worst))
    slower = parts.computing + parts.hidden - alone.parts.computing if alone is not None else 0.0
    if seconds < LIMITS_FROM * parts.total or seconds < slower:
        return Bottleneck(kind="computing", text=_computing_limits(figures, record))
    if worst == "loader":
        text = f"Training waits for samples in {parts.shares()['loader']:.0%} of a step."
        return Bottleneck(kind="loader", text=text)
    if worst == "waiting":
        return _uneven_ranks(record, parts.shares()["waiting"])
    return Bottleneck(kind="network", text=_network_limits(figures, parts.shares()["exposed"]))


def _computing_limits(figures: Figures, record: RunRecord) -> str:
    parts, alone = figures.summary.parts, record.facts.baseline
    shares = parts.shares()
    text = f"Computing takes {shares['computing'] + shares['hidden']:.0%} of a step"
    if figures.summary.num_ranks > 1:
        text += f"; a perfect network and equal ranks would save {shares['exposed'] + shares['waiting']:.0%}"
    text += "."
    if alone is None or not alone.parts.computing:
        return text
    more = parts.computing + parts.hidden - alone.parts.computing
    if more < (SLOWER_FROM - 1.0) * alone.parts.computing:
        return text
    rebuild = statistics.fmean(step.seconds_in(Activity.REBUILD) for t in record.timelines for step in t.steps)
    text += f" It takes {1 + more / alone.parts.computing:.2f} times as long as on one rank alone: "
    if rebuild >= more / 2:
        return f"{text}{format_seconds(rebuild)} of it rebuild gradients from factors."
    return f"{text}copies, rebuilds, and whatever else is busy on the same cores."


def _uneven_ranks(record: RunRecord, share: float) -> Bottleneck:
    computing = {
        timeline.steps[0].rank: statistics.median(_computing_seconds(step) for step in timeline.steps)
        for timeline in record.timelines
    }
    slowest = max(computing, key=computing.__getitem__)
    usual = statistics.median(seconds for rank, seconds in computing.items() if rank != slowest)
    text = f"Ranks wait for one another in {share:.0%} of a step."
    if computing[slowest] < SLOWER_FROM * usual:
        return Bottleneck(kind="uneven ranks", text=f"{text} No rank is always the slow one: they take turns.")
    text += f" Rank {slowest} computes {format_seconds(computing[slowest])} a step, the others {format_seconds(usual)}."
    return Bottleneck(kind="a slow rank", text=text)


def _computing_seconds(step: Step) -> float:
    parts = split_step(step, {})
    return parts.computing + parts.hidden


def _network_limits(figures: Figures, share: float) -> str:
    text = f"Training stands still for the network in {share:.0%} of a step."
    link = figures.link
    if link is None:
        return text
    sent = f"{format_traffic(link.bytes_per_host)} per host at {format_bandwidth(link.bandwidth)}"
    floor = (
        f"{sent} take at least {format_seconds(link.floor_seconds)} of {format_seconds(figures.step_seconds.median)}"
    )
    if link.of_transfers >= LINK_IS_FULL_FROM:
        return f"{text} {floor}: a faster link or fewer bytes would help most."
    return (
        f"{text} {floor}, and the link is used by {link.of_transfers:.0%} while transfers are under way: latency or "
        "busy processors hold them up more than bandwidth."
    )
