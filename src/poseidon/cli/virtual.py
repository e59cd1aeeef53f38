"""`--virtual`: a task whose layers sleep for their seconds instead of computing, so that many hosts fit on a few cores.

Sockets, shaping, buckets and the schedule are the real ones, and so are the sizes of gradients and factors.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.utils.data import TensorDataset

from poseidon.errors import ConfigError
from poseidon.profile.graph import ModelProfile
from poseidon.profile.measure import profile_model, scale_to
from poseidon.profile.virtual import VirtualOptimizer, virtual_counts, virtual_loss, virtual_model
from poseidon.tasks import Objective, Task, TaskData
from poseidon.units import parse_seconds

VirtualOption = Annotated[
    str | None,
    typer.Option(
        "--virtual",
        help="Sleep instead of computing: seconds of a rank's forward and backward pass, such as 9.25s, or a profile.",
        metavar="SECONDS|FILE",
    ),
]


def as_virtual(task: Task, virtual: str | None, batch_size: int) -> Task:
    """The same task with its computing slept; the task itself where `virtual` is None.

    Args:
        task: What is trained.
        virtual: A duration, spread over the layers by their operations, or the path of a profile with seconds, which is
            scaled if it was made with another batch.
        batch_size: Samples per rank and step.

    Raises:
        ConfigError: Neither a duration nor the path of a profile with seconds.
    """
    if virtual is None:
        return task
    profile = _profile(task, virtual, batch_size)
    data = TensorDataset(torch.zeros(len(task.make_train_data()), 1))
    return replace(
        task,
        note=f"virtual compute: layers sleep instead of computing, numbers are zeros; {profile.source or virtual}",
        make_model=lambda: virtual_model(profile, writable=True),
        make_optimizer=partial(VirtualOptimizer, seconds=profile.optimizer_seconds),
        objective=Objective(loss=virtual_loss, evaluate=_counts),
        data=TaskData(make_train=lambda: data, make_test=lambda: TensorDataset(torch.zeros(1, 1))),
        batch_size=batch_size,
    )


def _counts(model: torch.nn.Module, batch: object) -> dict[str, torch.Tensor]:
    assert isinstance(batch, tuple | list)
    return virtual_counts(model, batch[0])


def _profile(task: Task, virtual: str, batch_size: int) -> ModelProfile:
    if Path(virtual).exists():
        profile = ModelProfile.load(virtual)
        if not profile.seconds:
            raise ConfigError(
                f"cannot sleep for what {virtual} says: its layers have no seconds; measure the model first"
            )
        return profile if profile.batch_size == batch_size else profile.scaled_to_batch(batch_size)
    try:
        seconds = parse_seconds(virtual)
    except ConfigError as error:
        raise ConfigError(f"cannot use --virtual {virtual!r}: it is no file, and no duration such as 9.25s") from error
    if not seconds:
        raise ConfigError(f"cannot use --virtual {virtual!r}: a step has to take some time")
    data = task.make_train_data()
    batch = task.collate([data[index % len(data)] for index in range(batch_size)])
    with torch.device("meta"):
        model = task.make_model()
    profile = profile_model(model, [tensor.to("meta") for tensor in batch], task.loss, batch_size=batch_size)
    return scale_to(
        profile, seconds, source=f"{virtual} a step of {batch_size} samples, spread over the layers by their operations"
    )
