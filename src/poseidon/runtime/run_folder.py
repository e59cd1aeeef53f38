"""What a training leaves behind: a folder with its options, steps, timeline, plan and model.

| file | what |
| --- | --- |
| `run.json` | options, surroundings, baseline, clocks, rates, events, the plan in words and the result |
| `steps.jsonl` | one line per step: epoch, global loss, seconds, samples per second |
| `timeline.jsonl` | what each rank did when, on rank 0's clock; until the end `timeline.rank3.jsonl`, each on its own |
| `plan.json` | the plan at the end, to be given to `--plan` |
| `predicted.jsonl` | steps as predicted, of one rank of each kind; where layers and links were timed |
| `model.safetensors` | the trained model |
| `tensorboard/` | the same figures for TensorBoard, where they were asked for |
"""

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import nn

from poseidon.artifact import write_whole
from poseidon.comm.group import Group
from poseidon.errors import ConfigError
from poseidon.plan import Plan
from poseidon.runtime.clocks import Clocks
from poseidon.runtime.ledger import StepResult
from poseidon.timeline import Step, Timeline, merge, to_line

VERSION = 1


def check_unused(path: Path) -> None:
    """Raises ConfigError where a folder has files in it already: no run overwrites another's."""
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"cannot write the run into {path}: the folder is not empty; name another or remove it")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"cannot write the run into {path}: it is a file; name a folder")


class RunFolder:
    """The folder of one run, as one rank sees it; a context manager that closes its files.

    Args:
        path: A folder that is empty or not there yet, on all ranks.
        group: All ranks make it together; if it cannot be used on one, it is refused on all.

    Raises:
        ConfigError: It is not empty, or cannot be made.
    """

    def __init__(self, path: Path, group: Group) -> None:
        self.path = path
        self._group = group
        problems = group.all_gather_text(_problem_with(path), "looking at the run's folder")
        if problem := next(filter(None, problems), ""):
            raise ConfigError(problem)
        self._open = ExitStack()
        path.mkdir(parents=True, exist_ok=True)
        self._timeline = self._open.enter_context(_part(path, group.rank).open("x", encoding="utf-8", buffering=1))
        if group.rank == 0:
            self._steps = self._open.enter_context((path / "steps.jsonl").open("x", encoding="utf-8", buffering=1))

    def note_step(self, step: Step) -> None:
        """Adds a step of this rank to the timeline."""
        self._timeline.write(to_line(step))

    def note_results(self, results: Sequence[StepResult]) -> None:
        """Adds combined steps, on rank 0."""
        self._steps.writelines(result.to_line() for result in results)

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Writes `run.json` anew."""
        write_whole(self.path / "run.json", json.dumps({"version": VERSION, **facts}, indent=2) + "\n")

    def write_model(self, model: nn.Module, plan: Plan) -> None:
        """Writes the model and the plan; weights that are tied are written once."""
        save_model(model, str(self.path / "model.safetensors"))
        plan.save(self.path / "plan.json")

    def write_predicted(self, timelines: Sequence[Timeline]) -> None:
        """Writes predicted steps, if there are any."""
        if timelines:
            merge(timelines).save(self.path / "predicted.jsonl")

    def merge_timelines(self, clocks: Clocks) -> list[int]:
        """On all ranks together at the end: rank 0 makes one timeline of all that it finds in its folder.

        Args:
            clocks: All times become times of rank 0's clock.

        Returns:
            On rank 0, ranks whose part is not here but in the folder of the same name on their own host.
        """
        self._timeline.close()
        self._group.barrier()
        if self._group.rank != 0:
            return []
        parts = {rank: _part(self.path, rank) for rank in range(self._group.world_size)}
        found = {rank: part for rank, part in parts.items() if part.exists()}
        with ExitStack() as stack, (self.path / "timeline.jsonl").open("x", encoding="utf-8") as merged:
            files = [stack.enter_context(part.open(encoding="utf-8")) for part in found.values()]
            keyed = [_keyed(rank, file, clocks) for rank, file in zip(found, files, strict=True)]
            merged.writelines(line for _, line in heapq.merge(*keyed))
        for part in found.values():
            part.unlink()
        return [rank for rank in parts if rank not in found]

    def __enter__(self) -> "RunFolder":
        """The files are open already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the files."""
        self._open.close()


def _keyed(rank: int, lines: Iterator[str], clocks: Clocks) -> Iterator[tuple[tuple[int, int], str]]:
    for line in lines:
        key = (json.loads(line)["index"], rank)
        yield key, to_line(clocks.align(Step.model_validate_json(line))) if clocks.differ(rank) else line


def _part(path: Path, rank: int) -> Path:
    return path / f"timeline.rank{rank}.jsonl"


def _problem_with(path: Path) -> str:
    try:
        check_unused(path)
    except ConfigError as error:
        return str(error)
    return ""
