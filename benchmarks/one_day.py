"""A day of faults in ten minutes: four emulated hosts train on while one of them fails every hundred steps.

    python benchmarks/one_day.py --json one_day.json

Every fault strikes a rank drawn at random, in a phase drawn at random: signals, an exception, memory that runs out, a
cable cut for three seconds or until everybody has noticed. Each step is committed; the launcher starts the ranks anew
after each fault. At the end the model has to have the same bits as without faults, it must not have taken much longer,
and neither memory nor open files may have grown on the way. A step sleeps in its forward pass, as if it computed; what
the same training takes without faults is the median of the steps before the first fault, as often as there are steps.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from poseidon.artifact import Value  # noqa: E402
from poseidon.cluster.emulated import enter_user_namespace  # noqa: E402
from poseidon.cluster.spec import ClusterSpec  # noqa: E402
from poseidon.units import format_bytes, format_seconds  # noqa: E402
from support.faults import CUTS, RAISED, SIGNALS, Injection  # noqa: E402
from support.faulty_run import Story, play  # noqa: E402
from support.faulty_training import Training  # noqa: E402

NUM_HOSTS, SCHEME = 4, "mixed"
FAULTS = (*SIGNALS, *RAISED, *CUTS)
PHASES = ("forward", "backward", "row gather", "factor gather", "server push", "optimizer", "save")
MOST_RATIO = 1.5
MOST_GROWTH = 1.1
"""Of memory, from the second fifth of the run to the last."""
LOOK_S = 2.0


class Look(Value):
    """What was in use at one moment."""

    seconds: float
    """Since the start."""
    launcher_rss: int
    launcher_files: int
    """Descriptors of the process that starts the ranks and watches them."""
    others_rss: int
    """Of all its children together: ranks, the processes that they are forked from, the coordinator."""
    others_files: int
    shared_files: int
    shared_bytes: int
    """In /dev/shm."""


class Watch:
    """Looks every few seconds at what this process and its children use, from a thread of its own."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self._start = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def __enter__(self) -> Self:
        """Begins."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.looks.append(look(time.monotonic() - self._start))


def look(seconds: float) -> Look:
    """What is in use now."""
    launcher = psutil.Process()
    others = [use_of(child) for child in launcher.children(recursive=True)]
    files = [
        Path(folder, name) for folder, _, names in os.walk("/dev/shm") for name in names
    ]  # what goes meanwhile is left out
    rss, descriptors = use_of(launcher)
    return Look(
        seconds=seconds,
        launcher_rss=rss,
        launcher_files=descriptors,
        others_rss=sum(rss for rss, _ in others),
        others_files=sum(count for _, count in others),
        shared_files=len(files),
        shared_bytes=sum(size_of(path) for path in files),
    )


def use_of(process: psutil.Process) -> tuple[int, int]:
    """Memory and descriptors; nothing of a process that has ended meanwhile."""
    try:
        return process.memory_info().rss, process.num_fds()
    except psutil.Error:
        return 0, 0


def size_of(path: Path) -> int:
    """Bytes of a file; none where it is gone meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Day(Value):
    """What was measured."""

    steps: int
    num_faults: int
    seconds: float
    undisturbed_seconds: float
    """What the same would have taken without faults: its start, and each step the median of those before the first."""
    lost_steps: tuple[int, ...]
    """At each fault that nobody could ride out, steps that were taken again."""
    recovery_seconds: tuple[float, ...]
    """From each of these to the first step that goes on."""
    equal: bool
    hung: bool
    failure: str
    looks: tuple[Look, ...]

    @property
    def ratio(self) -> float:
        """How many times as long it took."""
        return self.seconds / self.undisturbed_seconds

    def growth(self, name: str) -> float:
        """Of a figure, the median of the last fifth in relation to that of the second."""
        values = [getattr(one, name) for one in self.looks]
        fifth = max(1, len(values) // 5)
        return float(statistics.median(values[-fifth:]) / max(1, statistics.median(values[fifth : 2 * fifth])))

    @property
    def troubles(self) -> list[str]:
        """What is not as it should be."""
        found = {
            "it hangs": self.hung,
            f"the launcher gave up: {self.failure}": bool(self.failure),
            "another model than without faults": not self.equal,
            f"it took {self.ratio:.2f} times as long": self.ratio > MOST_RATIO,
            **{f"{name} has grown {self.growth(name):.2f} times": self.growth(name) > MOST_GROWTH for name in FIGURES},
        }
        return [text for text, holds in found.items() if holds]


FIGURES = [name for name in Look.model_fields if name != "seconds"]


def draw_faults(steps: int, every: int, seed: int) -> tuple[Injection, ...]:
    """One fault in each stretch of so many steps, but for the first."""
    dice = random.Random(seed)
    return tuple(
        Injection(
            fault=dice.choice(FAULTS),
            phase=dice.choice(PHASES),
            rank=dice.randrange(NUM_HOSTS),
            step=start + dice.randrange(every // 2),
        )
        for start in range(every, steps, every)
    )


def play_day(steps: int, step_seconds: float, injections: tuple[Injection, ...]) -> Story:
    """A training with these faults."""
    folder = Path(tempfile.mkdtemp(prefix="day-"))
    training = Training(
        scheme=SCHEME,
        folder=str(folder),
        steps=steps,
        commit_every=1,
        step_seconds=step_seconds,
        say_every=10,
        injections=injections,
    )
    spec = ClusterSpec.uniform(num_hosts=NUM_HOSTS, bandwidth="1Gbit/s")
    limit = 120.0 + 3 * steps * (step_seconds + 0.1) + 60.0 * len(injections)
    try:
        return play(training, spec, restarts=2 * len(injections), limit_s=limit)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(steps: int, story: Story, looks: Sequence[Look], undisturbed: set[str]) -> Day:
    """Measures what became of the day."""
    faults = story.of("fault")
    resumed = [one for one in story.of("resumed", rank=0) if one["attempt"] > 0]
    lost, recovery = [], []
    for fault, following in zip(faults, [*faults[1:], {"at": float("inf")}], strict=True):
        back = [one for one in resumed if fault["at"] < one["at"] < following["at"]]
        if back:
            lost.append(max(0, fault["step"] - back[-1]["step"]))
            recovery.append(back[-1]["at"] - fault["at"])
    return Day(
        steps=steps,
        num_faults=len(faults),
        seconds=story.seconds,
        undisturbed_seconds=undisturbed_seconds(steps, story),
        lost_steps=tuple(lost),
        recovery_seconds=tuple(recovery),
        equal=len(undisturbed) == 1 and story.digests == undisturbed,
        hung=story.hung,
        failure=story.failure,
        looks=tuple(looks),
    )


def undisturbed_seconds(steps: int, story: Story) -> float:
    """From the start, and the steps before the first fault."""
    first_fault = min((one["at"] for one in story.of("fault")), default=float("inf"))
    before = [one for one in story.of("step", rank=0) if one["at"] < first_fault]
    paces = [(b["at"] - a["at"]) / (b["step"] - a["step"]) for a, b in itertools.pairwise(before)]
    begin = story.of("resumed", rank=0)[0]["at"] - story.began
    return float(begin + steps * statistics.median(paces))


def show(day: Day) -> Table:
    """What was in use, early and late."""
    table = Table("in use", "second fifth", "last fifth", "growth")
    fifth = max(1, len(day.looks) // 5)
    for name in FIGURES:
        early = statistics.median(getattr(one, name) for one in day.looks[fifth : 2 * fifth])
        late = statistics.median(getattr(one, name) for one in day.looks[-fifth:])
        shown = [format_bytes(value) if name.endswith(("rss", "bytes")) else f"{value:g}" for value in (early, late)]
        table.add_row(name.replace("_", " "), *shown, f"{day.growth(name):.2f}")
    return table


def conclude(day: Day) -> str:
    """All of it in a few lines."""
    recovery = day.recovery_seconds
    recovered = (
        f"{len(recovery)} recoveries, {statistics.median(recovery):.1f} s each in the median" if recovery else ""
    )
    return "\n".join(
        [
            f"{day.steps} steps, {day.num_faults} faults, {recovered}, {max(recovery, default=0.0):.1f} s at most; "
            f"steps lost: {sum(day.lost_steps)} in all, {max(day.lost_steps, default=0)} at most",
            f"{format_seconds(day.seconds)} against {format_seconds(day.undisturbed_seconds)} without faults: "
            f"{day.ratio:.2f} times",
            f"model {'equal to' if day.equal else 'OTHER than'} the one without faults",
            *day.troubles,
        ]
    )


def main() -> int:
    """Plays the day and prints what was seen; 1 where anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps from fault to fault")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="what a step sleeps, as if it computed")
    parser.add_argument("--seed", type=int, default=0, help="which faults")
    parser.add_argument("--json", type=Path, help="everything that was measured")
    options = parser.parse_args()
    enter_user_namespace()
    injections = draw_faults(options.steps, options.every, options.seed)
    print("without faults, and without sleep ...", flush=True)
    undisturbed = play_day(options.steps, 0.0, ()).digests
    print(f"with {len(injections)} faults ...", flush=True)
    with Watch() as watch:
        story = play_day(options.steps, options.step_seconds, injections)
    day = judge(options.steps, story, watch.looks, undisturbed)
    if options.json:
        options.json.write_text(json.dumps(day.model_dump(), indent=1) + "\n", encoding="utf-8")
    Console(width=100).print(show(day))
    print(conclude(day))
    return int(bool(day.troubles))


if __name__ == "__main__":
    sys.exit(main())
