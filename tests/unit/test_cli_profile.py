"""`poseidon profile`: a table that fits a terminal, the totals, the file."""

import subprocess
import sys

import pytest
from rich.console import Console

from poseidon.cli.profile import SHOWN_LAYERS, measure, show
from poseidon.profile.graph import OUTSIDE, ComputeRates, LayerSpec, ModelProfile, TensorSpec
from poseidon.tasks import load_task

WEIGHT = TensorSpec(name="weight", shape=(1000, 1000), num_bytes=4_000_000)


def layers(count: int) -> tuple[LayerSpec, ...]:
    seconds = 0.5 / count
    return (
        *(
            LayerSpec(
                name=f"a.rather.deeply.nested.module.number.{index}",
                kind="Conv2d",
                parameters=(WEIGHT,),
                forward_seconds=seconds,
                backward_seconds=seconds,
                flops=10**9,
            )
            for index in range(count)
        ),
        LayerSpec(name="loss", kind=OUTSIDE, parameters=(), forward_seconds=0.25, backward_seconds=0.75),
    )


NET = ModelProfile(
    model="Net",
    batch_size=32,
    layers=layers(20),
    source="measured on 2 threads of any processor, median of 10 passes",
    device=ComputeRates(name="any processor", flops_per_s=5e10, memory_bandwidth=1e10),
    step_seconds=2.0,
    optimizer="SGD",
    optimizer_seconds=0.01,
    loader_seconds=0.002,
    first_epoch_loader_seconds=0.25,
    notes=("block is compiled",),
)


def shown(profile: ModelProfile) -> list[str]:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        show(profile, console)
    return capture.get().splitlines()


def test_the_largest_layers_have_a_line_each_and_the_rest_one_together() -> None:
    lines = shown(NET)
    table = lines[: SHOWN_LAYERS + 2]
    assert max(map(len, table)) <= 80
    assert sum("a.rather.deeply" in line for line in table) == SHOWN_LAYERS - 1
    assert table[-2].split()[0] == "loss"
    assert table[-2].split()[-1] == "50.0%"
    assert table[-1].startswith("6 other layers")
    assert table[-1].split()[-1] == "15.0%"


def test_the_lines_below_say_what_the_layers_explain_and_what_else_a_step_takes() -> None:
    text = " ".join(shown(NET))
    assert "a step takes 2s; the layers explain 100.0% of it" in text
    assert "SGD takes 10ms" in text
    assert "waits 2ms for a batch, 250ms in the first epoch" in text
    assert "note: block is compiled" in text


def test_without_seconds_operations_are_shown() -> None:
    counted = tuple(x.model_copy(update={"forward_seconds": 0.0, "backward_seconds": 0.0}) for x in NET.layers)
    lines = shown(NET.model_copy(update={"layers": counted, "device": None, "step_seconds": 0.0, "source": "counted"}))
    assert lines[0].split()[-2:] == ["operations", "share"]
    assert lines[1].split()[-2:] == ["1GFLOP", "5.0%"]
    assert not any("a step takes" in line for line in lines)


@pytest.mark.parametrize("meta", [True, False])
def test_a_task_is_measured_with_its_optimizer_and_its_loader(meta: bool) -> None:
    found = measure(load_task("fc-heavy", num_features=32, hidden=16, num_classes=4), 4, num_passes=1, meta=meta)
    assert found.batch_size == 4
    assert sum(layer.flops for layer in found.layers) > 0
    assert (found.seconds > 0) is not meta
    assert found.optimizer == "SGD"
    assert (found.optimizer_seconds > 0) is not meta
    assert found.optimizer_state_num_bytes == found.num_bytes, "momentum"
    assert (found.loader_seconds > 0) is not meta


def test_the_command_writes_the_file(tmp_path) -> None:
    out = tmp_path / "model.json"
    command = [sys.executable, "-m", "poseidon", "profile", "fashion-mnist", "--batch", "4", "--meta", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert f"written to {out}" in done.stdout
    assert ModelProfile.load(out).batch_size == 4
