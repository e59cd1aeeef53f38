"""A link that is cut to a tenth in the middle of a run is named within twenty steps."""

import json
import sys
from typing import Any

import pytest

from poseidon.auto import distribute
from poseidon.cluster.emulated import why_unavailable
from poseidon.cluster.spec import ClusterSpec
from poseidon.launch.local import LabEngine
from poseidon.plan import uniform_plan
from poseidon.profile.graph import LayerSpec, ModelProfile, TensorSpec
from poseidon.profile.virtual import virtual_batch, virtual_loss, virtual_model, virtual_optimizer
from poseidon.runtime.join import init, shutdown
from poseidon.units import parse_bandwidth

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason))]

LINK, DEGRADED = "200Mbit/s", "20Mbit/s"
STEPS_BEFORE, STEPS_AFTER = 16, 20


def profile() -> ModelProfile:
    """A step of 0.1 s, whose 1 MB take 0.05 s over three hosts: hidden at first, a fivefold step later."""
    layer = LayerSpec(
        name="top",
        kind="Any",
        parameters=(TensorSpec(name="weight", shape=(250, 1000), num_bytes=10**6),),
        forward_seconds=0.05,
        backward_seconds=0.05,
    )
    return ModelProfile(model="net", batch_size=1, layers=(layer,))


def work() -> None:
    """On each host: steps until the monitor knows what to expect, and as many more as it has to find out."""
    group = init()
    model = virtual_model(profile())
    optimizer = virtual_optimizer(model.parameters())
    run = distribute(model, optimizer, uniform_plan(profile(), group.world_size), group=group)
    for index in range(STEPS_BEFORE + STEPS_AFTER):
        if index == STEPS_BEFORE and group.rank == 0:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        virtual_loss(model, virtual_batch(profile())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.events[-1:] and run.events[-1]["kind"] == "departed":
            break
    if group.rank == 0:
        sys.stdout.write(json.dumps(run.events) + "\n")
    run.detach()
    shutdown()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_link_that_was_cut_is_named_within_twenty_steps() -> None:
    events: list[dict[str, Any]] = []
    engine = LabEngine(ClusterSpec.uniform(num_hosts=3, bandwidth=LINK))

    def take(label: str, line: str) -> None:
        if line == "ready":
            engine.cluster.set_bandwidth("host2", parse_bandwidth(DEGRADED))
        elif line.startswith("["):
            events.extend(json.loads(line))

    engine.run([sys.executable, __file__], on_line=take, env={"OMP_NUM_THREADS": "1"})
    before = [event for event in events if event["exchange"] <= STEPS_BEFORE]
    assert [event["kind"] for event in before] == ["expected"]
    departed = next(event for event in events if event["kind"] == "departed")
    assert departed["exchange"] <= STEPS_BEFORE + STEPS_AFTER
    assert "the link of host2 (rank 2)" in departed["text"]
    assert "steps take" in departed["text"]


if __name__ == "__main__":
    work()
