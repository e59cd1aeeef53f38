"""Whatever two ranks do: what one process makes of the same, or a clear error. Never a hang, never another number.

`benchmarks/programs.py` plays thousands.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from support.drawn_programs import programs_in_step, programs_out_of_step
from support.programs import Program, Way
from support.rank_pair import RankPair, complaint

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

IN_STEP, OUT_OF_STEP = 60, 3
DEADLINE_SECONDS = 20.0

FACTORS = Way(schemes=(("embedding", "sparse_rows"), ("trunk", "sufficient_factor"), ("a", "sufficient_factor")))
SERVED = Way(schemes=(("a", "sharded_server"), ("c", "sharded_server")))
FIRST = ("forward 1 tac", "backward 1", "step", "zero")

FOUND = {
    "a plan is adopted after a forward that no backward followed": Program(
        ops=((*FIRST, "forward 1 ta", "drop", "adopt 0", *FIRST), (*FIRST, "adopt 0", *FIRST)), ways=(FACTORS,)
    ),
    "backward comes under another plan than its forward": Program(
        ops=((*FIRST, "forward 1 ta", "forward 2 tab", "backward 1", "adopt 1", "backward 1", "step"),) * 2,
        ways=(FACTORS, Way()),
    ),
    "backward comes twice, under plans with factors again": Program(
        ops=((*FIRST, "forward 1 ta", "forward 2 tb", "backward 1 keep", "adopt 1", "adopt 0", "backward 2", "step"),)
        * 2,
        ways=(FACTORS, Way()),
    ),
    "backward comes after the run of its forward has ended": Program(
        ops=((*FIRST, "forward 1 ta", "forward 2 tab", "backward 1", "attach 1", "backward 1", "step"),) * 2,
        ways=(FACTORS, Way()),
    ),
    "zero_grad between a backward in no_sync and the next": Program(
        ops=((*FIRST, "no_sync", "forward 1 ta", "backward 1", "sync", "zero", "forward 2 tab", "backward 1", "step"),)
        * 2,
        ways=(FACTORS,),
    ),
    "the same without set_to_none, on a server": Program(
        ops=(
            (
                *FIRST,
                "no_sync",
                "forward 1 ta",
                "backward 1",
                "sync",
                "zero keep",
                "forward 2 tab",
                "backward 1",
                "step",
            ),
        )
        * 2,
        ways=(SERVED,),
    ),
    "an optimizer's step after a forward that only this rank has run": Program(
        ops=((*FIRST, "step"), (*FIRST, "forward 1 tb", "drop", "step")),
        ways=(Way(schemes=(("trunk", "sharded_server"), ("b", "sufficient_factor"))),),
    ),
    "from a server to a deferred layer": Program(
        ops=((*FIRST, "adopt 1", *FIRST),) * 2, ways=(SERVED, Way(deferred=("a", "c")))
    ),
    "a mean of the exchange before the last leaves the server": Program(
        ops=(("forward 1 tac", "backward 1", "forward 1 ta", "backward 1", "adopt 1", "read", "step"),) * 2,
        ways=(SERVED, Way()),
        optimizer="adam",
    ),
    "an exchange to which no rank adds anything": Program(
        ops=(("forward 1 ta", "backward 1", "empty", "read", "step"),) * 2, mean="samples"
    ),
    "unequal passes are added to a mean": Program(
        ops=(
            (
                "forward 1 t",
                "backward 1",
                "no_sync",
                "forward 2 ta",
                "backward 1",
                "sync",
                "forward 1 t",
                "backward 1",
                "step",
            ),
            ("forward 3 t", "backward 1", "forward 4 t", "backward 1", "step"),
        ),
        mean="samples",
    ),
    "one rank has more samples": Program(
        ops=((*FIRST, *FIRST, "drain", *FIRST), ("forward 3 tac", "backward 1", "step", "zero", "drain", *FIRST)),
        ways=(SERVED,),
        mean="samples",
    ),
}
"""Programs that once went wrong, or show how one is written."""


def play_all(programs: SearchStrategy[Program], count: int) -> None:
    with RankPair(DEADLINE_SECONDS) as pair:

        @settings(max_examples=count, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
        @given(programs)
        def check(program: Program) -> None:
            if found := complaint(program, pair.play(program)):
                raise AssertionError(found)

        check()


def test_found() -> None:
    with RankPair(DEADLINE_SECONDS) as pair:
        assert {name: complaint(program, pair.play(program)) for name, program in FOUND.items()} == dict.fromkeys(
            FOUND, ""
        )


def test_in_step() -> None:
    play_all(programs_in_step(), IN_STEP)


def test_out_of_step() -> None:
    play_all(programs_out_of_step(), OUT_OF_STEP)
