"""Training on data that `run.shard` deals: the same as one process on all of it, whatever does not divide."""

import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import poseidon
from poseidon.comm import SufficientFactor
from poseidon.errors import ConfigError, PeerLostError
from poseidon.plan import uniform_plan
from poseidon.profile.structure import profile_structure
from poseidon.timeline import Activity
from support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
NUM_SAMPLES = 103
FEATURES = 6


def make_data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True), torch.arange(NUM_SAMPLES))


class Rows(IterableDataset):
    """The same samples, one after another, of no known number."""

    def __iter__(self):
        return iter(make_data())


def make_training(world_size):
    """A run with a scheduler; its model is the same in each call, as one process starts with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    poseidon.init()
    return model, optimizer, scheduler, poseidon.distribute(model, optimizer, "all_reduce")


def updating(optimizer, scheduler):
    def update():
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return update


def train_epochs(rank, world_size, batch_size, num_epochs, options, streamed=False):
    model, optimizer, scheduler, run = make_training(world_size)
    update = updating(optimizer, scheduler)
    source = DataLoader(Rows() if streamed else make_data(), batch_size=batch_size, shuffle=None if streamed else True)
    loader = run.shard(source, seed=7, update=update, **options)
    seen, losses = [], []
    for _ in range(num_epochs):
        for x, y, index in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            update()
            seen.append(index.tolist())
            losses.append(loss.item())
    run.check_replicas()
    weights = [p.detach().clone() for p in model.parameters()]
    rate = scheduler.get_last_lr()[0]
    poseidon.shutdown()
    return seen, weights, rate, losses


def train_alone(batches):
    """One process on the union of what the ranks saw, step by step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    update = updating(optimizer, scheduler)
    data = make_data()
    for indices in batches:
        x, y, _ = data[indices]
        nn.functional.mse_loss(model(x), y).backward()
        update()
    return [p.detach() for p in model.parameters()], scheduler.get_last_lr()[0]


def union(ranks, num_epochs):
    """The global batches of each epoch: a rank that has a batch less stands aside in the epoch's last step."""
    batches = []
    per_epoch = [len(rank) // num_epochs for rank in ranks]
    for epoch in range(num_epochs):
        parts = [rank[epoch * count : (epoch + 1) * count] for rank, count in zip(ranks, per_epoch, strict=True)]
        for step in range(max(per_epoch)):
            batches.append([index for part in parts if step < len(part) for index in part[step]])
    return batches


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_size", [5, 4, 8])
def test_map_style_data_trains_like_one_process(batch_size):
    """With 5 the last global batch has 3 samples for 4 ranks, with 4 it has 7, with 8 it has 7 too, of 32."""
    results = run_ranks(4, train_epochs, batch_size, 2, {}, init=False)
    ranks = [seen for seen, *_ in results]
    assert sorted(index for rank in ranks for batch in rank for index in batch) == sorted(2 * list(range(NUM_SAMPLES)))
    expected, rate = train_alone(union(ranks, 2))
    for _, weights, own_rate, _ in results:
        assert_close(weights, expected)
        assert own_rate == rate
    whole = batches_alone(4 * batch_size, 2)
    assert union(ranks, 2) == whole


def batches_alone(batch_size, num_epochs):
    """What one process with the whole batch sees."""
    (seen, *_) = train_epochs(0, 1, batch_size, num_epochs, {})
    return seen


def test_portions_train_like_one_process():
    options = {"portions": (4.0, 1.0, 1.0, 2.0)}
    results = run_ranks(4, train_epochs, 4, 2, options, init=False)
    ranks = [seen for seen, *_ in results]
    assert [len(rank[0]) for rank in ranks] == [8, 2, 2, 4]
    expected, _ = train_alone(union(ranks, 2))
    for _, weights, _, _ in results:
        assert_close(weights, expected)


def test_a_stream_trains_like_one_process():
    """Three ranks have 9, 9 and 9 batches of 4, the last of them unequal, so each has its own mean."""
    results = run_ranks(3, train_epochs, 4, 2, {}, True, init=False)
    ranks = [seen for seen, *_ in results]
    assert sorted(index for rank in ranks for batch in rank for index in batch) == sorted(2 * list(range(NUM_SAMPLES)))
    expected, rate = train_alone(union(ranks, 2))
    for _, weights, own_rate, _ in results:
        assert_close(weights, expected)
        assert own_rate == rate


def train_streams_of_other_sizes(rank, world_size):
    """Rank 0 has five times the batches of the others: it reads one element at a time."""
    return train_epochs(rank, world_size, 1 if rank == 0 else 5, 1, {}, True)


def test_ranks_that_run_out_early_answer_until_all_are_done():
    results = run_ranks(3, train_streams_of_other_sizes, init=False)
    ranks = [seen for seen, *_ in results]
    assert [len(rank) for rank in ranks] == [35, 7, 7]
    expected, rate = train_alone(union(ranks, 1))
    for _, weights, own_rate, _ in results:
        assert_close(weights, expected)
        assert own_rate == rate


# Going on in the middle, on other ranks


def train_a_part(rank, world_size, batch_size, state, num_steps):
    """Up to `num_steps` steps from a state on; hands back what was seen and the state, both of this rank."""
    model, optimizer, scheduler, run = make_training(world_size)
    update = updating(optimizer, scheduler)
    loader = run.shard(make_data(), batch_size=batch_size, update=update)
    if state is not None:
        loader.load_state_dict(state["loader"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    seen = []
    for x, y, index in loader:
        nn.functional.mse_loss(model(x), y).backward()
        update()
        seen.append(index.tolist())
        if len(seen) == num_steps:
            break
    parts = {"loader": loader, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    saved = {name: part.state_dict() for name, part in parts.items()}
    poseidon.shutdown()
    return seen, saved


def test_an_epoch_goes_on_on_another_number_of_ranks():
    first = run_ranks(2, train_a_part, 6, None, 3, init=False)
    assert first[0][1]["loader"] == first[1][1]["loader"]
    second = run_ranks(3, train_a_part, 4, first[0][1], None, init=False)
    batches = union([seen for seen, _ in first], 1) + union([seen for seen, _ in second], 1)
    whole = [seen for seen, _ in run_ranks(1, train_a_part, 12, None, None, init=False)]
    assert batches == whole[0]
    expected, _ = train_alone(batches)
    assert_close(second[2][1]["model"].values(), expected)


def train_until_rank_1_dies(rank, world_size, folder, die_at):
    """Each rank writes down what it has trained on; rank 0 also where the loader is, once a step is over everywhere."""
    model, optimizer, scheduler, run = make_training(world_size)
    loader = run.shard(make_data(), batch_size=4)
    try:
        for step, (x, y, index) in enumerate(loader):
            if rank == 1 and step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            nn.functional.mse_loss(model(x), y).backward()
            updating(optimizer, scheduler)()
            (folder / f"{step}-{rank}").write_text(json.dumps(index.tolist()))
            if rank == 0:
                (folder / "state").write_text(json.dumps({"step": step, "loader": loader.state_dict()}))
    except PeerLostError:
        poseidon.shutdown("rank 1 is gone")


def test_after_a_rank_has_died_each_sample_of_the_epoch_is_still_seen_once(tmp_path):
    run_ranks(3, train_until_rank_1_dies, tmp_path, 4, init=False, expect_dead=[1])
    state = json.loads((tmp_path / "state").read_text())
    assert state["step"] == 3
    before = [json.loads((tmp_path / f"{step}-{rank}").read_text()) for step in range(4) for rank in range(3)]
    after = run_ranks(2, go_on, state["loader"], init=False)
    seen = [index for batch in before for index in batch] + [index for rank in after for index in rank]
    assert sorted(seen) == list(range(NUM_SAMPLES))


def go_on(rank, world_size, state):
    *_, run = make_training(world_size)
    loader = run.shard(make_data(), batch_size=6, train=False, shuffle=True)
    loader.load_state_dict(state)
    seen = [number for _, _, index in loader for number in index.tolist()]
    poseidon.shutdown()
    return seen


# Evaluation and what is logged


def evaluate(rank, world_size):
    model, _, _, run = make_training(world_size)
    seen = []
    squares, num_samples = 0.0, 0
    loader = DataLoader(make_data(), batch_size=8, num_workers=1, multiprocessing_context="fork")
    for x, y, index in run.shard(loader, train=False):
        squares += (model(x) - y).square().sum().item()
        num_samples += len(index)
        seen += index.tolist()
    means = run.mean({"loss": squares / num_samples, "rank": float(rank)}, num_samples)
    alone = run.mean(rank + 1.0, 1 if rank == 2 else 0)
    poseidon.shutdown()
    return seen, num_samples, means, alone


def test_evaluating_counts_exactly_the_samples_there_are():
    results = run_ranks(4, evaluate, init=False)
    assert sorted(index for seen, *_ in results for index in seen) == list(range(NUM_SAMPLES))
    counts = [count for _, count, *_ in results]
    assert len(set(counts)) > 1
    x, y, _ = make_data()[:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    expected = nn.functional.mse_loss(model(x), y).item()
    for _, _, means, alone in results:
        assert means == results[0][2]
        assert means["loss"] == pytest.approx(expected, rel=1e-12)
        assert means["rank"] == sum(rank * count for rank, count in enumerate(counts)) / NUM_SAMPLES
        assert alone == 3.0


def log_in_between(rank, world_size):
    """The mean of a loss is asked for between forward and backward, while factors are on their way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = poseidon.init()
    profile = profile_structure(model)
    plan = uniform_plan(profile, world_size, {layer.name: SufficientFactor() for layer in profile.trainable})
    run = poseidon.distribute(model, optimizer, plan, group=group)
    losses = []
    for x, y, _ in run.shard(make_data(), batch_size=5, shuffle=False):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(run.mean(loss, len(x)))
        loss.backward()
        optimizer.step()
    run.check_replicas()
    assert any(one.activity is Activity.LOADER for step in run.timeline.steps for one in step.intervals)
    poseidon.shutdown()
    return losses


def test_a_loss_can_be_logged_before_its_backward_pass():
    results = run_ranks(2, log_in_between, init=False)
    (alone,) = run_ranks(1, log_in_between, init=False)
    assert results[0] == results[1]
    assert len(results[0]) == 11
    x, y, _ = make_data()[:10]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    assert results[0][0] == pytest.approx(nn.functional.mse_loss(model(x), y).item(), rel=1e-12)
    assert len(alone) == 21


def name_differently(rank, world_size):
    *_, run = make_training(world_size)
    with pytest.raises(ConfigError, match="rank 0 gives 'loss', rank 1 'Loss'"):
        run.mean({"loss" if rank == 0 else "Loss": 1.0})
    with pytest.raises(ConfigError, match="batch_size = 4 on rank 0 and batch_size = 5 on rank 1"):
        run.shard(make_data(), batch_size=4 + rank)
    poseidon.shutdown()


def test_what_differs_between_ranks_is_named_on_all():
    run_ranks(2, name_differently, init=False)
