"""Commits: the state of a step in the memory of the hosts, so that a job that starts again goes on from it at once.

A commit has the format of a checkpoint. What all ranks have alike is kept once on each host. What one rank has as its
own, such as its shard of the optimizer's state, is kept on its host and on the next one, so that a host that is lost
takes nothing with it. The training waits for a copy only; a thread writes it, sends it on and seals it, over
connections of its own. The commit before goes once all hosts have sealed theirs, so that one is always whole.
"""

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from poseidon.comm.group import Group
from poseidon.errors import CheckpointError, CommError, PeerLostError, PoseidonError
from poseidon.runtime import memory
from poseidon.runtime.checkpoint import Draft, Entry, Shelf
from poseidon.runtime.file_exchange import content_of, exchange_files, room_for
from poseidon.runtime.holdings import Tier, new_mark, receiver_of, senders_to
from poseidon.runtime.host_copies import HostCopies
from poseidon.runtime.memory import MemoryFolder
from poseidon.runtime.packing import pack
from poseidon.runtime.resuming import Resumption, resume
from poseidon.runtime.state import COMMON, State, capture
from poseidon.timeline import Step
from poseidon.units import format_bytes

if TYPE_CHECKING:
    from poseidon.runtime.attach import Run

LOOK_SECONDS = 0.2
"""How often it is looked whether all ranks are there, while a commit is waited for."""

_numbers = itertools.count()
"""Of the runs of this process that commit: a job that starts again has them in the same order."""

log = logging.getLogger(__name__)


class Commits:
    """Commits the states of one run; every rank has one, and all of them act together.

    Args:
        run: Whose states they are.
    """

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._layout = run.group.layout
        self._folder: MemoryFolder | None = None
        self._group: Group | None = None
        self._stopped = False
        self._copies = HostCopies()
        self._writing: threading.Thread | None = None
        self.problem = ""
        """Why the last commit could not be written."""
        self._num_commits = 0
        self._number = 0

    @property
    def folder(self) -> MemoryFolder | None:
        """Of this host; None where commits are off. Opened by all ranks together when it is first asked for."""
        if self._folder is None and not self._stopped:
            self._open()
        return self._folder

    @property
    def speaks_for_host(self) -> bool:
        """Whether this rank writes what all ranks of its host have alike."""
        return self._layout.place(self._run.group.rank) == 0

    def commit(self) -> bool:
        """Keeps the state as it is between two steps; on all ranks together.

        Returns:
            Whether it is being kept: not where there is no room for it, which is said once.
        """
        if (folder := self.folder) is None:
            return False
        self.finish()
        state = capture(self._run, common=self.speaks_for_host, copies=self._copies)
        told = self._tell(self._run.group, self._before_writing(folder, state))
        if problem := _first_problem(told) or ("" if self._group else self._lack_of_room(told)):
            self._stop(problem)
            return False
        if self._group is None:
            self._group = self._run.group.background()
        self._run.recorder.restart()
        arguments = (folder, self._group, self._run.step, state, self._run.settled)
        self._writing = threading.Thread(target=self._write, args=arguments, name="commit", daemon=True)
        self._writing.start()
        return True

    def resume(self, folder: Path | None) -> Resumption | None:
        """Goes on from the newest state that is kept whole, in memory or on disk; on all ranks together.

        Args:
            folder: Of checkpoints, where there are any.

        Returns:
            What it went on from; None where there is nothing.
        """
        own = self.folder
        shelves: list[tuple[Tier, Shelf]] = []
        if memory.attempt():
            shelves += [("memory", memory.commits_in(path, self._number)) for path in memory.folders_of_job()]
        if folder is not None:
            shelves.append(("disk", Shelf(folder)))
        if not shelves:
            return None
        noted = memory.last_noted(self._number) if memory.attempt() else 0
        found = resume(self._run, shelves, None if own is None else own.received, noted)
        if own is not None:
            own.note(found.step if found else 0)
            if self.speaks_for_host:
                own.go_on_from(found.step if found else 0, self._layout.host_of(self._run.group.rank))
        if found is not None:
            self._run.note("resumed", str(found), loud=True)
        self._run.group.barrier()
        return found

    def finish(self) -> None:
        """Waits until the last commit has been written, or could not be.

        Raises:
            PeerLostError: A rank is gone, and the commit cannot end.
        """
        if self._writing is None:
            return
        liveness = self._run.group.liveness
        while self._writing.is_alive():
            self._writing.join(LOOK_SECONDS)
            if self._writing.is_alive() and liveness is not None and (lost := liveness.lost()):
                raise PeerLostError(f"rank {self._run.group.rank}: committing a step failed: {lost}")
        self._writing = None
        self._copies.give_back()

    def close(self, *, failed: bool) -> None:
        """The run ends, on all ranks together; what is kept stays until the job ends well.

        Args:
            failed: Whether an exchange has; then nothing is waited for.
        """
        if not failed:
            self.finish()
        if self._group is not None:
            self._group.return_from_run(failed=failed)
            self._group = None
        self._let_go()

    def _open(self) -> None:
        self._number = next(_numbers)
        memory.agree_on_attempt(self._run.group)
        memory.remove_stale()
        problem = ""
        try:
            self._folder = MemoryFolder(memory.folder_of_host(), self._run.group.rank, self._number)
            if not memory.attempt():  # a job of the same name may have left something
                self._folder.note(0)
                if self.speaks_for_host:
                    self._folder.go_on_from(-1, self._layout.host_of(self._run.group.rank))
        except CheckpointError as error:
            problem = str(error)
        if problem := _first_problem(self._tell(self._run.group, {"problem": problem})):
            self._stop(problem)
        else:
            self._run.recorder.on_step.append(self._note)

    def _stop(self, problem: str) -> None:
        self._let_go()
        self._run.note("uncommitted", f"steps are not committed in memory from here on: {problem}", loud=True)

    def _let_go(self) -> None:
        self._stopped = True
        self._copies = HostCopies()
        if self._note in self._run.recorder.on_step:
            self._run.recorder.on_step.remove(self._note)
        if self._folder is not None:
            self._folder.release()
            self._folder = None

    def _note(self, step: Step) -> None:
        if self._folder is not None:
            self._folder.note(step.index + 1)

    def _before_writing(self, folder: MemoryFolder, state: State) -> dict[str, Any]:
        """What went wrong with the commit before; before the first, how large they will be."""
        if self.problem or self._group is not None:
            return {"problem": self.problem}
        return _attempted(self._run.group.rank, lambda: _sizes(state, folder))

    def _lack_of_room(self, told: Sequence[Mapping[str, Any]]) -> str:
        """Which host has too little memory for two commits, if one has."""
        for ranks in self._layout.hosts:
            guarded = [other for rank in ranks for other in senders_to(self._layout, rank)]
            own = sum(told[rank]["own"] for rank in (*ranks, *guarded))
            needed = 2 * (own + sum(told[rank]["alike"] for rank in ranks))
            if needed > (free := told[ranks[0]]["free"]):
                return (
                    f"they take {format_bytes(needed)} of memory on the host of rank {ranks[0]}, and "
                    f"{format_bytes(free)} are free there; what is saved on disk stays as it is"
                )
        return ""

    # On a thread

    def _write(self, folder: MemoryFolder, group: Group, step: int, state: State, settled: bool) -> None:
        try:
            self.problem = self._write_on_all(folder, group, step, state, settled=settled)
        except CommError as error:  # a rank is gone: the training learns of it by itself
            log.debug("rank %d: the commit of step %d was not ended: %s", group.rank, step, error)

    def _write_on_all(self, folder: MemoryFolder, group: Group, step: int, state: State, *, settled: bool) -> str:
        """Each act is done by all ranks before the next; one that cannot says why, and nobody goes on."""
        writing = _Writing(folder, group, step, seals=self.speaks_for_host)
        told = self._tell(group, _attempted(group.rank, lambda: writing.write(state)))
        if problem := _first_problem(told):
            return writing.drop(problem)
        entries = [[Entry.model_validate(entry) for entry in one["entries"]] for one in told]
        facts = {
            "world_size": group.world_size,
            "attempt": memory.attempt(),
            "settled": settled,
            "mark": told[0]["mark"],
        }
        acts = (
            lambda: writing.make_room(entries),
            writing.exchange,
            lambda: writing.seal(entries, facts),
        )
        for act in acts:
            if problem := _first_problem(self._tell(group, _attempted(group.rank, act))):
                return writing.drop(problem)
        is_first = not self._num_commits
        self._num_commits += 1
        return str(_attempted(group.rank, lambda: writing.end(is_first=is_first))["problem"])

    def _tell(self, group: Group, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in group.all_gather_text(json.dumps(facts), "committing a step")]


class _Writing:
    """One commit while it is written, as one rank does its part of it.

    Args:
        folder: Of this host.
        group: All ranks.
        step: Whose state it is.
        seals: Whether this rank completes what its host keeps.
    """

    def __init__(self, folder: MemoryFolder, group: Group, step: int, *, seals: bool) -> None:
        self._folder = folder
        self._group = group
        self._step = step
        self._seals = seals
        self._draft: Draft | None = None
        self._own: list[torch.Tensor] = []
        self._coming: list[tuple[int, Entry, torch.Tensor]] = []
        """From which rank, what, and memory for it."""

    def write(self, state: State) -> dict[str, Any]:
        """Writes what this rank has."""
        self._draft = self._folder.shelf.begin(self._step)
        entries = [self._draft.write(part, of_part) for part, of_part in state.items()]
        self._own = [content_of(self._draft.path / entry.file) for entry in _own(entries)]
        return {"entries": [entry.model_dump() for entry in entries], "mark": new_mark()}

    def make_room(self, entries: Sequence[Sequence[Entry]]) -> dict[str, Any]:
        """Gets memory for what comes from others, before anybody sends: who failed then would be waited for.

        Args:
            entries: What each rank has written.
        """
        senders = senders_to(self._group.layout, self._group.rank)
        expected = [(sender, one) for sender in senders for one in _own(entries[sender])]
        self._coming = [(sender, one, room_for(one.size)) for sender, one in expected]
        return {}

    def exchange(self) -> dict[str, Any]:
        """Sends what is this rank's own to another host, and writes what comes from others."""
        assert self._draft is not None
        receiver = receiver_of(self._group.layout, self._group.rank)
        sends = [(receiver, content) for content in self._own if receiver is not None]
        exchange_files(self._group, sends, [(sender, room) for sender, _, room in self._coming])
        for sender, entry, room in self._coming:
            if self._draft.copy(entry.part, [room.numpy().data]) != entry:
                raise CheckpointError(f"{entry.part} is not what rank {sender} has sent")
        return {}

    def seal(self, entries: Sequence[Sequence[Entry]], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Completes what this host keeps, once all that is to be in it is there."""
        assert self._draft is not None
        if self._seals:
            alike = [one for one in entries[self._group.rank] if one.part in COMMON]
            self._draft.seal([*alike, *(one for of_rank in entries for one in _own(of_rank))], facts)
        return {}

    def end(self, *, is_first: bool) -> dict[str, Any]:
        """Takes away the commit before, once all hosts have sealed this one.

        Args:
            is_first: Whether it is the first of this run; then what the host has kept under other numbers goes, too.
        """
        if self._seals:
            if is_first:
                memory.remove_former()
            self._folder.shelf.prune(keep_last=1)
            self._folder.touch()
        return {}

    def drop(self, problem: str) -> str:
        """Takes away what was written."""
        if self._seals and self._draft is not None:
            self._draft.drop()
        return problem


def _attempted(rank: int, act: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Does a part of a commit; what is to be told to all, with the problem if there is one, for they wait to be told.

    Raises:
        CommError: A rank is gone.
    """
    try:
        return {"problem": "", **act()}
    except CommError:
        raise
    except PoseidonError as error:
        return {"problem": f"rank {rank}: {error}"}
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait to be told
        return {"problem": f"rank {rank}: {type(error).__name__}: {error}"}


def _own(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.part not in COMMON]


def _first_problem(told: Sequence[Mapping[str, Any]]) -> str:
    return next((str(one["problem"]) for one in told if one["problem"]), "")


def _sizes(state: State, folder: MemoryFolder) -> dict[str, int]:
    """How many bytes of a state are this rank's own and how many all ranks have alike, and what is free."""
    sizes = {part: sum(tensor.nbytes for tensor in pack(of_part)[0].values()) for part, of_part in state.items()}
    own = sum(size for part, size in sizes.items() if part not in COMMON)
    free = min(folder.free_bytes(), psutil.virtual_memory().available)
    return {"own": own, "alike": sum(sizes.values()) - own, "free": free}
