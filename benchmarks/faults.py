"""Every kind of fault, in every phase of a step, under every scheme: what the survivors notice, and what is lost.

    python benchmarks/faults.py --json faults.json

Four emulated hosts train a small model for a dozen steps, and commit every second one. In each case one rank meets one
fault. The other ranks have to say who it was, all of them end by themselves, the launcher starts them anew, they go on
from what was committed last, and at the end the model has the same bits as after an undisturbed training. It needs
Linux that allows network namespaces. Nobody should use the machine meanwhile: seconds are measured.
"""

import argparse
import itertools
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from poseidon.artifact import Value  # noqa: E402
from poseidon.cluster.emulated import enter_user_namespace  # noqa: E402
from poseidon.cluster.spec import ClusterSpec  # noqa: E402
from poseidon.units import MIB, format_seconds  # noqa: E402
from support.faults import CUTS, DISKS, FAULTS, START_UP, Injection  # noqa: E402
from support.faulty_run import Event, Story, play  # noqa: E402
from support.faulty_training import Training  # noqa: E402

TRANSFER_PHASES = {
    "all_reduce": "all-reduce",
    "sufficient_factor": "factor gather",
    "sparse_rows": "row gather",
    "sharded_server": "server push",
    "two_level": "factor gather",
}
"""By scheme, what is under way in the phase that only it has."""
PHASES = ("start-up", "forward", "backward", "optimizer", "evaluation", "save")
STEPS, COMMIT_EVERY, FAULT_STEP, EVALUATION_STEP, SAVE_STEP = 12, 2, 5, 6, 7
SAVE_EVERY = 4
RANKS, VICTIM = range(4), 2
LIMIT_S = 120.0
"""A case that is not over by then hangs."""
NOTICE_S = 10.0
"""By when the last survivor should have said it."""


class Case(Value):
    """One fault in one phase under one scheme."""

    fault: str
    phase: str
    scheme: str

    def __str__(self) -> str:
        return f"{self.fault} during {self.phase} under {self.scheme}"

    @property
    def step(self) -> int:
        """When it happens."""
        by_phase = {"start-up": START_UP, "evaluation": EVALUATION_STEP, "save": SAVE_STEP}
        return by_phase.get(self.phase, FAULT_STEP)


class Outcome(Value):
    """What became of one case."""

    case: Case
    noticed_s: float | None
    """From the fault to the moment when the last survivor has said what happened; None where nobody ended."""
    names_right: bool
    """Whether everything that was said names the rank and host that met the fault, and no other; or the full disk."""
    lost_steps: int
    """Steps that were taken again."""
    lost_beyond_commit: int
    """Of these, the ones that had been committed."""
    equal: bool
    """Whether the model has the same bits as after the undisturbed training, on every rank."""
    hung: bool
    seconds: float
    """Of the whole case, start and recovery included."""
    said: tuple[str, ...]
    """What the ranks said, one line each."""
    failure: str
    """Why the launcher gave up, where it did."""

    @property
    def troubles(self) -> list[str]:
        """What is not as it should be."""
        late = self.noticed_s is not None and self.noticed_s > NOTICE_S
        found = {
            "hangs": self.hung,
            f"noticed after {self.noticed_s or 0:.1f} s": late,
            "a wrong name": not self.names_right,
            f"{self.lost_beyond_commit} committed steps lost": self.lost_beyond_commit > 0,
            "another model": not self.equal,
        }
        return [text for text, holds in found.items() if holds]


def why_left_out(fault: str, phase: str, scheme: str) -> str:
    """Why a combination is not played; empty where it is."""
    if phase in TRANSFER_PHASES.values() and TRANSFER_PHASES[scheme] != phase:
        return f"{scheme} has no {phase}"
    if fault in DISKS and phase != "save":
        return "a disk is used while saving only"
    return ""


def cases() -> list[Case]:
    """All combinations that mean something, in an order in which the first ones cover most.

    First each fault in each scheme's own phase, and those of the disk under each scheme. Then the phases that all
    schemes have in common, with one scheme each in turn. Then those with the others.
    """
    played = [
        Case(fault=fault, phase=phase, scheme=scheme)
        for fault, phase, scheme in itertools.product(
            FAULTS, (*dict.fromkeys(TRANSFER_PHASES.values()), *PHASES), TRANSFER_PHASES
        )
        if not why_left_out(fault, phase, scheme)
    ]
    schemes = list(TRANSFER_PHASES)

    def place(case: Case) -> int:
        if case.phase not in PHASES or case.fault in DISKS:
            return 0
        turn = FAULTS.index(case.fault) + PHASES.index(case.phase)
        return 1 + (schemes.index(case.scheme) - turn) % len(schemes)

    return sorted(played, key=place)


def left_out() -> Iterator[str]:
    """What is not played, and why."""
    yield "a process that the kernel kills for its memory: as SIGKILL; out_of_memory is the allocation that fails"
    yield "disk_full and slow_disk in other phases than save: a disk is used then only"
    yield "a scheme's transfer under another scheme: there is none"


def spec_of(scheme: str) -> ClusterSpec:
    """Four ranks: on a host each, or on two hosts where the scheme has two levels."""
    num_hosts = 2 if scheme == "two_level" else len(RANKS)
    return ClusterSpec.uniform(num_hosts=num_hosts, bandwidth="1Gbit/s", num_ranks=len(RANKS) // num_hosts)


# What a story says


def judge(case: Case, story: Story, undisturbed: set[str]) -> Outcome:
    """Measures what became of a case."""
    fault = next(iter(story.of("fault")), {"at": story.events[-1]["at"] if story.events else 0.0, "missing": True})
    said = [one for one in story.of("said") if one["at"] >= fault["at"]]
    survivors = [one for one in said if one["rank"] not in struck(case)]
    reached = max((one["step"] for one in story.of("step") if one["at"] <= fault["at"]), default=0)
    back = min((one["step"] for one in story.of("resumed") if one["attempt"] > 0), default=reached)
    return Outcome(
        case=case,
        noticed_s=max(one["at"] for one in survivors) - fault["at"] if survivors else None,
        names_right="missing" not in fault and is_named(case, story, survivors),
        lost_steps=max(0, reached - back),
        lost_beyond_commit=max(0, last_committed(story, fault["at"]) - back),
        equal=len(undisturbed) == 1 and story.digests == undisturbed,
        hung=story.hung,
        seconds=story.seconds,
        said=tuple(f"rank {one['rank']} after {one['at'] - fault['at']:.1f} s: {one['message']}" for one in said),
        failure=story.failure,
    )


def last_committed(story: Story, before: float) -> int:
    """The last step that is known to have been committed everywhere: what is kept is whole when the next one begins."""
    steps = [sorted(one["step"] for one in story.of("committed", rank=rank) if one["at"] <= before) for rank in RANKS]
    return min((taken[-2] if len(taken) > 1 else 0) for taken in steps)


def is_named(case: Case, story: Story, said: Sequence[Event]) -> bool:
    """Whether all that was said names who met the fault; of a full disk, that it is full and which."""
    if case.fault == "disk_full":
        return any("the disk is full" in line and "disk:" in line for line in story.output)
    return all(names_victim(case, one) for one in said)


def struck(case: Case) -> set[int]:
    """The rank that met the fault, and what shares its host where that was cut off."""
    return {VICTIM, VICTIM + 1} if case.scheme == "two_level" and case.fault in CUTS else {VICTIM}


def names_victim(case: Case, said: Event) -> bool:
    """Whether a survivor's message names who met the fault, with its host, and accuses nobody else."""
    named = {int(rank) for text in re.findall(r"ranks? (\d+(?:, \d+)*)", said["message"]) for rank in text.split(", ")}
    host = f"host{VICTIM // 2 if case.scheme == 'two_level' else VICTIM}"
    return VICTIM in named and host in said["message"] and named <= struck(case) | {said["rank"]}


# Playing


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of its own for checkpoints, so small that it can be filled."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={2 * MIB}", "tmpfs", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def play_case(scheme: str, case: Case | None) -> Story:
    """Plays one case, or the undisturbed training."""
    injections = () if case is None else (Injection(fault=case.fault, phase=case.phase, rank=VICTIM, step=case.step),)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    training = Training(
        scheme=scheme,
        folder=str(folder),
        steps=STEPS,
        commit_every=COMMIT_EVERY,
        save_every=SAVE_EVERY,
        injections=injections,
    )
    try:
        with small_disk(folder):
            return play(training, spec_of(scheme), restarts=2, limit_s=LIMIT_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def draw(outcomes: Sequence[Outcome]) -> Table:
    """By fault and phase: how many, seconds to notice, names, steps lost, models equal."""
    table = Table("fault", "phase", "cases", "noticed", "worst", "names right", "steps lost", "beyond commit", "equal")
    places = sorted({(FAULTS.index(one.case.fault), one.case.phase) for one in outcomes})
    for fault, phase in places:
        some = [one for one in outcomes if (one.case.fault, one.case.phase) == (FAULTS[fault], phase)]
        seconds = [one.noticed_s for one in some if one.noticed_s is not None]
        table.add_row(
            FAULTS[fault],
            phase,
            str(len(some)),
            format_seconds(statistics.median(seconds)) if seconds else "ridden out",
            format_seconds(max(seconds)) if seconds else "",
            f"{sum(one.names_right for one in some)}/{len(some)}",
            str(max(one.lost_steps for one in some)),
            str(max(one.lost_beyond_commit for one in some)),
            f"{sum(one.equal for one in some)}/{len(some)}",
        )
    return table


def conclude(outcomes: Sequence[Outcome]) -> str:
    """All of it in a line."""
    seconds = [one.noticed_s for one in outcomes if one.noticed_s is not None]
    noticed = (
        f"noticed by all survivors after {statistics.median(seconds):.1f} s in the median, {max(seconds):.1f} s at most"
        if seconds
        else "nothing to notice"
    )
    return (
        f"{len(outcomes)} cases: {sum(one.hung for one in outcomes)} hangs; {noticed}; names right in "
        f"{sum(one.names_right for one in outcomes)}; at most {max(one.lost_steps for one in outcomes)} steps lost, "
        f"{max(one.lost_beyond_commit for one in outcomes)} of them committed; model equal to the undisturbed one in "
        f"{sum(one.equal for one in outcomes)}"
    )


def main() -> int:
    """Plays the cases and prints what was seen; 1 where anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120, help="how many cases, those that cover most first")
    parser.add_argument(
        "--only", default="", help="only cases whose description has this, such as 'SIGKILL during save'"
    )
    parser.add_argument("--json", type=Path, help="everything that was measured")
    options = parser.parse_args()
    enter_user_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that disks and hosts are taken down
    chosen = [case for case in cases() if options.only in str(case)][: options.count]
    undisturbed: dict[str, set[str]] = {}
    outcomes: list[Outcome] = []
    start = time.monotonic()
    for number, case in enumerate(chosen, 1):
        if case.scheme not in undisturbed:
            undisturbed[case.scheme] = play_case(case.scheme, None).digests
        outcome = judge(case, play_case(case.scheme, case), undisturbed[case.scheme])
        outcomes.append(outcome)
        print(progress(number, len(chosen), time.monotonic() - start, outcome), flush=True)
        if options.json:
            options.json.write_text(
                json.dumps([one.model_dump() for one in outcomes], indent=1) + "\n", encoding="utf-8"
            )
    print(f"of {len(cases())} cases; left out:", *left_out(), sep="\n  ")
    Console(width=120).print(draw(outcomes))
    print(conclude(outcomes))
    return int(any(outcome.troubles for outcome in outcomes))


def progress(number: int, count: int, seconds: float, outcome: Outcome) -> str:
    """One case in a line, and what was said where it is not as it should be."""
    noticed = "ridden out" if outcome.noticed_s is None else f"noticed after {outcome.noticed_s:.1f} s"
    troubles = ", ".join(outcome.troubles)
    lines = [f"{number}/{count} {seconds:5.0f} s  {outcome.case}: {noticed}, {outcome.lost_steps} steps lost"]
    if troubles:
        lines = [f"{lines[0]}  ** {troubles}", *outcome.said, *filter(None, [outcome.failure])]
    return "\n    ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
