"""Parameters without a gradient are named once."""

from types import SimpleNamespace

from torch import nn

from poseidon.runtime.unused import Unused


def watch(count=4):
    model = nn.ParameterDict(
        {chr(97 + i): nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight.data)) for i in range(count)}
    )
    said = []
    return model, Unused(model, lambda text, never: said.append((text, never))), said


def finished(model, **made):
    return SimpleNamespace(parameters=tuple(model[name] for name in made), made=tuple(map(float, made.values())))


def test_named_once_and_new_ones_later():
    model, unused, said = watch()
    for index in range(2):
        unused.look([finished(model, a=3, b=0), finished(model, c=1, d=3)], index)
    assert [never for _, never in said] == [True, False]
    assert said[0][0].startswith("1 parameter got no gradient on any rank in exchange 0: b;")
    assert said[1][0].startswith("1 parameter got a gradient on some ranks only in exchange 0: c (1 of 3);")
    unused.look([finished(model, a=0, b=0), finished(model, c=3, d=3)], 2)
    assert said[2][0].startswith("1 parameter got no gradient on any rank in exchange 2: a;")
    assert set(unused.reasons) == {"a", "b", "c"}


def test_all_made_and_nothing_made_are_nothing_to_say():
    model, unused, said = watch()
    unused.look([finished(model, a=3, b=3), finished(model, c=3)], 0)
    unused.look([finished(model, a=0, b=0), finished(model, c=0)], 1)  # every rank has run out
    unused.look([finished(model, a=2, b=2), finished(model, c=2)], 2)  # one has
    unused.look([SimpleNamespace(parameters=(model["a"],), made=())], 3)  # nothing is known yet
    assert said == []


def test_frozen_ones_are_not_named():
    model, unused, said = watch()
    model["b"].requires_grad_(False)
    unused.look([finished(model, a=3, b=0)], 0)
    assert said == []


def test_what_ends_later_is_held_against_the_whole_step():
    model, unused, said = watch()
    unused.look([finished(model, a=3)], 0)
    unused.look([finished(model, b=1)], 0)
    assert "b (1 of 3)" in said[0][0]
    unused.look([finished(model, c=2)], 1)  # of another step, in which one rank had no samples
    assert len(said) == 1


def test_many_names_are_shortened():
    model, unused, said = watch(9)
    unused.look([finished(model, **{name: int(name == "a") for name in "abcdefghi"})], 0)
    assert "8 parameters" in said[0][0]
    assert "b, c, d, e, f, g and 2 more" in said[0][0]
