"""A plan with every scheme: written and read again in both file forms, checked when built, errors that name the key."""

import json

import pytest
import torch
from torch import nn

from poseidon.comm import SCHEMES, AllReduce, ShardedServer
from poseidon.errors import ConfigError, InfeasibleError
from poseidon.plan import Choice, Plan, uniform_plan
from poseidon.profile.structure import StepWatch


def make_profile():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4))
    watch = StepWatch(model)
    model(torch.arange(5)).sum().backward()
    return watch.profile(5)


def make_plan():
    """Every member of the table somewhere."""
    profile = make_profile()
    usable = {
        kind: [layer.name for layer in profile.layers if make().refuse(layer) is None] for kind, make in SCHEMES.items()
    }
    schemes = {}
    for kind in sorted(usable, key=lambda kind: len(usable[kind])):
        name = next(name for name in usable[kind] if name not in schemes)
        schemes[name] = SCHEMES[kind]()
    return uniform_plan(profile, 3, schemes).model_copy(
        update={"choices": {"1": Choice(seconds_by_scheme={"all_reduce": 0.25}, reason="an example")}, "connections": 2}
    )


def test_every_scheme_is_in_the_plan():
    assert {scheme.kind for scheme in make_plan().schemes.values()} == set(SCHEMES)


@pytest.mark.parametrize("name", ["plan.json", "plan.toml"])
def test_read_as_written(tmp_path, name):
    plan = make_plan()
    plan.save(tmp_path / name)
    assert Plan.load(tmp_path / name) == plan
    assert Plan.parse(plan.to_json()) == plan


def test_a_size_may_be_written_with_its_unit(tmp_path):
    path = tmp_path / "plan.toml"
    plan = uniform_plan(make_profile(), 2, AllReduce(first_bytes="64KiB", bucket_bytes="4MiB"))
    plan.save(path)
    text = path.read_text().replace("bucket_bytes = 4194304", 'bucket_bytes = "8MiB"')
    path.write_text(text)
    assert {scheme.bucket_bytes for scheme in Plan.load(path).schemes.values()} == {8 * 1024**2}


CHANGES = {
    "'schemes.1.all_reduce.bucket'": ({"schemes": {"1": {"kind": "all_reduce", "bucket": 3}}}, "is not known here"),
    "'schemes.1'": ({"schemes": {"1": {"kind": "carrier_pigeon"}}}, "all_reduce"),
    "'world_size'": ({"world_size": 0}, "greater than or equal to 1"),
    "'speed'": ({"speed": 3}, "is not known here"),
    "'arrival'": ({"arrival": None}, "tuple"),
    "at layer '7'": ({"schemes": {"7": {"kind": "all_reduce"}}}, "the model has no such trainable layer"),
    "at layer '0'": ({"arrival": ["1", "2", "3"]}, "a scheme and a place in the order are needed"),
    "names a layer twice": ({"arrival": ["0", "1", "2", "3", "3"]}, "arrival"),
    "layer '2' cannot use sufficient_factor": (
        {"schemes": {"2": {"kind": "sufficient_factor"}}},
        "its gradient is dense, not a sum of outer products",
    ),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_is_wrong_is_named(tmp_path, key):
    change, reason = CHANGES[key]
    data = uniform_plan(make_profile(), 2).model_dump(mode="json")
    for name, value in change.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) else value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)
    assert key in str(caught.value)
    assert reason in str(caught.value)


def test_a_uniform_plan_uses_a_scheme_where_it_can():
    profile = make_profile()
    kinds = {name: scheme.kind for name, scheme in uniform_plan(profile, 2, SCHEMES["sparse_rows"]()).schemes.items()}
    assert kinds == {"0": "sparse_rows", "1": "all_reduce", "2": "all_reduce", "3": "all_reduce"}
    with pytest.raises(InfeasibleError, match="layer '2' cannot use sparse_rows: its gradient is dense"):
        uniform_plan(profile, 2, {"2": SCHEMES["sparse_rows"]()})
    assert uniform_plan(profile, 2).arrival == ("3", "2", "1", "0")


def test_summary_and_bytes():
    profile = make_profile()
    plain = uniform_plan(profile, 2)
    assert plain.is_plain
    assert plain.summary() == "4 layers by all_reduce: 100% of the bytes of plain all-reduce"
    assert plain.bytes_sent == profile.num_bytes == 4 * (50 * 6 + 6 * 9 + 9 + 18 + 36 + 4)
    mixed = uniform_plan(profile, 2, {"1": ShardedServer()})
    assert not mixed.is_plain
    assert mixed.summary().startswith("1 by sharded_server; 3 layers by all_reduce: 100% of the bytes")
