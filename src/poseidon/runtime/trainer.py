"""The step loop for a Task: the same on one rank and on many."""

import json
import logging
from contextlib import nullcontext
from itertools import islice

import torch
from pydantic import Field

from poseidon.artifact import Value
from poseidon.comm.group import Group
from poseidon.errors import ConfigError
from poseidon.runtime.attach import Run
from poseidon.runtime.cursor import Cursor, Fit
from poseidon.runtime.data import Share, Shares, batches
from poseidon.runtime.keeping import Keeper, Keeping, Kept, go_on
from poseidon.runtime.ledger import Ledger, Watcher
from poseidon.runtime.loading import timed
from poseidon.tasks.task import Batch, Samples, Task
from poseidon.timeline import Activity

log = logging.getLogger(__name__)


class Schedule(Value):
    """How long and with how many samples at a time."""

    epochs: int = Field(ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many steps, even within an epoch."""
    batch_size: int = Field(ge=1)
    """Samples per rank and step."""
    accumulate: int = Field(default=1, ge=1)
    """Backward passes that these are divided among, with one exchange and one update at the end."""
    seed: int = Field(default=0, ge=0)
    """Of the order of the samples."""
    check_replicas: bool = False
    """Prove at the end of each epoch that all ranks hold the same parameters, bit by bit."""


class Outcome(Value):
    """What came out of a training."""

    scores: dict[str, float]
    """Of the last evaluation, as the task names them."""
    num_steps: int
    num_samples: int
    """Trained on, over all ranks and epochs."""
    seconds: float
    """Of all training steps, without evaluations."""
    kept: Kept
    """What was kept on the way, and where it went on from."""

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.num_samples / self.seconds if self.seconds else 0.0


def train(
    task: Task,
    run: Run,
    schedule: Schedule,
    watcher: Watcher,
    keeping: Keeping = Keeping(),  # noqa: B008 - a frozen value
) -> Outcome:
    """Trains a model that is under a plan, and scores it at the end of each epoch.

    Every rank takes its part of each global batch. The run is told how many samples that is, so that the update is the
    mean over the global batch also where ranks have different numbers of samples, or none. Where an earlier start of
    the job or an earlier run has left a state, training goes on from it, in the middle of an epoch if need be, with
    global batches as large as they were.

    Args:
        task: Data, loss and score.
        run: Model, optimizer and ranks, on every rank alike; takes the mean over samples.
        schedule: How long.
        watcher: Is told how it goes.
        keeping: What is kept on the way, and what training goes on from.
    """
    data, test_data = task.make_train_data(), task.make_test_data()
    cursor = Cursor(
        num_samples=len(data),
        seed=schedule.seed,
        global_batch_size=schedule.batch_size * run.group.world_size,
        samples_per_pass=-(-schedule.batch_size // schedule.accumulate),
        world_size=run.group.world_size,
    )
    go_on(run, cursor, keeping)
    shares = Shares(
        num_samples=len(data),
        rank=run.group.rank,
        world_size=run.group.world_size,
        local_batch_size=schedule.batch_size,
        kept_batch_size=cursor.global_batch_size,
        seed=schedule.seed,
    )
    num_passes = Fit.of(cursor, run.group.world_size).num_passes
    portions = run.dealing.join()
    wanted = min(schedule.epochs * shares.num_steps, schedule.max_steps or schedule.epochs * shares.num_steps)
    num_steps = max(wanted, cursor.num_steps)
    if cursor.num_steps >= wanted and run.group.rank == 0:
        log.warning("nothing is left to train: %d steps lie behind, and %d were asked for", cursor.num_steps, wanted)
    ledger = Ledger(run, cursor, num_steps // 10, watcher)
    keeper = Keeper(run, cursor, ledger, keeping)
    watcher.on_start(num_steps, cursor.num_steps)
    for epoch in range(cursor.epoch, -(-num_steps // shares.num_steps)):
        run.model.train()
        run.recorder.restart()
        portions.begin_epoch()
        left = shares.epoch(epoch, start=cursor.num_seen, portions=portions)
        loaded = timed(run.recorder, batches(data, left, collate=task.collate))
        for share, batch in islice(loaded, num_steps - cursor.num_steps):
            ledger.note(share, take_step(task, run, share, batch, num_passes))
            watcher.on_step(cursor.num_steps)
            keeper.after_step()
        ledger.combine()
        run.sync_buffers()
        if schedule.check_replicas:
            run.check_replicas()
        cursor.scores = evaluate(task, run.model, test_data, run.group, schedule.batch_size)
        watcher.on_epoch(epoch, cursor.num_steps, cursor.scores)
        if cursor.num_seen == len(data):
            cursor.begin_epoch(epoch + 1)
        keeper.after_epoch(task.objective)
    ledger.close()
    return Outcome(
        scores=cursor.scores,
        num_steps=cursor.num_steps,
        num_samples=cursor.num_trained,
        seconds=cursor.seconds,
        kept=keeper.kept,
    )


def take_step(task: Task, run: Run, share: Share, batch: Batch | None, accumulate: int = 1) -> torch.Tensor | None:
    """Forward, backward and one update; a rank without samples only takes part in the exchange.

    Args:
        task: The loss.
        run: Model, optimizer and ranks.
        share: Which samples of the global batch these are.
        batch: The samples; None if this rank has none.
        accumulate: Backward passes that they are divided among; fewer where all ranks have few.

    Returns:
        This rank's mean loss, a scalar; None if it had no samples.
    """
    assert run.optimizer is not None
    run.recorder.begin(Activity.OPTIMIZER)
    run.optimizer.zero_grad()
    run.recorder.end(Activity.OPTIMIZER)
    loss = None
    if batch is None:
        run.empty_step()
    else:
        num_passes = min(accumulate, -(-share.global_count // run.group.world_size))  # of the rank that has most
        loss = _pass_by_pass(task, run, to_device(batch, device_of(run.model)), len(share.indices), num_passes)
    run.optimizer.step()
    return loss


def _pass_by_pass(task: Task, run: Run, batch: Batch, count: int, num_passes: int) -> torch.Tensor:
    """Accumulates the gradient of the mean loss over `count` samples; the last of the passes exchanges it."""
    parts = split(batch, count, min(num_passes, count))
    losses = []
    for number, (part, size) in enumerate(parts, 1):
        with run.no_sync() if number < len(parts) else nullcontext():
            loss = task.loss(run.model, part)
            run.recorder.add_since_last(Activity.FORWARD, "loss")
            run.weight(size)
            (loss / num_passes).backward()
        losses.append(loss.detach() * (size / count))
    return torch.stack(losses).sum()


def split(batch: Batch, count: int, num_parts: int) -> list[tuple[Batch, int]]:
    """A batch of so many samples in parts, each with its number of samples.

    Raises:
        ConfigError: The batch is not made of tensors with one row for each sample.
    """
    if num_parts == 1:
        return [(batch, count)]
    if odd := [tuple(tensor.shape) for tensor in batch if not tensor.dim() or len(tensor) != count]:
        raise ConfigError(
            f"cannot divide a batch of {count} samples among {num_parts} backward passes: it has a tensor of shape "
            f"{odd[0]}, which is not one row for each sample; accumulate in a loop of your own with run.no_sync()"
        )
    rows = torch.arange(count).tensor_split(num_parts)
    return [(tuple(tensor[part[0] : part[-1] + 1] for tensor in batch), len(part)) for part in rows]


def evaluate(task: Task, model: torch.nn.Module, data: Samples, group: Group, batch_size: int) -> dict[str, float]:
    """Scores a model on data of which each rank takes a part: each sample counts once, whatever the sizes."""
    shares = Shares(num_samples=len(data), rank=group.rank, world_size=group.world_size, local_batch_size=batch_size)
    counts: dict[str, torch.Tensor] = {}
    model.eval()
    for _, batch in batches(data, shares.epoch(), collate=task.collate):
        if batch is not None:
            for name, value in task.evaluate(model, to_device(batch, device_of(model))).items():
                counts[name] = counts.get(name, torch.zeros((), dtype=torch.float64)) + value.double().cpu()
    model.train()
    mine = json.dumps({name: float(value) for name, value in counts.items()})
    everyone = [json.loads(text) for text in group.all_gather_text(mine, "adding up the evaluation")]
    names = dict.fromkeys(name for one in everyone for name in one)
    return task.score({name: sum(one.get(name, 0.0) for one in everyone) for name in names})


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model's first parameter is."""
    return next(model.parameters()).device


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch on a device."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)
