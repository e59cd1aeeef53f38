"""Killed while saving: writers of checkpoints are killed at random moments, and each time a reader looks what is there.

    python benchmarks/saving.py --kills 100 --json saving.json

One process, and then four that write their parts together, save one checkpoint after another, each sealed by the first
process, and keep the last two. At a random moment all of them get SIGKILL, in random order. Then a reader must find a
checkpoint that is complete, at least as new as the last that the writers had reported, with every part bit for bit what
was written for that step; and the next writers go on in the same folder.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from poseidon.runtime.checkpoint import MANIFEST, Entry, Shelf, what_is_wrong
from poseidon.units import MIB, format_bytes, format_seconds, format_traffic, parse_bytes

KEPT = 2
STEPS_BEFORE_KILL = 3.0
"""Saves that a writer has time for, at most, before it is killed."""
PATIENCE_S = 60.0
MOMENTS = ("a part", "the seal", "the removal of an old one", "between two")
"""In what a kill fell, as the folder shows it afterwards."""

processes = multiprocessing.get_context("forkserver")


@dataclass
class Tally:
    """What came of the kills of one number of writers."""

    num_writers: int
    part_bytes: int
    durable: bool
    save_seconds: float = 0.0
    """Of one checkpoint without a kill."""
    kills: int = 0
    sound: int = 0
    """Kills after which all was as it should be."""
    moments: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MOMENTS, 0))
    steps: int = 0
    """Of the checkpoint that was found last."""
    problems: list[str] = field(default_factory=list)


# The writers


def make_part(step: int, rank: int, num_bytes: int) -> dict[str, object]:
    """What a rank saves at a step: always the same."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    words = torch.randint(-(2**62), 2**62, (num_bytes // torch.int64.itemsize,), generator=generator)
    return {"words": words, "step": step, "rank": rank}


def write_steps(rank: int, shelf: Shelf, first: int, part_bytes: int, peers: Sequence[Connection]) -> None:
    """Saves one step after another, until it is killed.

    Args:
        rank: Of this process; rank 0 seals.
        shelf: Where.
        first: The first step.
        part_bytes: Of the tensor of a part.
        peers: For rank 0 first the reader and then all other ranks; for others rank 0.
    """
    torch.set_num_threads(1)
    step = first
    while True:
        draft = shelf.begin(step)
        entry = draft.write(f"rank-{rank:05d}", make_part(step, rank, part_bytes))
        if rank:
            peers[0].send_bytes(entry.model_dump_json().encode())
            peers[0].recv_bytes()
        else:
            reader, *others = peers
            others_entries = [Entry.model_validate_json(other.recv_bytes()) for other in others]
            draft.seal([entry, *others_entries], {"world_size": len(peers)})
            reader.send_bytes(str(step).encode())
            shelf.prune(KEPT)
            for other in others:
                other.send_bytes(b"go on")
        step += 1


class Writers:
    """Processes that save together."""

    def __init__(self, shelf: Shelf, first: int, num_writers: int, part_bytes: int) -> None:
        self._reports, reader = processes.Pipe(duplex=False)
        pairs = [processes.Pipe() for _ in range(num_writers - 1)]
        peers = [[reader, *(ours for ours, _ in pairs)], *([theirs] for _, theirs in pairs)]
        self._processes = [
            processes.Process(target=write_steps, args=(rank, shelf, first, part_bytes, peers[rank]))
            for rank in range(num_writers)
        ]
        for process in self._processes:
            process.start()
        for connection in (connection for group in peers for connection in group):
            connection.close()

    def wait_for_report(self) -> int:
        """The step that is complete next, as its writers say."""
        if not self._reports.poll(PATIENCE_S):
            raise TimeoutError("the writers save nothing")
        return int(self._reports.recv_bytes())

    def kill(self, order: random.Random) -> int:
        """Kills all of them; the last step that they had reported, or 0."""
        for process in order.sample(self._processes, len(self._processes)):
            process.kill()
        for process in self._processes:
            process.join()
        last = 0
        try:
            while self._reports.poll():
                last = int(self._reports.recv_bytes())
        except EOFError:
            pass
        return last

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *_: object) -> None:
        """None of them is left, whatever happened here."""
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        self._reports.close()


# The reader


def moment_of_death(shelf: Shelf) -> str:
    """What the writers were at, one of `MOMENTS`."""
    names = {path.name: path for path in shelf.path.iterdir()}
    partial = next((path for name, path in names.items() if name.endswith(".partial")), None)
    if partial is not None:
        return MOMENTS[1] if (partial / MANIFEST).exists() else MOMENTS[0]
    return MOMENTS[2] if any(name.endswith(".trash") for name in names) else MOMENTS[3]


def look(shelf: Shelf, reported: int, tally: Tally) -> int:
    """What a reader finds after a kill; the step that training would go on from."""
    newest = shelf.newest(tally.problems.append)
    if newest is None:
        tally.problems.append("no complete checkpoint")
        return 0
    if newest.step < reported:
        tally.problems.append(f"step {reported} was reported as saved, and step {newest.step} is the newest")
    for found in shelf.found():
        if what := what_is_wrong(found):
            tally.problems.append(f"step {found.step}: {what}")
            continue
        for rank in range(tally.num_writers):
            part, expected = found.read(f"rank-{rank:05d}"), make_part(found.step, rank, tally.part_bytes)
            same = torch.equal(part.pop("words"), expected.pop("words")) and part == expected
            if not same:
                tally.problems.append(f"step {found.step} has not what rank {rank} wrote")
    return newest.step


def kill_while_saving(
    folder: Path, num_writers: int, kills: int, part_bytes: int, *, durable: bool = True, seed: int = 0
) -> Tally:
    """Kills writers so many times in one folder.

    Args:
        folder: Made here.
        num_writers: Processes that write together.
        kills: How often.
        part_bytes: That each writes for a step.
        durable: Whether it is flushed to the disk.
        seed: Of the moments.
    """
    shelf = Shelf(folder, durable=durable)
    tally = Tally(num_writers=num_writers, part_bytes=part_bytes, durable=durable)
    chance = random.Random(seed)
    while tally.kills < kills:
        with Writers(shelf, tally.steps + 1, num_writers, part_bytes) as writers:
            reported = writers.wait_for_report()
            if not tally.save_seconds:
                start = time.monotonic()
                reported = writers.wait_for_report()
                tally.save_seconds = time.monotonic() - start
            time.sleep(chance.uniform(0, STEPS_BEFORE_KILL * tally.save_seconds))
            reported = max(reported, writers.kill(chance))
        tally.kills += 1
        tally.moments[moment_of_death(shelf)] += 1
        num_problems = len(tally.problems)
        tally.steps = look(shelf, reported, tally)
        tally.sound += len(tally.problems) == num_problems
    return tally


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="for each number of writers")
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--part", type=parse_bytes, default=2 * MIB, help="size of a part, such as 2MiB")
    parser.add_argument("--folder", type=Path, help="where, on which disk; a temporary folder if left out")
    parser.add_argument("--not-durable", action="store_true", help="without flushing, as in memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    processes.set_forkserver_preload(["poseidon.runtime.checkpoint"])
    tallies = []
    for num_writers in arguments.writers:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            tally = kill_while_saving(
                Path(folder) / "checkpoints",
                num_writers,
                arguments.kills,
                arguments.part,
                durable=not arguments.not_durable,
                seed=arguments.seed,
            )
        tallies.append(tally)
        say(tally)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(tally) for tally in tallies], indent=2) + "\n")
    if any(tally.problems for tally in tallies):
        raise SystemExit(1)


def say(tally: Tally) -> None:
    """What came of it, in lines."""
    size = tally.num_writers * tally.part_bytes
    rate = format_traffic(size / tally.save_seconds)
    print(f"{tally.num_writers} writers, {format_bytes(size)} in {format_seconds(tally.save_seconds)} ({rate}/s)")
    fell = ", ".join(f"{tally.moments[moment]} in {moment}" for moment in MOMENTS)
    print(f"  {tally.kills} kills of all writers: {fell}")
    print(f"  found complete and bit for bit: {tally.sound}; saved in all: {tally.steps} steps")
    for problem in tally.problems:
        print(f"  problem: {problem}")


if __name__ == "__main__":
    main()
