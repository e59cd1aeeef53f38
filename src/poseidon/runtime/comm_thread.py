"""Issues the plan's schedule: the same transfers in the same order on every rank, step after step.

One thread issues. It takes the transfers one by one, waits until the training thread has made the next one ready, and
starts it; nothing overtakes, so ranks can neither deadlock nor mix up messages. A second thread waits for what was
started and finishes it. Where a transfer has several stages, a thread for each waits for one stage and starts the next,
so that what the stages start is in the schedule's order as well. What the training thread starts itself is waited for
by one more thread, never behind the schedule: that may have begun in a forward pass which only this rank has run. The
training thread only sets flags, and waits at the end of the backward pass.

It waits as long as every rank shows signs of life, and says from time to time who is late. A rank that is lost ends the
exchange on all others.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from poseidon.comm.group import Group, Pending
from poseidon.comm.lateness import Reminders, say_who_is_late
from poseidon.comm.scheme import Transfer
from poseidon.errors import CommError, PeerLostError, PoseidonError

LOOK_UP_SECONDS = 0.2
"""How often a waiting training thread looks whether all ranks are still there."""
CLOSE_SECONDS = 5.0
"""How long the end of the threads may take; after a failure one may hang in a transfer that nothing ends."""


class CommThread:
    """The communication threads of one rank.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._steps: queue.SimpleQueue[Sequence[Transfer] | None] = queue.SimpleQueue()
        self._started: list[queue.SimpleQueue[Transfer | None]] = []
        """For each stage, what is under way in it."""
        self._aside: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        """What the training thread has started itself."""
        self._failure: BaseException | None = None
        self._closing = False
        self._threads: list[threading.Thread] = []
        self.make_stages(1)
        self._start("poseidon-complete-aside", self._complete_aside)
        self._start("poseidon-issue", self._issue_all)

    def make_stages(self, count: int) -> None:
        """Has a thread for each of so many stages; before a schedule with such transfers begins."""
        while len(self._started) < count:
            stage = len(self._started)
            self._started.append(queue.SimpleQueue())
            self._start(f"poseidon-complete{stage or ''}", partial(self._complete_all, stage))

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def failed(self) -> bool:
        """Whether an exchange has failed; nothing is exchanged any more."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raises what failed, if anything did."""
        if self._failure is not None:
            raise self._failure

    def begin(self, schedule: Sequence[Transfer]) -> None:
        """Hands over the transfers of one step, in the order in which they are to be issued."""
        self._steps.put(schedule)

    def wait(self, transfer: Transfer, num_exchanges: int | None = None) -> None:
        """Blocks the training thread until a transfer has ended.

        Args:
            transfer: Of the schedule, or issued by this thread.
            num_exchanges: How many exchanges lie behind it; those that lie behind this rank if left out.

        Raises:
            CommError: The transfer failed, or others wait for this rank elsewhere.
            PeerLostError: A rank fell silent.
        """
        index = self._group.num_exchanges if num_exchanges is None else num_exchanges
        reminders = Reminders()
        with self._seen_to_wait(transfer):
            while not transfer.done.wait(LOOK_UP_SECONDS):
                self._look_up(transfer, index)
                self.raise_failure()
                if (waited := reminders.due()) is not None and self._group.liveness is not None:
                    late = self._group.liveness.late(index)
                    say_who_is_late(self._group.rank, late, f"{transfer.name} of exchange {index}", waited)
        self.raise_failure()

    @contextmanager
    def _seen_to_wait(self, transfer: Transfer) -> Iterator[None]:
        """Meanwhile the others know that this rank is not the late one."""
        liveness = self._group.liveness
        if liveness is None or transfer.done.is_set():
            yield
            return
        with liveness.waiting_in_exchange():
            yield

    def wait_issued(self, transfer: Transfer) -> None:
        """Blocks the training thread until a transfer that is ready has been started.

        Raises:
            CommError: A transfer failed.
        """
        while not transfer.issued.wait(LOOK_UP_SECONDS):
            self.raise_failure()

    def _look_up(self, transfer: Transfer, index: int) -> None:
        """Looks for what keeps a transfer from ending, unless that is known already."""
        what = f"rank {self._group.rank}: {transfer.name} in exchange {index}"
        liveness = self._group.liveness
        if self._failure is not None or liveness is None:
            return
        if lost := liveness.lost():
            self._fail(PeerLostError(f"{what} cannot end: {lost}"))
        elif transfer.scheduled and (elsewhere := liveness.left_behind(index)):
            self._fail(
                CommError(
                    f"{what} cannot end: {elsewhere}; every rank must run backward equally often (one without data "
                    "calls empty_step())"
                )
            )

    def _fail(self, error: PoseidonError) -> None:
        """Keeps the first failure for the training thread, and ends what is under way: no thread is to hang in it."""
        if self._failure is None:
            self._failure = error
            self._group.abort()

    def wait_for(self, pending: Pending, name: str, *, in_step: bool = False) -> None:
        """Blocks the training thread until what it has issued itself, outside the schedule, has ended.

        Args:
            pending: What it has issued.
            name: As messages have it.
            in_step: Whether every rank takes part in it before it goes on to the next exchange.

        Raises:
            CommError: As `wait`.
            PeerLostError: As `wait`.
        """
        transfer = Transfer(name, lambda: pending)
        transfer.scheduled = in_step
        transfer.issue()
        self._aside.put(transfer)
        self.wait(transfer)

    def close(self) -> None:
        """Ends the threads after the current step; a schedule that waits for data is given up."""
        self._closing = True
        self._steps.put(None)
        self._aside.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0 if self.failed else CLOSE_SECONDS)

    def _issue_all(self) -> None:
        while (schedule := self._steps.get()) is not None:
            for transfer in schedule:
                while not transfer.wait_ready(LOOK_UP_SECONDS):
                    if self._closing:
                        self._started[0].put(None)
                        return
                if not self._guarded(transfer.issue):
                    transfer.done.set()
                self._started[0].put(transfer)
        self._started[0].put(None)

    def _complete_all(self, stage: int) -> None:
        while (transfer := self._started[stage].get()) is not None:
            if self._failure is None:
                self._guarded(partial(transfer.advance, stage))
            if self._failure is None and stage + 1 < transfer.num_stages:
                self._started[stage + 1].put(transfer)
            else:
                transfer.done.set()
        if stage + 1 < len(self._started):
            self._started[stage + 1].put(None)

    def _complete_aside(self) -> None:
        while (transfer := self._aside.get()) is not None:
            if self._failure is None:
                self._guarded(partial(transfer.advance, 0))
            transfer.done.set()

    def _guarded(self, action: Callable[[], None]) -> bool:
        """Runs one action; its error goes to the training thread."""
        try:
            action()
        except PoseidonError as error:
            self._fail(error)
            return False
        except Exception as error:  # noqa: BLE001  # whatever it is, the training thread waits for this one
            failure = CommError(f"a communication thread failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)
            return False
        return True
