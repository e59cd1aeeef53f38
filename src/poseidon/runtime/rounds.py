"""Rounds: within a forward or backward pass every rank gives a few numbers on a topic and gets those of all.

A rank has nothing to say when it has no samples, or fewer micro-batches than others. It must answer all the same, and
cannot know what it will be asked. So every rank says when its step ends, and then listens until all others have said
so: whoever still has a round on a topic goes on without the ranks that have ended, and is answered with zeros by those
that have ended in another run only (two runs in one program take turns, and share the rounds).

Messages go point to point, so that one that listens sees from the message what it is about. They are sent by the
training thread, over connections of their own: transfers of gradients are under way meanwhile.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from poseidon.comm.group import Group, Pending
from poseidon.errors import CommError
from poseidon.runtime.comm_thread import CommThread

ROUNDS_TAG = 1
"""The only messages between pairs on the side's connections."""

ENDING = "the end of a step's rounds"
"""As messages have it."""

Parts = dict[int, torch.Tensor]
"""By rank, what each said in a round; a rank that has ended is not in it."""


@dataclass(frozen=True, eq=False)
class Topic:
    """What a round can be about; the same on every rank."""

    name: str
    """As messages have it."""
    run: int
    width: int
    """How many numbers a part has. One of zeros must change nothing."""
    heard: Callable[[Parts], None]
    """Called with what was said on a rank that had nothing to say itself."""


class Rounds:
    """The rounds of all runs on one group and its siblings; a run takes part through its `Seat`.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._side: Group | None = None
        self._threads: CommThread | None = None
        self._seats: list[Seat] = []
        self._num_seats = 0
        self._topics: dict[int, Topic] = {}
        self._num_topics = 0
        self._received: dict[int, torch.Tensor] = {}
        """What a message of each other rank is received in."""
        self._ended: defaultdict[int, set[int]] = defaultdict(set)
        """By run, the other ranks that have ended their present step."""
        self._over: set[int] = set()
        """The runs whose present step this rank has ended."""
        self._farewells: dict[int, Pending] = {}
        """By run, what says so, until it has been received."""

    def take_seat(self) -> "Seat":
        """One more run may take part; called on all ranks together."""
        self._num_seats += 1
        self._seats.append(Seat(self, self._num_seats))
        return self._seats[-1]

    def leave(self, seat: "Seat") -> None:
        """A run is over, on all ranks together, and its topics with it."""
        self._seats.remove(seat)
        self._topics = {index: topic for index, topic in self._topics.items() if topic.run != seat.run}
        self._ended.pop(seat.run, None)
        if not self._topics and self._threads is not None:
            self._threads.close()
            self._threads = None
        if not self._seats:
            _rounds.pop(self._group, None)

    def add(self, topic: Topic) -> int:
        """Adds a topic, in the same order on every rank; its number."""
        self._side = self._group.side()
        if self._threads is None:
            self._threads = CommThread(self._side)
        self._num_topics += 1
        self._topics[self._num_topics] = topic
        width = max(topic.width for topic in self._topics.values())
        self._received = {peer: torch.zeros(1 + width, dtype=torch.float64) for peer in self._side.peers}
        return self._num_topics

    @property
    def has_topics(self) -> bool:
        """Whether there is anything to hold rounds on."""
        return bool(self._topics)

    def hold(self, number: int, part: torch.Tensor) -> Parts:
        """One round.

        Args:
            number: Of the topic.
            part: This rank's numbers, shape `(width,)`.

        Returns:
            What each rank said, this one included.
        """
        return {self._group.rank: part, **self._round(number, part, {})}

    def end(self, run: int) -> None:
        """Says that this rank has nothing more to say in this run's present step; waits for nobody."""
        if self._topics and run not in self._over:
            self._over.add(run)
            self._farewells[run] = self._send(torch.tensor([-run], dtype=torch.float64), ENDING)

    def listen(self, run: int) -> None:
        """Takes part in the rounds of the others until all have ended this run's present step."""
        if run not in self._farewells:
            return
        while waited_for := [peer for peer in self._group.peers if peer not in self._ended[run]]:
            self._answer(self._receive(waited_for, ENDING))
        self._wait(self._farewells.pop(run), ENDING)

    def next_step(self, run: int) -> None:
        """All have ended this run's step, and this rank has listened: there may be rounds again."""
        self._over.discard(run)
        self._ended[run].clear()

    def _answer(self, heard: dict[int, tuple[int, torch.Tensor]]) -> None:
        for number in {number for number, _ in heard.values() if number > 0}:
            topic = self._topics[number]
            silent = topic.run in self._over
            part = None if silent else torch.zeros(topic.width, dtype=torch.float64)
            topic.heard(self._round(number, part, heard))

    def _round(self, number: int, part: torch.Tensor | None, heard: dict[int, tuple[int, torch.Tensor]]) -> Parts:
        """What the others say in one round, of which some may have been heard already."""
        topic = self._topics[number]
        said = None
        if part is not None:
            said = self._send(torch.cat([torch.tensor([number], dtype=torch.float64), part]), topic.name)
        parts: Parts = {}
        self._sort_in(heard, number, parts)
        while missing := [p for p in self._group.peers if p not in parts and p not in self._ended[topic.run]]:
            self._sort_in(self._receive(missing, topic.name), number, parts)
        if said is not None:
            self._wait(said, topic.name)
        return parts

    def _sort_in(self, heard: dict[int, tuple[int, torch.Tensor]], number: int, parts: Parts) -> None:
        for rank, (about, part) in heard.items():
            if about == number:
                parts[rank] = part
            elif about > 0:
                raise CommError(
                    f"rank {self._group.rank}: this rank is in {self._topics[number].name}, rank {rank} in "
                    f"{self._topics[about].name}; every rank must call these layers equally often and in the same order"
                )

    def _receive(self, peers: Iterable[int], what: str) -> dict[int, tuple[int, torch.Tensor]]:
        """The next message of each of these ranks: the topic's number, or minus the run that it has ended."""
        receives = [(peer, self._received[peer]) for peer in peers]
        assert self._side is not None
        self._wait(self._side.exchange([], receives, tag=ROUNDS_TAG, what=what), what)
        heard = {}
        for peer, buffer in receives:
            number = int(buffer[0])
            if number < 0:
                self._ended[-number].add(peer)
            width = self._topics[number].width if number > 0 else 0
            heard[peer] = (number, buffer[1 : 1 + width].clone())
        return heard

    def _send(self, message: torch.Tensor, what: str) -> Pending:
        assert self._side is not None
        return self._side.exchange([(peer, message) for peer in self._side.peers], [], tag=ROUNDS_TAG, what=what)

    def _wait(self, pending: Pending, name: str) -> None:
        assert self._threads is not None
        self._threads.wait_for(pending, name, in_step=True)


class Seat:
    """One run's part in the rounds.

    Args:
        rounds: Of the run's group.
        run: The run's number.
    """

    def __init__(self, rounds: Rounds, run: int) -> None:
        self._rounds = rounds
        self.run = run

    def add(self, name: str, width: int, heard: Callable[[Parts], None]) -> Callable[[torch.Tensor], Parts]:
        """Adds a topic; what it returns holds a round on it. See `Topic` and `Rounds.hold`."""
        return partial(self._rounds.hold, self._rounds.add(Topic(name, self.run, width, heard)))

    def end_step(self) -> None:
        """This rank has nothing more to say in the present step."""
        self._rounds.end(self.run)

    @property
    def is_heard(self) -> bool:
        """Whether this run, or another one on the same ranks, has topics: nobody listens where there are none."""
        return self._rounds.has_topics

    def listen(self) -> None:
        """Answers the others until they have ended the step too; nothing to do where this rank has not."""
        self._rounds.listen(self.run)

    def next_step(self) -> None:
        """The step is over."""
        self._rounds.next_step(self.run)

    def leave(self) -> None:
        """The run is over; called on all ranks together."""
        self._rounds.leave(self)


_rounds: dict[Group, Rounds] = {}


def take_seat(group: Group) -> Seat:
    """A seat for one more run on a group or a sibling of it; called on all ranks together."""
    rounds = _rounds.setdefault(group.root, Rounds(group.root))
    return rounds.take_seat()
