"""`run.load`: a run goes on from the newest checkpoint of which every rank has what it needs."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon.errors import CheckpointError
from poseidon.runtime.checkpoint import MANIFEST, Damaged, Found, open_checkpoint, shelf_in
from poseidon.runtime.state import COMMON, on_all_ranks, rank_part, restore, shard_part
from poseidon.runtime.stepping import Steps
from poseidon.runtime.weights import apply_weights, load_weights

Which = tuple[int, str]
"""Of the checkpoints in a folder: its step and its mark, for each folder may have another training's step."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a run goes on from."""

    step: int
    """So many steps lie behind."""
    path: Path
    """The checkpoint, or the file of weights."""
    world_size: int
    """Ranks that it was saved by."""


def load(run: Steps, path: Path) -> Loaded:
    """Brings a run to the newest state in a folder, to one checkpoint's or to a file's weights; see `Run.load`."""
    kinds = run.group.all_gather_text("file" if path.is_file() else "folder", "looking for checkpoints")
    if len(set(kinds)) > 1:
        raise CheckpointError(
            f"cannot resume from {path}: it is a file on rank {kinds.index('file')} only; name the same"
        )
    if kinds[0] == "file":
        return _load_weights(run, path)
    mine = on_all_ranks(run, lambda: _scan(path))
    for one in _common(run, mine, path):
        found = next(each for each in mine if isinstance(each, Found) and _which(each) == one)
        if (loaded := _try(run, found)) is not None:
            return loaded
    raise CheckpointError(f"cannot resume from {path}: no checkpoint there is complete and undamaged")


def _load_weights(run: Steps, path: Path) -> Loaded:
    """The model's only: the run begins."""
    weights = on_all_ranks(run, lambda: load_weights(path))
    on_all_ranks(run, lambda: apply_weights(run.model, weights))
    run.check_replicas()
    run.note("resumed", f"beginning with the weights of {path}", loud=True)
    return Loaded(step=run.step, path=path, world_size=run.group.world_size)


def _scan(path: Path) -> Sequence[Found | Damaged]:
    return [open_checkpoint(path)] if (path / MANIFEST).exists() else shelf_in(path).scan()


def _common(run: Steps, mine: Sequence[Found | Damaged], path: Path) -> list[Which]:
    """The checkpoints that have all that each rank needs, as far as names of files tell; the newest first.

    Raises:
        CheckpointError: There are none.
    """
    usable = [_which(each) for each in mine if isinstance(each, Found) and not _wanting(each, run)]
    steps = {step for step, _ in usable}
    said = {str(each.step): f"{each.path.name}: {_what(each, run)}" for each in mine if each.step not in steps}
    texts = run.group.all_gather_text(json.dumps([usable, said]), "looking for checkpoints")
    everyone = [json.loads(text) for text in texts]
    common = set.intersection(*({(step, mark) for step, mark in usable} for usable, _ in everyone))
    newest = max((step for step, _ in common), default=-1)
    newer = {what for _, odd in everyone for step, what in odd.items() if int(step) > newest}
    if run.group.rank == 0:
        for what in sorted(newer):
            log.warning("a checkpoint in %s is skipped: %s", path, what)
    if not common:
        why = f": {sorted(newer)[0]}" if newer else ""
        raise CheckpointError(f"cannot resume from {path}: there is no complete checkpoint that all ranks see{why}")
    return sorted(common, reverse=True)


def _which(found: Found) -> Which:
    return found.step, str(found.facts.get("mark", ""))


def _wanting(found: Found, run: Steps) -> list[str]:
    """Parts that this rank needs and that are not in its folder."""
    rank, world_size = run.group.rank, found.world_size
    shards = [rank] if world_size == run.group.world_size else range(world_size)
    needed = [*COMMON, rank_part(rank if rank < world_size else 0)]
    needed += [shard_part(one) for one in shards]
    listed = {entry.part for entry in found.entries}
    return [part for part in needed if part not in listed or part in found.missing()]


def _what(each: Found | Damaged, run: Steps) -> str:
    if isinstance(each, Damaged):
        return each.what
    return f"rank {run.group.rank} has no file of {', '.join(_wanting(each, run))} there"


def _try(run: Steps, found: Found) -> Loaded | None:
    """Goes on from a checkpoint; None if a part is damaged that some rank needs.

    Raises:
        CheckpointError: It is that of another model or run.
    """
    damage = ""

    def read(part: str) -> Any:
        nonlocal damage
        try:
            return found.read(part)
        except CheckpointError as error:
            damage = str(error)
            raise

    try:
        step = restore(run, read)
    except CheckpointError:
        damages = list(filter(None, run.group.all_gather_text(damage, "telling what is damaged")))
        if not damages:
            raise
        if run.group.rank == 0:
            log.warning("the checkpoint %s is skipped: %s", found.path, damages[0])
        return None
    loaded = Loaded(step=step, path=found.path, world_size=found.world_size)
    now, before = run.group.world_size, found.world_size
    ranks = f"{now} ranks" if now == before else f"{now} ranks; it was saved by {before}"
    run.note("resumed", f"going on after step {step} from {found.path} with {ranks}", loud=True)
    run.recorder.restart()
    return loaded
