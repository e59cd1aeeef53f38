"""Whatever two ranks do: what one process makes of the same, or a clear error. Never a hang, never another number."""

import pytest
from hypothesis import Phase, given, settings

from support.drawn_programs import programs_in_step, programs_out_of_step
from support.programs import OutOfStepError, Program, Reference, difference
from support.rank_pair import Outcome, RankPair

pytestmark = pytest.mark.multiprocess

DEADLINE_SECONDS = 20.0


def complaint(program: Program, outcomes: list[Outcome]) -> str:
    """What is wrong with what became of a program; empty if nothing is."""
    try:
        expected = Reference(program).play()
    except OutOfStepError as error:
        return complaint_out_of_step(str(error), outcomes)
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            return f"rank {rank}: {outcome.error}\n" + "\n".join(other.text for other in outcomes)
        if found := difference(outcome.seen, expected[rank]):
            return f"rank {rank}: {found}"
    return ""


def complaint_out_of_step(where: str, outcomes: list[Outcome]) -> str:
    if all(outcome.error and outcome.is_clear for outcome in outcomes):
        return ""
    return f"out of step ({where}), but the ranks end with\n" + "\n".join(
        f"{outcome.error or 'no error'}: {outcome.text}" for outcome in outcomes
    )


def play_all(strategy, count: int, deadline: float) -> None:
    with RankPair(deadline) as pair:

        @settings(max_examples=count, phases=[Phase.generate, Phase.shrink])
        @given(strategy)
        def check(program: Program) -> None:
            if found := complaint(program, pair.play(program)):
                raise AssertionError(found)

        check()


def test_in_step() -> None:
    play_all(programs_in_step(), 180, DEADLINE_SECONDS)


def test_out_of_step() -> None:
    play_all(programs_out_of_step(), 20, DEADLINE_SECONDS)
