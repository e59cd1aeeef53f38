"""`poseidon plan`: before a run, what so many hosts will give, with which plan, and why."""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from poseidon.cli.profile import measure
from poseidon.cli.terminal import make_console
from poseidon.cluster.spec import ClusterSpec
from poseidon.errors import ConfigError
from poseidon.planner.explain import bottleneck_table, explain, layer_table, scaling_table, what_ifs
from poseidon.planner.hosts import Scaling, compare_hosts, recommend, recommendation
from poseidon.planner.search import memory_limit, search_plan
from poseidon.planner.shares import propose_shares
from poseidon.profile.graph import ModelProfile
from poseidon.profile.measure import NUM_PASSES
from poseidon.report.speedup import check_plot, draw_speedups
from poseidon.runtime.options import Shares
from poseidon.tasks import load_task
from poseidon.units import format_bandwidth, parse_bandwidth

T = TypeVar("T")
WIDTH = 80
"""Columns of the tables, wherever they go."""


def plan(
    model: Annotated[
        str, typer.Argument(help="A task, which is profiled first, or the file of a profile.", metavar="TASK|FILE")
    ],
    cluster: Annotated[
        str | None, typer.Option(help="A cluster's file, or a preset's name.", show_default=False)
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="How many hosts, with commas; all up to the cluster's if not given.")
    ] = None,
    links: Annotated[
        str | None, typer.Option(help="Rates of every link, with commas; those of the cluster if not given.")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Samples per rank and backward pass, with commas.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Backward passes to one exchange; what the profile says if not given.", min=1)
    ] = None,
    allow: Annotated[
        str, typer.Option(help="How far the mathematics may bend: exact, rounded, compressed or relaxed.")
    ] = "exact",
    shares: Annotated[
        Shares, typer.Option(help="speed gives the plan more samples for ranks that compute faster.")
    ] = "equal",
    given: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field that is not up for choice, such as layers.fc6.scheme=all_reduce."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where the plan goes, such as plan.json.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of the speed-up: out.html or out.png.")] = None,
) -> None:
    """Say what N hosts will give, with which plan, and why, before the run.

    poseidon plan fashion-mnist --cluster lab.toml --hosts 1,2,4 -o plan.json
    """
    rates = _listed(links, parse_bandwidth)
    counts = _listed(hosts, _count)
    spec = _cluster(cluster, counts, rates)
    overrides = read_overrides(given or [])
    if plot is not None:
        check_plot(plot)
    for path in (out, plot):
        _check_folder(path)
    console = make_console(width=WIDTH)
    profiles = _profiles(model, _listed(batch, _count), console)
    if accumulate is not None:
        profiles = [profile.accumulated(accumulate) for profile in profiles]
    counts = counts or _up_to(len(spec.hosts))
    effort = max(0.1, 1.0 / (len(profiles) * len(rates or [0.0]) * len(counts)))
    search: dict[str, Any] = {"allow": allow, "overrides": overrides}
    scalings = [
        scaling
        for profile in profiles
        for scaling in compare_hosts(profile, spec, hosts=counts, links=rates or [None], effort=effort, **search)
    ]
    chosen = _chosen(scalings, counts)
    if shares == "speed" and (proposed := propose_shares(chosen.plan.profile, chosen.plan, chosen.rates)):
        search["overrides"] = {**overrides, "portions": proposed.samples}
    chosen, scalings = _in_full(chosen, scalings, spec, search)
    _show(console, scalings, chosen)
    if out is not None:
        chosen.plan.save(out)
        console.print(f"written to {out}: poseidon train … --plan {out}", soft_wrap=True)
    if plot is not None:
        draw_speedups(scalings, plot)
        console.print(f"drawn to {plot}", soft_wrap=True)


def read_overrides(texts: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` by key.

    Raises:
        ConfigError: A text has another form, or a key is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"cannot read --set {text!r}: write it like layers.fc6.scheme=all_reduce")
        if key in found:
            raise ConfigError(f"cannot set {key!r} twice")
        found[key] = value
    return found


def _listed(text: str | None, read: Callable[[str], T]) -> list[T]:
    return [read(part.strip()) for part in text.split(",")] if text else []


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise ConfigError(f"cannot read {text!r} as a number of hosts or samples: it must be a whole number from 1 on")
    return int(text)


def _cluster(given: str | None, counts: Sequence[int], links: Sequence[float]) -> ClusterSpec:
    """The cluster that was named, or as many equal hosts as are asked for."""
    if given is not None:
        return ClusterSpec.find(given)
    if not counts or not links:
        raise ConfigError(
            "nothing is known about the hosts: give --cluster with a file from `poseidon probe` or a preset's name, or "
            "--hosts and --links"
        )
    return ClusterSpec.uniform(num_hosts=max(counts), bandwidth=links[0])


def _up_to(most: int) -> list[int]:
    """1, 2, 4, … and the whole cluster."""
    return sorted({most, *(1 << bit for bit in range(most.bit_length()))})


def _profiles(model: str, batches: Sequence[int], console: Console) -> list[ModelProfile]:
    """One for each batch, measured or read."""
    if Path(model).is_file() and Path(model).suffix in (".json", ".toml"):
        found = ModelProfile.load(model)
        if not found.seconds or not found.batch_size:
            missing = "its layers have no seconds" if found.batch_size else "it does not say for which batch it is"
            raise ConfigError(f"cannot plan from {model}: {missing}; profile the model where it runs")
        return [found if size == found.batch_size else found.scaled_to_batch(size) for size in batches] or [found]
    task = load_task(model)
    profiles = []
    for size in batches or [task.batch_size]:
        console.print(f"profiling {task.name} with {size} samples a step, {NUM_PASSES} passes")
        profiles.append(measure(task, size, num_passes=NUM_PASSES, meta=False))
    return profiles


def _chosen(scalings: Sequence[Scaling], counts: Sequence[int]) -> Scaling:
    """Of the first link and batch, the number of hosts that was asked for, or the best one of several."""
    first = scalings[0]
    alike = [one for one in scalings if (one.link, one.batch_size) == (first.link, first.batch_size)]
    return recommend([one for one in alike if one.num_hosts in counts])


def _in_full(
    chosen: Scaling, scalings: Sequence[Scaling], spec: ClusterSpec, search: Mapping[str, Any]
) -> tuple[Scaling, list[Scaling]]:
    """The chosen plan searched for with all effort, and put in its place."""
    limit = memory_limit(spec, chosen.num_hosts)
    found = search_plan(chosen.plan.profile, chosen.rates, memory_num_bytes=limit, **search)
    if found.predicted is None or found.predicted.step_seconds >= chosen.step_seconds:
        return chosen, list(scalings)
    speed_up = chosen.speed_up * chosen.step_seconds / found.predicted.step_seconds
    better = chosen.model_copy(update={"plan": found, "speed_up": speed_up})
    return better, [better if one is chosen else one for one in scalings]


def _show(console: Console, scalings: Sequence[Scaling], chosen: Scaling) -> None:
    console.print(scaling_table(scalings))
    console.print()
    for _, group in groupby(scalings, key=lambda one: (one.link, one.batch_size)):
        console.print(recommendation(list(group)))
    where = "one host" if chosen.num_hosts == 1 else f"{chosen.num_hosts} hosts"
    link = f" at {format_bandwidth(chosen.link)}" if chosen.link else ""
    console.print(f"\nthe plan for {where}{link} with {chosen.batch_size} samples a rank:")
    profile, plan, rates = chosen.plan.profile, chosen.plan, chosen.rates
    others = [one for one in scalings if one.link == chosen.link]
    for sentence in explain(profile, plan, rates, others):
        console.print(sentence)
    if plan.world_size > 1:
        console.print()
        console.print(layer_table(plan))
    console.print()
    console.print(bottleneck_table(what_ifs(profile, plan, rates, others)))


def _check_folder(path: Path | None) -> None:
    if path is not None and not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: there is no folder {path.absolute().parent} to write to")
