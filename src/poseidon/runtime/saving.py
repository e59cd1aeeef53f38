"""`run.save`: a checkpoint written in the background from a copy, by all ranks together.

The training waits for the copy only. A thread writes it, one file for each part: what all ranks have alike is written
by one rank in each folder, what is a rank's own by that rank. Then the ranks tell each other over connections of their
own what they have written, and once everything is there the checkpoint is sealed in each folder. Until then it does not
count, and the one before stays.

A disk that is full, or fails, costs a checkpoint and not the training: it is said aloud, and the next save tries again.
Only a save that is waited for raises.
"""

import atexit
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from poseidon.comm.group import Group
from poseidon.errors import CheckpointError, ConfigError, PeerLostError, PoseidonError
from poseidon.runtime.checkpoint import Draft, Entry, Found, Shelf
from poseidon.runtime.holdings import new_mark
from poseidon.runtime.host_copies import HostCopies
from poseidon.runtime.state import capture
from poseidon.runtime.stepping import Steps
from poseidon.units import format_seconds

LOOK_SECONDS = 0.2
"""How often it is looked whether all ranks are there, while a checkpoint is waited for."""

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay in a folder, and how good the new one is."""

    last: int = 3
    best: int = 0
    score: float | None = None
    """The higher the better."""

    def __post_init__(self) -> None:
        """Refuses what would keep nothing."""
        if self.last < 1 or self.best < 0:
            raise ConfigError(
                f"cannot keep the last {self.last} and the best {self.best} checkpoints: keep at least the last one"
            )


class Saving:
    """One checkpoint on its way; the same on every rank once it has ended.

    Args:
        step: After which the state was.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.path: Path | None = None
        """Where it lies, once it is complete."""
        self.error = ""
        """Why there is none."""
        self.stall_seconds = 0.0
        """For which the training has stood still on this rank."""
        self.seconds = 0.0
        """From the call of `run.save` until it was complete on all ranks, as this rank saw it."""
        self.done = threading.Event()

    def check(self) -> None:
        """Raises CheckpointError if it has ended without a checkpoint."""
        if self.path is None:
            raise CheckpointError(self.error or f"the state after step {self.step} was not saved")


@dataclass(frozen=True)
class Place:
    """A folder as this rank sees it."""

    shelf: Shelf
    leads: bool
    """Whether this rank is the one that writes what all have alike, and seals, for those that see the same folder."""


class Saver:
    """Saves one run, one checkpoint at a time.

    Args:
        run: Whose state.
    """

    def __init__(self, run: Steps) -> None:
        self._run = run
        self._background: Group | None = None
        self._places: dict[Path, Place] = {}
        self._locks = ExitStack()
        self._copies = HostCopies()
        self._saving: Saving | None = None
        self._thread: threading.Thread | None = None

    def save(self, folder: str | Path, keep: Keep) -> Saving:
        """Takes the state and starts to write it; waits for the checkpoint before, if that is still on its way.

        Raises:
            CheckpointError: It is not between two steps, or the folder cannot be used; the same on every rank.
        """
        started = time.monotonic()
        self.finish()
        if self._background is None:
            self._background = self._run.group.background()
            atexit.register(self._at_exit)
        place = self._place(Path(folder).absolute())
        state = capture(self._run, common=place.leads, copies=self._copies)
        saving = self._saving = Saving(self._run.step)
        facts = {"world_size": self._run.group.world_size, "settled": self._run.settled, **_scored(keep)}
        arguments = (saving, place, state, facts, keep, started)
        self._thread = threading.Thread(target=self._write, args=arguments, name="poseidon-save", daemon=True)
        self._thread.start()
        self._run.recorder.restart()
        saving.stall_seconds = time.monotonic() - started
        return saving

    def finish(self) -> None:
        """Waits until the last checkpoint is complete, or has failed; says so among the events, on all ranks alike.

        Raises:
            PeerLostError: A rank is gone, and the checkpoint cannot be completed.
        """
        if self._thread is None or self._saving is None:
            return
        if lost := self._wait_for(self._thread):
            raise PeerLostError(
                f"rank {self._run.group.rank}: saving the state after step {self._saving.step} failed: {lost}"
            )
        self._thread = None
        saving, self._saving = self._saving, None
        if saving.path is not None:
            self._run.note("saved", f"saved the state after step {saving.step} in {format_seconds(saving.seconds)}")
        else:
            self._run.note("unsaved", saving.error)

    def close(self, *, failed: bool) -> None:
        """The run ends, on all ranks together.

        Args:
            failed: Whether an exchange has; then nothing is waited for.
        """
        atexit.unregister(self._at_exit)
        if not failed:
            self.finish()
        self._locks.close()
        if self._background is not None:
            self._background.return_from_run(failed=failed)

    def _at_exit(self) -> None:
        """The program ends, and has not detached the run."""
        if self._thread is not None:
            self._wait_for(self._thread)

    def _wait_for(self, thread: threading.Thread) -> str:
        """Waits until it has ended; or says who is lost, for it waits for them too."""
        liveness = self._run.group.liveness
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            if thread.is_alive() and liveness is not None and (lost := liveness.lost()):
                return lost
        return ""

    # Folders

    def _place(self, folder: Path) -> Place:
        if folder not in self._places:
            self._places[folder] = self._look_at(folder)
        return self._places[folder]

    def _look_at(self, folder: Path) -> Place:
        """Finds out which ranks see the same folder, and takes hold of it."""
        group = self._run.group
        token = folder / f".rank-{group.rank:05d}-{secrets.token_hex(8)}"
        try:
            names = self._agree(_touch(token), token.name, "looking for the folder")
            seen = [rank for rank, name in enumerate(names) if (folder / name).exists()]
            shelf, leads = Shelf(folder), group.rank == min(seen)
            self._agree(self._lock(shelf) if leads else "", "", "taking hold of the folder")
        finally:
            with suppress(OSError):
                token.unlink()
        return Place(shelf, leads)

    def _lock(self, shelf: Shelf) -> str:
        try:
            self._locks.enter_context(shelf.lock())
        except CheckpointError as error:
            return str(error)
        return ""

    def _agree(self, problem: str, fact: str, what: str) -> list[str]:
        """The facts of all ranks, unless one of them has a problem."""
        texts = self._run.group.all_gather_text(json.dumps([problem, fact]), what)
        everyone = [json.loads(text) for text in texts]
        if failed := [(rank, text) for rank, (text, _) in enumerate(everyone) if text]:
            rank, text = failed[0]
            raise CheckpointError(f"{text} (on rank {rank})")
        return [fact for _, fact in everyone]

    # In the background

    def _write(
        self,
        saving: Saving,
        place: Place,
        state: Mapping[str, Any],
        facts: Mapping[str, Any],
        keep: Keep,
        started: float,
    ) -> None:
        assert self._background is not None
        try:
            saving.path = _save_together(self._background, saving.step, place, state, facts, keep)
        except PoseidonError as error:
            saving.error = f"the state after step {saving.step} was not saved: {error}"
            if self._run.group.rank == 0:
                log.warning("%s; training goes on, and the checkpoint before this one stays", saving.error)
        finally:
            saving.seconds = time.monotonic() - started
            self._copies.give_back()
            saving.done.set()


def _save_together(
    group: Group, step: int, place: Place, state: Mapping[str, Any], facts: Mapping[str, Any], keep: Keep
) -> Path:
    """Writes this rank's parts; returns where they lie once the checkpoint is complete in all folders.

    Whatever goes wrong on a rank, it says so when the others ask, for they wait for it.

    Raises:
        CheckpointError: It could not be written, on some rank.
        CommError: A rank is gone.
    """
    facts = {**facts, "mark": group.broadcast_text(new_mark(), "naming the checkpoint")}
    mine, problem = _try(lambda: _write_parts(place.shelf, step, state))
    entries = _tell(group, problem, [entry.model_dump() for entry in mine or []], "telling what was written")
    found: Found | None = None
    if place.leads and not _first_problem(entries):
        # Of what all ranks have alike a folder has a file of its own.
        listed = [Entry.model_validate(one) for _, parts in entries for one in parts] + (mine or [])
        found, problem = _try(lambda: _seal(place.shelf, step, {one.part: one for one in listed}, facts))
    sealed = _tell(group, problem, [] if found is None else [{"name": found.path.name}], "telling what was sealed")
    if failure := _first_problem(sealed):
        if place.leads and found is None:
            Draft(place.shelf, step).drop()
        raise CheckpointError(failure)
    if place.leads:
        _prune(place.shelf, step, keep)
    return place.shelf.path / str(next(told[0]["name"] for _, told in sealed if told))


def _write_parts(shelf: Shelf, step: int, state: Mapping[str, Any]) -> list[Entry]:
    draft = shelf.begin(step)
    return [draft.write(part, value) for part, value in state.items()]


def _seal(shelf: Shelf, step: int, entries: Mapping[str, Entry], facts: Mapping[str, Any]) -> Found:
    return Draft(shelf, step).seal(list(entries.values()), facts)


def _scored(keep: Keep) -> dict[str, float]:
    return {} if keep.score is None else {"score": keep.score}


def _try(act: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or what went wrong."""
    try:
        return act(), ""
    except PoseidonError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to be told
        return None, f"{type(error).__name__}: {error}"


def _tell(group: Group, problem: str, facts: list[dict[str, Any]], what: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """What went wrong and what there is, by rank."""
    texts = group.all_gather_text(json.dumps([problem, facts]), what)
    return [(text[0], text[1]) for text in map(json.loads, texts)]


def _first_problem(everyone: list[tuple[str, list[dict[str, Any]]]]) -> str:
    return next((f"{problem} (on rank {rank})" for rank, (problem, _) in enumerate(everyone) if problem), "")


def _prune(shelf: Shelf, step: int, keep: Keep) -> None:
    try:
        if aside := shelf.set_aside_after(step):
            names = ", ".join(path.name for path in aside)
            log.warning(
                "%s: training went back to step %d; what it had saved later is set aside: %s", shelf.path, step, names
            )
        shelf.prune(keep.last, keep.best, better="higher")
    except CheckpointError as error:
        log.warning("older checkpoints stay: %s", error)


def _touch(path: Path) -> str:
    """Makes an empty file; what is wrong, if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except (FileExistsError, NotADirectoryError):
        return f"cannot save into {path.parent}: a part of the path is a file; name a folder"
    except OSError as error:
        return f"cannot save into {path.parent}: {error.strerror or error}"
    return ""
