"""What two levels spare a real link: bytes counted at the interfaces of emulated hosts with two ranks each."""

import json
import subprocess
import sys

import pytest

from poseidon.cluster.emulated import why_unavailable

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason))]

WIDTH, ROWS, STEPS = 1024, 64, 3

SCRIPT = f"""
import json
import psutil
import torch
import poseidon
from poseidon.comm import AllReduce, SufficientFactor
from poseidon.plan import uniform_plan
from poseidon.profile.structure import StepWatch
from poseidon.runtime.attach import attach

group = poseidon.init()
assert [len(host) for host in group.layout.hosts] == [2, 2], group.layout
torch.manual_seed(group.rank)
model = torch.nn.Sequential(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False))
watch = StepWatch(model)
model(torch.randn({ROWS}, {WIDTH})).square().mean().backward()
profile = watch.profile()

def sent():
    return sum(c.bytes_sent for name, c in psutil.net_io_counters(pernic=True).items() if name != "lo")

for scheme in (AllReduce(), AllReduce(levels=2), SufficientFactor(), SufficientFactor(levels=2)):
    model.zero_grad()
    run = attach(model, None, uniform_plan(profile, group.world_size, scheme), group)
    group.barrier()
    before = sent()
    group.barrier()  # the other rank of this host sends nothing until the counter was read
    for step in range({STEPS}):
        model.zero_grad()
        model(torch.randn({ROWS}, {WIDTH})).square().mean().backward()
    run.check_replicas()
    group.barrier()
    if group.rank == 0:
        print(json.dumps([scheme.kind, scheme.levels, sent() - before]), flush=True)
    run.detach()
poseidon.shutdown()
"""


@pytest.mark.thorough
def test_bytes_on_the_link(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "poseidon", "lab", "--hosts", "2", "--procs-per-host", "2", "--link", "1Gbit/s"]
    done = subprocess.run(
        [*command, "--", sys.executable, str(script)], capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.endswith("]")]
    crossed = {(kind, levels): num_bytes / STEPS for kind, levels, num_bytes in map(json.loads, lines)}
    gradient, factors = WIDTH * WIDTH * 4, ROWS * 2 * WIDTH * 4
    # Headers of packets, acknowledgements, signs of life and the barriers come on top.
    assert crossed["all_reduce", 2] == pytest.approx(gradient, rel=0.15)
    assert crossed["all_reduce", 1] == pytest.approx(1.5 * gradient, rel=0.15)
    assert crossed["sufficient_factor", 2] == pytest.approx(2 * factors, rel=0.15)
    assert crossed["sufficient_factor", 1] == pytest.approx(4 * factors, rel=0.15)
