"""`attach`: puts a plan to work on a model in place, and the `Run` that results.

DDP's contract holds. Replicas start equal; the model's class, parameters and `state_dict` stay; when `backward()`
returns, `p.grad` is the mean over all ranks (layers on `sharded_server` excepted: there the optimizer owns the mean).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from poseidon.comm.all_reduce import BucketExchange
from poseidon.comm.group import Group
from poseidon.errors import CommError, ConfigError, InfeasibleError
from poseidon.plan import Plan, PredictedStep
from poseidon.profile.structure import owned_parameters
from poseidon.runtime.binding import check_plan
from poseidon.runtime.claims import check_unclaimed
from poseidon.runtime.clipping import clip_grad_norm_, grad_norm
from poseidon.runtime.commits import Commits
from poseidon.runtime.explanation import Setting, explain
from poseidon.runtime.ignored import ignored_names
from poseidon.runtime.loading import ShardedLoader, Sharding, Source, shard
from poseidon.runtime.means import Figure, mean_over_ranks
from poseidon.runtime.memory import can_restart
from poseidon.runtime.optimizers import Optimizers, listed
from poseidon.runtime.options import RunOptions
from poseidon.runtime.replicas import broadcast_model, check_same_model, check_same_plan
from poseidon.runtime.resuming import Resumption
from poseidon.runtime.saved_state import Loaded, load
from poseidon.runtime.saving import Keep, Saver, Saving
from poseidon.runtime.stepping import Steps
from poseidon.runtime.streams import Split
from poseidon.timeline import Timeline


class Run(Steps):
    """A model under a plan: made by `attach`, undone by `detach`.

    Args:
        model: The root module, changed in place.
        optimizer: Any `torch.optim` optimizer over its parameters, or several; None if the caller updates them in
            another way.
        plan: How the gradients cross the network.
        group: The ranks.
        options: What holds whatever the plan.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        plan: Plan,
        group: Group,
        options: RunOptions = RunOptions(),  # noqa: B008 - a frozen value
    ) -> None:
        super().__init__(model, optimizer, plan, group, options)
        self._saver = Saver(self)
        self._commits = Commits(self)
        self.resumption: Resumption | None = None
        """What `resume` went on from."""

    # The loop

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here accumulate on this rank; nothing is sent until the next one outside."""
        before, self._state.syncing = self._state.syncing, False
        try:
            yield
        finally:
            self._state.syncing = before

    def weight(self, num_items: float) -> None:
        """Says what the loss of the next backward pass on this rank is a mean over: samples, tokens, pixels.

        The gradient is then the mean over the items of all ranks; see `poseidon.comm.counting` for accumulation. Where
        nothing is said the rows of the model's first input count. No effect where the run was asked for `mean="ranks"`.

        Args:
            num_items: How many; 0 leaves this rank's gradient out.

        Raises:
            ConfigError: It is no number that can be used.
        """
        if not (math.isfinite(num_items) and num_items >= 0):
            raise ConfigError(f"cannot weight a rank's loss by {num_items!r}: say how many items it is a mean over")
        self._counting.tell(float(num_items))

    def empty_step(self) -> None:
        """Takes part in an exchange without a forward and backward pass: this rank has no samples for this step."""
        self._state.syncing = True
        self.refresh()
        self._compare_if_due()
        self._exchange()

    def drain(self, update: Callable[[], None] | None = None) -> None:
        """This rank has no samples left: answers the exchanges of the others until all ranks have called this.

        Args:
            update: What the loop does between a backward pass and the next forward: clipping, the optimizer's step, a
                scheduler's, zeroing gradients. `optimizer.step()` and `optimizer.zero_grad()` if left out.

        Raises:
            CommError: Replicas have drifted apart, because `update` is not what the others do.
        """
        num_answered = 0
        if not self._counting.num_passes:  # the others have zeroed theirs: a loop may do so before each forward pass
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self._counting.leaving = True
        try:
            while self._answer():
                num_answered += 1
                (update or self._update)()
        finally:
            self._counting.leaving = False
        if any(map(int, self.group.all_gather_text(str(num_answered), "leaving the last exchange"))):
            self.check_replicas()

    @contextmanager
    def join(self, update: Callable[[], None] | None = None) -> Iterator[None]:
        """Around a loop that may have more steps on one rank than on another: `drain` at its end.

        Args:
            update: See `drain`.
        """
        yield
        self.drain(update)

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def detach(self) -> None:
        """Undoes `attach`, on all ranks together: the model and the optimizer are as if they had never been touched."""
        has_failed = self._threads is not None and self._threads.failed
        self._saver.close(failed=has_failed)
        self._commits.close(failed=has_failed)
        self.on_detach()
        self._hooks.remove()
        self._buffers.remove()
        for handle in self._optimizer_handles:
            handle.remove()
        self._lookout.keep(False)
        try:
            if self._threads is not None and not self._threads.failed and not self._hooks.in_backward:
                self._end_open_step("detaching")
            self._unbind()
        finally:
            self._batch_norms.remove()
            self._claim.release()
            if self._threads is not None:
                self._threads.close()
                self.group.return_from_run(failed=self._threads.failed)

    # Its data and figures

    def shard(
        self,
        source: Source,
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        train: bool = True,
        portions: Sequence[float] | None = None,
        split: Split = "elements",
        seed_samples: bool = False,
        update: Callable[[], None] | None = None,
    ) -> ShardedLoader:
        """This rank's part of the data of a loop; all ranks call this together.

        Each `for` over what it returns is an epoch, in which each sample is seen by one rank, once: nothing is padded,
        repeated or left out. The next epoch is shuffled anew. Batches say themselves how many samples they have, and a
        rank whose epoch ends a batch early answers the others' last exchange.

        Args:
            source: A data set, map-style or iterable, or a `DataLoader` of one; batch sizes are those of one rank.
            batch_size: For a data set; a loader has its own.
            shuffle: Whether map-style data is shuffled; as the loader's sampler says if left out, and a data set for
                training only.
            seed: Of the order.
            train: False for evaluation, where only the samples are dealt.
            portions: How much of each batch of all ranks each rank takes, in relation to the others; as `dealing` says
                if left out.
            split: How an iterable data set is divided: by `"elements"`, by itself among `"workers"`, or `"none"`
                because it divides itself by ranks, too.
            seed_samples: Makes random draws in `__getitem__` depend on seed, epoch and index only.
            update: What the loop does after a backward pass, for exchanges that are answered; see `drain`.

        Returns:
            A loader, with `state_dict` and `load_state_dict` to go on in the middle of an epoch.

        Raises:
            ConfigError: The data or an option cannot be used, or they differ between ranks.
        """
        sharding = Sharding(
            shuffle=shuffle,
            seed=seed,
            train=train,
            portions=None if portions is None else tuple(portions),
            split=split,
            seed_samples=seed_samples,
            update=update,
        )
        loader = shard(self, source, batch_size=batch_size, sharding=sharding)
        self.belongings.add_loader(loader)
        return loader

    @overload
    def mean(self, value: Figure, n: float = 1) -> float: ...

    @overload
    def mean(self, value: Mapping[str, Figure], n: float = 1) -> dict[str, float]: ...

    def mean(self, value: Figure | Mapping[str, Figure], n: float = 1) -> float | dict[str, float]:
        """The mean over the samples of all ranks of what each rank has as its own; all ranks call this together.

        Args:
            value: This rank's mean, such as a loss, or several by name.
            n: How many samples it is a mean over; zero where this rank had none.

        Raises:
            ConfigError: Ranks give figures of different names.
        """
        with self.recorder.standing_still("mean"):
            return mean_over_ranks(self.group, value, n)

    # Its state

    def track(self, *, each_rank: bool = False, **things: Any) -> None:
        """Names what belongs to the state of the run beside model, optimizers and loaders.

        Args:
            each_rank: Whether each rank has its own, such as a generator of random numbers; else they are the same on
                every rank, and rank 0's are saved.
            things: Schedulers, a `GradScaler`, anything with `state_dict` and `load_state_dict`; a generator of torch
                or numpy; or a pair of functions that give a value and take it.

        Raises:
            ConfigError: One of them cannot be tracked, or its name is taken.

        Example:
            ```python
            run.track(scheduler=scheduler, best=(lambda: best, set_best))
            ```
        """
        self.belongings.track(things, each_rank=each_rank)

    def save(
        self,
        folder: str | Path,
        *,
        score: float | None = None,
        keep_last: int = 3,
        keep_best: int = 0,
        wait: bool = False,
    ) -> Saving:
        """Saves the state as a checkpoint; on all ranks together, between `optimizer.step()` and the next forward pass.

        It is copied now and written in the background. Only one is on its way at a time: the next `save` waits for it,
        and so do `finish_saving` and `detach`.

        Args:
            folder: Of checkpoints, for this run alone; hosts may share it or each have their own under this name.
            score: How good the model is, the higher the better.
            keep_last: So many of the newest checkpoints stay in the folder.
            keep_best: And so many of those with the best score.
            wait: Whether to return once it is complete; if it cannot be written, that raises then. Else a full disk is
                said aloud, and training goes on.

        Returns:
            When it is complete, where, and how long the training has stood still.

        Raises:
            CheckpointError: It is not between two steps, the folder cannot be used, or another run saves there; the
                same on every rank.
        """
        saving = self._saver.save(folder, Keep(last=keep_last, best=keep_best, score=score))
        if wait:
            self.finish_saving()
            saving.check()
        if self.leaving.ranks:
            self.finish_saving()
            self.leaving.end(self.step, saving.error)
        return saving

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is complete, or could not be written; on all ranks together."""
        self._saver.finish()

    def load(self, path: str | Path) -> Loaded:
        """Goes on from a checkpoint; on all ranks together, best as the last thing before the loop.

        With as many ranks as before everything goes on bit for bit: losses, the order of samples, random numbers, the
        plan. With another number an epoch goes on with the samples that are left.

        Args:
            path: A folder of checkpoints, or of a run, of which the newest counts that is complete and undamaged; one
                checkpoint; or a file of weights, with which the run begins.

        Raises:
            CheckpointError: There is none, or it is that of another model; the same on every rank.
        """
        return load(self, Path(path))

    def commit(self) -> bool:
        """Keeps the state of this step in the memory of the hosts; on all ranks together, where `save` may be called.

        It survives the processes and, since each host also keeps what is the own of a neighbor's ranks, any one host.
        It costs the time of a copy. The commit before goes when this one is complete.

        Returns:
            Whether it is being kept: not where memory is short, which is said once.

        Raises:
            CheckpointError: It is not between two steps; the same on every rank.
        """
        kept = self._commits.commit()
        if self.leaving.ranks:
            self._commits.finish()
            self.leaving.end(self.step, self._commits.problem if kept else "steps are not committed in memory")
        return kept

    def resume(self, folder: str | Path | None = None) -> int:
        """Goes on from the newest state that is whole, committed or saved; on all ranks together, before the loop.

        Called after `distribute`, `shard` and `track`. A job that starts for the first time has committed nothing; one
        that was started again has. The state may be of another number of ranks.

        Args:
            folder: Of checkpoints to look at, too.

        Returns:
            How many steps lie behind; 0 where nothing was found.

        Raises:
            CheckpointError: The state is that of another model; the same on every rank.
        """
        if folder is None and not can_restart():
            return 0
        self.resumption = self._commits.resume(None if folder is None else Path(folder))
        return 0 if self.resumption is None else self.resumption.step

    # Gradients and optimizers

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the whole gradient, the same on every rank; on all ranks together, as `clip_grad_norm_`."""
        self.flush()
        return grad_norm(self._parameters(), self._exchanges, self.group, norm_type)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` of the whole gradient, whichever way its layers travel.

        On all ranks together, between `backward()` and `optimizer.step()`.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            RuntimeError: It is not finite, and `error_if_nonfinite` is set.
        """
        self.flush()
        return clip_grad_norm_(
            self._parameters(), self._exchanges, self.group, max_norm, norm_type, error_if_nonfinite, foreach
        )

    def _parameters(self) -> list[nn.Parameter]:
        """Those whose gradients are exchanged, in the model's order; all of them on one rank."""
        exchanged = {id(parameter) for exchange in self._exchanges for parameter in exchange.parameters}
        return [p for p in self.model.parameters() if id(p) in exchanged or self.group.world_size == 1]

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """The state of the optimizer for all parameters, as one process would have it; on all ranks together.

        On `sharded_server` each rank's optimizer has a part. `load_state_dict` of an optimizer takes the result in a
        process of its own, `load_optimizer_state_dict` on any number of ranks.

        Args:
            optimizer: Which one, where there are several.
        """
        with self._unsharded():
            return self._chosen(optimizer).state_dict()

    def load_optimizer_state_dict(
        self, state_dict: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Gives the optimizer a state for all parameters, the same on every rank; on all ranks together.

        Args:
            state_dict: From `optimizer_state_dict`, or of an optimizer in one process.
            optimizer: Which one, where there are several.
        """
        with self._unsharded():
            self._chosen(optimizer).load_state_dict(state_dict)

    def _chosen(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        if optimizer is None and len(self.optimizers) == 1:
            return self.optimizers[0]
        if optimizer not in self.optimizers:
            raise ConfigError(f"cannot tell which of {len(self.optimizers)} optimizers of the run is meant: name it")
        assert optimizer is not None
        return optimizer

    @contextmanager
    def _unsharded(self) -> Iterator[None]:
        """Every optimizer has whole parameters and whole state meanwhile."""
        self.flush()
        if not any(exchange.held for exchange in self._exchanges):
            yield
            return
        if self._begun:
            raise CommError(
                f"rank {self.group.rank}: the optimizer's state was asked for after a forward pass whose backward has "
                "not run, with layers on sharded_server; ask between optimizer.step() and the next forward pass"
            )
        self._unbind()
        try:
            yield
        finally:
            self._bind()

    # Buffers

    def sync_buffers(self) -> None:
        """Gives every rank rank 0's buffers (running statistics); do it before evaluating or saving."""
        self.flush()
        self._buffers.sync()
        self.recorder.restart()

    def sync_batch_norm(self) -> None:
        """From now on batch normalization sees the batches of all ranks together, as one process on their union would.

        In training only; layers that are evaluating use their running statistics. Called on all ranks together.
        """
        self._batch_norms.sync()

    # What can be asked

    def explain(self, *, full: bool = False) -> str:
        """A table: for each parameter how it travels, what it sends in a step, and why it goes in no other way.

        Args:
            full: A line for each parameter and buffer; else those that are alike share one.
        """
        buckets = [exchange for exchange in self._exchanges if isinstance(exchange, BucketExchange)]
        number_of = {id(p): number for number, bucket in enumerate(buckets, 1) for p in bucket.parameters}
        setting = Setting(
            buckets={name: number_of[id(p)] for name, p in self.model.named_parameters() if id(p) in number_of},
            ignored=self.ignored,
            unused=self._unused.reasons,
            buffers=self.options.buffers,
        )
        return explain(self.model, self.plan, setting, full=full)

    @property
    def timeline(self) -> Timeline:
        """What happened when in the last steps on this rank."""
        return self.recorder.timeline

    @property
    def layers_by_exchange(self) -> dict[str, tuple[str, ...]]:
        """Which layers each exchange of the present plan carries, by the name that its transfers begin with."""
        return {exchange.name: exchange.layers for exchange in self._exchanges}

    @property
    def num_passes(self) -> int:
        """Backward passes to the last exchange, of the rank that made most."""
        return self._counting.most_passes

    @property
    def rows_by_layer(self) -> dict[str, int]:
        """Of each layer that travels as rows, those of the rank that had most in its last exchange that has ended."""
        return {name: one.num_rows for one in self._exchanges for name in one.layers if one.num_rows}

    @property
    def prediction(self) -> PredictedStep | None:
        """What the planner expects of a step under the present plan; None where it was not asked."""
        return self.plan.predicted


def attach(
    model: nn.Module,
    optimizer: Optimizers,
    plan: Plan,
    group: Group,
    options: RunOptions = RunOptions(),  # noqa: B008 - a frozen value
) -> Run:
    """Makes the replicas equal and puts a plan to work on them, in place.

    Args:
        model: The root module, built alike on every rank.
        optimizer: Over the model's parameters, or several over parts of them; needed where a layer uses
            `sharded_server`.
        plan: For this model and this number of ranks.
        group: From `join.init`.
        options: What holds whatever the plan.

    Returns:
        The run; training goes on with the caller's own loop.

    Raises:
        InfeasibleError: The models or plans differ between ranks, or the plan does not fit; the first difference is
            named.
    """
    ignored = ignored_names(model, options.ignore)
    check_unclaimed(model, ignored)
    check_same_model(model, group, ignored)
    check_plan(plan, model, listed(optimizer), group, owned_parameters(model, ignored=ignored))
    check_same_plan(plan, group)
    if plan.portions and options.mean != "samples":
        raise InfeasibleError("the plan gives ranks unequal numbers of samples: take mean='samples', or leave it out")
    broadcast_model(model, group, ignored)
    return Run(model, optimizer, plan, group.take_for_run(), options)
