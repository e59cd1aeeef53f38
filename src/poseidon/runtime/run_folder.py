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
| `checkpoints/` | states of the run that training can go on from |

A run that goes on in its folder adds to these files. What a lost step has written is cut off before it is made anew.
"""

import fcntl
import heapq
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import save_model
from torch import nn

from poseidon.artifact import write_whole
from poseidon.comm.group import Group
from poseidon.errors import ConfigError
from poseidon.plan import Plan
from poseidon.reading import parse_json, read_text
from poseidon.runtime.clocks import Clocks
from poseidon.runtime.ledger import StepResult
from poseidon.runtime.surroundings import counted
from poseidon.timeline import Step, Timeline, merge, to_line

VERSION = 1
LOCK_SECONDS = 10.0
"""How long a run that goes on waits for the one before to let go of its folder."""

log = logging.getLogger(__name__)


def check_unused(path: Path) -> None:
    """Raises ConfigError where a folder has files in it already: no run overwrites another's."""
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"cannot write the run into {path}: the folder is not empty; name another or remove it")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"cannot write the run into {path}: it is a file; name a folder")


def is_unbegun(path: Path) -> bool:
    """Whether a folder is not there, or has only the empty files of a run that has not written anything yet."""
    return not path.exists() or (
        path.is_dir() and all(one.suffix == ".jsonl" and not one.stat().st_size for one in path.iterdir())
    )


def read_facts(path: Path) -> dict[str, Any]:
    """What `run.json` of a run's folder says.

    Raises:
        ConfigError: There is none, it cannot be read, or it is of another version.
    """
    try:
        facts = parse_json(read_text(path / "run.json"), "run.json", finite=False)
    except ConfigError as error:
        raise ConfigError(f"cannot go on with the run in {path}: its run.json cannot be read: {error}") from error
    if not isinstance(facts, dict) or facts.get("version") != VERSION or not isinstance(facts.get("options"), dict):
        raise ConfigError(f"cannot go on with the run in {path}: its run.json is not one of version {VERSION}")
    return facts


class RunFolder:
    """The folder of one run, as one rank sees it; a context manager that closes its files.

    Args:
        path: The folder.
        group: All ranks make it together; if it cannot be used on one, it is refused on all.
        check: Raises ConfigError where the folder is not for this run; one that has files in it is not, if left out.

    Raises:
        ConfigError: It is refused, cannot be made, or another run writes into it.
    """

    def __init__(self, path: Path, group: Group, *, check: Callable[[Path], None] = check_unused) -> None:
        self.path = path
        self._group = group
        self._open = ExitStack()
        self._agree(_problem_with(path, check))
        self._agree(self._open_files(LOCK_SECONDS if check is not check_unused else 0.0))

    def _agree(self, problem: str) -> None:
        problems = self._group.all_gather_text(problem, "looking at the run's folder")
        if problem := next(filter(None, problems), ""):
            self._open.close()
            raise ConfigError(problem)

    def _open_files(self, patience: float) -> str:
        """On rank 0 in a way that keeps other runs out for as long as this process lives; what is wrong, if anything.

        Args:
            patience: Seconds to wait for one that is at its end.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._group.rank == 0:
                steps = (self.path / "steps.jsonl").open("a", encoding="utf-8", buffering=1)
                self._steps = self._open.enter_context(steps)
                _lock(self._steps, patience)
            timeline = _part(self.path, self._group.rank).open("a", encoding="utf-8", buffering=1)
            self._timeline = self._open.enter_context(timeline)
        except BlockingIOError:
            return f"cannot write the run into {self.path}: another run writes there now; name another folder"
        except OSError as error:
            return f"cannot write the run into {self.path}: {error.strerror or error}"
        return ""

    def begin(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Writes `run.json`, on rank 0, so that it can be told whose folder this is; one that is there stays as it is.

        Returns:
            What it said before, of a run that goes on; nothing on other ranks.
        """
        if self._group.rank != 0:
            return {}
        if (self.path / "run.json").exists():
            return read_facts(self.path)
        self.write_facts(facts)
        return {}

    def go_on_from(self, step: int) -> None:
        """Cuts off what was written of steps from this one on; on all ranks together, before the first is noted.

        Args:
            step: Counted from zero: the next that is made.
        """
        parts = [_part(self.path, self._group.rank)]
        if self._group.rank == 0:
            num_cut = _keep_lines(self.path / "steps.jsonl", lambda line: line["step"] < step)
            if num_cut:
                log.warning("%s: cut off %s made anew", self.path / "steps.jsonl", counted(num_cut, "step"))
            ranks = {_part(self.path, rank) for rank in range(self._group.world_size)}
            parts += [self.path / "timeline.jsonl", *sorted(set(self.path.glob("timeline.rank*.jsonl")) - ranks)]
        for part in parts:
            _keep_lines(part, lambda line: line["index"] < step)

    def note_step(self, step: Step) -> None:
        """Adds a step of this rank to the timeline."""
        self._timeline.write(to_line(step))

    def note_results(self, results: Sequence[StepResult]) -> None:
        """Adds combined steps, on rank 0."""
        if self._group.rank == 0:
            self._steps.writelines(result.to_line() for result in results)

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Writes `run.json` anew, on rank 0."""
        if self._group.rank == 0:
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
        mine = {rank: _part(self.path, rank) for rank in range(self._group.world_size)}
        parts = sorted(self.path.glob("timeline.rank*.jsonl"))
        merged, whole = self.path / "timeline.jsonl", self.path / "timeline.jsonl.part"
        with ExitStack() as stack:
            files = [stack.enter_context(part.open(encoding="utf-8")) for part in parts]
            keyed = [_keyed(file, clocks) for file in files]
            if merged.exists():  # of the run that goes on here: on one clock already
                keyed.append(_keyed(stack.enter_context(merged.open(encoding="utf-8")), None))
            with whole.open("w", encoding="utf-8") as out:
                out.writelines(line for _, line in heapq.merge(*keyed, key=itemgetter(0)))
        whole.replace(merged)
        for part in parts:
            part.unlink()
        return [rank for rank, part in mine.items() if part not in parts]

    def __enter__(self) -> "RunFolder":
        """The files are open already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the files."""
        self._open.close()


def _lock(file: TextIO, patience: float) -> None:
    """Raises BlockingIOError where another process has locked the file and keeps it."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _keyed(lines: Iterable[str], clocks: Clocks | None) -> Iterator[tuple[tuple[int, int], str]]:
    for line in lines:
        facts = json.loads(line)
        rank = facts["rank"]
        if clocks is not None and rank < len(clocks.start) and clocks.differ(rank):
            line = to_line(clocks.align(Step.model_validate_json(line)))
        yield (facts["index"], rank), line


def _keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> int:
    """Cuts a file of JSON lines off at the first that is not kept or was not written to its end.

    Returns:
        How many lines were cut off.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        end = num_cut = 0
        for line in file:
            if num_cut or not line.endswith(b"\n") or not is_kept(json.loads(line)):
                num_cut += 1
            else:
                end += len(line)
        file.truncate(end)
    return num_cut


def _part(path: Path, rank: int) -> Path:
    return path / f"timeline.rank{rank}.jsonl"


def _problem_with(path: Path, check: Callable[[Path], None]) -> str:
    try:
        check(path)
    except ConfigError as error:
        return str(error)
    return ""
