"""Going on: from the newest state of which every part is still somewhere, in a host's memory or on a disk.

All ranks together say what their hosts hold, choose alike, send parts to hosts that lack them, and restore. What cannot
be read is named, and the choice is made again without it.
"""

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poseidon.artifact import Value
from poseidon.errors import CheckpointError
from poseidon.runtime import memory
from poseidon.runtime.checkpoint import Entry, Found, Shelf
from poseidon.runtime.file_exchange import content_of, exchange_files, room_for
from poseidon.runtime.holdings import Choice, Delivery, Holding, Identity, Tier, deliveries, newest_complete
from poseidon.runtime.state import COMMON, JOB, rank_part, restore, shard_part
from poseidon.runtime.surroundings import counted
from poseidon.units import format_seconds

if TYPE_CHECKING:
    from poseidon.runtime.attach import Run

log = logging.getLogger(__name__)


class Resumption(Value):
    """What a run went on from."""

    step: int
    """Steps that lie behind."""
    place: str
    """`memory`, or the folder."""
    seconds: float
    """That finding, sending and restoring it took."""
    lost_steps: int
    """Steps that were made after it, as far as any host knows, and are made anew."""
    lost_seconds: float
    """Since the state was kept: the steps that are lost, and standing still."""
    world_size_before: int
    world_size: int

    def __str__(self) -> str:
        ranks = f"{counted(self.world_size_before, 'rank')} before, {self.world_size} now"
        lost = f"{counted(self.lost_steps, 'step')} lost and made anew" if self.lost_steps else "no step is lost"
        return f"going on at step {self.step} from {self.place}: {lost}; {ranks}; took {format_seconds(self.seconds)}"


def resume(
    run: "Run", shelves: Sequence[tuple[Tier, Shelf]], received: Shelf | None, noted: int = 0
) -> Resumption | None:
    """Goes on from the newest state that is complete; on all ranks together.

    Args:
        run: That restores it.
        shelves: Where this host looks.
        received: Where this host keeps what others send; None on all ranks where one has no room for it.
        noted: The last step that a rank of this host has made, as far as is known.

    Returns:
        What it went on from; None where there is nothing, which is said.

    Raises:
        CheckpointError: The state is that of another model, or there is no room for it.
    """
    return _Search(run, shelves, received, noted).go_on()


@dataclass(frozen=True)
class _Held:
    """One state as a host says that it holds it."""

    holding: Holding
    entries: Mapping[str, Entry]
    kept_at: float
    settled: bool


class _Search:
    """One search for a state, as one rank takes part in it."""

    def __init__(self, run: "Run", shelves: Sequence[tuple[Tier, Shelf]], received: Shelf | None, noted: int) -> None:
        self._run = run
        self._group, self._layout = run.group, run.group.layout
        self._host = self._layout.hosts.index(self._layout.host_of(run.group.rank))
        self._speaks = self._layout.place(run.group.rank) == 0
        self._shelves = shelves
        self._noted = noted
        self._received = received
        self._here: dict[Identity, Found] = {}
        self._began = time.monotonic()

    def go_on(self) -> Resumption | None:
        """See `resume`."""
        held, noted = self._look()
        while choice := newest_complete(one.holding for one in held):
            states = self._collect(choice, {one.holding.host: one for one in held if _is_of(one, choice)})
            if isinstance(states, dict):
                restore(self._run, states.__getitem__)
                return self._describe(choice.identity, held, noted)
            left = [one for one in held if not (_is_of(one, choice) and one.holding.host in states)]
            if self._host in states:  # damaged here: it comes from others, or is not taken
                self._here.pop(choice.identity, None)
            if len(left) == len(held):
                raise CheckpointError(f"cannot go on from step {choice.identity.step}: it cannot be taken to all hosts")
            held = left
        if self._group.rank == 0:
            lost = f"; {noted} steps are lost" if noted else ""
            log.warning("nothing to go on from was found in memory or on disk: training begins at step 0%s", lost)
        return None

    # What is there

    def _look(self) -> tuple[list[_Held], int]:
        """What all hosts hold, and the last step that any rank has noted."""
        for tier, shelf in self._shelves:
            for one in shelf.scan():
                if isinstance(one, Found):
                    if any(entry.part == JOB for entry in one.entries):  # else it has weights, and nothing to go on by
                        self._here.setdefault(_identity(one, tier), one)
                elif self._speaks:
                    log.warning("rank %d: %s is skipped: %s", self._group.rank, one.path, one.what)
        mine: dict[str, Any] = {"noted": self._noted, "held": []}
        if self._speaks:
            mine["held"] = [_as_json(identity, found) for identity, found in self._here.items()]
        texts = self._group.all_gather_text(json.dumps(mine), "looking for a state to go on from")
        everyone = [json.loads(text) for text in texts]
        hosts = [self._layout.hosts.index(self._layout.host_of(rank)) for rank in range(self._group.world_size)]
        held = [_from_json(one, host) for host, told in zip(hosts, everyone, strict=True) for one in told["held"]]
        return held, max(told["noted"] for told in everyone)

    # What is needed

    def _collect(self, choice: Choice, held: Mapping[int, _Held]) -> dict[str, Any] | set[int]:
        """The parts that this rank needs; or the hosts on which something of the state was found to be damaged.

        Args:
            choice: The state.
            held: What each host has of it.
        """
        settled = all(one.settled for one in held.values())
        wanted = [self._needs(rank, choice, settled=settled) for rank in range(self._group.world_size)]
        needs = [set().union(*(wanted[rank] for rank in ranks)) for ranks in self._layout.hosts]
        if damaged := self._all_damaged(choice, self._deliver(choice, deliveries(choice, needs), held)):
            return damaged
        states, found = self._read(choice, wanted[self._group.rank])
        return self._all_damaged(choice, found) or states

    def _all_damaged(self, choice: Choice, found_here: Mapping[int, str]) -> set[int]:
        """On which hosts any rank has found damage; said on rank 0."""
        texts = self._group.all_gather_text(json.dumps(found_here), "reading the state to go on from")
        found = {int(host): what for text in texts for host, what in json.loads(text).items()}
        for host, what in found.items():
            if self._group.rank == 0:
                step, tier, rank = choice.identity.step, choice.identity.tier, self._layout.hosts[host][0]
                log.warning("step %d on %s of the host of rank %d is skipped: %s", step, tier, rank, what)
        return set(found)

    def _needs(self, rank: int, choice: Choice, *, settled: bool) -> set[str]:
        """Shards of others, too, where they are cut anew: for other ranks, or for the plan that a run begins with."""
        if choice.identity.world_size != self._group.world_size or not settled:
            return set(choice.hosts)
        return {part for part in (*COMMON, shard_part(rank), rank_part(rank)) if part in choice.hosts}

    def _deliver(self, choice: Choice, wanted: list[Delivery], held: Mapping[int, _Held]) -> dict[int, str]:
        """Sends what hosts lack; what came damaged, by the host that sent it."""
        if wanted and self._received is None:
            raise CheckpointError(
                f"cannot go on from step {choice.identity.step}: {len(wanted)} of its parts are not on the hosts that "
                "need them, and there is no folder in memory to take them; name one by POSEIDON_MEMORY"
            )
        if not wanted or not self._speaks:
            return {}
        speakers = [ranks[0] for ranks in self._layout.hosts]
        found = self._here.get(choice.identity)
        sends = [
            (speakers[one.target], content_of(found.file(one.part)))
            for one in wanted
            if one.source == self._host and found is not None
        ]
        coming = [(one, held[one.source].entries[one.part]) for one in wanted if one.target == self._host]
        rooms = [room_for(entry.size) for _, entry in coming]
        exchange_files(
            self._group, sends, [(speakers[one.source], room) for (one, _), room in zip(coming, rooms, strict=True)]
        )
        if not coming:
            return {}
        return self._keep_received(choice.identity, coming, [room.numpy().data for room in rooms])

    def _keep_received(
        self, identity: Identity, coming: Sequence[tuple[Delivery, Entry]], contents: Sequence[memoryview]
    ) -> dict[int, str]:
        assert self._received is not None
        try:
            draft = self._received.begin(identity.step)
            for (delivery, entry), content in zip(coming, contents, strict=True):
                if draft.copy(entry.part, [content]) != entry:
                    return {delivery.source: f"{entry.file} is not what was written: its checksum is another"}
            draft.seal([entry for _, entry in coming], {})
        except CheckpointError as error:
            return {self._host: str(error)}
        return {}

    def _read(self, choice: Choice, wanted: Collection[str]) -> tuple[dict[str, Any], dict[int, str]]:
        here = self._here.get(choice.identity)
        there = {one.step: one for one in self._received.found()} if self._received is not None else {}
        missing = {part for part in wanted if here is None or not _has_size(here.file(part), here.entry(part).size)}
        try:
            return {part: _source(part in missing, there, here, choice).read(part) for part in wanted}, {}
        except CheckpointError as error:
            return {}, {self._host: str(error)}

    def _describe(self, identity: Identity, held: Sequence[_Held], noted: int) -> Resumption:
        kept_at = max(one.kept_at for one in held if one.holding.identity == identity)
        return Resumption(
            step=identity.step,
            place="memory" if identity.tier == "memory" else str(self._shelves[-1][1].path),
            seconds=time.monotonic() - self._began,
            lost_steps=max(0, noted - identity.step),
            lost_seconds=max(0.0, time.time() - kept_at) if memory.attempt() else 0.0,
            world_size_before=identity.world_size,
            world_size=self._group.world_size,
        )


def _source(is_missing: bool, received: Mapping[int, Found], here: Found | None, choice: Choice) -> Found:
    source = received.get(choice.identity.step) if is_missing else here
    assert source is not None
    return source


def _is_of(one: _Held, choice: Choice) -> bool:
    return one.holding.identity == choice.identity


def _identity(found: Found, tier: Tier) -> Identity:
    attempt = found.facts.get("attempt", 0)
    return Identity(
        step=found.step,
        tier=tier,
        attempt=attempt if isinstance(attempt, int) else 0,
        world_size=found.world_size,
        mark=str(found.facts.get("mark", "")),
    )


def _as_json(identity: Identity, found: Found) -> dict[str, Any]:
    """What a host holds of a state; a part of another size than it should have counts as absent."""
    whole = [entry.part for entry in found.entries if _has_size(found.path / entry.file, entry.size)]
    entries = [entry.model_dump() for entry in found.entries]
    return {
        "identity": asdict(identity),
        "parts": whole,
        "entries": entries,
        "kept_at": found.manifest.time,
        "settled": found.facts.get("settled") is True,
    }


def _from_json(told: Mapping[str, Any], host: int) -> _Held:
    entries = {entry["part"]: Entry.model_validate(entry) for entry in told["entries"]}
    holding = Holding(
        host=host,
        identity=Identity(**told["identity"]),
        parts=frozenset(told["parts"]),
        all_parts=frozenset(entries),
    )
    return _Held(holding=holding, entries=entries, kept_at=told["kept_at"], settled=told["settled"])


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
