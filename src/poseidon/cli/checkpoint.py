"""`poseidon checkpoint`: what a folder of checkpoints holds, whether it is sound, and weights out of it and into it."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from poseidon.cli.terminal import make_console
from poseidon.errors import CheckpointError
from poseidon.runtime.checkpoint import Damaged, Found, Shelf, shelf_in, what_is_wrong
from poseidon.runtime.weights import MODEL, load_weights, save_weights
from poseidon.units import format_bytes

COMPLETE = "complete"

Action = Literal["list", "verify", "export", "import"]


def checkpoint(
    action: Annotated[Action, typer.Argument(help="What to do.", metavar="list|verify|export|import")],
    folder: Annotated[
        Path, typer.Argument(help="A folder of checkpoints or of a run; to export also a single checkpoint.")
    ],
    file: Annotated[
        Path | None, typer.Argument(help="To export: what is written. To import: .safetensors, .pt or .pth.")
    ] = None,
) -> None:
    """List and verify checkpoints; export their weights, import others.

    poseidon checkpoint list runs/first

    poseidon checkpoint verify runs/first

    poseidon checkpoint export runs/first weights.pt

    poseidon checkpoint import checkpoints weights.pt
    """
    if action in _WITH_FILE:
        if file is None:
            raise typer.BadParameter(f"name a file to {action}", param_hint="FILE")
        _WITH_FILE[action](folder, file)
    else:
        if file is not None:
            raise typer.BadParameter(f"{action} takes only a folder", param_hint="FILE")
        _show(shelf_in(folder), checksums=action == "verify")


def _show(shelf: Shelf, *, checksums: bool) -> None:
    """The table of all checkpoints; exit code 1 where none is complete."""
    if not shelf.path.is_dir():
        raise CheckpointError(f"cannot look for checkpoints in {shelf.path}: there is no such folder")
    scanned = shelf.scan()
    if not scanned:
        raise CheckpointError(f"no checkpoint is in {shelf.path}")
    table = Table("step", "when", "size", "ranks", "score", "", title=str(shelf.path), box=SIMPLE_HEAD)
    states = [_state(each, checksums=checksums) for each in scanned]
    for each, state in zip(scanned, states, strict=True):
        table.add_row(str(each.step), *_columns(each), state)
    make_console().print(table)
    if COMPLETE not in states:
        raise CheckpointError(f"no checkpoint in {shelf.path} is complete")


def _columns(each: Found | Damaged) -> tuple[str, str, str, str]:
    if isinstance(each, Damaged):
        return "", "", "", ""
    when = datetime.fromtimestamp(each.manifest.time).strftime("%Y-%m-%d %H:%M:%S")
    size = format_bytes(sum(entry.size for entry in each.entries))
    return when, size, str(each.world_size), "" if each.score is None else f"{each.score:.6g}"


def _state(each: Found | Damaged, *, checksums: bool) -> str:
    what = each.what if isinstance(each, Damaged) else what_is_wrong(each, checksums=checksums)
    return what or COMPLETE


def _export(folder: Path, file: Path) -> None:
    weights = load_weights(folder)
    save_weights(weights, file)
    print(f"{_count(weights)} written to {file}")


def _import(folder: Path, file: Path) -> None:
    """As the checkpoint of step 0, which holds weights and nothing else."""
    weights = load_weights(file)
    shelf = Shelf(folder)
    with shelf.lock():
        if shelf.scan():
            raise CheckpointError(f"cannot import into {folder}: there are checkpoints already; name a new folder")
        draft = shelf.begin(0)
        try:
            found = draft.seal([draft.write(MODEL, OrderedDict(weights))], {"imported": file.name})
        except BaseException:
            draft.drop()
            raise
    print(f"{_count(weights)} written to {found.path}")


def _count(weights: Mapping[str, object]) -> str:
    return "1 tensor" if len(weights) == 1 else f"{len(weights)} tensors"


_WITH_FILE: Mapping[str, Callable[[Path, Path], None]] = {"export": _export, "import": _import}
