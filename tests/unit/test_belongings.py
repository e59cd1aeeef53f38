"""What a loop names, and copies of state in memory that is used again."""

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.errors import CheckpointError, ConfigError
from poseidon.runtime.belongings import Belongings
from poseidon.runtime.host_copies import HostCopies
from poseidon.runtime.packing import pack
from poseidon.runtime.portions import Portions


def make() -> tuple[Belongings, dict[str, Any]]:
    values: dict[str, Any] = {"best": 0.5}
    belongings = Belongings()
    belongings.track({"best": (lambda: values["best"], lambda best: values.update(best=best))}, each_rank=False)
    return belongings, values


def test_generators_and_values_go_back_to_where_they_were() -> None:
    belongings, values = make()
    of_torch, of_numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
    belongings.track({"torch": of_torch, "numpy": of_numpy}, each_rank=True)
    of_all, of_rank = belongings.of_all_ranks(), HostCopies().copy(belongings.of_rank())
    drawn = torch.rand(3, generator=of_torch), of_numpy.random(3)
    values["best"] = 0.9
    belongings.load(of_all, of_rank)
    assert values["best"] == 0.5
    assert torch.equal(torch.rand(3, generator=of_torch), drawn[0])
    assert np.array_equal(of_numpy.random(3), drawn[1])


def test_what_is_named_after_a_state_was_loaded_gets_its_part_then() -> None:
    belongings, values = make()
    later = Belongings()
    later.load(belongings.of_all_ranks(), belongings.of_rank())
    values["best"] = 0.9
    later.track({"best": (lambda: 0, lambda best: values.update(best=best))}, each_rank=False)
    assert values["best"] == 0.5


def test_what_cannot_be_tracked_is_refused_with_what_can() -> None:
    belongings, _ = make()
    with pytest.raises(ConfigError, match="cannot track 'number', a int: give something with state_dict"):
        belongings.track({"number": 3}, each_rank=False)
    with pytest.raises(ConfigError, match="the name is taken"):
        belongings.track({"best": (int, int)}, each_rank=False)


def test_a_state_that_does_not_fit_names_whose_it_is() -> None:
    belongings = Belongings()
    belongings.track({"noise": torch.Generator()}, each_rank=True)
    with pytest.raises(CheckpointError, match="cannot give 'noise' its state of the checkpoint"):
        belongings.load({}, {"tracked": {"noise": 3}, "loaders": []})


def test_copies_are_made_into_memory_that_was_given_back() -> None:
    copies, state = HostCopies(), {"a": torch.arange(4.0), "b": [torch.zeros(2, 3).t(), None]}
    first = copies.copy(state)
    where = first["a"].data_ptr()
    state["a"] += 1
    assert first["a"].tolist() == [0, 1, 2, 3]
    copies.give_back()
    second = copies.copy(state)
    assert second["a"].data_ptr() == where
    assert second["a"].tolist() == [1, 2, 3, 4]
    assert second["b"][0].stride() == state["b"][0].stride()  # type: ignore[index, union-attr]


@pytest.mark.parametrize("state", [Counter({30: 2}), OrderedDict(b=1, a=2), {"b": 1}])
def test_a_copy_is_of_the_same_kind(state: dict[Any, Any]) -> None:
    copied = HostCopies().copy([state])[0]
    assert (type(copied), copied) == (type(state), state)
    assert copied is not state


def test_a_copy_does_not_hide_what_cannot_be_saved() -> None:
    with pytest.raises(CheckpointError, match="seen is a defaultdict"):
        pack(HostCopies().copy({"seen": defaultdict(int, a=1)}))


def test_tied_tensors_are_copied_once() -> None:
    weight = torch.ones(3)
    copied = HostCopies().copy({"one": weight, "other": weight.detach()})
    assert copied["one"] is copied["other"]
    assert copied["one"] is not weight


def test_portions_that_were_to_change_still_change_after_a_pause() -> None:
    portions = Portions([1, 1])
    cuts = [portions.cut(6)]
    portions.change([2, 1], 3)
    cuts += [portions.cut(6) for _ in range(4)]
    for num_taken in range(5):
        resumed = Portions([5, 1])
        resumed.begin_epoch(portions.changes_from(num_taken))
        assert [resumed.cut(6) for _ in cuts[num_taken:]] == cuts[num_taken:]
