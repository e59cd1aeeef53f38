"""Every member of `SCHEMES` against its contract: the global mean, the same bits everywhere, the promised bytes."""

import pytest
import torch
from torch import nn

from poseidon.cluster.rates import Rates
from poseidon.comm import SCHEMES
from poseidon.profile.graph import GradientStructure, LayerSpec, TensorSpec
from support.ranks import run_ranks
from support.steps import Pair, seeded

NUM_ROWS, WIDTH, LENGTH, BATCH = 3000, 64, 8, 16


class Zoo(nn.Module):
    """A layer of every structure, of realistic size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(NUM_ROWS, WIDTH)
        self.conv = nn.Conv1d(WIDTH, 128, 3, padding=1)
        self.norm = nn.LayerNorm(128)
        self.wide = nn.Linear(128 * LENGTH, 512)
        self.head = nn.Linear(512, 100)

    def forward(self, x):
        x = torch.relu(self.conv(self.table(x).transpose(1, 2)))
        x = self.norm(x.transpose(1, 2)).flatten(1)
        return self.head(torch.relu(self.wide(x)))


def lookups(rank, step):
    """As many different rows in every batch, so that the bytes are known."""
    return torch.randperm(NUM_ROWS, generator=seeded(rank, step))[: BATCH * LENGTH].view(BATCH, LENGTH)


def conforms(rank, world_size, kind):
    pair = Pair(
        *(rank, world_size, Zoo(), SCHEMES[kind](), lambda model, x: model(x).square().mean(), lookups),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
    kinds = {scheme.kind for scheme in pair.run.plan.schemes.values()}
    pair.steps(3)  # gradients, parameters, and bits on all ranks
    before = pair.run.group.bytes_sent
    pair.step(3)
    counted = pair.run.group.bytes_sent - before
    pair.backward(4)  # what followed step 3's exchange is noted in the next one
    exchanges = pair.run.timeline.steps[-2:]
    pair.run.detach()
    return kinds, counted, pair.run.plan.bytes_sent, [step.bytes_sent for step in exchanges]


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_mean_bits_and_bytes(kind, world_size):
    for kinds, counted, promised, noted in run_ranks(world_size, conforms, kind):
        assert kind in kinds
        assert counted == pytest.approx(promised, rel=0.02)
        assert noted[1] == pytest.approx(promised, rel=0.02)


@pytest.mark.parametrize("kind", SCHEMES)
def test_the_table(kind):
    scheme = SCHEMES[kind]()
    assert scheme.kind == kind
    assert scheme.exactness in ("exact", "rounded", "compressed", "relaxed")
    assert type(scheme).model_validate_json(scheme.model_dump_json()) == scheme
    assert hash(scheme) == hash(type(scheme)()), "equal schemes share one call of bind"
    with pytest.raises(ValueError, match="frozen"):
        scheme.kind = "other"


def test_what_is_here_so_far_is_exact():
    assert {scheme().exactness for scheme in SCHEMES.values()} == {"exact"}


def layer(structure):
    weight = TensorSpec(name="weight", shape=(512, 256), num_bytes=512 * 256 * 4)
    return LayerSpec(name="layer", kind="Layer", parameters=(weight,), structure=structure, rows=32)


@pytest.mark.parametrize("structure", GradientStructure)
@pytest.mark.parametrize("kind", SCHEMES)
def test_the_cost_face(kind, structure):
    scheme, spec = SCHEMES[kind](), layer(structure)
    refusal = scheme.refuse(spec)
    assert refusal is None or "gradient is" in refusal
    if refusal:
        reason = "its weight is tied"
        assert scheme.refuse(layer(GradientStructure.DENSE).model_copy(update={"reason": reason})) == reason
        return
    assert scheme.bytes_sent(spec, 1) == 0
    sent = [scheme.bytes_sent(spec, ranks) for ranks in range(1, 20)]
    assert sent == sorted(sent)
    rates = Rates.equal(world_size=4, bandwidth=1e8, flops_per_s=1e10, latency=1e-4)
    cost = scheme.cost(spec, rates)
    assert cost.seconds == cost.wire_seconds + cost.compute_seconds
    assert cost.wire_seconds >= scheme.bytes_sent(spec, 4) / 1e8
    assert sum(message.num_bytes for message in cost.messages) == pytest.approx(scheme.bytes_sent(spec, 4))
    faster = scheme.cost(spec, Rates.equal(world_size=4, bandwidth=1e9, flops_per_s=1e10, latency=1e-4))
    assert faster.wire_seconds < cost.wire_seconds
