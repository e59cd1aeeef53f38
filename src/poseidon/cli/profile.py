"""`poseidon profile`: what the layers of a task's model cost, forward and backward, and what a step costs besides."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from poseidon.cli.terminal import make_console
from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile
from poseidon.profile.loader import LoaderSeconds, measure_loader
from poseidon.profile.measure import NUM_PASSES, profile_model
from poseidon.runtime.data import Shares, batches
from poseidon.runtime.surroundings import device_of_rank
from poseidon.tasks import Task, load_task
from poseidon.units import format_bytes, format_flops_per_s, format_seconds, format_traffic

SHOWN_LAYERS = 15
"""The layers that take longest have a line each; the others share one."""


def profile(
    task: Annotated[str, typer.Argument(help="A built-in task's name, or path/to/file.py:function.", metavar="TASK")],
    batch: Annotated[
        int | None, typer.Option(help="Samples per rank and step; the task's own if not given.", min=1)
    ] = None,
    passes: Annotated[int, typer.Option(help="Timed passes; medians count.", min=1)] = NUM_PASSES,
    threads: Annotated[int | None, typer.Option(help="Processor threads; torch's choice if not given.", min=1)] = None,
    meta: Annotated[bool, typer.Option("--meta", help="Count without computing: no seconds, no memory.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file for the profile, such as model.json.")] = None,
) -> None:
    """Measure what each layer of a model costs in a training step, here, on one process.

    poseidon profile vgg19 --batch 8 -o vgg19.json
    """
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = load_task(task)
    console = make_console()
    console.print(f"{chosen.name}: {chosen.note}", soft_wrap=True)
    found = measure(chosen, batch or chosen.batch_size, num_passes=passes, meta=meta)
    show(found, console)
    if out is not None:
        found.save(out)
        console.print(f"written to {out}", soft_wrap=True)


def measure(task: Task, batch_size: int, *, num_passes: int, meta: bool) -> ModelProfile:
    """Profiles a task's model on one rank's batch, its optimizer and its loader included.

    Args:
        task: What is trained.
        batch_size: Samples per rank and step.
        num_passes: Timed passes.
        meta: Only count, on the meta device.
    """
    data = task.make_train_data()
    sample = task.collate([data[index % len(data)] for index in range(batch_size)])
    device = torch.device("meta") if meta else device_of_rank()
    torch.manual_seed(0)
    with device:
        model = task.make_model()
    sample = [tensor.to(device) for tensor in sample]
    if meta:
        return profile_model(model, sample, task.loss, batch_size=batch_size, optimizer=task.make_optimizer)
    with _bar() as bar:
        line = bar.add_task("measuring", total=None)
        found = profile_model(
            model,
            sample,
            task.loss,
            batch_size=batch_size,
            num_passes=num_passes,
            optimizer=task.make_optimizer,
            on_pass=lambda done, total: bar.update(line, completed=done, total=total),
        )
    del model
    waits = _waits(task, batch_size)
    return found.model_copy(update={"loader_seconds": waits.later, "first_epoch_loader_seconds": waits.first_epoch})


def _waits(task: Task, batch_size: int) -> LoaderSeconds:
    data = task.make_train_data()  # anew, so that its first epoch is one
    shares = Shares(num_samples=len(data), rank=0, world_size=1, local_batch_size=batch_size, seed=0)
    return measure_loader(lambda epoch: batches(data, shares.epoch(epoch), collate=task.collate))


def _bar() -> Bar:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = make_console(stderr=True)
    return Bar(*columns, console=console, transient=True, disable=not console.is_terminal)


def show(found: ModelProfile, console: Console) -> None:
    """The layers that take longest, and lines on the whole."""
    console.print(_table(found))
    for line in _lines(found):
        console.print(line, soft_wrap=True)


def _table(found: ModelProfile) -> Table:
    measured = found.seconds > 0
    total = found.seconds or sum(layer.flops for layer in found.layers) or 1
    weight = _seconds_of if measured else _flops_of
    largest = sorted(found.layers, key=weight, reverse=True)[:SHOWN_LAYERS]
    names = {layer.name for layer in largest}
    shown = [layer for layer in found.layers if layer.name in names]
    rest = [layer for layer in found.layers if layer.name not in names]
    table = Table(box=None, pad_edge=False, title=None)
    table.add_column("layer", overflow="ellipsis", no_wrap=True, max_width=28)
    table.add_column("gradient", no_wrap=True)
    for column in ("bytes", "forward", "backward", "share") if measured else ("bytes", "operations", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in shown:
        table.add_row(layer.name or "the model itself", _gradient(layer), *_figures([layer], total, measured=measured))
    if rest:
        table.add_row(f"{len(rest)} other layers", "", *_figures(rest, total, measured=measured))
    return table


def _seconds_of(layer: LayerSpec) -> float:
    return layer.seconds


def _flops_of(layer: LayerSpec) -> float:
    return layer.flops


def _gradient(layer: LayerSpec) -> str:
    if not layer.parameters:
        return ""
    words = {
        GradientStructure.DENSE: "dense",
        GradientStructure.OUTER_PRODUCT: "factors",
        GradientStructure.ROWS: "rows",
    }
    return f"{words[layer.structure]} {layer.rows}" if layer.rows else words[layer.structure]


def _figures(layers: list[LayerSpec], total: float, *, measured: bool) -> list[str]:
    num_bytes = sum(layer.num_bytes for layer in layers)
    size = format_bytes(num_bytes) if num_bytes else ""
    if not measured:
        flops = sum(layer.flops for layer in layers)
        return [size, _format_flops(flops), f"{flops / total:.1%}"]
    forward = sum(layer.forward_seconds for layer in layers)
    backward = sum(layer.backward_seconds + layer.weight_gradient_seconds for layer in layers)
    return [size, format_seconds(forward), format_seconds(backward), f"{(forward + backward) / total:.1%}"]


def _format_flops(flops: int) -> str:
    return format_flops_per_s(flops).removesuffix("/s")


def _lines(found: ModelProfile) -> list[str]:
    flops = sum(layer.flops for layer in found.layers)
    activations = sum(layer.activation_num_bytes for layer in found.layers)
    lines = [
        f"{found.model}: {found.batch_size} samples a step, {format_bytes(found.num_bytes)} of gradients in "
        f"{len(found.trainable)} layers, {_format_flops(flops)} forward, {format_bytes(activations)} of activations"
    ]
    if found.device is not None:
        rates = found.device
        lines.append(
            f"a step takes {format_seconds(found.step_seconds)}; the layers explain "
            f"{found.seconds / found.step_seconds:.1%} of it; {found.source} "
            f"({format_flops_per_s(rates.flops_per_s)}, memory {format_traffic(rates.memory_bandwidth)}/s)"
        )
        lines.append(
            f"{found.optimizer} takes {format_seconds(found.optimizer_seconds)} a step and keeps "
            f"{format_bytes(found.optimizer_state_num_bytes)}; the loop waits {format_seconds(found.loader_seconds)} "
            f"for a batch, {format_seconds(found.first_epoch_loader_seconds)} in the first epoch"
        )
    else:
        state = format_bytes(found.optimizer_state_num_bytes)
        lines.append(f"{found.source}; {found.optimizer} keeps {state}")
    return [*lines, *(f"note: {note}" for note in found.notes)]
