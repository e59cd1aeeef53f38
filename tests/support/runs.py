"""A run's folder as `poseidon train --out` leaves it, with numbers that can be checked by hand.

Two ranks on two hosts at 1 Gbit/s, three layers, ten settled steps of 100 ms. Rank 1 is ready for the bucket 10 ms
later than rank 0; the bucket takes 20 ms from then on.
"""

import json
from pathlib import Path
from typing import Any

from poseidon.artifact import write_whole
from poseidon.comm import SufficientFactor
from poseidon.plan import uniform_plan
from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile, TensorSpec
from poseidon.timeline import Activity, Interval, Step, Timeline

NUM_STEPS = 10
BATCH = 8
STEP_SECONDS = 0.1
BYTES_PER_RANK = 3_000_000 + 500_000
EPOCH = 1_700_000_000.0


def write_run(folder: Path, *, predicted: bool = True, hostile: str = "", **changes: Any) -> Path:
    """Writes the folder.

    Args:
        folder: Made here.
        predicted: Whether there is a predicted step, of 90 ms.
        hostile: Text that goes into the names of a layer and of the task.
        changes: Keys of run.json that are to be others.
    """
    folder.mkdir(parents=True)
    facts = {**make_facts(hostile), **changes}
    write_whole(folder / "run.json", json.dumps(facts))
    lines = [
        {"step": i, "epoch": 0, "loss": 2.0 - i / 10, "seconds": STEP_SECONDS, "num_samples": 2 * BATCH}
        for i in range(NUM_STEPS)
    ]
    rate = 2 * BATCH / STEP_SECONDS
    write_whole(folder / "steps.jsonl", "".join(json.dumps({**one, "samples_per_s": rate}) + "\n" for one in lines))
    steps = [make_step(rank, index, hostile) for index in range(NUM_STEPS) for rank in range(2)]
    Timeline(steps=tuple(steps)).save(folder / "timeline.jsonl")
    make_plan(hostile).save(folder / "plan.json")
    if predicted:
        Timeline(steps=(make_predicted(hostile),)).save(folder / "predicted.jsonl")
    return folder


def make_step(rank: int, index: int, hostile: str = "") -> Step:
    """Optimizer 10, forward 20, backward 30, standing still 30 (rank 0) or 20 and rebuilding 10, loading 5, other 5."""
    begin = EPOCH + index * STEP_SECONDS

    def interval(activity: Activity, start: int, end: int, name: str = "", num_bytes: int = 0) -> Interval:
        start_s, end_s = begin + start / 1000, begin + end / 1000
        return Interval(activity=activity, name=name, start=start_s, end=end_s, num_bytes=num_bytes)

    late = 10 * rank
    bucket, fc = bucket_name(hostile), f"fc{hostile} (second factor)"
    return Step(
        rank=rank,
        index=index,
        start=begin,
        end=begin + STEP_SECONDS,
        intervals=(
            interval(Activity.OPTIMIZER, 0, 10),
            interval(Activity.LOADER, 10, 15),
            interval(Activity.FORWARD, 15, 35),
            interval(Activity.BACKWARD, 35, 65 + late),
            interval(Activity.TRANSFER, 50, 60, fc, 500_000),
            interval(Activity.TRANSFER, 65 + late, 95, bucket, 3_000_000),
            interval(Activity.EXPOSED, 65 + late, 95, bucket),
        ),
    )


def make_predicted(hostile: str = "") -> Step:
    """A step of 90 ms that begins at 1 s."""
    step = make_step(0, 0, hostile)
    moved = step.shifted(1.0 - step.start)
    kept = [i for i in moved.intervals if i.activity is not Activity.EXPOSED]
    return moved.model_copy(update={"end": 1.09, "intervals": tuple(i for i in kept if i.end <= 1.09)})


def bucket_name(hostile: str = "") -> str:
    """Of the two layers that share an all-reduce."""
    return f"head..conv{hostile}"


def make_facts(hostile: str = "") -> dict[str, Any]:
    """run.json."""
    clock = {"at": EPOCH, "offset_seconds": 0.0, "uncertainty_seconds": 5e-5}
    return {
        "version": 1,
        "poseidon": "0.1.0",
        "task": f"synthetic{hostile}",
        "note": f"numbers made by hand{hostile}",
        "options": {"batch_size": BATCH, "virtual": None, "link_bytes_per_s": 125_000_000.0},
        "surroundings": {
            "torch": "2.13.0",
            "python": "3.11.7",
            "world_size": 2,
            "hosts": 2,
            "cores": 2,
            "threads": 1,
            "device": "cpu",
            "link": "1Gbit/s",
            "shaped": True,
            "interface": "eth0",
        },
        "baseline": {
            "step_seconds": 0.08,
            "samples_per_s": 100.0,
            "num_steps": 5,
            "batch_size": BATCH,
            "parts": {"computing": 0.075, "loader": 0.005},
            "note": "rank 0 alone",
        },
        "exchanges": {bucket_name(hostile): ["head", f"conv{hostile}"], f"fc{hostile}": [f"fc{hostile}"]},
        "clocks": {"start": [clock, clock], "end": [clock, clock]},
        "rates": None,
        "events": [{"kind": "noted", "exchange": 3, "seconds": 1.0, "text": f"something happened{hostile}"}],
        "plan": "fc by sufficient_factor; 2 layers by all_reduce",
        "result": {"num_steps": NUM_STEPS},
    }


def make_plan(hostile: str = "") -> Any:
    """Two layers by all-reduce, one by factors."""
    profile = ModelProfile(
        model="Synthetic",
        batch_size=BATCH,
        layers=(
            _layer(f"conv{hostile}", (500, 1000), GradientStructure.DENSE),
            _layer(f"fc{hostile}", (1000, 4000), GradientStructure.OUTER_PRODUCT),
            _layer("head", (250, 1000), GradientStructure.OUTER_PRODUCT),
        ),
    )
    return uniform_plan(profile, 2, {f"fc{hostile}": SufficientFactor()})


def _layer(name: str, shape: tuple[int, int], structure: GradientStructure) -> LayerSpec:
    weight = TensorSpec(name="weight", shape=shape, num_bytes=4 * shape[0] * shape[1])
    return LayerSpec(name=name, kind="Linear", parameters=(weight,), structure=structure, rows=BATCH)
