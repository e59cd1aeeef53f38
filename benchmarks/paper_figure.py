"""The scaling figure of the Poseidon paper, predicted: VGG19-22K on 1 to 32 nodes at 40 and 10 Gbit/s.

Nothing is run: the model is laid out on the meta device, its seconds are the published 0.925 s of a step over 32
samples, the nodes are those of a preset with other links, and steps are simulated. Beside each speed-up stands what the
authors measured, where they did.

    python benchmarks/paper_figure.py --png paper_figure.png

*Sequential server*: a sharded parameter server, after backward. *Wait-free*: every layer by the server, or every layer
by all-reduce, while backward goes on. *Hybrid*: the plan that the search finds.

Source: Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU clusters",
USENIX ATC 2017, section 5.1, figures 5 and 6; seconds per 20 iterations from the data that the authors published with
their plots.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from vgg19_22k_virtual import make_profile

from poseidon.cluster.rates import Rates
from poseidon.cluster.spec import ClusterSpec
from poseidon.cluster.topology import rates_of
from poseidon.comm import ShardedServer
from poseidon.plan import Plan, uniform_plan
from poseidon.planner.search import search_plan
from poseidon.profile.graph import ModelProfile
from poseidon.simulator import simulate
from poseidon.units import parse_bandwidth

PRESET = "gpu-32x10GbE"
NODES = (1, 2, 4, 8, 16, 32)
LINKS = ("40Gbit/s", "10Gbit/s")
ONE_NODE = 18.5
"""Seconds of 20 iterations on one node."""
AUTHORS = {
    ("40Gbit/s", "sequential server"): dict(zip(NODES, (ONE_NODE, 36.8, 50.3, 68.5, 105.0, 134.0), strict=True)),
    ("40Gbit/s", "wait-free server"): dict(zip(NODES, (ONE_NODE, 20.8, 22.6, 24.2, 25.6, 27.7), strict=True)),
    ("40Gbit/s", "hybrid"): dict(zip(NODES, (ONE_NODE, 18.9, 19.3, 19.4, 19.7, 20.1), strict=True)),
    ("10Gbit/s", "sequential server"): {1: ONE_NODE, 16: 16 * ONE_NODE / 4.0},
    ("10Gbit/s", "hybrid"): {1: ONE_NODE, 16: 16 * ONE_NODE / 15.5},
}
"""Seconds of 20 iterations by nodes; at 10 Gbit/s the paper's text gives two speed-ups."""

PLANS: dict[str, Callable[[ModelProfile, Rates], Plan]] = {
    "sequential server": lambda profile, rates: uniform_plan(
        profile, rates.world_size, ShardedServer(), wait_free=False
    ),
    "wait-free server": lambda profile, rates: uniform_plan(profile, rates.world_size, ShardedServer()),
    "wait-free all-reduce": lambda profile, rates: uniform_plan(profile, rates.world_size),
    "hybrid": search_plan,
}
COLORS = dict(zip(PLANS, ("#e45756", "#f58518", "#b279a2", "#4c78a8"), strict=True))

SpeedUps = dict[str, dict[str, dict[int, float]]]
"""By link, plan and nodes."""


def group_of(profile: ModelProfile, nodes: int, link: str) -> Rates:
    """The first nodes of the preset, whose GPUs rebuild as fast as they compute the model."""
    rates = rates_of(ClusterSpec.load_preset(PRESET), num_hosts=nodes, bandwidth=parse_bandwidth(link))
    flops = sum(layer.flops for layer in profile.layers)
    seconds = sum(layer.forward_seconds for layer in profile.layers)
    return rates.model_copy(update={"flops_per_s": flops / seconds})


def predict(profile: ModelProfile) -> SpeedUps:
    """Speed-ups over one node."""
    found: SpeedUps = {link: {name: {} for name in PLANS} for link in LINKS}
    for link in LINKS:
        alone = group_of(profile, 1, link)
        one = simulate(profile, uniform_plan(profile, 1), alone).step_seconds
        for nodes in NODES:
            rates = group_of(profile, nodes, link)
            for name, make in PLANS.items():
                seconds = one if nodes == 1 else simulate(profile, make(profile, rates), rates).step_seconds
                found[link][name][nodes] = nodes * one / seconds
    return found


def measured(link: str, name: str) -> dict[int, float]:
    """The authors' speed-ups; none where they gave no figure."""
    return {nodes: nodes * ONE_NODE / seconds for nodes, seconds in AUTHORS.get((link, name), {}).items()}


def table(found: SpeedUps) -> str:
    """Markdown: predicted speed-ups, the authors' in brackets."""
    lines = []
    for link in LINKS:
        lines += [f"| {link} | {' | '.join(f'{n} nodes' for n in NODES)} |", "| --- |" + " --- |" * len(NODES)]
        for name, speed_ups in found[link].items():
            authors = measured(link, name)
            cells = [f"{speed_ups[n]:.1f}" + (f" ({authors[n]:.1f})" if n in authors else "") for n in NODES]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def draw(found: SpeedUps, path: Path) -> None:
    """One picture for each link: lines as predicted, crosses as the authors measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(LINKS), figsize=(11, 4.8), sharey=True, layout="constrained")
    for axes, link in zip(panels, LINKS, strict=True):
        axes.plot(NODES, NODES, linestyle="--", color="#9a9fa6", label="ideal")
        for name, speed_ups in found[link].items():
            axes.plot(speed_ups.keys(), speed_ups.values(), marker="o", color=COLORS[name], label=name)
            if authors := measured(link, name):
                axes.plot(authors.keys(), authors.values(), "x", markersize=9, color=COLORS[name])
        axes.plot([], [], "x", markersize=9, color="black", label="measured by the authors")
        axes.set(title=f"VGG19-22K, {link}", xlabel="nodes", xticks=NODES, xlim=(0, 33), ylim=(0, 33))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("speed-up over one node")
    panels[0].legend(loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, help="where the picture goes")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    found = predict(make_profile(1.0))
    print(table(found))
    if given.png:
        draw(found, given.png)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
