"""Who is still there: each rank beats in the rendezvous store, and silence names who is lost.

A broken connection says that something ended, not who. So every rank counts up a key of its own, twice a second, over
a store connection that nothing else uses; a rank whose key stands still is lost. The first to find out writes it down,
so that all the others name the same rank and not one another. Deadlines count silence, not waiting: a rank that is slow
but beats is waited for.

With its beat a rank says where all ranks have to meet, if it waits there. One that waits in an exchange learns so that
the others have left the exchanges behind, and that it waits in vain.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

BEAT_SECONDS = 0.5
SILENT_SECONDS = 3.0
"""A broken connection and this much silence: the rank is gone."""
LOST_SECONDS = 10.0
"""This much silence alone: the rank is gone, or its link is."""
PATIENCE_SECONDS = 10.0
"""Others may be seen where this rank has just been; after so long they wait for it."""


class Liveness:
    """Beats for this rank and listens for the others.

    Args:
        store: A store connection of its own: `connect` makes it, in the thread that uses it.
        rank: This rank.
        world_size: How many there are.
    """

    def __init__(self, connect: Callable[[], Store], rank: int, world_size: int) -> None:
        self._connect = connect
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        self._guard = threading.Lock()  # guards the five fields below
        self._last_beat = dict.fromkeys(self._others, time.monotonic())
        self._meeting: dict[int, tuple[str, float]] = {}
        """What ranks say about where they wait, and since when they say so."""
        self._farewells: dict[int, str] = {}
        self._store_gone_since: float | None = None
        self._verdict = ""
        self._announce = ""
        self._waits = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poseidon-liveness", daemon=True)
        self._thread.start()

    def close(self, reason: str = "") -> None:
        """Stops beating; a reason is left for the others to read."""
        self._announce = reason
        self._stop.set()
        self._thread.join(timeout=2 * BEAT_SECONDS + 1)

    @contextmanager
    def waiting(self, num_exchanges: int, what: str) -> Iterator[None]:
        """Tells the others that this rank waits for all ranks, outside any exchange.

        Args:
            num_exchanges: How many exchanges lie behind it.
            what: What it waits in.
        """
        self._waits = f"{num_exchanges} {what}"
        try:
            yield
        finally:
            self._waits = ""

    def left_behind(self, num_exchanges: int) -> str:
        """Which rank will not come to the next exchange because it waits elsewhere, in words; empty if none does.

        Args:
            num_exchanges: How many exchanges lie behind this rank.
        """
        with self._guard:
            meeting = dict(self._meeting)
        for rank, (waits, since) in sorted(meeting.items()):
            theirs, _, what = waits.partition(" ")
            if int(theirs) <= num_exchanges and time.monotonic() - since > PATIENCE_SECONDS:
                return f"rank {rank} has left the exchanges behind after {theirs} of them and waits in {what!r}"
        return ""

    def lost(self) -> str:
        """Who has been silent for so long that it is lost, in words; empty while all are there."""
        return self._judge(LOST_SECONDS)

    def name_lost(self, since: float) -> str:
        """Waits until it is clear who is gone, at most `SILENT_SECONDS` and a little; empty if all keep beating.

        Args:
            since: `time.monotonic()` of the moment when a connection broke.
        """
        while time.monotonic() < since + SILENT_SECONDS + 4 * BEAT_SECONDS:
            if verdict := self._judge(SILENT_SECONDS):
                return verdict
            time.sleep(BEAT_SECONDS / 5)
        return ""

    def _judge(self, silent_seconds: float) -> str:
        now = time.monotonic()
        with self._guard:
            if self._verdict:
                return self._verdict
            if self._farewells:
                rank, reason = min(self._farewells.items())
                self._verdict = f"rank {rank} ended with: {reason}"
            elif silent := self._silent(now, silent_seconds):
                self._verdict = _in_words(silent)
            elif self._store_gone_since is not None and now - self._store_gone_since > silent_seconds / 2:
                self._verdict = "rank 0 is gone, and the rendezvous store with it (the process or its link ended)"
            return self._verdict

    def _silent(self, now: float, seconds: float) -> dict[int, float]:
        """The ranks that have been silent for so long, and how long; without a store, those that were when it went."""
        gone = self._store_gone_since
        before = now if gone is None else gone - 2 * BEAT_SECONDS - 0.1
        return {r: now - last for r, last in self._last_beat.items() if now - last > seconds and last < before}

    def _run(self) -> None:
        try:
            store = self._connect()
        except (RuntimeError, OSError):
            self._mark_store_gone()
            return
        beats: dict[int, bytes] = {}
        count = 0
        while True:
            try:
                count += 1
                stopping = self._stop.is_set()
                store.set(f"poseidon/beat/{self._rank}", f"{count} {self._waits}")
                self._agree(store)
                if stopping:
                    if self._announce:
                        store.set(f"poseidon/farewell/{self._rank}", self._announce[:500])
                    return
                self._listen(store, beats)
            except (RuntimeError, OSError):
                self._mark_store_gone()
                return
            self._stop.wait(BEAT_SECONDS)

    def _listen(self, store: Store, beats: dict[int, bytes]) -> None:
        for rank in self._present(store, "beat", self._others):
            beat = store.get(f"poseidon/beat/{rank}")
            if beats.get(rank) != beat:
                beats[rank] = beat
                self._note_beat(rank, beat.decode(errors="replace").partition(" ")[2])
        for rank in self._present(store, "farewell", self._others):
            reason = store.get(f"poseidon/farewell/{rank}").decode(errors="replace")
            with self._guard:
                self._farewells[rank] = reason

    def _note_beat(self, rank: int, waits: str) -> None:
        now = time.monotonic()
        with self._guard:
            self._last_beat[rank] = now
            if not waits:
                self._meeting.pop(rank, None)
            elif self._meeting.get(rank, ("", now))[0] != waits:
                self._meeting[rank] = (waits, now)

    @staticmethod
    def _present(store: Store, kind: str, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if store.check([f"poseidon/{kind}/{rank}"])]

    def _agree(self, store: Store) -> None:
        """Writes a verdict down for the others, or takes over the first that was written."""
        with self._guard:
            verdict = self._verdict
        if verdict:
            store.compare_set("poseidon/verdict", "", verdict)
        elif store.check(["poseidon/verdict"]):
            with self._guard:
                self._verdict = store.get("poseidon/verdict").decode(errors="replace")

    def _mark_store_gone(self) -> None:
        with self._guard:
            self._store_gone_since = time.monotonic()


def _in_words(silent: dict[int, float]) -> str:
    longest = max(silent.values())
    first = sorted(rank for rank, seconds in silent.items() if longest - seconds < 2 * BEAT_SECONDS + 0.1)
    names = f"rank {first[0]} is" if len(first) == 1 else f"ranks {', '.join(map(str, first))} are"
    return f"{names} gone: no sign of life for {longest:.1f}s (the process or its link ended)"
