"""The steps of a run: what autograd and the optimizer tell, what is exchanged when, and when it is over.

A forward pass hands over what it makes ready, a backward pass the rest; at its end this rank has handed over everything
and waits. Then gradients are final, and the step is closed. `Run` adds what a loop may ask for.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import nn

from poseidon.cluster.rates import Rates
from poseidon.comm.all_reduce import VOTE_AFTER, BucketExchange
from poseidon.comm.capture import Removable, inside_backward
from poseidon.comm.counting import Counting
from poseidon.comm.group import Group, Pending
from poseidon.comm.scheme import Exchange, Place, StepState, Transfer
from poseidon.errors import CommError
from poseidon.plan import Plan
from poseidon.profile.structure import profile_structure, say_compiled
from poseidon.runtime.batch_norm import SyncedBatchNorms
from poseidon.runtime.belongings import Belongings
from poseidon.runtime.binding import Schedule, bind, check_plan, schedule
from poseidon.runtime.buffers import Buffers
from poseidon.runtime.claims import Claim
from poseidon.runtime.clipping import Oversight
from poseidon.runtime.comm_thread import CommThread
from poseidon.runtime.deferral import Deferral, Lookout, undisturbed
from poseidon.runtime.drift import DriftCheck
from poseidon.runtime.extension import extend
from poseidon.runtime.hooks import PassHooks
from poseidon.runtime.ignored import ignored_names
from poseidon.runtime.inventory import Change, Inventory, agree
from poseidon.runtime.leaving import Leaving, is_asked
from poseidon.runtime.optimizers import Optimizers, StepHooks, listed
from poseidon.runtime.options import RunOptions
from poseidon.runtime.portions import Dealing
from poseidon.runtime.recorder import Recorder
from poseidon.runtime.unused import Unused
from poseidon.timeline import Activity

log = logging.getLogger(__name__)


class Event(TypedDict):
    """Something that was decided or noticed on the way."""

    kind: str
    """`measured`, `planned`, `adopted`, `kept`, `dropped`, `shared`, `noticed`, `compiled`, `expected`, `departed`,
    `grown`, `overlooked`, `unused`, `leaving`, `trained`, `saved`, `unsaved`, `uncommitted` or `resumed`."""
    exchange: int
    """How many exchanges lay behind."""
    seconds: float
    """Since the model was put under its first plan."""
    text: str


class Steps:
    """A model under a plan, step after step.

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
        self.ignored = ignored_names(model, options.ignore)
        """Names of the parameters and buffers that stay each rank's own."""
        self._claim = Claim(model, self.ignored)
        self.model = model
        self.optimizers = listed(optimizer)
        self.group = group
        self.plan = plan
        self.options = options
        self.recorder = Recorder(group.rank)
        self.settled = True
        """False while schemes are still being tried out; steps taken meanwhile are as exact as any."""
        self.on_computed: Callable[[], None] = lambda: None
        """Called at the end of each synchronized backward pass, before anything is waited for."""
        self.on_exchanged: Callable[[], None] = lambda: None
        """Called at the end of each synchronized backward pass, gradients final; may call `adopt`."""
        self.on_detach: Callable[[], None] = lambda: None
        """Called on all ranks together before everything is undone."""
        self.on_retrained: Callable[[], None] = lambda: None
        """Called on all ranks together once the plan has been extended by what is trained newly; may call `adopt`."""
        self.on_resumed: Callable[[Plan], None] = self.adopt
        """Called on all ranks together with the plan under which a run goes on that was saved; has to adopt it."""
        self.belongings = Belongings()
        """What else belongs to the run's state."""
        self.rates: Rates | None = None
        """What links and computing were last measured to be; None where nobody has measured."""
        self.dealing = Dealing(group, plan.portions or plan.loads)
        """How the samples of each global batch are dealt to the ranks, by those who load them."""
        self.events: list[Event] = []
        """What was decided or noticed when, oldest first; the same on every rank."""
        self._inventory = Inventory(model, self.ignored)
        self._unused = Unused(model, lambda text, loud: self.note("unused", text, loud=loud))
        self._drift = DriftCheck(
            model,
            self.optimizers,
            group,
            every=options.check_every,
            equal_buffers=lambda: self._buffers.equal,
            ignored=self.ignored,
        )
        self._started = time.monotonic()
        self._state = StepState()
        self._state.on_work = lambda activity, name, start, end: self.recorder.add(activity, name, start, end)
        self._threads = CommThread(group) if group.world_size > 1 else None
        self._counting = Counting(group, self._state, by_items=options.mean == "samples")
        self._counting.is_asked = is_asked
        self.leaving = Leaving(group, lambda text: self.note("leaving", text, loud=True))
        """Which ranks were asked to leave."""
        self._hooks = PassHooks(
            model,
            on_forward=self._on_forward,
            on_rows=self._counting.see,
            on_backward_start=self._on_backward_start,
            on_backward_end=self._on_backward_end,
            on_all_ended=self._on_all_ended,
            on_backward_broken=self._on_backward_broken,
        )
        self._state.on_backward = self._hooks.backward_is_under_way
        self._buffers = Buffers(model, group, after_step=options.buffers == "after_step", ignored=self.ignored)
        self._batch_norms = SyncedBatchNorms(model, group, self._items, self.recorder.standing_still)
        self._exchanges: list[Exchange] = []
        self._schedule = Schedule([], [])
        self._finishing: list[Exchange] = []
        """The exchanges that end with backward, in the order in which their last transfers end."""
        self._deferral: Deferral | None = None
        """The exchanges that may end later, where the plan has such."""
        self._lookout = Lookout()
        self._was_forward = False
        """Whether the model was called since the last backward pass."""
        self._awaits_backward = False
        """Whether that made a graph through parameters that are trained."""
        self._is_updated = True
        """Whether an optimizer has made a step since the last exchange."""
        self._begun: list[Transfer] = []
        """Of the present step's schedule, what has been handed over."""
        self._misplaced = 0
        self.last_arrivals: list[str] = []
        """The layers in the order in which the last exchange's gradients became ready on this rank."""
        self.label = "plan"
        """What the timeline calls the steps from now on."""
        self._oversight = Oversight()
        self._step_hooks: dict[torch.optim.Optimizer, StepHooks] = {}
        self._optimizer_handles: list[Removable] = []
        for one in self.optimizers:
            state_hook = one.register_state_dict_pre_hook(self._before_state_dict)
            hooks = StepHooks(one, self._before_optimizer, self._after_optimizer, lambda *_: self._show_whole(False))
            self._step_hooks[one] = hooks
            self._optimizer_handles += [hooks, state_hook]
        self._bind()
        if text := say_compiled(model):
            self.note("compiled", text)
        if names := self._batch_norms.sync(nn.SyncBatchNorm):
            self.note("noticed", f"nn.SyncBatchNorm is computed as after sync_batch_norm(): {', '.join(names)}")

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The only one, or the first of several."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def num_exchanges(self) -> int:
        """How many times gradients were exchanged."""
        return self._state.index

    @property
    def step(self) -> int:
        """How many steps lie behind since the job began, those included after which it was saved and resumed."""
        return self._state.index

    def note(self, kind: str, text: str, *, loud: bool = False) -> None:
        """Keeps what was decided or noticed among the events, on every rank; rank 0 says it."""
        seconds = time.monotonic() - self._started
        self.events.append(Event(kind=kind, exchange=self.num_exchanges, seconds=seconds, text=text))
        if self.group.rank == 0:
            log.log(logging.WARNING if loud else logging.INFO, "exchange %d: %s", self.num_exchanges, text)

    def flush(self) -> None:
        """Waits for what the plan has deferred: gradients are final and parameters up to date when this returns.

        Not needed for what reaches the parameters through torch or the model. Needed before something else reads their
        memory: a view that was made earlier, another process, the entries of `optimizer.state`.
        """
        if self._deferral is not None:
            self._deferral.settle()

    def check_replicas(self) -> None:
        """Proves that every rank holds the same parameters, bit by bit, and the same hyperparameters of the optimizer.

        Buffers too, where they have to be equal: if nothing has changed them since they were made so.

        Raises:
            CommError: They differ; the first difference is named.
        """
        self.flush()
        self._drift.compare(self._state.index)

    # Changing the plan

    def check_plan(self, plan: Plan) -> None:
        """Raises InfeasibleError where a plan is for another model, another number of ranks or another optimizer."""
        self._show_whole(True)
        try:
            check_plan(plan, self.model, self.optimizers, self.group, self._inventory.layers)
        finally:
            self._show_whole(False)

    def adopt(self, plan: Plan, label: str = "plan", meanwhile: Callable[[], None] = lambda: None) -> None:
        """Goes on under another plan; only between exchanges, and on all ranks together.

        Args:
            plan: From the next step on.
            label: What the timeline calls its steps.
            meanwhile: Called while the model is as if it were under no plan.

        Raises:
            InfeasibleError: The plan is for another model, another number of ranks or another optimizer.
        """
        self.check_plan(plan)
        if self._threads is not None:
            self._end_open_step("adopting a plan")
        self._unbind()
        self.plan, self.label = plan, label
        meanwhile()
        self._bind()

    def refresh(self) -> None:
        """Takes in what the model trains since it was changed: layers that were frozen, layers that were not there.

        Happens by itself before each forward pass of the model. Needed where a loop calls the model's parts only. Every
        rank has to have made the same change; all of them call this together.

        Raises:
            CommError: Ranks have made different changes, or a parameter has another type or is on another device.
        """
        change = self._inventory.look()
        if change is not None:
            self._take_in(change)

    def _take_in(self, change: Change) -> None:
        wait = self._threads.wait_for if self._threads is not None else lambda pending, what: pending.wait()
        is_open = bool(self._begun) or self._counting.num_passes > 0
        if agree(change, self.group, self._state.index, is_open=is_open, wait=wait):
            self._complete_step()
        self.flush()
        self._inventory.make_equal(self.group)
        if self.options.buffers == "after_step":
            self._buffers.sync()
        self._claim.release()
        self._claim = Claim(self.model, self.ignored)
        changed = self._inventory.changed_layers
        self._inventory.take()
        now = profile_structure(self.model, trained=self._inventory.trained, ignored=self.ignored)
        self.adopt(extend(self.plan, now, changed), self.label)
        self.note("trained", f"{change}: the plan goes on with what is trained now")
        self.on_retrained()

    def _check_not_too_late(self) -> None:
        """Backward begins: what came to be trained after the forward pass has begun can no longer be taken in."""
        if self._was_forward and not self._inventory.has_other_parameters():
            return
        if (change := self._inventory.look()) is not None:
            raise CommError(
                f"rank {self.group.rank}: {change}, as is noticed only now that backward has begun, in exchange "
                f"{self._state.index}; change what is trained before the forward pass and, where the loop calls the "
                "model's parts but not the model, call run.refresh() after the change"
            )

    def _compare_if_due(self) -> None:
        """Before anything of a step has begun. Every rank comes here, by whatever begins its step."""
        if self._drift.is_due(self._state.index) and not self._begun:
            self.check_replicas()

    def _bind(self) -> None:
        if self.group.world_size == 1:
            return
        self.group.connections = min(self.plan.connections, self.group.max_connections)
        owned = self._inventory.layers
        self._exchanges = bind(self.plan, self.model, owned, self.optimizers, self.group, self._state)
        self._schedule = schedule(self.plan, self._exchanges, self._counting.transfer)
        place = {transfer: index for index, transfer in enumerate(self._schedule.all)}
        in_order = sorted(self._exchanges, key=lambda exchange: place[exchange.transfers[-1]])
        deferred = [exchange for exchange in in_order if exchange.layers[0] in self.plan.deferred]
        self._finishing = [exchange for exchange in in_order if exchange not in deferred]
        if deferred:
            assert self.optimizer is not None
            self._deferral = Deferral(
                deferred,
                self.model,
                self.optimizer,
                self._lookout,
                wait=lambda transfer: self._wait(transfer, steps_ago=1),
                on_ended=self.recorder.add_transfers,
            )
        if not inside_backward():
            self._lookout.keep(bool(deferred))
        if self._threads is not None:
            self._threads.make_stages(max(transfer.num_stages for transfer in self._schedule.all))
        self._begun = []

    def _unbind(self) -> None:
        if self._deferral is not None:
            assert self._threads is not None
            self._deferral.close(failed=self._threads.failed)
            self._deferral = None
        for exchange in reversed(self._exchanges):
            exchange.detach()
        self._exchanges = []

    def _end_open_step(self, what: str) -> None:
        """A forward that no backward followed has begun a step, perhaps not everywhere: all ranks end it together."""
        if any(self.group.all_gather_text("begun" if self._begun else "", what)):
            self._complete_step()

    # Its state between two steps, beside model, optimizers and plan

    def what_is_open(self) -> str:
        """What stands against this being between two steps, in words; empty where nothing does."""
        self.flush()
        if self._hooks.in_backward:
            return "a backward pass is under way"
        if num_passes := self._counting.num_passes:
            return f"the gradients of {num_passes} backward pass(es) have accumulated and were not exchanged yet"
        if self._awaits_backward:
            return "the model was called and no backward pass has followed (evaluate under torch.no_grad())"
        if not self._is_updated and self._has_gradients_to_use():
            return "gradients were exchanged and no optimizer.step() has used them yet"
        return ""

    def _has_gradients_to_use(self) -> bool:
        """Whether gradients are there that a `GradScaler` has no reason to leave out."""
        held = [own for exchange in self._exchanges for own in exchange.held]
        gradients = [p.grad for p in (*self.model.parameters(), *held) if p.grad is not None]
        return any(bool(gradient.any()) for gradient in gradients) and all(
            bool(torch.isfinite(gradient).all()) for gradient in gradients
        )

    def places(self) -> list[Place]:
        """Where optimizer state lies that ranks have shared out."""
        return [place for exchange in self._exchanges for place in exchange.places()]

    @property
    def alarm_ids(self) -> set[int]:
        """`id`s of what optimizers may hold that is no parameter of anything."""
        return {id(alarm.parameter) for alarm in self._state.alarms.values()}

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Those that each rank has as its own at present, because of what it has seen or because they are ignored."""
        same = [*self._buffers.equal, *self._batch_norms.buffers]
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in same}

    def progress(self) -> dict[str, Any]:
        """What the steps to come depend on, on rank 0, whose word counts."""
        buckets = [exchange for exchange in self._exchanges if isinstance(exchange, BucketExchange)]
        return {
            "counting": self._counting.state_dict(),
            "buffers_are_equal": self._buffers.are_equal,
            "misplaced": self._misplaced,
            "last_arrivals": list(self.last_arrivals),
            "votes": [bucket.votes for bucket in buckets],
            "vote_for_new_order": bool(buckets) and buckets[0].vote_for_new_order,
        }

    def go_on_from(self, step: int, progress: dict[str, Any], *, same_plan: bool) -> None:
        """Goes on after so many steps; on all ranks together, model, optimizers and plan restored already.

        Args:
            step: How many lie behind.
            progress: From `progress`.
            same_plan: Whether the plan is the one of that moment.
        """
        for parameter in (*self.model.parameters(), *(own for one in self._exchanges for own in one.held)):
            parameter.grad = None
        self._state.index, self._is_updated = step, True
        self._awaits_backward = False
        self._counting.load_state_dict(progress["counting"])
        self._buffers.note_equal(progress["buffers_are_equal"])
        if same_plan:
            self._misplaced, self.last_arrivals = progress["misplaced"], progress["last_arrivals"]
            buckets = [exchange for exchange in self._exchanges if isinstance(exchange, BucketExchange)]
            for bucket, votes in zip(buckets, progress["votes"], strict=True):
                bucket.votes = votes
            if buckets and self.group.rank == 0:
                buckets[0].vote_for_new_order = progress["vote_for_new_order"]

    # What autograd tells

    def _items(self) -> float:
        """What the loss of the backward pass under way on this rank is a mean over."""
        return self._counting.items_of_pass(under_way=self._hooks.in_backward)

    def _on_forward(self, before: bool) -> None:
        if before:
            if not inside_backward():
                self._was_forward = True
                self._awaits_backward = any(parameter.requires_grad for parameter in self.model.parameters())
                self.refresh()
                self._compare_if_due()
            self._lookout.keep(self._deferral is not None)
            self.recorder.begin(Activity.FORWARD)
            if self.plan.wait_free and self._state.syncing:
                self._begin(backward=False)
        else:
            self.recorder.end(Activity.FORWARD)

    def _on_backward_start(self) -> None:
        self.flush()
        for exchange in self._exchanges:
            exchange.begin_backward()
        self._check_not_too_late()
        self._compare_if_due()
        if (factor := self._counting.begin_pass()) != 1.0:
            self._reweigh(factor)
        self.recorder.begin(Activity.BACKWARD)
        if self.plan.wait_free and self._state.syncing:
            self._counting.seal()
            self._begin(backward=True)

    def _reweigh(self, factor: float) -> None:
        """Multiplies the gradients that have accumulated on this rank."""
        for exchange in self._exchanges:
            exchange.reweigh(factor)
        if self.group.world_size == 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _on_backward_end(self) -> None:
        self._was_forward = self._awaits_backward = False
        self.recorder.end(Activity.BACKWARD)
        if self._state.syncing:
            self.on_computed()
            self._hand_over()
        else:
            for exchange in self._exchanges:
                exchange.end_unsynced()

    def _on_all_ended(self) -> None:
        if self._state.syncing:
            self._exchange()

    def _on_backward_broken(self) -> None:
        if self._exchanges and self._state.syncing:
            raise CommError(
                f"rank {self.group.rank}: the last backward pass broke off with an exception in exchange "
                f"{self._state.index}, and the other ranks wait for its gradients; let the exception end the program, "
                "or call poseidon.shutdown(reason) where it is caught"
            )

    # One exchange

    def _exchange(self) -> None:
        """The exchange of one step, and what is learned from it."""
        before = self.last_arrivals
        self._complete_step()
        if any(exchange.wants_new_order() for exchange in self._exchanges):
            self._reorder()
        else:
            self._vote(before)
        self.on_exchanged()
        if self.optimizer is None:
            self._buffers.after_step()

    def _hand_over(self) -> None:
        """This rank's part of the step is complete: everything may leave, and nothing is waited for."""
        self.flush()
        for exchange in self._exchanges:
            exchange.flush()
        self._counting.seal()
        self._begin(backward=not self._counting.leaving)
        self._batch_norms.end_step()

    def _begin(self, *, backward: bool) -> None:
        """Hands the step's schedule to the communication threads, each part once in every step.

        Args:
            backward: Whether what backward makes ready is to go too.
        """
        if self._threads is None:
            return
        self._threads.raise_failure()
        wanted = self._schedule.all if backward else self._schedule.head
        if more := wanted[len(self._begun) :]:
            self._threads.begin(more)
            self._begun = wanted

    def _complete_step(self) -> None:
        """Waits for what is under way, finishes each gradient as its transfers end, and closes the step."""
        self._hand_over()
        if self._deferral is not None:  # what was deferred in the step before has ended now
            self._unused.look([e for e in self._exchanges if e not in self._finishing], self._state.index - 1)
        self._begin(backward=True)
        self._batch_norms.listen()
        if self._threads is not None:
            self._finish()
            self._unused.look(self._finishing, self._state.index)
            self._oversight.remember(self._finishing)
        elif (factor := self._state.weighing.by_rank[0]) not in (0.0, 1.0):
            self._reweigh(factor)
        if self._deferral is not None:
            self._postpone(self._deferral)
        self._close_step()

    def _finish(self) -> None:
        self._wait(self._counting.transfer)
        for exchange in self._finishing:
            for transfer in exchange.transfers:
                self._wait(transfer)
            with undisturbed():
                exchange.finish()
        self.recorder.add_transfers([self._counting.transfer])
        self.recorder.add_transfers(t for exchange in self._finishing for t in exchange.transfers)

    def _postpone(self, deferral: Deferral) -> None:
        assert self._threads is not None
        under_way = deferral.postpone()
        for transfer in under_way:  # so that what the loop itself sends to all ranks comes after it on every rank
            self._threads.wait_issued(transfer)
        self.recorder.add_under_way(under_way)

    def _close_step(self) -> None:
        self.recorder.close_step(self._state.index, self.label)
        self._batch_norms.next_step()
        self._state.index += 1
        self._is_updated = not self.optimizers
        self.group.num_exchanges += 1
        self.last_arrivals = list(self._state.arrivals)
        self._state.arrivals = {}
        for exchange in self._finishing:
            exchange.reset()
        self._begun = []
        self.leaving.after_exchange(self.step, self._counting.asked)
        if text := self._counting.end():
            self.note("weighted", text, loud=True)

    def _answer(self) -> bool:
        """One exchange without a part; False if every rank has run out, and nothing was exchanged."""
        if self._threads is None:
            return False
        self._state.syncing = True
        self.refresh()
        self._compare_if_due()
        self._hand_over()
        self._batch_norms.listen()
        self._wait(self._counting.transfer)
        if not self._state.weighing.all_leave:
            self._exchange()
            return True
        for transfer in self._schedule.head:
            self._wait(transfer)
        for transfer in self._schedule.tail:
            transfer.withdraw()
        for exchange in self._exchanges:
            exchange.reset()
        self._counting.end()
        self._batch_norms.next_step()
        self._begun = []
        self.recorder.restart()
        return False

    def _wait(self, transfer: Transfer, steps_ago: int = 0) -> None:
        """For one of the schedule of this step, or of an earlier one."""
        assert self._threads is not None
        num_exchanges = self.group.num_exchanges - steps_ago
        if not transfer.done.is_set():
            start = time.time()
            self._threads.wait(transfer, num_exchanges)
            self.recorder.add(Activity.EXPOSED, transfer.name, start, time.time())
        self._threads.wait(transfer, num_exchanges)

    def _wait_for(self, pending: Pending, name: str) -> None:
        """For what the training thread has issued itself."""
        assert self._threads is not None
        start = time.time()
        self._threads.wait_for(pending, name)
        self.recorder.add(Activity.EXPOSED, name, start, time.time(), pending.num_bytes)

    # Order of arrival

    def _vote(self, before: Sequence[str]) -> None:
        """On rank 0: votes for new buckets once gradients have come in the same other order several times in a row.

        Only layers in buckets count: what travels layer by layer loses little by its place.
        """
        bucketed = {
            name for exchange in self._exchanges if isinstance(exchange, BucketExchange) for name in exchange.layers
        }
        arrived = [name for name in self.last_arrivals if name in bucketed]
        if [name for name in self.plan.arrival if name in set(arrived)] == arrived:
            self._misplaced = 0
        else:
            self._misplaced = self._misplaced + 1 if self.last_arrivals == before else 1
        buckets = [exchange for exchange in self._exchanges if isinstance(exchange, BucketExchange)]
        if buckets and self.group.rank == 0:
            buckets[0].vote_for_new_order = self._misplaced >= VOTE_AFTER

    def _reorder(self) -> None:
        seen = self.last_arrivals
        mine = [*dict.fromkeys(seen), *(name for name in self.plan.arrival if name not in seen)]
        arrival = json.loads(self.group.broadcast_text(json.dumps(mine), "sending the order of arrival"))
        if self.group.rank == 0:
            log.info(
                "gradients arrive in another order than planned: new buckets from exchange %d on", self._state.index
            )
        self._misplaced = 0
        self.adopt(self.plan.with_arrival(arrival), self.label)

    # The optimizer

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if self._deferral is not None:
            self._deferral.before_step(args, kwargs, is_last=self._step_hooks[optimizer].is_last_before)
        self._show_whole(False)
        self._step_hooks[optimizer].begin()
        if self._oversight.happened():
            self._say_what_was_overlooked()
        self.recorder.begin(Activity.OPTIMIZER)

    def _say_what_was_overlooked(self) -> None:
        first, *others = [name for exchange in self._exchanges if exchange.held for name in exchange.layers]
        names = f"{first} and {len(others)} more" if others else first
        self.note(
            "overlooked",
            f"gradients in p.grad were changed before optimizer.step(), those of {names} on sharded_server were not: "
            "torch.nn.utils.clip_grad_norm_ does not see them; use run.clip_grad_norm_",
            loud=True,
        )

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        if any(exchange.optimizer is optimizer for exchange in self._exchanges):
            log.warning(
                "rank %d: optimizer.state_dict() holds this rank's shards of layers on sharded_server only; all ranks "
                "together get the whole state from run.optimizer_state_dict()",
                self.group.rank,
            )

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.recorder.end(Activity.OPTIMIZER)
        self._is_updated = True
        if self._deferral is not None:
            self._deferral.after_step()
            self._step_hooks[optimizer].end()
        pendings = [
            (exchange.name, exchange.after_optimizer())
            for exchange in self._exchanges
            if exchange.optimizer in (None, optimizer)
        ]
        with self.group.waiting("the gathering of parameters after optimizer.step()"):
            for name, pending in pendings:
                if pending is not None:
                    self._wait_for(pending, f"{name} (gather)")
        self._buffers.after_step()
        self._show_whole(True)  # to the hooks that follow: what they change has to change on every rank

    def _show_whole(self, whole: bool) -> None:
        for exchange in self._exchanges:
            exchange.show_whole(whole)
