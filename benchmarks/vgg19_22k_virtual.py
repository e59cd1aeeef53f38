"""VGG19-22K on one and on eight emulated hosts, at the compute-to-bytes ratio that the Poseidon paper had at 10 GbE.

The model sleeps for the published 0.925 s of a step over 32 samples, spread over its layers by their operations; the
229 million gradients and their factors are real bytes on shaped links. So that a few cores can move the bytes of eight
hosts, time is stretched: a step takes `stretch` times as long, and the link has 10 Gbit/s over `stretch`. The ratio of
the two, which decides what an exchange costs, stays the paper's.

    python benchmarks/vgg19_22k_virtual.py --json vgg19_22k.json

Three plans: *hybrid* (Poseidon's rule), *wait-free* (all-reduce everywhere, while backward goes on) and *sequential
server* (a sharded parameter server, after backward). A speed-up is samples per second over those of one host without
exchange.

Source: Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU clusters",
USENIX ATC 2017, section 5.1 and figure 6.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch
from torch.nn import functional as F

from poseidon.cluster.rates import Rates
from poseidon.cluster.spec import ClusterSpec
from poseidon.comm import ShardedServer
from poseidon.comm.group import Group
from poseidon.errors import ConfigError, PoseidonError
from poseidon.launch.local import LabEngine
from poseidon.plan import Plan, uniform_plan
from poseidon.planner.rules import choose_plan
from poseidon.profile.graph import ModelProfile
from poseidon.profile.measure import profile_model, scale_to
from poseidon.profile.virtual import virtual_batch, virtual_loss, virtual_model, virtual_optimizer
from poseidon.runtime.attach import Run
from poseidon.runtime.join import init, shutdown
from poseidon.tasks.models import VGG19
from poseidon.timeline import Activity, Step
from poseidon.units import format_bandwidth, format_bytes, parse_bandwidth, parse_bytes

PAPER_SECONDS = 0.925
"""One step over 32 samples on one GPU (34.6 samples a second in Caffe)."""
PAPER_LINK = "10Gbit/s"
NUM_CLASSES = 21841
BATCH_SIZE = 32
ALL_REDUCE_EFFICIENCY, EXCHANGE_EFFICIENCY = 0.95, 0.75
"""Shares of a link that gloo's all-reduce and messages point to point reach on emulated hosts."""
BYTES_PER_HOST = {
    "hybrid": parse_bytes("600MB"),
    "wait-free": parse_bytes("1400MB"),
    "sequential server": parse_bytes("1900MB"),
}
"""Memory that a host needs: under all-reduce one copy of the gradients, under the server the parameters too."""
RESULT = "result: "


def make_profile(stretch: float) -> ModelProfile:
    """VGG19-22K with the paper's seconds times `stretch`, without a weight in memory."""
    with torch.device("meta"):
        model = VGG19(num_classes=NUM_CLASSES)
        batch = torch.empty(BATCH_SIZE, 3, 224, 224), torch.empty(BATCH_SIZE, dtype=torch.long)
    profile = profile_model(model, batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    source = f"{PAPER_SECONDS}s per step on one GPU of the ATC'17 paper, times {stretch:g}, spread by operations"
    return scale_to(profile, PAPER_SECONDS * stretch, source=source)


def _hybrid(profile: ModelProfile, world_size: int, bandwidth: float) -> Plan:
    forward_seconds = sum(layer.forward_seconds for layer in profile.layers)
    rates = Rates.of(
        world_size=world_size,
        all_reduce_bandwidth=ALL_REDUCE_EFFICIENCY * bandwidth,
        exchange_bandwidth=EXCHANGE_EFFICIENCY * bandwidth,
        flops_per_s=sum(layer.flops for layer in profile.layers) / forward_seconds,
    )
    return choose_plan(profile, rates)


PLANS: dict[str, tuple[Callable[[ModelProfile, int, float], Plan], int, int]] = {
    "hybrid": (_hybrid, 2, 3),
    "wait-free": (lambda profile, world_size, bandwidth: uniform_plan(profile, world_size), 1, 2),
    "sequential server": (
        lambda profile, world_size, bandwidth: uniform_plan(profile, world_size, ShardedServer(), wait_free=False),
        1,
        2,
    ),
}
"""Each with its steps to warm up and to measure: where a step takes long, little differs between steps."""


# On each host


def work(stretch: float, plans: list[str]) -> None:
    """Runs the plans one after the other, or on one host the model alone, and prints what rank 0 gathered."""
    group = init()
    profile = make_profile(stretch)
    bandwidth = parse_bandwidth(PAPER_LINK) / stretch
    results = {}
    try:
        if group.world_size == 1:
            results["one host"] = _measure(profile, None, group, 1, 2)
        for name in plans:
            make_plan, warm_up, measured = PLANS[name]
            results[name] = _measure(profile, make_plan(profile, group.world_size, bandwidth), group, warm_up, measured)
            gc.collect()  # buckets as large as the model, in cycles with the hooks that fill them
    except PoseidonError as error:
        shutdown(str(error))
        raise
    if group.rank == 0:
        print(RESULT + json.dumps(results), flush=True)
    shutdown()


def _measure(profile: ModelProfile, plan: Plan | None, group: Group, warm_up: int, measured: int) -> dict[str, Any]:
    """Steps under one plan; the replicas are zeros everywhere, so `Run` is made without making them equal first."""
    writable = plan is not None and any(scheme.kind == "sharded_server" for scheme in plan.schemes.values())
    model, batch = virtual_model(profile, writable=writable), virtual_batch(profile)
    optimizer = virtual_optimizer(model.parameters())
    run = Run(model, optimizer, plan, group) if plan is not None else None
    ends, processor = [], []
    group.barrier()
    for _ in range(warm_up + measured):
        virtual_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
        processor.append(time.process_time())
    mine = {
        "seconds": [after - before for before, after in zip(ends[-measured - 1 :], ends[-measured:], strict=False)],
        "processor_seconds": (processor[-1] - processor[-measured - 1]) / measured,
    }
    if run is not None:
        mine |= _facts(run.timeline.steps[-measured:])
    everyone = [json.loads(text) for text in group.all_gather_text(json.dumps(mine))]
    if run is not None:
        run.detach()
    result = {
        "seconds": median(mean(rank["seconds"][i] for rank in everyone) for i in range(measured)),
        "all_seconds": [round(mean(rank["seconds"][i] for rank in everyone), 3) for i in range(measured)],
        "processor_seconds": round(sum(rank["processor_seconds"] for rank in everyone), 2),
    }
    if plan is not None:
        result |= {"plan": plan.summary(), **{key: everyone[0][key] for key in mine if key not in result}}
        result["exposed_seconds"] = round(mean(rank["exposed_seconds"] for rank in everyone), 3)
    return result


def _facts(steps: tuple[Step, ...]) -> dict[str, Any]:
    """What was exposed on one rank, on average over steps, and the transfers of the last step."""
    exposed: dict[str, float] = {}
    for step in steps:
        for interval in step.intervals:
            if interval.activity is Activity.EXPOSED:
                exposed[interval.name] = exposed.get(interval.name, 0.0) + interval.seconds / len(steps)
    last = steps[-1]
    return {
        "exposed_seconds": sum(exposed.values()),
        "exposed": {name: round(seconds, 3) for name, seconds in exposed.items() if seconds >= 0.001},
        "rebuild_seconds": round(mean(step.seconds_in(Activity.REBUILD) for step in steps), 3),
        "bytes_sent": last.bytes_sent,
        "intervals": [
            [i.activity.value, i.name, round(i.start - last.start, 3), round(i.end - last.start, 3), i.num_bytes]
            for i in last.intervals
        ],
    }


# On the machine that emulates them


def check_memory(num_hosts: int, plans: list[str]) -> None:
    """Raises ConfigError where the plans need more memory than is free: the system would kill one of the hosts."""
    need = num_hosts * max((BYTES_PER_HOST[name] for name in plans), default=0)
    free = psutil.virtual_memory().available
    if need > free:
        raise ConfigError(
            f"cannot run {', '.join(plans)} on {num_hosts} hosts: they need {format_bytes(need)} of memory, "
            f"{format_bytes(free)} are free; leave out a plan (--plans hybrid) or use fewer --hosts"
        )


def launch(num_hosts: int, stretch: float, plans: list[str]) -> dict[str, Any]:
    """Runs this file's other half on so many hosts."""
    spec = ClusterSpec.uniform(num_hosts=num_hosts, bandwidth=parse_bandwidth(PAPER_LINK) / stretch)
    results: dict[str, Any] = {}

    def take(label: str, line: str) -> None:
        if line.startswith(RESULT):
            results.update(json.loads(line.removeprefix(RESULT)))
        else:
            print(f"[{label}] {line}", file=sys.stderr)

    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--stretch", str(stretch), "--plans", *plans]
    LabEngine(spec).run(command, on_line=take, env={"OMP_NUM_THREADS": "1"})
    return results


def report(results: dict[str, Any], num_hosts: int, stretch: float) -> None:
    """The table."""
    link = format_bandwidth(parse_bandwidth(PAPER_LINK) / stretch)
    one = results["one host"]["seconds"]
    print(
        f"\nVGG19-22K, virtual compute, {BATCH_SIZE} samples per host and step, {os.cpu_count()} cores for all hosts,"
    )
    print(f"links of {link}: time stretched {stretch:g} times against {PAPER_LINK} and {PAPER_SECONDS}s a step\n")
    print(f"{'':<18} hosts  step        speed-up  exposed  sent by a host")
    print(f"{'one host':<18} {1:>5}  {one:>7.2f} s   {1.0:>8.2f}")
    for name, result in results.items():
        if name == "one host":
            continue
        result["speed_up"] = num_hosts * one / result["seconds"]
        print(
            f"{name:<18} {num_hosts:>5}  {result['seconds']:>7.2f} s   {result['speed_up']:>8.2f}"
            f"  {result['exposed_seconds']:>5.2f} s  {result['bytes_sent'] / 10**6:>7.0f} MB"
        )
        print(f"{'':<18}        {result['plan']}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--stretch", type=float, default=10.0, help="how much slower than in the paper time goes")
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.stretch, given.plans)
        return
    try:
        check_memory(given.hosts, given.plans)
        results = launch(1, given.stretch, []) | launch(given.hosts, given.stretch, given.plans)
    except PoseidonError as error:
        sys.exit(f"error: {error}")
    report(results, given.hosts, given.stretch)
    if given.json:
        facts = {
            "hosts": given.hosts,
            "cores": os.cpu_count(),
            "link_bytes_per_s": parse_bandwidth(PAPER_LINK) / given.stretch,
            "stretch": given.stretch,
            "batch_size": BATCH_SIZE,
        }
        given.json.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
