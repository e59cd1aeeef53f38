"""Thousands of random programs over two ranks, each held against one process that does the same.

    python benchmarks/programs.py --count 10000 --limit 10min

Hypothesis draws them (`tests/support/drawn_programs.py`): any scheme for any layer, deferred or not, in any order
forward, backward, `no_sync`, branches that a rank does not use, steps without samples, an early end, other plans on the
way. One in a hundred is out of step on purpose: one rank takes part in an exchange less, and both have to end with an
error that says so. The first program that hangs, or gives another number, is made as short as it goes and printed.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from poseidon.units import parse_seconds  # noqa: E402
from support.drawn_programs import programs_in_step, programs_out_of_step  # noqa: E402
from support.programs import Program  # noqa: E402
from support.rank_pair import Outcome, RankPair, complaint  # noqa: E402

AT_A_TIME = 250
OUT_OF_STEP_ONE_IN = 100


class Tally:
    """What has been played so far."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.programs = 0
        self.ops = 0
        self.exchanges = 0
        self.ends: Counter[str] = Counter()

    def add(self, program: Program, outcomes: list[Outcome]) -> None:
        """One more."""
        self.programs += 1
        self.ops += sum(map(len, program.ops))
        self.exchanges += sum(outcome.num_exchanges for outcome in outcomes)
        self.ends.update(outcome.error or "no error" for outcome in outcomes)

    @property
    def seconds(self) -> float:
        """Since the first."""
        return time.monotonic() - self.start

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return (
            f"{self.programs} programs in {self.seconds:.0f} s: {self.ops} ops, {self.exchanges} exchanges; "
            f"the ranks ended with {ends}; hangs: {self.ends['hung']}"
        )


def play(pair: RankPair, tally: Tally, count: int, number: int) -> None:
    """Draws and plays so many programs."""
    programs = st.integers(1, OUT_OF_STEP_ONE_IN).flatmap(
        lambda die: programs_out_of_step() if die == OUT_OF_STEP_ONE_IN else programs_in_step()
    )

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(programs)
    def check(program: Program) -> None:
        outcomes = pair.play(program)
        tally.add(program, outcomes)
        if found := complaint(program, outcomes):
            raise AssertionError(found)

    check()


def main() -> int:
    """Plays until the count or the limit is reached, or something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="how many programs")
    parser.add_argument("--limit", default="10min", help="when to stop at the latest")
    parser.add_argument("--deadline", default="10s", help="how long one program may take before it counts as hung")
    parser.add_argument("--seed", type=int, default=0, help="which programs")
    options = parser.parse_args()
    limit = parse_seconds(options.limit)
    tally = Tally()
    with RankPair(parse_seconds(options.deadline)) as pair:
        while tally.programs < options.count and tally.seconds < limit:
            try:
                play(pair, tally, min(AT_A_TIME, options.count - tally.programs), options.seed + tally.programs)
            except AssertionError as error:
                print(error, *getattr(error, "__notes__", []), sep="\n")
                print(tally)
                return 1
            print(tally, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
