"""Plays a training in which faults happen on emulated hosts, pulls the cables it asks for, and keeps what was said."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from poseidon.cluster.spec import ClusterSpec
from poseidon.errors import LaunchError
from poseidon.launch.local import LabEngine
from support.faults import CUTS, heard
from support.faulty_training import Training

Event = dict[str, Any]
RESTORE_S = 30.0
"""A cable that was cut for good is plugged in again when every rank has said that it ended, and at the latest then."""


class HungError(Exception):
    """A run was not over when its time was."""


@dataclass
class Story:
    """What became of one training."""

    events: list[Event] = field(default_factory=list)
    """What ranks said, in the order in which it was heard."""
    output: list[str] = field(default_factory=list)
    """What they printed otherwise."""
    failure: str = ""
    """Why the launcher gave up; empty where it did not."""
    hung: bool = False
    began: float = 0.0
    """When it was started, on the clock of the events."""
    seconds: float = 0.0

    def of(self, kind: str, **facts: Any) -> list[Event]:
        """The events of one kind, with these facts."""
        return [one for one in self.events if one["event"] == kind and facts.items() <= one.items()]

    @property
    def digests(self) -> set[str]:
        """Of the models at the end; one where all ranks agree."""
        return {one["model"] for one in self.of("end")}


class Stage:
    """Hears what the ranks of one training say, and does to the cables what their faults ask for.

    Args:
        engine: Its hosts.
        training: What is trained.
    """

    def __init__(self, engine: LabEngine, training: Training, spec: ClusterSpec) -> None:
        self.story = Story()
        self._engine = engine
        self._training = training
        self._host_by_rank = [host.name for host in spec.hosts for _ in range(host.num_ranks)]
        self._said_before_cut: dict[str, int] = {}
        self._timers: list[threading.Timer] = []

    def take(self, label: str, line: str) -> None:
        """One line of a rank's output."""
        if (event := heard(line)) is None:
            self.story.output.append(f"[{label}] {line}")
            return
        self.story.events.append(event)
        if event["event"] == "fault" and event["fault"] in CUTS:
            self._cut(event)
        elif event["event"] == "said":
            self._restore_if_all_have_ended()

    def close(self) -> None:
        """Nothing is restored any more."""
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _cut(self, event: Event) -> None:
        host = self._host_by_rank[event["rank"]]
        direction, seconds = CUTS[event["fault"]]
        self._engine.cluster.cut(host, direction)  # type: ignore[arg-type]
        event["at"] = time.monotonic()
        (Path(self._training.folder) / f"cut{event['index']}").touch()
        if seconds is None:
            self._said_before_cut[host] = len(self.story.of("said"))
        timer = threading.Timer(RESTORE_S if seconds is None else seconds, self._restore, [host])
        self._timers.append(timer)
        timer.start()

    def _restore_if_all_have_ended(self) -> None:
        said = len(self.story.of("said"))
        for host, before in list(self._said_before_cut.items()):
            if said - before >= len(self._host_by_rank):
                self._restore(host)

    def _restore(self, host: str) -> None:
        self._said_before_cut.pop(host, None)
        self._engine.cluster.restore(host)
        self.story.events.append({"event": "restored", "host": host, "at": time.monotonic()})


def play(training: Training, spec: ClusterSpec, *, restarts: int, limit_s: float) -> Story:
    """Runs a training to its end.

    Args:
        training: What is trained, and what goes wrong.
        spec: The hosts.
        restarts: How often the launcher may start all ranks anew.
        limit_s: After so long the run counts as hung, and is ended.
    """
    engine = LabEngine(spec, restarts=restarts)
    stage = Stage(engine, training, spec)
    stage.story.began = time.monotonic()
    try:
        with engine, _at_most(limit_s):
            engine.start(training.command(), on_line=stage.take, env={"OMP_NUM_THREADS": "1"})
            engine.wait()
    except LaunchError as error:
        stage.story.failure = str(error)
    except HungError:
        stage.story.hung = True
    finally:
        stage.close()
    stage.story.seconds = time.monotonic() - stage.story.began
    return stage.story


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises `HungError` in the main thread once the time is over."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
