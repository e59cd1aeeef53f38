"""`poseidon simulate`: the predicted steps of a plan on a cluster, in numbers and as a timeline."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from poseidon.breakdown import LABELS
from poseidon.cli.terminal import make_console
from poseidon.cluster.spec import ClusterSpec
from poseidon.errors import InfeasibleError
from poseidon.plan import Plan
from poseidon.planner.explain import what_it_waits_for
from poseidon.planner.hosts import format_rate
from poseidon.simulator import Simulation
from poseidon.simulator import simulate as predict
from poseidon.simulator.rates import rates_for
from poseidon.timeline import merge
from poseidon.units import format_seconds


def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan's file, as `poseidon plan -o` writes it.")],
    cluster: Annotated[str, typer.Option(help="A cluster's file, or a preset's name.", show_default=False)],
    hosts: Annotated[int | None, typer.Option(help="The first so many hosts; all if not given.", min=1)] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Backward passes to one exchange; what the plan says if not given.", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps, one after the other; the last one is shown.", min=2)] = 3,
    timeline: Annotated[
        Path | None, typer.Option(help="Where all intervals go, as JSON lines, one step a line.")
    ] = None,
) -> None:
    """Predict what a plan's steps take on a cluster, and where the time goes.

    poseidon simulate plan.json --cluster lab.toml --timeline predicted.jsonl
    """
    chosen = Plan.load(plan)
    if accumulate is not None:
        chosen = chosen.model_copy(update={"profile": chosen.profile.accumulated(accumulate)})
    rates = rates_for(chosen.profile, ClusterSpec.find(cluster), num_hosts=hosts)
    if chosen.world_size != rates.world_size:
        raise InfeasibleError(
            f"{plan} is for a world size of {chosen.world_size}, but {cluster} has {rates.world_size} ranks: "
            "make a plan for these, or choose with --hosts how many hosts take part"
        )
    simulation = predict(chosen.profile, chosen, rates, num_steps=steps)
    console = make_console()
    console.print(_parts(simulation))
    samples = chosen.world_size * chosen.profile.batch_size / simulation.step_seconds
    console.print(f"{format_rate(samples)} samples/s over {chosen.world_size} ranks", soft_wrap=True)
    console.print(what_it_waits_for(chosen.profile, chosen, rates, simulation), soft_wrap=True)
    if timeline is not None:
        merge(simulation.timelines).save(timeline)
        console.print(f"written to {timeline}", soft_wrap=True)


def _parts(simulation: Simulation) -> Table:
    """The step and what it goes to."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_row("predicted step", format_seconds(simulation.step_seconds), "")
    parts = simulation.parts
    for name, share in parts.shares().items():
        table.add_row(f"  {LABELS[name]}", format_seconds(getattr(parts, name)), f"{share:.0%}")
    return table
