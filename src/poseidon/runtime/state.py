"""The state of a run between two steps: everything that the steps to come depend on, in parts that can be saved apart.

| part | what is in it | who has it |
| --- | --- | --- |
| `model` | parameters and buffers, as `state_dict()` has them | all ranks alike |
| `optimizer` | of each optimizer, what is not sharded | all ranks alike |
| `job` | step, plan, weighting, order of arrival, events, tracked objects, where shards lie | all ranks alike |
| `shard-00003` | of each optimizer, this rank's stretches of what `sharded_server` updates | rank 3 |
| `rank-00003` | random numbers, loaders, buffers and parameters that are its own | rank 3 |

With as many ranks as before a run goes on bit for bit. With another number shards are cut anew, loaders go on with the
samples that are left, the plan is the one that the run has for its ranks, and ranks that are new draw random numbers
from a seed of their own.
"""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from poseidon.cluster.rates import Rates
from poseidon.errors import CheckpointError, PoseidonError
from poseidon.plan import Plan
from poseidon.runtime.host_copies import HostCopies
from poseidon.runtime.optimizer_state import Parts, Saved, put_together, take_apart
from poseidon.runtime.seeding import number_from, seed
from poseidon.runtime.stepping import Steps

T = TypeVar("T")
State = dict[str, Any]
Read = Callable[[str], Any]
"""From the name of a part to the part."""

FORMAT = 1
JOB = "job"
"""What all ranks have alike beside model and optimizers: the step, the plan, what is tracked."""
COMMON = ("model", "optimizer", JOB)
"""The parts that all ranks have alike."""
_DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def shard_part(rank: int) -> str:
    """The name of what a rank has of sharded optimizer state."""
    return f"shard-{rank:05d}"


def rank_part(rank: int) -> str:
    """The name of what is a rank's own."""
    return f"rank-{rank:05d}"


def capture(run: Steps, *, common: bool = True, copies: HostCopies | None = None) -> State:
    """Takes the state of a run; on all ranks together, between `optimizer.step()` and the next forward pass.

    Args:
        run: Whose state.
        common: Whether this rank is to have the parts that all ranks have alike, too.
        copies: Memory to be used again, once it is given back.

    Returns:
        This rank's parts and, if asked for, the common ones, by name and in memory of their own.

    Raises:
        CheckpointError: It is not between two steps, on some rank.
    """
    first_seed = _agree_on_seed(run)
    places = run.places()
    ignored = {id(p) for name, p in run.model.named_parameters() if name in run.ignored}
    optimizers = [take_apart(one, places, ignored=ignored, without=run.alarm_ids) for one in run.optimizers]
    state: State = {
        shard_part(run.group.rank): [one.shard for one in optimizers],
        rank_part(run.group.rank): _of_rank(run, optimizers),
    }
    if common:
        state["model"] = run.model.state_dict()
        state["optimizer"] = [one.alike for one in optimizers]
        state["job"] = _of_job(run, optimizers, first_seed)
    return dict((copies or HostCopies()).copy(state))


def restore(run: Steps, read: Read) -> int:
    """Brings a run to a saved state; on all ranks together, between two steps, best before the first.

    Args:
        run: With the model, the optimizers and the options of the one that was saved.
        read: Gives a part. Every rank asks for the common ones, for its own and, where the number of ranks or the plan
            has changed, for shards of others. A rank that is new asks for what rank 0 had.

    Returns:
        How many steps lie behind.

    Raises:
        CheckpointError: The state is that of another model, has not all that is needed, or something does not take its
            part; the same on every rank. But for the last case, model and optimizers are as they were.
    """
    job = on_all_ranks(run, lambda: _checked_job(run, read("job")))
    plan = Plan.parse(job["plan"], source="the saved plan")
    if job["settled"] and plan.world_size == run.group.world_size:
        on_all_ranks(run, lambda: run.check_plan(plan))
        run.rates = Rates.model_validate_json(job["rates"]) if job["rates"] else None
        run.on_resumed(plan)
    run.flush()
    found = on_all_ranks(run, lambda: _Found(run, job, read))
    on_all_ranks(run, lambda: found.load(run, same_plan=run.plan == plan))
    return int(job["step"])


def _agree_on_seed(run: Steps) -> int:
    """That all ranks are between the same two steps; rank 0's seed, for ranks that may be new one day.

    Raises:
        CheckpointError: They are not.
    """
    mine = [run.step, run.what_is_open(), number_from(*torch.get_rng_state()[:32].tolist())]
    everyone = [json.loads(text) for text in run.group.all_gather_text(json.dumps(mine), "taking the state of the run")]
    for rank, (step, problem, _) in enumerate(everyone):
        if problem:
            raise CheckpointError(
                f"cannot take the state of the run after step {step}: {problem}, on rank {rank}; save between "
                "optimizer.step() and the next forward pass"
            )
        if step != everyone[0][0]:
            raise CheckpointError(
                f"cannot take the state of the run: rank {rank} has {step} steps behind it and rank 0 has "
                f"{everyone[0][0]}; save after the same step on every rank"
            )
    return int(everyone[0][2])


def _of_rank(run: Steps, optimizers: list[Parts]) -> State:
    parameters = {name: p for name, p in run.model.named_parameters() if name in run.ignored}
    return {
        "random": random_state(),
        "buffers": run.own_buffers(),
        "parameters": parameters,
        "optimizers": [one.own for one in optimizers],
        **run.belongings.of_rank(),
    }


def _of_job(run: Steps, optimizers: list[Parts], first_seed: int) -> State:
    return {
        "format": FORMAT,
        "step": run.step,
        "world_size": run.group.world_size,
        "seed": first_seed,
        "plan": run.plan.to_json(),
        "settled": run.settled,
        "rates": run.rates.model_dump_json() if run.rates is not None else "",
        "options": _options(run),
        "model": _forms(run.model),
        "progress": run.progress(),
        "portions": run.dealing.latest,
        "stretches": [one.stretches for one in optimizers],
        "tracked": run.belongings.of_all_ranks(),
        "events": list(run.events),
    }


def _options(run: Steps) -> dict[str, Any]:
    """What has to be as it was."""
    options = run.options
    return {"mean": options.mean, "buffers": options.buffers, "ignore": sorted(run.ignored)}


def _checked_job(run: Steps, job: State) -> State:
    if job["format"] != FORMAT:
        raise CheckpointError(f"the state has format {job['format']}, and this version of Poseidon reads {FORMAT}")
    here, there = _options(run), job["options"]
    for name, value in here.items():
        if there[name] != value:
            raise CheckpointError(f"the run had {name}={there[name]!r} when it was saved, and has {value!r} here")
    _check_model(_forms(run.model), job["model"])
    if len(job["stretches"]) != len(run.optimizers):
        raise CheckpointError(
            f"the run had {len(job['stretches'])} optimizers when it was saved, and has {len(run.optimizers)} here"
        )
    return job


class _Found:
    """All that this rank needs, read and found to fit."""

    def __init__(self, run: Steps, job: State, read: Read) -> None:
        self._job = job
        rank, self._world_size = run.group.rank, job["world_size"]
        self._is_new = rank >= self._world_size
        self._own = read(rank_part(0 if self._is_new else rank))
        self._model = read("model")
        self._optimizers = self._put_together(run, read) if run.optimizers else []

    def _put_together(self, run: Steps, read: Read) -> list[State]:
        shards: dict[int, Any] = {}

        def shard_of(rank: int, number: int) -> Mapping[int, State]:
            if rank not in shards:
                shards[rank] = read(shard_part(rank))
            found: Mapping[int, State] = shards[rank][number]
            return found

        places, common = run.places(), read("optimizer")
        saved = [
            Saved(common[n], self._own["optimizers"][n], stretches, lambda rank, n=n: shard_of(rank, n))  # type: ignore[misc]
            for n, stretches in enumerate(self._job["stretches"])
        ]
        return [put_together(one, places, s, run.group.rank) for one, s in zip(run.optimizers, saved, strict=True)]

    def load(self, run: Steps, *, same_plan: bool) -> None:
        """Gives everything its state."""
        job, own = self._job, self._own
        same_ranks = self._world_size == run.group.world_size
        run.model.load_state_dict(self._model)
        for optimizer, state in zip(run.optimizers, self._optimizers, strict=True):
            optimizer.load_state_dict(state)
        if not self._is_new:
            _copy({**own["buffers"], **own["parameters"]}, run.model)
        if same_ranks:
            run.dealing.resume(job["portions"])
        run.belongings.load(job["tracked"], {**own, "tracked": {} if self._is_new else own["tracked"]})
        run.go_on_from(job["step"], job["progress"], same_plan=same_plan)
        run.events[:0] = job["events"]
        if self._is_new:
            seed(number_from(job["seed"], job["step"]), group=run.group)
        else:
            set_random_state(own["random"])


def on_all_ranks(run: Steps, read: Callable[[], T]) -> T:
    """Does something on every rank that may fail on one.

    Raises:
        CheckpointError: It has failed on some rank; the same on every rank.
    """
    problem, result = "", None
    try:
        result = read()
    except PoseidonError as error:
        problem = str(error)
    except _DAMAGE as error:
        problem = f"the state is not what this version of Poseidon saves: {type(error).__name__}: {error}"
    problems = run.group.all_gather_text(problem, "reading the state of the run")
    if failed := [(rank, text) for rank, text in enumerate(problems) if text]:
        rank, text = failed[0]
        raise CheckpointError(f"cannot resume on rank {rank}: {text}")
    return result  # type: ignore[return-value]


def _check_model(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raises CheckpointError with the first difference between a model and one that was saved."""
    for name in dict.fromkeys([*here, *there]):
        now, before = here.get(name, "missing"), there.get(name, "missing")
        if now != before:
            raise CheckpointError(
                f"the model does not fit: {name!r} was {before} when it was saved and is {now} here; build the same one"
            )


def _forms(model: nn.Module) -> dict[str, str]:
    """Shape and type of all that is in a model's `state_dict()`, by name."""
    return {
        name: f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else "no tensor"
        for name, value in model.state_dict().items()
    }


@torch.no_grad()
def _copy(values: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        there[name].copy_(value)


def random_state() -> State:
    """Of the global generators of Python, numpy, torch and each GPU in use."""
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint64), gauss),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: State) -> None:
    """Has the global generators go on from there."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(of_device, device)
