"""Weights from checkpoints, runs and files of others, into models, and out again; nothing that is read is run."""

import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from poseidon.errors import CheckpointError
from poseidon.runtime.checkpoint import Shelf
from poseidon.runtime.weights import apply_weights, load_weights, save_weights
from support.states import same_bits


class Tied(nn.Module):
    """A head that is the embedding, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def put_on_shelf(path: Path, state: Any, step: int = 1) -> Path:
    draft = Shelf(path).begin(step)
    return draft.seal([draft.write("model", state), draft.write("job", {"step": step})], {}).path


WAYS: dict[str, Callable[[Mapping[str, Tensor], Path], Path | None]] = {
    "model.pt": lambda state, path: torch.save(state, path),
    "model.pth": lambda state, path: torch.save({"epoch": 3, "state_dict": state, "optimizer": {}}, path),
    "model.bin": lambda state, path: torch.save({"model_state_dict": state, "loss": torch.tensor(1.0)}, path),
    "model.ckpt": lambda state, path: torch.save({"model": {"state_dict": state}}, path),
    "model.safetensors": lambda state, path: save_file(dict(state), path),
    "old.pt": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "wrapped.pt": lambda state, path: torch.save({f"module.{name}": value for name, value in state.items()}, path),
    "compiled.pt": lambda state, path: torch.save(
        {f"_orig_mod.module.{name}": value for name, value in state.items()}, path
    ),
    "own state.pt": lambda state, path: torch.save({**state, "1._extra_state": {"any": 1}}, path),
    "checkpoint": lambda state, path: put_on_shelf(path, state),
    "checkpoints": lambda state, path: put_on_shelf(path, state).parent,
    "run": lambda state, path: put_on_shelf(path / "checkpoints", state) and path,
    "part": lambda state, path: put_on_shelf(path, state) / "model.safetensors",
}


@pytest.mark.parametrize("name", WAYS)
def test_weights_from_wherever_they_lie(tmp_path: Path, name: str) -> None:
    state = make_model().state_dict()
    path = WAYS[name](state, tmp_path / name) or tmp_path / name
    weights = load_weights(path)
    assert set(weights) == set(state)
    model = make_model()
    apply_weights(model, weights)
    assert same_bits(model.state_dict(), state)


def test_what_was_looked_up_or_taken_off_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "model.pt"
    torch.save({"state_dict": {"module.weight": torch.ones(1)}}, path)
    assert list(load_weights(path)) == ["weight"]
    assert f"weights are under 'state_dict' in {path}" in caplog.messages
    assert f"the names of the weights in {path} are used without 'module.'" in caplog.messages


def test_of_a_run_the_newer_of_model_and_checkpoint_counts(tmp_path: Path) -> None:
    put_on_shelf(tmp_path / "checkpoints", OrderedDict(weight=torch.zeros(1)))
    model = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(1)}, model)
    os.utime(model, (2**33, 2**33))
    assert load_weights(tmp_path)["weight"] == 1
    os.utime(model, (0, 0))
    assert load_weights(tmp_path)["weight"] == 0


def test_of_checkpoints_the_newest_sound_one_counts(tmp_path: Path) -> None:
    put_on_shelf(tmp_path, OrderedDict(weight=torch.zeros(1)), step=1)
    (put_on_shelf(tmp_path, OrderedDict(weight=torch.ones(1)), step=2) / "model.safetensors").write_bytes(b"")
    assert load_weights(tmp_path)["weight"] == 0


def test_tied_weights_may_be_given_once(tmp_path: Path) -> None:
    tied = Tied()
    save_model(tied, str(tmp_path / "tied.safetensors"))
    model = Tied()
    weights = load_weights(tmp_path / "tied.safetensors")
    assert set(weights) == set(model.state_dict())
    for name in ("embedding.weight", "head.weight"):
        once = {key: value for key, value in weights.items() if key != name}
        apply_weights(model := Tied(), once)
        assert same_bits(model.state_dict(), tied.state_dict())


# What does not fit


def test_keys_that_do_not_fit_are_named_and_nothing_is_changed() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {name: torch.zeros_like(value) for name, value in before.items()}
    del weights["0.bias"]
    weights["1.weight"] = torch.zeros(7)
    weights |= {f"fc{i}.weight": torch.zeros(1) for i in range(7)}
    with pytest.raises(CheckpointError) as caught:
        apply_weights(model, weights)
    assert str(caught.value) == (
        "cannot load these weights into Sequential: missing: 0.bias; not in the model: fc0.weight, fc1.weight, "
        "fc2.weight, fc3.weight, fc4.weight and 2 more; of another shape: 1.weight (7,) instead of (4,)"
    )
    assert same_bits(dict(model.state_dict()), before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(2), "it holds a Tensor, not a state_dict"),
        ({}, "there are no tensors in it"),
        ({"state_dict": {}}, "there are no tensors in it"),
        ({"weight": torch.ones(1), "epoch": 3}, "'epoch' is of type int"),
        ({1: torch.ones(1)}, "1 is of type Tensor"),
    ],
    ids=["tensor", "nothing", "empty", "number", "key"],
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(100), b"\x80\x02}q\x00."], ids=range(4))
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot load weights from .*model\."):
        load_weights(tmp_path / name)


def test_what_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it does not exist"):
        load_weights(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"neither a complete checkpoint in it nor a model\.safetensors"):
        load_weights(tmp_path)
    (tmp_path / "model.h5").touch()
    with pytest.raises(CheckpointError, match=r"its name must end with \.safetensors, \.pt"):
        load_weights(tmp_path / "model.h5")


# Nothing is run


class Trap:
    """What a pickle can do: run any function when it is read."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.evidence),)


@pytest.mark.parametrize("name", ["model.pt", "old.pt"])
def test_a_pickle_that_calls_something_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    evidence = tmp_path / "it ran"
    content = {"weight": torch.ones(1), "more": Trap(evidence)}
    torch.save(content, tmp_path / name, _use_new_zipfile_serialization=name == "model.pt")
    with pytest.raises(CheckpointError, match=r"to read it, \w+\.mkdir would have to be called"):
        load_weights(tmp_path / name)
    torch.save({"weight": torch.ones(1), "f": functools.partial(print)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"to read it, functools\.partial would have to be called"):
        load_weights(tmp_path / name)
    assert not evidence.exists()


def test_a_checkpoint_in_the_format_of_another_program_is_not_run(tmp_path: Path) -> None:
    evidence = tmp_path / "it ran"
    folder = tmp_path / "step-000000001"
    folder.mkdir()
    for name in (".metadata", "manifest.json", "model.safetensors"):  # as torch.distributed.checkpoint's pickle
        with (folder / name).open("wb") as file:
            torch.save(Trap(evidence), file)
    assert Shelf(tmp_path).newest() is None
    with pytest.raises(CheckpointError, match="its manifest is torn"):
        load_weights(folder)
    assert not evidence.exists()


# Export


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.safetensors"])
def test_what_is_exported_opens_without_poseidon(tmp_path: Path, name: str) -> None:
    tied = Tied()
    put_on_shelf(tmp_path / "run", tied.state_dict())
    path = tmp_path / name
    save_weights(load_weights(tmp_path / "run"), path)
    plain = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert set(plain) == set(tied.state_dict())
    model = Tied()
    model.load_state_dict(plain)
    assert same_bits(model.state_dict(), tied.state_dict())
    assert set(load_weights(path)) == set(plain)
    if path.suffix != ".safetensors":
        assert plain["head.weight"].data_ptr() == plain["embedding.weight"].data_ptr()
    assert [each.name for each in tmp_path.iterdir() if each.name.endswith(".part")] == []


def test_export_of_tensors_as_they_may_be(tmp_path: Path) -> None:
    weights = {
        "turned": nn.Parameter(torch.randn(3, 2).t()),
        "row": torch.randn(2, 5)[0],
        "number": torch.tensor(3),
        "none": torch.empty(0, 4),
        "half": torch.randn(3, dtype=torch.bfloat16),
    }
    expected = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    for name in ("weights.pt", "weights.safetensors"):
        save_weights(weights, tmp_path / name)
        assert same_bits({key: load_weights(tmp_path / name)[key] for key in expected}, expected)


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"its name must end with \.safetensors, \.pt, \.pth"):
        save_weights(weights, tmp_path / "weights.onnx")
    for name in ("weights.pt", "weights.safetensors"):
        with pytest.raises(CheckpointError, match=r"cannot write weights into .*none/weights"):
            save_weights(weights, tmp_path / "none" / name)
    with pytest.raises(CheckpointError, match=r"'w' into safetensors: torch.complex64 is not known there; use \.pt"):
        save_weights({"w": torch.ones(1, dtype=torch.complex64)}, tmp_path / "weights.safetensors")
    assert list(tmp_path.iterdir()) == []
