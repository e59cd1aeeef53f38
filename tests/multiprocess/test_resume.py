"""A run that is saved and gone on with is the run that never paused: bit for bit, and on other numbers of ranks."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import preload, run_ranks
from tests.support.resuming import (
    CASES,
    gone_on_with,
    interrupted,
    relative_difference,
    saved_on_the_way,
)
from torch import nn

from poseidon.auto import distribute
from poseidon.comm import ShardedServer
from poseidon.comm.group import Group
from poseidon.errors import CheckpointError
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.checkpoint import Shelf

preload("tests.support.resuming", "poseidon.auto")

FEW = ("sharded_server, Adam", "mixed")
MANY = ("all_reduce", "sparse_rows, two optimizers", "sharded_server, momentum", "sufficient_factor", "deferred", *FEW)


def resume_all(rank: int, world_size: int, folder: Path, before: int, after: int) -> dict[str, str]:
    cases = {name: case for name, case in CASES.items() if case.min_ranks <= world_size}
    return {
        name: interrupted(rank, case, folder / str(n), before, after, alone=name == "mixed")
        for n, (name, case) in enumerate(cases.items())
    }


def test_every_scheme_goes_on_bit_for_bit_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    for differences in run_ranks(2, resume_all, tmp_path, 6, 5):
        assert set(differences.values()) == {""}, differences


@pytest.mark.thorough
def test_every_scheme_goes_on_bit_for_bit_on_four_ranks(tmp_path: Path) -> None:
    for differences in run_ranks(4, resume_all, tmp_path, 10, 10):
        assert set(differences.values()) == {""}, differences


# Other numbers of ranks


def save_all(rank: int, world_size: int, folder: Path, names: tuple[str, ...]) -> list[list[float]]:
    return [saved_on_the_way(rank, CASES[name], folder / name, 5, 5) for name in names]


def load_all(rank: int, world_size: int, folder: Path, names: tuple[str, ...]) -> list[list[float]]:
    return [gone_on_with(rank, CASES[name], folder / name, 5) for name in names]


def check_other_ranks(folder: Path, before: int, now: int, names: tuple[str, ...]) -> None:
    expected = run_ranks(before, save_all, folder, names)[0]
    for losses in run_ranks(now, load_all, folder, names):
        for name, some, others in zip(names, losses, expected, strict=True):
            assert relative_difference(some, others) < 1e-6, name


def test_three_ranks_save_and_two_go_on(tmp_path: Path) -> None:
    check_other_ranks(tmp_path, 3, 2, FEW)


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "now"), [(4, 3), (2, 4), (4, 1), (1, 3)])
def test_other_numbers_of_ranks_go_on(tmp_path: Path, before: int, now: int) -> None:
    check_other_ranks(tmp_path, before, now, MANY)


# A small run for what goes wrong


def make_run(world_size: int, width: int = 4) -> tuple[nn.Linear, torch.optim.Optimizer, Run]:
    torch.manual_seed(0)
    model = nn.Linear(3, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plan = uniform_plan(profile_structure(model), world_size, ShardedServer())
    return model, optimizer, attach(model, optimizer, plan, Group.of_default())


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def message_of(act: Callable[[], object]) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return ""


def refuse_moments(rank: int, world_size: int, folder: Path) -> list[str]:
    model, optimizer, run = make_run(world_size)
    take_step(model, optimizer)

    def save() -> None:
        run.save(folder)

    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).sum()
    messages = [message_of(save)]
    with run.no_sync():
        loss.backward()
    messages.append(message_of(save))
    model(torch.ones(2, 3)).sum().backward()
    messages.append(message_of(save))
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 3))
    messages.append(message_of(save))
    run.detach()
    return messages


def test_a_moment_that_is_not_between_two_steps_is_refused(tmp_path: Path) -> None:
    for between, accumulating, unused, good in run_ranks(2, refuse_moments, tmp_path):
        assert "the model was called and no backward pass has followed" in between
        assert "1 backward pass(es) have accumulated" in accumulating
        assert "no optimizer.step() has used them" in unused
        assert all("save between optimizer.step() and the next forward pass" in text for text in (between, unused))
        assert good == ""


def skip_damaged(rank: int, world_size: int, folder: Path) -> list[Any]:
    model, optimizer, run = make_run(world_size)
    for _ in range(3):
        take_step(model, optimizer)
        run.save(folder)
    run.finish_saving()
    run.group.barrier()
    if rank == 0:
        newest = Shelf(folder).found()[0]
        content = bytearray((newest.path / "shard-00001.safetensors").read_bytes())
        content[-1] ^= 1
        (newest.path / "shard-00001.safetensors").write_bytes(content)
    run.group.barrier()
    run.detach()
    _, _, run = make_run(world_size)
    facts = [message_of(lambda: run.load(folder / "step-000000003")), run.load(folder).step, run.step]
    run.detach()
    _, _, other = make_run(world_size, width=5)
    facts.append(message_of(lambda: other.load(folder)))
    facts.append(message_of(lambda: other.load(folder / "nothing")))
    if rank == 0:
        torch.save(nn.Linear(3, 5).state_dict(), folder / "weights.pt")
    other.group.barrier()
    other.load(folder / "weights.pt")
    facts.append([value.tolist() for value in other.model.state_dict().values()])
    other.detach()
    return facts


def test_a_damaged_checkpoint_is_skipped_and_another_model_refused(tmp_path: Path) -> None:
    answers = run_ranks(2, skip_damaged, tmp_path)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    for damaged, step, here, other, nothing, loaded in answers:
        assert loaded == [value.tolist() for value in weights.values()]
        assert (step, here) == (2, 2)
        assert "'weight' was (4, 3) torch.float32 when it was saved and is (5, 3) torch.float32" in other
        assert "no checkpoint there is complete and undamaged" in damaged
        assert "no complete checkpoint that all ranks see" in nothing


def keep_apart(rank: int, world_size: int, folder: Path) -> list[Any]:
    own = folder / f"host{rank}"
    model, optimizer, run = make_run(world_size)
    for _ in range(3):
        take_step(model, optimizer)
        run.save(own)
    run.detach()
    facts: list[Any] = [sorted(path.name for path in (own / "step-000000003").glob("*.safetensors"))]
    if rank == 1:
        (own / "step-000000003" / "model.safetensors").unlink()
    _, _, run = make_run(world_size)
    facts.append(run.load(own).step)
    run.detach()
    return facts


def test_hosts_may_have_folders_of_their_own(tmp_path: Path) -> None:
    for rank, (files, step) in enumerate(run_ranks(2, keep_apart, tmp_path)):
        parts = ["job", "model", "optimizer", f"rank-0000{rank}", f"shard-0000{rank}"]
        assert files == [f"{part}.safetensors" for part in parts]
        assert step == 2


def fail_to_write(rank: int, world_size: int, folder: Path) -> list[Any]:
    model, optimizer, run = make_run(world_size)
    take_step(model, optimizer)
    run.save(folder, wait=True)
    if rank == 1:
        write = os.write
        os.write = _no_space  # type: ignore[assignment]
    take_step(model, optimizer)
    facts: list[Any] = [message_of(lambda: run.save(folder, wait=True)), [each.step for each in Shelf(folder).found()]]
    take_step(model, optimizer)
    run.save(folder)
    take_step(model, optimizer)
    run.finish_saving()
    if rank == 1:
        os.write = write
    facts.append([event["kind"] for event in run.events])
    run.save(folder, wait=True, keep_last=1)
    run.group.barrier()
    facts.append([each.step for each in Shelf(folder).found()])
    run.detach()
    return facts


def _no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    for message, left, kinds, at_last in run_ranks(2, fail_to_write, tmp_path):
        assert "the disk is full" in message
        assert "(on rank 1)" in message
        assert left == [1]
        assert kinds == ["saved", "unsaved", "unsaved"]
        assert at_last == [4]


def use_one_folder_twice(rank: int, world_size: int, folder: Path) -> list[str]:
    runs = [make_run(world_size)[2] for _ in range(2)]
    runs[0].save(folder)
    messages = [message_of(lambda: runs[1].save(folder)), message_of(lambda: runs[1].save(folder / "lock"))]
    for run in reversed(runs):
        run.detach()
    return messages


def test_two_runs_in_one_folder_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for taken, no_folder in run_ranks(2, use_one_folder_twice, tmp_path):
        assert "cannot save into" in taken
        assert "another run of this process does" in taken
        assert "a part of the path is a file; name a folder" in no_folder


# A plan that was found on the way


def go_on_under_the_plan(rank: int, world_size: int, folder: Path) -> list[Any]:
    facts: list[Any] = []
    for resume in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = distribute(model, optimizer)
        if resume:
            run.load(folder)
        facts.append([run.settled, run.label])
        while not run.settled:
            take_step(model, optimizer)
        take_step(model, optimizer)
        if not resume:
            run.save(folder)
        facts.append(json.loads(run.plan.to_json()))
        run.detach()
    return facts


def test_a_plan_that_has_settled_is_not_looked_for_again(tmp_path: Path) -> None:
    for (is_new, label), plan, (is_settled, _), plan_after in run_ranks(2, go_on_under_the_plan, tmp_path):
        assert (is_new, label) == (False, "observation")
        assert is_settled
        assert plan == plan_after


def go_on_with_one_rank(folder: Path) -> None:
    model, optimizer, run = make_run(1)
    take_step(model, optimizer)
    run.save(folder, score=1.0)
    run.detach()


def test_one_process_saves_as_many_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go_on_with_one_rank(tmp_path)
    _, _, run = make_run(1)
    with caplog.at_level(logging.WARNING):
        loaded = run.load(tmp_path)
    run.detach()
    assert (loaded.step, loaded.world_size, run.step) == (1, 1, 1)
    assert "going on after step 1 from" in caplog.text
