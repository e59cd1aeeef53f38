"""Holds a settled run to its word: a lasting departure from what its steps took is noticed and named.

The first settled steps say what is expected. From then on the ranks tell each other in a few numbers, now and then,
what their last steps were made of. The numbers leave at the end of one exchange and are read at the end of the next, so
that nobody waits for them. Each rank feeds them to a `DepartureWatch`, and all come to the same verdict at the same
exchange. If it is a departure, the ranks find out together whether a host computes more slowly or a link moves less.

Where samples are shared by speed, a `Balance` is fed the same numbers, and its changes are carried out here.
"""

from collections.abc import Callable, Sequence

import torch

from poseidon.comm.group import Pending
from poseidon.comm.link_probe import LinkSpeed, probe_links
from poseidon.runtime.attach import Run
from poseidon.runtime.balance import Balance, Change
from poseidon.runtime.blame import blame_links, blame_ranks
from poseidon.runtime.departure import Departure, DepartureWatch, Reading, step_seconds
from poseidon.runtime.growth import GrowthWatch
from poseidon.runtime.surroundings import find_hosts
from poseidon.timeline import Step
from poseidon.units import format_seconds

EXPECTED_FROM = 10
"""So many steps say what is expected, of which the median counts."""
CHECK_EVERY = 5
"""Later so many steps make one reading."""
WARM_UP_STEPS = 2
"""After a plan was adopted these do not count."""
READING_TAG = 5


class Monitor:
    """Watches one run from now on; its `exchanged` is called after each exchange, on all ranks.

    Args:
        run: Under the plan that it is to keep.
        on_departure: Called on all ranks together when steps have departed from what was expected, after it was said;
            may bring the run under another plan, and has then to call `restart`.
        balance: Which decides on the samples of each rank; None leaves them as they are.
        on_growth: Called on all ranks together when the loop makes so many more passes to an exchange, or has so many
            more rows, that the plan is no longer for it; may do as `on_departure`.
    """

    def __init__(
        self,
        run: Run,
        on_departure: Callable[[Departure], None] = lambda departure: None,
        balance: Balance | None = None,
        on_growth: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._on_growth = on_growth
        self._growth = GrowthWatch()
        self._on_departure = on_departure
        self._watch = DepartureWatch()
        self._balance = balance
        self._readings: list[Reading] = []
        self._mail: _Mail | None = None
        self._hosts = find_hosts(run.group)
        self._links: list[LinkSpeed] = []
        """What each host's link moved when it was last probed; nothing where there is one host only."""
        run.recorder.on_step.append(self._note)
        self.restart()

    def restart(self) -> None:
        """From now on the run is under a plan that is to stay: what steps take is learned anew."""
        self._watch.restart()
        self._growth.restart(self._run.plan)
        if self._balance is not None:
            self._balance.restart()
        self._readings = []
        self._skip = WARM_UP_STEPS
        self._run.on_exchanged, self._run.on_detach = self.exchanged, self.close

    def close(self) -> None:
        """Ends the watching, on all ranks after the same exchange."""
        self._run.recorder.on_step.remove(self._note)
        self._run.on_exchanged = self._run.on_detach = lambda: None
        self._read_mail()

    def exchanged(self) -> None:
        """Advances by one step."""
        readings = self._read_mail()
        if text := self._growth.note(self._run.num_passes, self._run.rows_by_layer):
            self._run.flush()
            self._run.note("grown", text, loud=True)
            self.restart()
            self._on_growth()
            self._run.recorder.restart()
        elif readings is not None:
            self._take(readings)
        elif len(self._readings) >= (CHECK_EVERY if self._watch.expected else EXPECTED_FROM):
            self._mail = _Mail(self._run, Reading.median_of(self._readings))
            self._readings = []

    def _note(self, step: Step) -> None:
        if self._skip:
            self._skip -= 1
        else:
            self._readings.append(Reading.of_step(step))

    def _read_mail(self) -> list[Reading] | None:
        mail, self._mail = self._mail, None
        return None if mail is None else mail.read()

    def _take(self, readings: list[Reading]) -> None:
        if change := self._find_change(readings):
            self._share(change)
        else:
            self._compare(readings)

    def _find_change(self, readings: Sequence[Reading]) -> Change | None:
        if self._balance is None:
            return None
        if (parts := self._run.dealing.parts) is None:
            self._balance = None
            self._run.note("shared", "shares stay as they are: the loop does not load through run.shard", loud=True)
            return None
        return self._balance.note(readings, parts)

    def _share(self, change: Change) -> None:
        """Has the loaders of all ranks deal samples in another way."""
        self._run.flush()
        portions = self._run.dealing.change(change.samples)
        self._run.plan = self._run.plan.model_copy(update={"portions": portions, "predicted": None})
        samples = ", ".join(
            f"{host} {sum(round(portions[rank]) for rank in ranks)}" for host, ranks in self._hosts.items()
        )
        before, after = format_seconds(change.seconds_before), format_seconds(change.seconds_after)
        self._run.note(
            "shared",
            f"samples by speed, of {sum(change.samples)} from now on {samples}: the slowest rank computes for {after} "
            f"instead of {before}",
        )
        self.restart()
        self._run.recorder.restart()

    def _compare(self, readings: Sequence[Reading]) -> None:
        if self._watch.expected is None:
            self._expect(readings)
        if (departure := self._watch.note(readings)) is None:
            return
        self._run.flush()
        cause = self._find_cause(departure)
        now, before = format_seconds(departure.seconds_now), format_seconds(departure.seconds_before)
        self._run.note("departed", f"{cause}: steps take {now} instead of {before}", loud=departure.slower)
        self.restart()
        self._on_departure(departure)
        self._run.recorder.restart()

    def _expect(self, readings: Sequence[Reading]) -> None:
        """Says what steps take beside what was predicted, and sees what the links move while all is well."""
        if not self._links and len(self._hosts) > 1:
            self._run.flush()
            self._links = self._probe()
            self._run.recorder.restart()
        predicted = self._run.prediction
        beside = f", predicted {format_seconds(predicted.step_seconds)}" if predicted else ""
        self._run.note("expected", f"steps take {format_seconds(step_seconds(readings))}{beside}")

    def _find_cause(self, departure: Departure) -> str:
        if (suspect := departure.suspect()) is not None:
            return blame_ranks(self._hosts, suspect)
        if self._links:
            before, self._links = self._links, self._probe()
            if blame := blame_links(self._hosts, before, self._links, slower=departure.slower):
                return blame
        return "neither a rank's own time nor a link accounts for it"

    def _probe(self) -> list[LinkSpeed]:
        return probe_links(self._run.group, [ranks[0] for ranks in self._hosts.values()], self._links)


class _Mail:
    """One reading on its way to all other ranks, and theirs on their way here."""

    def __init__(self, run: Run, reading: Reading) -> None:
        self._group = group = run.group
        self._mine = torch.tensor(reading, dtype=torch.float64)
        self._theirs = {peer: torch.zeros_like(self._mine) for peer in group.peers}
        self._pending: Pending = group.exchange(
            [(peer, self._mine) for peer in group.peers],
            list(self._theirs.items()),
            tag=READING_TAG,
            what="telling how long steps take",
        )

    def read(self) -> list[Reading]:
        """By rank; the same on every rank."""
        self._pending.wait()
        by_rank = {self._group.rank: self._mine, **self._theirs}
        return [Reading(*by_rank[rank].tolist()) for rank in range(self._group.world_size)]
