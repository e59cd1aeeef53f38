"""A loop that leaves what its plan was made for: told once, after it has lasted, and not for a single large batch."""

import pytest

from poseidon.comm import SufficientFactor
from poseidon.plan import uniform_plan
from poseidon.runtime.growth import LASTING, GrowthWatch
from support.models_as_data import linear, model


def plan_for(num_passes=1, *, batch=32):
    profile = model([linear("fc", 10, 10, rows=32), linear("head", 4, 10, rows=32)], batch=batch).accumulated(
        num_passes
    )
    return uniform_plan(profile, 2, SufficientFactor())


def watching(plan):
    watch = GrowthWatch()
    watch.restart(plan)
    return watch


def rows(count):
    return {"fc": count, "head": count}


def test_what_was_planned_and_a_little_more_is_nothing():
    watch = watching(plan_for())
    assert not any(watch.note(1, rows(count)) for count in (32, 40, 63) * LASTING)


def test_rows_that_have_grown_for_good_are_told_once():
    watch = watching(plan_for())
    assert [bool(watch.note(1, rows(128))) for _ in range(2 * LASTING)] == [
        i == LASTING - 1 for i in range(2 * LASTING)
    ]
    text = [watch.note(1, rows(1024)) for _ in range(LASTING)][-1]
    assert text.startswith("fc has 1,024 rows to an exchange, and the plan is for 128, and so 1 more")


def test_a_large_batch_now_and_then_is_none():
    watch = watching(plan_for())
    assert not any(watch.note(1, rows(128 if index % LASTING else 32)) for index in range(4 * LASTING))


@pytest.mark.parametrize(("before", "now", "text"), [(1, 8, "8 backward passes to"), (8, 1, "1 backward pass to")])
def test_other_passes_are_told_whatever_travels(before, now, text):
    watch = watching(plan_for(before))
    assert watch.note(now, {}) == ""
    found = [watch.note(now, {}) for _ in range(LASTING)]
    assert found[LASTING - 2] == f"{text} an exchange, where the plan was made for {before}"
    assert found.count("") == LASTING - 1


def test_the_same_plan_forgets_nothing_and_another_one_is_learned():
    plan = plan_for()
    watch = watching(plan)
    assert [watch.note(8, {}) for _ in range(LASTING)][-1]
    watch.restart(plan)
    assert not any(watch.note(8, {}) for _ in range(2 * LASTING))
    watch.restart(plan_for(8))
    assert not any(watch.note(8, {}) for _ in range(2 * LASTING))


def test_a_plan_without_a_profile_was_made_for_nothing():
    watch = watching(plan_for(batch=0))
    assert not any(watch.note(8, rows(1024)) for _ in range(2 * LASTING))


def test_a_rank_that_has_more_samples_by_the_plan_has_more_rows():
    watch = watching(plan_for().model_copy(update={"portions": (3.0, 1.0)}))
    assert not any(watch.note(1, rows(count)) for count in (48, 64, 95) * LASTING)
    assert any(watch.note(1, rows(96)) for _ in range(LASTING))
