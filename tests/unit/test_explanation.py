"""How each parameter travels, in a table."""

import re

import pytest
import torch
from torch import nn

from poseidon.cluster.rates import Rates
from poseidon.comm import AllReduce, ShardedServer, SufficientFactor
from poseidon.plan import uniform_plan
from poseidon.planner.search import search_plan
from poseidon.profile.structure import StepWatch
from poseidon.runtime.explanation import WIDTH, Setting, explain


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.narrow(self.wide(self.norm(x)).relu())


class Language(nn.Module):
    """Blocks of which the first is frozen, a tied head, batch normalization and a classifier."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[0].requires_grad_(False)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.table.weight
        self.classes = nn.Linear(64, 4000)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).sum() + self.classes(x).square().sum()


@pytest.fixture(scope="module")
def seen():
    model = Language()
    watch = StepWatch(model)
    model(torch.arange(4)).backward()
    return model, watch.profile(4)


def line_of(text, name):
    """The row of the table that begins with a name, and the reasons below that it points at; wrapped lines joined."""
    joined = re.sub(r"\n {2,}", "   ", text)
    (line,) = [one for one in joined.splitlines() if re.match(re.escape(name) + r"\s{2,}", one)]
    reasons = dict(re.findall(r"^\[(\d+)\] (.*)$", joined, flags=re.MULTILINE))
    return re.sub(r" +", " ", line), " ".join(reasons[number] for number in re.findall(r"\[(\d+)\]", line))


def test_a_plan_that_was_given(seen):
    model, profile = seen
    schemes = {"classes": SufficientFactor(wire="bfloat16"), "norm": ShardedServer()}
    plan = uniform_plan(profile, 3, schemes).model_copy(update={"deferred": ("classes",), "connections": 2})
    setting = Setting(buckets={"table.weight": 2}, ignored=("norm.bias",), buffers="after_step")
    text = explain(model, plan, setting)
    assert text.startswith("3 ranks over 2 connections to each peer.")
    assert "nothing was compared" in text
    line, reason = line_of(text, "table.weight")
    assert "all_reduce, bucket 2" in line
    assert "no sufficient_factor or sparse_rows: its weight is tied" in reason
    line, reason = line_of(text, "classes.weight")
    assert "sufficient_factor(wire=bfloat16)," in line
    assert "deferred" in line
    assert "no sparse_rows: its gradient is outer_product" in reason
    assert "sharded_server" in line_of(text, "norm.weight")[0]
    assert "not at all" in line_of(text, "norm.bias")[0]
    assert "ignored" in line_of(text, "norm.bias")[1]
    assert "frozen" in line_of(text, "blocks.0: 6 parameters")[1]
    assert "as table.weight" in line_of(text, "head.weight")[0]
    assert "rank 0's, after each step" in line_of(text, "norm: 3 buffers")[0]


def test_a_plan_that_was_searched_shows_what_the_others_cost(seen):
    model, profile = seen
    plan = search_plan(profile, Rates.equal(world_size=4, bandwidth=2e7, flops_per_s=1e11, latency=1e-4))
    assert plan.schemes["classes"].kind == "sufficient_factor"
    text = explain(model, plan, Setting(), full=True)
    assert "nothing was compared" not in text
    line, reason = line_of(text, "classes.weight")
    assert "alone" in line
    assert "by all_reduce" in line
    assert "no sharded_server: it is used only where a" in reason
    assert "with weight" in line_of(text, "classes.bias")[0]
    assert "0B" in line_of(text, "classes.bias")[0]


def test_alike_parameters_share_a_line_unless_all_are_asked_for(seen):
    model, profile = seen
    plan = uniform_plan(profile, 2, {f"blocks.{i}.wide": SufficientFactor() for i in (1, 2)})
    setting = Setting(buckets={f"blocks.{i}.norm.weight": i for i in (1, 2, 3)})
    text = explain(model, plan, setting)
    assert "all_reduce, buckets 1-3" in line_of(text, "blocks.1-3.norm.weight (3)")[0]
    assert "sufficient_factor" in line_of(text, "blocks.1,2.wide.weight (2)")[0]
    assert "all_reduce" in line_of(text, "blocks.3.wide.weight")[0]
    lines = explain(model, plan, setting, full=True).splitlines()
    names = {line.split("  ")[0] for line in lines}
    tensors = [*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())]
    assert names.issuperset(tensors)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("scheme", [AllReduce(levels=2, wire="bfloat16"), SufficientFactor(), ShardedServer()])
def test_fits_and_adds_up(seen, scheme, full):
    model, profile = seen
    plan = uniform_plan(profile, 3, scheme)
    text = explain(model, plan, Setting(), full=full)
    assert max(map(len, text.splitlines())) <= WIDTH
    shown = re.findall(r"  ([\d.]+)([kM]?)B(?:  |$)", text, flags=re.MULTILINE)
    total = sum(float(number) * {"": 1, "k": 1e3, "M": 1e6}[unit] for number, unit in shown)
    assert total == pytest.approx(plan.bytes_sent, rel=1e-3)


def test_long_names_are_wrapped():
    name = "a_module_with_a_very_long_name" * 3
    model = nn.ModuleDict({name: nn.Linear(2, 2)})
    watch = StepWatch(model)
    model[name](torch.ones(1, 2)).sum().backward()
    text = explain(model, uniform_plan(watch.profile(), 2), Setting(buckets={f"{name}.weight": 1}))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert f"{name}.weight" in "".join(line[:40].strip() for line in text.splitlines())


def test_what_is_frozen_now_and_what_has_no_gradient_is_said(seen):
    model, profile = seen
    plan = uniform_plan(profile, 2)
    model.classes.weight.requires_grad_(False)
    try:
        text = explain(model, plan, Setting(unused={"norm.weight": "no gradient on any rank in exchange 0"}))
    finally:
        model.classes.weight.requires_grad_(True)
    assert "frozen at present" in text
    assert "no gradient on any rank in exchange 0" in text


def test_one_rank(seen):
    model, profile = seen
    text = explain(model, uniform_plan(profile, 1), Setting())
    assert text.startswith("One rank: nothing crosses a network.")
    assert "all_reduce" not in text
