"""A small training over all ranks in which faults happen; the program that a launcher starts as every rank.

    python tests/support/faulty_training.py '{"scheme": "all_reduce", "steps": 12, ...}'

Its only argument is a `Training` as JSON. It says on standard output when it goes on from which step, what it has
committed, which error ended it and, at the end, the digest of the model.
"""

# ruff: noqa: E402 - a launcher starts this file, and the folder of tests is not where Python looks

import hashlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
from torch import nn

from poseidon.comm import AllReduce, CommScheme, ShardedServer, SparseRows, SufficientFactor
from poseidon.plan import Plan
from poseidon.runtime.attach import Run, attach
from poseidon.runtime.join import init, shutdown
from support.faults import DISKS, FILLING, RAISED, START_UP, Injection, Injector, say
from support.steps import plan_for, seeded

NUM_ROWS, WIDTH, HIDDEN, CLASSES, BATCH = 64, 16, 32, 4, 6
SCHEMES: dict[str, dict[str, CommScheme]] = {
    "all_reduce": {},
    "sufficient_factor": {"hidden": SufficientFactor(), "head": SufficientFactor()},
    "sparse_rows": {"embedding": SparseRows()},
    "sharded_server": {name: ShardedServer() for name in ("embedding", "hidden", "head")},
    "two_level": {
        "embedding": AllReduce(levels=2),
        "hidden": SufficientFactor(levels=2),
        "head": AllReduce(levels=2),
    },
    "mixed": {"embedding": SparseRows(), "hidden": SufficientFactor(), "head": ShardedServer()},
}
"""By name, what is not on plain all-reduce."""
BUCKETS = (("head",), ("hidden", "embedding"))
"""Where all is: the first crosses the network while backward goes on."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and what goes wrong meanwhile."""

    scheme: str
    folder: str
    """Where the ranks of all hosts and whoever started them leave files."""
    steps: int = 12
    commit_every: int = 2
    save_every: int = 0
    """Checkpoints on the disk; 0 for none."""
    evaluate_every: int = 3
    step_seconds: float = 0.0
    """Slept in each forward pass, as if it took that long to compute."""
    say_every: int = 1
    """How often a rank says which step it has taken and what it has committed."""
    injections: tuple[Injection, ...] = ()

    def command(self) -> list[str]:
        """What a launcher is to start as every rank."""
        return [sys.executable, __file__, json.dumps(asdict(self))]

    @classmethod
    def parse(cls, text: str) -> "Training":
        """From the program's argument."""
        facts = json.loads(text)
        injections = tuple(Injection(**one) for one in facts.pop("injections"))
        return cls(**facts, injections=injections)

    @property
    def disk(self) -> Path:
        """The folder of the checkpoints."""
        return Path(self.folder) / "disk"


class Small(nn.Module):
    """A table and two layers: every scheme has something to carry; dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_ROWS, WIDTH)
        self.hidden = nn.Linear(WIDTH, HIDDEN)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """From row numbers to scores."""
        scores: torch.Tensor = self.head(self.dropout(torch.tanh(self.hidden(self.embedding(rows)))))
        return scores


def batch(rank: int, step: int) -> torch.Tensor:
    """What one rank looks up in one step."""
    return torch.randint(NUM_ROWS, (BATCH,), generator=seeded(rank, step))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """How far the scores are from the row numbers' remainders."""
    return nn.functional.cross_entropy(model(rows), rows % CLASSES)


class Trainee:
    """One rank's training.

    Args:
        training: What is trained.
        injector: Brings about what goes wrong on this rank.
    """

    def __init__(self, training: Training, injector: Injector) -> None:
        self.training = training
        self.injector = injector
        group = init()
        torch.manual_seed(0)
        self.model = Small()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.run: Run = attach(self.model, self.optimizer, self._plan(group.world_size), group)
        torch.manual_seed(1 + group.rank)
        self.rank = group.rank
        self._make_phases()

    def _plan(self, world_size: int) -> Plan:
        schemes = SCHEMES[self.training.scheme]
        plan = plan_for(self.model, world_size, schemes, lambda: loss_of(self.model, batch(0, 0)))
        return plan if schemes else plan.model_copy(update={"buckets": BUCKETS})

    def _make_phases(self) -> None:
        """Forward, backward and optimizer are phases from their middle on."""
        reach = self.injector.reach
        self.injector.watch_transfers()
        self.injector.watch_saving()
        self.model.hidden.register_forward_hook(lambda *_: reach("forward"))
        self.model.hidden.register_full_backward_hook(lambda *_: reach("backward"))
        self.model.embedding.register_forward_hook(lambda *_: time.sleep(self.training.step_seconds))
        self.model.embedding.register_forward_hook(self._watch_end_of_backward)
        self.optimizer.register_step_pre_hook(lambda *_: reach("optimizer"))

    def _watch_end_of_backward(self, module: nn.Module, args: Any, found: torch.Tensor) -> None:
        found.register_hook(lambda _: self.injector.reach_end_of_backward())

    def train(self) -> None:
        """From where an earlier attempt has come to, or the start, to the end."""
        start = self.run.resume(self.training.disk if self.training.save_every else None)
        say("resumed", rank=self.rank, step=start, attempt=attempt())
        for step in range(start, self.training.steps):
            self.injector.step = step
            self._step(step)
            self._keep(step + 1)
        self.run.flush()
        say("end", rank=self.rank, model=digest(self.model))
        self.run.detach()

    def _step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch(self.rank, step))
        loss.backward()
        self.optimizer.step()
        if step % self.training.evaluate_every == 0:
            self.injector.reach("evaluation")
            self.run.mean(loss.item())
        self._say("step", step + 1)

    def _keep(self, step: int) -> None:
        """In memory and on the disk, as often as wanted."""
        if step % self.training.commit_every == 0:
            self._about_to_save()
            self.run.commit()
            self._say("committed", step)
        if self.training.save_every and step % self.training.save_every == 0:
            self._about_to_save()
            self.run.save(self.training.disk, wait=self._waits_for_disk)
            self._say("saved", step)

    @property
    def _waits_for_disk(self) -> bool:
        """Not where the disk itself has the fault: training is to go on meanwhile."""
        return not any(one.fault in DISKS for one in self.training.injections)

    def _about_to_save(self) -> None:
        self.injector.reach("save", (*RAISED, *DISKS))

    def _say(self, event: str, step: int) -> None:
        if step % self.training.say_every == 0:
            say(event, rank=self.rank, step=step)


def attempt() -> int:
    """How many times all ranks have been started anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def digest(model: nn.Module) -> str:
    """The bits of all parameters and buffers."""
    hashed = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hashed.update(name.encode())
        hashed.update(tensor.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def main() -> None:
    """One rank, from its start to its end."""
    training = Training.parse(sys.argv[1])
    training.disk.mkdir(exist_ok=True)
    (training.disk / FILLING).unlink(missing_ok=True)
    rank = int(os.environ["RANK"])
    injector = Injector(training.injections, rank, Path(training.folder), training.disk)
    start_group = dist.init_process_group

    def watched(*args: Any, **kwargs: Any) -> None:
        injector.reach("start-up")
        start_group(*args, **kwargs)

    dist.init_process_group = watched
    assert injector.step == START_UP
    try:
        Trainee(training, injector).train()
    except BaseException as error:
        say("said", rank=rank, error=type(error).__name__, message=str(error))
        raise
    shutdown()


if __name__ == "__main__":
    main()
