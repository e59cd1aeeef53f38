"""Unequal hosts: equal shares of each global batch against shares by speed, in turns.

    python benchmarks/shares.py --json shares.json

Four emulated hosts, two of which get a quarter of the others' processor time. First a run with `shares="speed"` goes on
until its shares have stayed for a while. Then the same model under the same plan takes turns with equal shares and with
those that were found; the global batch is the same. It needs Linux that allows network namespaces and control groups.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from poseidon.artifact import Value
from poseidon.auto import distribute
from poseidon.cluster.spec import ClusterSpec, limit_cpus
from poseidon.comm.group import Group
from poseidon.errors import PoseidonError
from poseidon.launch.local import LabEngine
from poseidon.plan import Plan
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.join import init, shutdown
from poseidon.runtime.options import RunOptions
from poseidon.tasks import Task, load_task
from poseidon.units import format_seconds

STAYS_FOR = 25
"""Exchanges without a change after which shares have settled: one more reading than a change needs."""
MOST_WARM_UP = 90
SWITCH_STEPS = 1
"""At the start of a turn, not counted."""
RESULT = "result: "


class Turns(Value):
    """What was measured with one way to share."""

    name: str
    samples: tuple[int, ...]
    """Of each global batch, by host."""
    rounds: tuple[tuple[float, ...], ...]
    """Seconds of each step, the mean over ranks, by round."""

    @property
    def medians(self) -> list[float]:
        """Of each round."""
        return [statistics.median(steps) for steps in self.rounds]


class Result(Value):
    """What rank 0 says at the end."""

    task: str
    link: str
    cpus: tuple[str, ...]
    plan: str
    equal: Turns
    speed: Turns

    @property
    def ratios(self) -> list[float]:
        """By round, how many times as fast steps are by speed."""
        return [a / b for a, b in zip(self.equal.medians, self.speed.medians, strict=True)]


# On each host


class Training:
    """A task's model, optimizer and loss on this rank."""

    def __init__(self, task: Task, batch_size: int) -> None:
        torch.manual_seed(0)
        self._task = task
        self._batch_size = batch_size
        self.model = task.make_model().train()
        self.optimizer = task.make_optimizer(self.model.parameters())
        self._batches: Iterator[Any] = iter(())

    def go_on_with(self, run: Run) -> None:
        """Takes its samples as a run deals them, full batches only."""
        loader = run.shard(
            DataLoader(
                self._task.make_train_data(),  # type: ignore[arg-type]
                batch_size=self._batch_size,
                shuffle=True,
                drop_last=True,
                collate_fn=self._task.collate,
            )
        )
        self._batches = (batch for _ in iter(int, 1) for batch in loader)

    def step(self) -> float:
        """Seconds of one step, the loader included."""
        start = time.perf_counter()
        batch = next(self._batches)
        self.optimizer.zero_grad()
        self._task.loss(self.model, batch).backward()
        self.optimizer.step()
        return time.perf_counter() - start


def find_shares(training: Training, group: Group) -> tuple[Plan, tuple[int, ...]]:
    """Trains by speed until the shares stay; the plan that was found with them."""
    run = distribute(training.model, training.optimizer, shares="speed", group=group)
    training.go_on_with(run)
    changed_at = 0
    while run.num_exchanges < MOST_WARM_UP and not (run.settled and run.num_exchanges - changed_at > STAYS_FOR):
        training.step()
        changes = [event["exchange"] for event in run.events if event["kind"] in ("kept", "dropped", "shared")]
        changed_at = changes[-1] if changes else run.num_exchanges
    parts = run.dealing.parts
    assert parts is not None
    run.detach()
    return run.plan, parts


def race(training: Training, plan: Plan, shares: dict[str, Sequence[int]], group: Group, rounds: int, steps: int):
    """Seconds by way to share, round and step."""
    run = attach(training.model, training.optimizer, plan, group, RunOptions(mean="samples"))
    training.go_on_with(run)
    training.step()
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in shares}
    for _ in range(rounds):
        for name, samples in shares.items():
            run.dealing.change(samples)
            group.barrier()
            mine = [training.step() for _ in range(SWITCH_STEPS + steps)][SWITCH_STEPS:]
            everyone = [json.loads(text) for text in group.all_gather_text(json.dumps(mine), "comparing a turn")]
            seconds[name].append(tuple(statistics.fmean(ranks) for ranks in zip(*everyone, strict=True)))
    run.check_replicas()
    run.detach()
    return seconds


def work(given: argparse.Namespace) -> None:
    """What every rank does; rank 0 prints the result."""
    group = init(max_connections=4)
    try:
        training = Training(load_task(given.task), given.batch)
        plan, found = find_shares(training, group)
        count = sum(found)
        equal = tuple(count // group.world_size for _ in found)
        seconds = race(training, plan, {"equal": equal, "speed": found}, group, given.rounds, given.steps)
        if group.rank == 0:
            result = Result(
                task=given.task,
                link=given.link,
                cpus=tuple(given.cpu),
                plan=plan.summary(),
                equal=Turns(name="equal shares", samples=equal, rounds=tuple(seconds["equal"])),
                speed=Turns(name="shares by speed", samples=found, rounds=tuple(seconds["speed"])),
            )
            print(RESULT + result.model_dump_json(), flush=True)
    except PoseidonError as error:
        shutdown(str(error))
        raise
    shutdown()


# On the machine that emulates them


def draw(result: Result) -> str:
    """The table, and what to know with it."""
    lines = [f"{'':<16}{'samples by host':<18}{'step':>9}  {'p10 - p90':<18}{'samples/s':>10}"]
    for turns in (result.equal, result.speed):
        steps = sorted(seconds for one in turns.rounds for seconds in one)
        median = statistics.median(steps)
        spread = f"{format_seconds(steps[len(steps) // 10])} - {format_seconds(steps[(9 * len(steps)) // 10])}"
        samples = ", ".join(map(str, turns.samples))
        rate = sum(turns.samples) / median
        lines.append(f"{turns.name:<16}{samples:<18}{format_seconds(median):>9}  {spread:<18}{rate:>10.1f}")
    ratios = sorted(result.ratios)
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f} over {len(ratios)} rounds"
    lines.append(f"\nby speed, a step is {statistics.median(ratios):.2f} times as fast ({spread})")
    cpus = ", ".join(result.cpus)
    lines.append(
        f"{result.task}, {len(result.cpus)} hosts with {cpus} of a core, on {os.cpu_count()} cores, {result.link}"
    )
    lines.append(f"plan: {result.plan}")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="resnet20", help="a built-in task, or path/to/file.py:function")
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank where shares are equal")
    parser.add_argument("--cpu", nargs="+", default=["60%", "60%", "15%", "15%"], help="of a core, by host")
    parser.add_argument("--link", default="1Gbit/s")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each way to share")
    parser.add_argument("--steps", type=int, default=4, help="of a turn that count")
    parser.add_argument("--json", type=Path, help="everything that was measured")
    given = parser.parse_args()
    if "RANK" in os.environ:
        work(given)
        return
    results: list[Result] = []

    def take(label: str, line: str) -> None:
        if line.startswith(RESULT):
            results.append(Result.model_validate_json(line.removeprefix(RESULT)))
        else:
            print(f"[{label}] {line}", file=sys.stderr)

    try:
        spec = ClusterSpec.uniform(num_hosts=len(given.cpu), bandwidth=given.link)
        spec = limit_cpus(spec, [f"host{index}={cpu}" for index, cpu in enumerate(given.cpu)])
        LabEngine(spec).run([sys.executable, *sys.orig_argv[1:]], on_line=take, env={"OMP_NUM_THREADS": "1"})
    except PoseidonError as error:
        sys.exit(f"error: {error}")
    print(draw(results[0]))
    if given.json:
        given.json.write_text(results[0].model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
