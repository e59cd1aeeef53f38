"""A task with its computing slept."""

import time

import pytest
import torch

from poseidon.cli.virtual import as_virtual
from poseidon.errors import ConfigError
from poseidon.profile.graph import ModelProfile
from poseidon.profile.measure import profile_model, scale_to
from poseidon.profile.structure import owned_parameters, profile_structure
from poseidon.tasks import load_task


@pytest.mark.parametrize("name", ["fashion-mnist", "gpt-mini", "recsys", "resnet20"])
def test_the_virtual_task_has_the_layers_of_the_real_one_and_runs(name):
    task = load_task(name)
    virtual = as_virtual(task, "1ms", 2)
    model = virtual.make_model()
    real = {n: {k: p.shape for k, p in ps.items()} for n, ps in owned_parameters(task.make_model()).items()}
    assert {n: {k: p.shape for k, p in ps.items()} for n, ps in owned_parameters(model).items()} == real
    data = virtual.make_train_data()
    assert len(data) == len(task.make_train_data())
    virtual.loss(model, virtual.collate([data[0], data[1]])).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert "virtual compute" in virtual.note


def test_without_the_option_the_task_is_itself():
    task = load_task("fc-heavy")
    assert as_virtual(task, None, 32) is task


def test_a_profile_without_seconds_is_refused(tmp_path):
    task = load_task("resnet20")
    path = tmp_path / "profile.json"
    profile_structure(task.make_model()).save(path)
    assert ModelProfile.load(path).seconds == 0
    with pytest.raises(ConfigError, match="no seconds"):
        as_virtual(task, str(path), 2)


def test_a_measured_profile_is_slept_with_its_optimizer_and_for_the_batch_that_is_asked_for(tmp_path):
    task = load_task("resnet20")
    path = tmp_path / "profile.json"
    with torch.device("meta"):
        model = task.make_model()
        profile = profile_model(model, [torch.empty(4, 3, 32, 32), torch.empty(4, dtype=torch.long)], task.loss)
    scale_to(profile, 0.5, source="a paper").model_copy(update={"optimizer_seconds": 0.125}).save(path)
    same, half = as_virtual(task, str(path), 4), as_virtual(task, str(path), 2)
    assert same.note.endswith("a paper")
    assert half.note.endswith("a paper; estimated from 4 to 2 samples")
    optimizer = half.make_optimizer(half.make_model().parameters())
    start = time.monotonic()
    optimizer.step()
    assert time.monotonic() - start >= 0.125


@pytest.mark.parametrize(("text", "message"), [("soon", "no duration"), ("0s", "some time")])
def test_what_is_no_duration_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        as_virtual(load_task("resnet20"), text, 2)
