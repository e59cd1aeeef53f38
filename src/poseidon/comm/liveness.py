"""Who is still there: each rank beats at the coordinator, and whoever is lost is named the same by all others.

A broken connection between two ranks says that something ended, not who. So every rank beats twice a second over a
connection to the coordinator that nothing else uses, and reads the beats of the others with the answer. A rank is lost

- when its connection to the coordinator ends without a goodbye: its process has ended, which is seen within a second;
- when it is silent for too long: it stands still, or its link is down. How long is too long follows the arrivals seen
  so far, within bounds: TCP takes some six seconds to come back to a link that was down for three;
- when it says itself that it ends by an error, and why.

The first rank to find out writes it down at the coordinator, and that is what all ranks say, the lost one too if it
comes back. Deadlines count silence, not waiting: a rank that is slow but beats is waited for, for days if need be, and
can be named as late. Silence is not counted while this rank cannot hear: the coordinator was away, or its own link was.

With its beat a rank says where it runs, how many exchanges lie behind it, and where all ranks have to meet, if it waits
there. One that waits in an exchange so learns that the others have left the exchanges behind and it waits in vain.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import TypeVar

from pydantic import ValidationError
from torch.distributed import DistStoreError

from poseidon.artifact import Value
from poseidon.comm.lateness import Reminders, say_who_is_late
from poseidon.comm.remote_store import RemoteStore, StoreLostError, Trouble
from poseidon.errors import PeerLostError

T = TypeVar("T")

BEAT_SECONDS = 0.5
LEAST_SILENCE_SECONDS = 7.0
"""Less silence than this loses nobody: a link that was down for three seconds is ridden out."""
LOST_SECONDS = 8.5
"""This much silence: the rank is gone, or its link is."""
SPREADS = 20.0
"""Silence that loses a rank whose beats come irregularly: their median interval and so many times the median deviation
from it, within the bounds above."""
PATIENCE_SECONDS = 10.0
"""Others may be seen where this rank has just been; after so long they wait for it."""
SILENT_SECONDS = 2.0
"""A connection between ranks broke, and this much later all of them still beat: none has ended."""

_BEATS, _GONE, _FAREWELLS, _VERDICTS = folders = (
    "poseidon/beat/",
    "poseidon/gone/",
    "poseidon/farewell/",
    "poseidon/verdict/",
)
_VERDICT = _VERDICTS + "first"
_NUM_INTERVALS = 32
"""Of the latest beats of a rank, from which the limit of its silence follows."""
_FIRST_BEAT_SECONDS = 0.02
"""While ranks are missing the first beats follow closer on each other: most come at the same time."""
_LOOK_SECONDS = 0.02
_MOST_REASON_BYTES = 2000


class Beat(Value):
    """What a rank says of itself."""

    count: int
    """Of its beats: a rank that says nothing new has not beaten."""
    num_exchanges: int
    """How many lie behind it."""
    host: str
    waits: str = ""
    """For what all ranks have to come, outside any exchange; empty where it does not wait so."""
    in_exchange: bool = False
    """Whether it waits for an exchange to end."""


class Verdict(Value):
    """Who is lost, in the words that all ranks use."""

    ranks: tuple[int, ...]
    text: str


class _Peer:
    """What is known of another rank."""

    def __init__(self) -> None:
        self.beat: Beat | None = None
        """None until it has come."""
        self.heard_at = 0.0
        self.waits_since = 0.0
        self.intervals: deque[float] = deque(maxlen=_NUM_INTERVALS)
        self.is_gone = False
        self.farewell: str | None = None
        """Why it ended; empty where it ended in good order."""

    def note(self, beat: Beat, now: float) -> None:
        """Takes in what it says, if that is new."""
        if self.beat is not None and beat.count == self.beat.count:
            return
        if self.beat is None or beat.waits != self.beat.waits:
            self.waits_since = now
        if self.beat is not None:
            self.intervals.append(now - self.heard_at)
        self.beat, self.heard_at = beat, now

    @property
    def silence_limit(self) -> float:
        """Seconds of silence after which it is lost."""
        if not self.intervals:
            return LOST_SECONDS
        usual = statistics.median(self.intervals)
        spread = statistics.median(abs(interval - usual) for interval in self.intervals)
        return min(LOST_SECONDS, max(LEAST_SILENCE_SECONDS, usual + SPREADS * spread))


class Liveness:
    """Beats for this rank and listens for the others, from a thread of its own, until it is closed.

    Args:
        store: A connection to the coordinator that nothing else uses; closed with this.
        rank: This rank.
        world_size: How many there are.
        host: What messages call this rank's host.
        serving_rank: The rank whose process the coordinator lives in; None where it has one of its own.
    """

    def __init__(
        self, store: RemoteStore, rank: int, world_size: int, *, host: str = "", serving_rank: int | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._host = host
        self._serving_rank = serving_rank
        self._guard = threading.Lock()  # guards what is known of the peers, and the verdict
        self._peers = {other: _Peer() for other in range(world_size) if other != rank}
        self._verdict: Verdict | None = None
        self._announce: str | None = None
        self._waits = ""
        self._reminders = Reminders()
        self._in_exchange = False
        self._count_exchanges: Callable[[], int] = int
        self._on_lost: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poseidon-liveness", daemon=True)
        self._thread.start()

    def follow(self, count_exchanges: Callable[[], int]) -> None:
        """Tells the others from now on how many exchanges lie behind this rank."""
        self._count_exchanges = count_exchanges

    def on_lost(self, end: Callable[[], None]) -> None:
        """Has this called once, from the thread that listens, as soon as a rank is lost: to end what waits for it."""
        self._on_lost = end

    def close(self, reason: str = "") -> None:
        """Stops beating and says goodbye; a reason is left for the others to read."""
        self._announce = reason
        self._stop.set()
        self._thread.join(timeout=2 * BEAT_SECONDS + 1)
        self._store.close()
        self._thread.join(timeout=1)

    @contextmanager
    def waiting(self, num_exchanges: int, what: str) -> Iterator[None]:
        """Tells the others that this rank waits for all ranks, outside any exchange.

        Args:
            num_exchanges: How many exchanges lie behind it.
            what: What it waits in.
        """
        self._waits, self._reminders = f"{num_exchanges} {what}", Reminders()
        try:
            yield
        finally:
            self._waits = ""

    @contextmanager
    def waiting_in_exchange(self) -> Iterator[None]:
        """Tells the others that this rank waits for an exchange to end: it is not the late one."""
        self._in_exchange = True
        try:
            yield
        finally:
            self._in_exchange = False

    def left_behind(self, num_exchanges: int) -> str:
        """Which rank will not come to the next exchange because it waits elsewhere, in words; empty if none does.

        Args:
            num_exchanges: How many exchanges lie behind this rank.
        """
        now = time.monotonic()
        for rank, peer, beat in self._present():
            theirs, _, what = beat.waits.partition(" ")
            if what and int(theirs) <= num_exchanges and now - peer.waits_since > PATIENCE_SECONDS:
                return f"rank {rank} has left the exchanges behind after {theirs} of them and waits in {what!r}"
        return ""

    def late(self, num_exchanges: int) -> dict[int, str]:
        """The ranks that live but have not come to where this rank waits, and what messages call them.

        Args:
            num_exchanges: How many exchanges lie behind this rank.
        """
        return {
            rank: f"rank {rank}{f' ({beat.host})' if beat.host else ''}"
            for rank, peer, beat in self._present()
            if peer.farewell is None and not beat.waits and not beat.in_exchange and beat.num_exchanges <= num_exchanges
        }

    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        with self._guard:
            return [rank for rank, peer in self._peers.items() if peer.beat is None]

    def lost(self) -> str:
        """Who is lost, in words; empty while all are there."""
        with self._guard:
            verdict = self._verdict
        if verdict is None:
            return ""
        if self._rank in verdict.ranks:
            return f"the other ranks have gone on without this one, which they took for lost: {verdict.text}"
        return verdict.text

    def name_lost(self, since: float) -> str:
        """Waits until it is clear who is gone; empty as soon as it is clear that all ranks live.

        Args:
            since: `time.monotonic()` of the moment when a connection broke.
        """
        while time.monotonic() < since + LOST_SECONDS + 2 * BEAT_SECONDS:
            if lost := self.lost():
                return lost
            with self._guard:
                staying = [peer for peer in self._peers.values() if peer.farewell is None]
                heard = min((peer.heard_at for peer in staying), default=since)
            if heard > since + SILENT_SECONDS:
                return ""
            time.sleep(_LOOK_SECONDS)
        return ""

    def watch_over(self, call: Callable[[], T], what: str) -> T:
        """Runs a call of torch that nothing can interrupt, in a thread that is left behind where a rank is lost.

        Args:
            call: What to run.
            what: It, in words.

        Raises:
            PeerLostError: A rank was lost meanwhile.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001  # handed on to whoever waits for it
                errors.append(error)

        thread = threading.Thread(target=run, name="poseidon-watched", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            if thread.is_alive() and (lost := self.lost()):
                raise PeerLostError(f"rank {self._rank}: {what} cannot end: {lost}")
        for error in errors:
            raise error
        return results[0]

    def _present(self) -> list[tuple[int, _Peer, Beat]]:
        with self._guard:
            return [(rank, peer, peer.beat) for rank, peer in self._peers.items() if peer.beat is not None]

    def _run(self) -> None:
        try:
            self._store.register(f"{_GONE}{self._rank}", self._host)
            count = 0
            while True:
                count += 1
                is_last = self._stop.is_set()
                self._beat(count)
                self._agree(self._judge(time.monotonic()))
                self._act()
                if is_last:
                    reason = (self._announce or "").encode(errors="replace")
                    self._store.set(f"{_FAREWELLS}{self._rank}", reason[:_MOST_REASON_BYTES])
                    return
                self._stop.wait(BEAT_SECONDS if not self.missing() else min(BEAT_SECONDS, count * _FIRST_BEAT_SECONDS))
        except DistStoreError as error:
            with self._guard:
                self._verdict = self._verdict or self._without_coordinator(error)
            self._act()

    def _act(self) -> None:
        """Ends what waits for a lost rank, and says for whom this rank has waited long."""
        waits = self._waits
        if self.lost():
            end, self._on_lost = self._on_lost, lambda: None
            end()
        elif waits and (waited := self._reminders.due()) is not None:
            num_exchanges, _, what = waits.partition(" ")
            say_who_is_late(self._rank, self.late(int(num_exchanges)), what, waited)

    def _beat(self, count: int) -> None:
        mine = Beat(
            count=count,
            num_exchanges=self._count_exchanges(),
            host=self._host,
            waits=self._waits,
            in_exchange=self._in_exchange,
        )
        asked_at = time.monotonic()
        found = self._store.beat(f"{_BEATS}{self._rank}", mine.model_dump_json(), folders)
        deaf_seconds = max(0.0, time.monotonic() - asked_at - BEAT_SECONDS)
        with self._guard:
            for peer in self._peers.values():
                peer.heard_at += deaf_seconds
            self._take_in(found, time.monotonic())

    def _take_in(self, found: Mapping[str, bytes], now: float) -> None:
        for rank, peer in self._peers.items():
            if (beat := _beat_of(found.get(f"{_BEATS}{rank}"))) is not None:
                peer.note(beat, now)
            peer.is_gone = peer.is_gone or f"{_GONE}{rank}" in found
            if (farewell := found.get(f"{_FAREWELLS}{rank}")) is not None:
                peer.farewell = farewell.decode(errors="replace")
        if _VERDICT in found and self._verdict is None:
            self._verdict = _verdict_of(found[_VERDICT])

    def _judge(self, now: float) -> Verdict | None:
        """Who is lost, as far as this rank sees; None if nobody is, or all have agreed already."""
        with self._guard:
            if self._verdict is not None:
                return None
            for rank, peer in sorted(self._peers.items()):
                if peer.farewell:
                    return Verdict(
                        ranks=(rank,), text=f"rank {rank} ended with: {peer.farewell}{self._last_seen(peer)}"
                    )
            staying = {rank: peer for rank, peer in self._peers.items() if peer.farewell is None}
            gone = sorted(rank for rank, peer in staying.items() if peer.is_gone)
            if gone:
                return Verdict(
                    ranks=tuple(gone),
                    text=f"{_ranks(gone)} {_listed(gone)} {_is(gone)} gone: the process ended without a word"
                    f"{self._last_seen(*(staying[rank] for rank in gone))}",
                )
            silent = {
                rank: now - peer.heard_at
                for rank, peer in staying.items()
                if peer.beat is not None and now - peer.heard_at > peer.silence_limit
            }
            return self._of_silence(silent) if silent else None

    def _of_silence(self, silent: Mapping[int, float]) -> Verdict:
        longest = max(silent.values())
        first = sorted(rank for rank, seconds in silent.items() if longest - seconds < 2 * BEAT_SECONDS)
        peers = [self._peers[rank] for rank in first]
        why = "it stands still, or its link is down"
        if len(first) > 1:
            everybody = len(first) == len(self._peers)
            why = "this host's own link is down, or theirs" if everybody else "they stand still, or their link is down"
        return Verdict(
            ranks=tuple(first),
            text=f"{_ranks(first)} {_listed(first)} {_is(first)} gone: no sign of life for {longest:.1f}s ({why})"
            f"{self._last_seen(*peers)}",
        )

    def _last_seen(self, *peers: _Peer) -> str:
        """Where they ran and how far they were, as the end of a sentence."""
        seen = [f"{_on(peer.beat)}{peer.beat.num_exchanges} exchanges" for peer in peers if peer.beat is not None]
        return f"; last seen {' and '.join(f'{text} behind it' for text in seen)}" if seen else "; it had just started"

    def _agree(self, found: Verdict | None) -> None:
        """Writes down what this rank found, and takes over what was written first."""
        if found is None:
            return
        first = self._store.compare_set(_VERDICT, "", found.model_dump_json())
        with self._guard:
            self._verdict = _verdict_of(first) or found

    def _without_coordinator(self, error: DistStoreError) -> Verdict | None:
        """What follows for this rank from a coordinator that cannot be asked."""
        trouble = error.trouble if isinstance(error, StoreLostError) else None
        if trouble is Trouble.CLOSED:
            return None
        if trouble is None or self._serving_rank is None or self._serving_rank == self._rank:
            return Verdict(
                ranks=(),
                text=f"{error}; without it nobody knows who is left, and this rank may be the one that is cut off",
            )
        what = "is gone: its process ended, and the coordinator with it"
        if trouble is not Trouble.REFUSED:
            what = (
                "cannot be reached, and the coordinator with it: it stands still, or its link is down, or this host's "
                "own"
            )
        return Verdict(
            ranks=(self._serving_rank,),
            text=f"rank {self._serving_rank} {what} ({error}){self._last_seen(self._peers[self._serving_rank])}",
        )


def _beat_of(text: bytes | None) -> Beat | None:
    try:
        return None if text is None else Beat.model_validate_json(text)
    except ValidationError:
        return None


def _verdict_of(text: bytes) -> Verdict | None:
    try:
        return Verdict.model_validate_json(text)
    except ValidationError:
        return None


def _on(beat: Beat) -> str:
    return f"on host {beat.host} with " if beat.host else "with "


def _ranks(ranks: Sized) -> str:
    return "rank" if len(ranks) == 1 else "ranks"


def _is(ranks: Sized) -> str:
    return "is" if len(ranks) == 1 else "are"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
