"""Jobs that are started again on emulated hosts: without one that stays cut off, and what a cut in one direction is."""

import sys
import textwrap
from pathlib import Path

import pytest

from poseidon.cluster.emulated import EmulatedCluster, why_unavailable
from poseidon.cluster.spec import ClusterSpec, LinkChange
from poseidon.errors import LaunchError
from poseidon.launch.local import LabEngine

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(reason := why_unavailable()), reason=str(reason))]

TRAINING = """
    import os, torch, poseidon
    poseidon.init()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    run = poseidon.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="all_reduce")
    print(f"attempt {attempt}: {run.resume()} steps made, {run.group.world_size} ranks", flush=True)
    while run.step < (20 if attempt else 10**9):
        run.optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(run.step))).square().mean().backward()
        run.optimizer.step()
        run.commit()
        if run.step == 5:
            print("five steps made", flush=True)
    print(f"done after {run.step} steps", flush=True)
"""


def run_training(tmp_path: Path, num_hosts: int, to_cut: list[str]) -> list[str]:
    """Trains until all hosts have made a few steps, then cuts some of them off for good."""
    script = tmp_path / "training.py"
    script.write_text(textwrap.dedent(TRAINING))
    lines: list[str] = []
    engine = LabEngine(ClusterSpec.uniform(num_hosts=num_hosts, bandwidth="1Gbit/s"), restarts=1)

    def show(label: str, line: str) -> None:
        lines.append(f"{label} {line}")
        if line == "five steps made" and lines.count(lines[-1]) == 1 and label == "host0":
            for host in to_cut:
                engine.cluster.cut(host)

    engine.run([sys.executable, str(script)], on_line=show, env={"OMP_NUM_THREADS": "1"})
    return lines


def test_a_host_that_is_cut_off_for_good_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own rank says that it is cut off and ends; the others go on from the last step that was kept."""
    lines = run_training(tmp_path, 3, ["host1"])
    (said,) = [record.message for record in caplog.records if record.name == "poseidon.launch.local"]
    assert said.endswith("attempt 1 starts with 2 of 3: host0, host2; host1 cannot be reached")
    resumed = [line for line in lines if "attempt 1: " in line]
    assert [line.split()[0] for line in sorted(resumed)] == ["host0", "host2"]
    assert all(line.endswith("2 ranks") and int(line.split()[3]) >= 4 for line in resumed)
    assert sum("done after " in line for line in lines) == 2


@pytest.mark.thorough
def test_of_two_halves_only_that_of_the_coordinator_goes_on(tmp_path: Path) -> None:
    lines = run_training(tmp_path, 4, ["host0", "host3"])
    assert {line.split()[0] for line in lines if "done after " in line} == {"host1", "host2"}


@pytest.mark.thorough
def test_the_smaller_part_does_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"1 of 4 hosts reach the coordinator \(host2\), and 2 are needed"):
        run_training(tmp_path, 4, ["host0", "host1", "host3"])


def test_a_link_that_is_cut_in_one_direction_carries_nothing_that_way() -> None:
    with EmulatedCluster(ClusterSpec.uniform(num_hosts=2, bandwidth="1Gbit/s")) as cluster:
        assert cluster.reachable(5.0) == ["host0", "host1"]
        for action in ("cut-up", "cut-down", "cut"):
            cluster.apply(LinkChange.parse(f"0s:host1={action}"))
            cluster.set_bandwidth("host1", 5e7)  # a new rate does not mend a cut
            assert cluster.reachable(0.5) == ["host0"]
            cluster.restore("host1")
            assert cluster.reachable(5.0) == ["host0", "host1"]
        assert cluster.measure("host1", seconds=0.3).up > 1e7
