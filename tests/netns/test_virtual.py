"""Virtual compute over shaped links: what backward hides is hidden, what comes after it is waited for."""

import json
import sys
from statistics import median
from typing import Any

import pytest

from poseidon.cluster.emulated import why_unavailable
from poseidon.cluster.spec import ClusterSpec
from poseidon.launch.local import LabEngine
from poseidon.plan import uniform_plan
from poseidon.profile.graph import LayerSpec, ModelProfile, TensorSpec
from poseidon.profile.virtual import virtual_batch, virtual_loss, virtual_model, virtual_optimizer
from poseidon.runtime.attach import attach
from poseidon.runtime.join import init, shutdown

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason))]

COMPUTE, WIRE = 0.8, 0.4
"""Seconds of a step, and of its 10 MB between two hosts at 200 Mbit/s."""


def profile() -> ModelProfile:
    """The bytes on top and the computing below, as in a convolutional network with fully connected layers."""
    top = LayerSpec(
        name="top",
        kind="Any",
        parameters=(TensorSpec(name="weight", shape=(2500, 1000), num_bytes=10**7),),
        forward_seconds=0.05,
        backward_seconds=0.05,
    )
    bottom = LayerSpec(
        name="bottom",
        kind="Any",
        parameters=(TensorSpec(name="weight", shape=(10,), num_bytes=40),),
        forward_seconds=0.1,
        backward_seconds=0.6,
    )
    return ModelProfile(model="net", batch_size=1, layers=(bottom, top))


def work() -> None:
    """On each host: a few steps with and without overlap; rank 0 prints the medians."""
    group = init()
    model = virtual_model(profile())
    medians = {}
    for wait_free in (True, False):
        optimizer = virtual_optimizer(model.parameters())
        run = attach(model, optimizer, uniform_plan(profile(), group.world_size, wait_free=wait_free), group)
        for _ in range(4):
            virtual_loss(model, virtual_batch(profile())).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps = run.timeline.steps[1:]
        medians[str(wait_free)] = [median(s.seconds for s in steps), median(s.exposed_seconds for s in steps)]
        run.detach()
    if group.rank == 0:
        sys.stdout.write(json.dumps(medians) + "\n")
    shutdown()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_wire_hides_behind_slept_seconds() -> None:
    found: dict[str, Any] = {}

    def take(label: str, line: str) -> None:
        if line.startswith("{"):
            found.update(json.loads(line))

    engine = LabEngine(ClusterSpec.uniform(num_hosts=2, bandwidth="200Mbit/s"))
    engine.run([sys.executable, __file__], on_line=take, env={"OMP_NUM_THREADS": "1"})
    (overlapped, exposed), (sequential, waited) = found["True"], found["False"]
    assert overlapped == pytest.approx(COMPUTE, rel=0.2)
    assert exposed < WIRE / 2
    assert sequential == pytest.approx(COMPUTE + WIRE, rel=0.2)
    assert waited == pytest.approx(WIRE, rel=0.4)


if __name__ == "__main__":
    work()
