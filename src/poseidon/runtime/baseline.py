"""What one rank alone trains, measured before the run: scaling efficiency is against this, not against an assumption.

Rank 0 takes a few steps on a model of its own, without anything to exchange, while the others wait; then the model is
thrown away. The steps are recorded as those of the run are, from loader to optimizer.
"""

import statistics
import time
from collections.abc import Iterator
from itertools import cycle, islice

import torch

from poseidon.artifact import Value
from poseidon.breakdown import StepParts, split_step
from poseidon.comm.group import Group
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import attach
from poseidon.runtime.data import Share, Shares, batches
from poseidon.runtime.loading import timed
from poseidon.runtime.trainer import Schedule, take_step
from poseidon.tasks.task import Batch, Task

WARM_UP_STEPS = 2
"""The first is slow everywhere; the second is the first that has an optimizer's step in it."""
LEAST_STEPS, MOST_STEPS = 3, 20
"""That count."""
ENOUGH_SECONDS = 2.0
"""After these the least number of steps is enough."""
MOST_SECONDS = 10.0
"""After these one step is enough."""


class Baseline(Value):
    """A few steps of one rank alone."""

    step_seconds: float
    """Median."""
    samples_per_s: float
    num_steps: int
    """That count."""
    batch_size: int
    parts: StepParts
    """Mean over the steps; nothing is communicated."""
    note: str
    """What it ran on."""


def measure_baseline(task: Task, schedule: Schedule, device: torch.device, group: Group, *, note: str) -> Baseline:
    """Trains on rank 0 alone while all others wait; all ranks call this together.

    It draws from torch's global generator: seed it afterwards.

    Args:
        task: What is trained.
        schedule: With which batch.
        device: Of this rank.
        group: All ranks.
        note: What it runs on, in words.

    Returns:
        The same on every rank.
    """
    text = ""
    if group.rank == 0:
        text = _train_alone(task, schedule, device, note).model_dump_json()
    return Baseline.model_validate_json(group.broadcast_text(text, "waiting for rank 0 to measure one rank alone"))


def _train_alone(task: Task, schedule: Schedule, device: torch.device, note: str) -> Baseline:
    model = task.make_model().to(device)
    optimizer = task.make_optimizer(model.parameters())
    run = attach(model, optimizer, uniform_plan(profile_structure(model), 1), Group([]))
    model.train()
    began = time.monotonic()
    for share, batch in timed(run.recorder, _some_batches(task, schedule)):
        take_step(task, run, share, batch, schedule.accumulate)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # as the wait for the exchange does in the run
        counted = run.num_exchanges - WARM_UP_STEPS
        if counted <= 0:
            began = time.monotonic()
        elif time.monotonic() - began > (ENOUGH_SECONDS if counted >= LEAST_STEPS else MOST_SECONDS):
            break
    steps = run.timeline.steps[WARM_UP_STEPS:]
    run.detach()
    seconds = statistics.median(step.seconds for step in steps)
    parts = sum((split_step(step, {}) for step in steps), StepParts())
    return Baseline(
        step_seconds=seconds,
        samples_per_s=schedule.batch_size / seconds,
        num_steps=len(steps),
        batch_size=schedule.batch_size,
        parts=StepParts.model_validate({name: value / len(steps) for name, value in parts}),
        note=note,
    )


def _some_batches(task: Task, schedule: Schedule) -> Iterator[tuple[Share, Batch | None]]:
    """Whole batches, from the beginning again where the data has too few."""
    data = task.make_train_data()
    shares = Shares(num_samples=len(data), rank=0, world_size=1, local_batch_size=schedule.batch_size)
    whole = [share for share in shares.epoch() if len(share.indices) == schedule.batch_size] or list(shares.epoch())
    return batches(data, islice(cycle(whole), WARM_UP_STEPS + MOST_STEPS), collate=task.collate)
