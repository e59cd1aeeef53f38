"""Overlap with the next forward: transfers of some layers may end when the layer is needed again, and no earlier.

When `backward()` returns, a `StandIn` lies in `p.grad` of a deferred layer. `optimizer.step()` passes the layer by;
what it would have done is owed, with the hyperparameters of that moment. It is paid when the layer's module is called
again, or when anything else needs its parameters or its gradient: then we wait for the transfers, finish the gradient
and let the optimizer update these parameters alone. So every number is as if nothing had been deferred.

What needs them is seen in three ways. A hook of the module sees its next forward. A torch function mode sees every
function of torch that is handed one of the parameters, in the loop or in the model, on the thread that trains. The
stand-in sees whatever reads the gradient below Python. State that the optimizer keeps is seen at its `state_dict()`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only

from poseidon.comm.capture import ModuleHook, Removable
from poseidon.comm.scheme import BoundLayer, CommScheme, Exchange, Transfer
from poseidon.comm.sharded_server import ELEMENTWISE
from poseidon.errors import InfeasibleError
from poseidon.profile.structure import shared_parameters

SHORT = 64
"""A list of at most so many is always looked through for parameters."""
_GRADIENT: Any = torch.Tensor.grad
_GET_GRADIENT = _GRADIENT.__get__
_ZEROING = frozenset({torch.Tensor.zero_, torch._foreach_zero_})
_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "requires_grad", "is_sparse")
_METADATA = frozenset(
    {
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
        torch.Tensor.requires_grad_,
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
    }
)
"""What may be asked of a parameter, and done to its gradient, without knowing the numbers in either."""
_ZERO_ONE, _ZERO_MANY = torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default


class StandIn(torch.Tensor):
    """Lies in `p.grad` while the gradient is under way; whatever is done with it is done with the gradient."""

    _owed: "Owed"
    _gradient: torch.Tensor | None
    """The last one that was finished; None before, and where no rank made one."""
    _zeroed: bool
    """The loop has zeroed it after `optimizer.step()`: once the update is paid, the gradient will be zero."""

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, owed: "Owed") -> Self:
        """Of the parameter's shape and layout, with no memory of its own."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )

    def __init__(self, parameter: nn.Parameter, owed: "Owed") -> None:
        del parameter
        self._owed = owed
        self._gradient = None
        self._zeroed = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Acts on the gradients, which are finished first; zeroing them after `optimizer.step()` can wait."""
        if func is _ZERO_ONE and args[0]._zero_later():
            return args[0]
        if func is _ZERO_MANY:
            args = ([t for t in args[0] if not (isinstance(t, StandIn) and t._zero_later())],)
            if not args[0]:
                return None
        args, kwargs = tree_map_only(StandIn, StandIn._finished, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _zero_later(self) -> bool:
        self._zeroed = self._zeroed or self._owed.update is not None
        return self._zeroed

    def _finished(self) -> torch.Tensor:
        if self._owed.is_open:
            self._owed.settle()
        if self._gradient is not None:
            return self._gradient
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class Update:
    """What `optimizer.step()` would have done to some parameters, had their gradients been there."""

    optimizer: torch.optim.Optimizer
    settings: list[dict[str, Any]]
    """Of each of the optimizer's groups, as they were then."""
    members: list[tuple[int, nn.Parameter]] = field(default_factory=list)
    """Parameters, and the groups that they are in."""

    def pay(self) -> None:
        """Does it now; hooks of `step` have been called then, and schedulers have counted it."""
        groups = [
            {**settings, "params": [p for index, p in self.members if index == number]}
            for number, settings in enumerate(self.settings)
        ]
        step: Any = type(self.optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        now, self.optimizer.param_groups = self.optimizer.param_groups, [g for g in groups if g["params"]]
        try:
            step(self.optimizer)
        finally:
            self.optimizer.param_groups = now


class Owed:
    """One deferred exchange: its stand-ins and, after `optimizer.step()`, the update that is due."""

    def __init__(self, exchange: Exchange, settle: Callable[["Owed"], None]) -> None:
        self.exchange = exchange
        self.stand_ins = [StandIn(parameter, self) for parameter in exchange.parameters]
        self.is_open = False
        """Whether the gradients of the last exchange have not been finished."""
        self.update: Update | None = None
        self.noted: set[Transfer] = set()
        """The transfers that ended before the step did, and are in its timeline."""
        self._held: list[torch.Tensor | None] = []
        """What lay in `p.grad` when backward ended."""
        self._withheld: set[int] = set()
        """Places of the parameters whose stand-ins `optimizer.step()` is not to see."""
        self._settle = settle

    def settle(self) -> None:
        """Finishes the gradients and pays the update."""
        self._settle(self)

    def open(self) -> None:
        """Backward has ended: from here on stand-ins lie in `p.grad`."""
        self.is_open = True
        self._held = [parameter.grad for parameter in self.exchange.parameters]
        for parameter, stand_in in zip(self.exchange.parameters, self.stand_ins, strict=True):
            stand_in._gradient, stand_in._zeroed = None, False
            parameter.grad = stand_in

    def withhold(self, update: Update, group_of: dict[int, int]) -> None:
        """`optimizer.step()` begins: it is to pass by what is still a stand-in, which is owed from here on."""
        self.update = update
        for place, (parameter, stand_in) in enumerate(zip(self.exchange.parameters, self.stand_ins, strict=True)):
            if parameter.grad is stand_in and id(parameter) in group_of:
                update.members.append((group_of[id(parameter)], parameter))
                self._withheld.add(place)
                parameter.grad = None

    def hand_back(self) -> None:
        """`optimizer.step()` has ended."""
        for place in self._withheld:
            self.exchange.parameters[place].grad = self.stand_ins[place]
        self._withheld.clear()

    def finish(self) -> None:
        """The transfers have ended: the gradients in `p.grad`, unless the loop has put something else there."""
        parameters = self.exchange.parameters
        self.hand_back()
        now = [parameter.grad for parameter in parameters]
        for parameter, held in zip(parameters, self._held, strict=True):
            parameter.grad = held
        self.exchange.finish()
        if self.update is not None:
            with self.exchange.step.working("optimizer", self.exchange.name):
                self.update.pay()
        for parameter, stand_in, present in zip(parameters, self.stand_ins, now, strict=True):
            stand_in._gradient = parameter.grad
            if present is not stand_in:
                parameter.grad = present
            elif stand_in._zeroed and parameter.grad is not None:
                parameter.grad.zero_()
            stand_in._zeroed = False
        self._close()

    def drop(self) -> None:
        """Nothing will come any more: no stand-in stays behind."""
        self.hand_back()
        for parameter, stand_in in zip(self.exchange.parameters, self.stand_ins, strict=True):
            if parameter.grad is stand_in:
                parameter.grad = None
        self._close()

    def _close(self) -> None:
        self.is_open, self.update, self._held = False, None, []
        self.noted.clear()


class Lookout(TorchFunctionMode):
    """Sees every function of torch that is handed a parameter, or a stand-in, of an exchange that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.owed: dict[int, Owed] = {}
        """By the `id` of each parameter and stand-in."""
        self._is_kept = False

    def keep(self, wanted: bool) -> None:
        """Looks, or no longer, on this thread: the one that trains."""
        if wanted and not self._is_kept:
            self.__enter__()
        elif not wanted and self._is_kept:
            self.__exit__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.owed and func not in _METADATA:
            self._look_at(func, args)
            if kwargs:
                self._look_at(func, kwargs.values())
        return func(*args, **kwargs)

    def _look_at(self, func: Any, values: Iterable[Any]) -> None:
        for value in values:
            if (owed := self.owed.get(id(value))) is not None:
                if not _can_wait(func, value, owed):
                    owed.settle()
            elif isinstance(value, list | tuple) and _may_hold_tensors(value):
                self._look_at(func, value)

    def add(self, owed: Owed) -> None:
        """From here on."""
        for tensor in (*owed.exchange.parameters, *owed.stand_ins):
            self.owed[id(tensor)] = owed

    def remove(self, owed: Owed) -> None:
        """No longer."""
        for tensor in (*owed.exchange.parameters, *owed.stand_ins):
            self.owed.pop(id(tensor), None)

    def __enter__(self) -> Self:
        """Below the modes that are there, since who has entered one takes the uppermost out."""
        above = [_pop_mode() for _ in _get_current_function_mode_stack()]
        if above and above[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
            _push_mode(above.pop())  # of `torch.set_default_device`, which expects to find it at the bottom
        for mode in (self, *reversed(above)):
            _push_mode(mode)
        self._is_kept = True
        return self

    def __exit__(self, *_: object) -> None:
        modes = [_pop_mode() for _ in _get_current_function_mode_stack()]
        for mode in reversed(modes):
            if mode is not self:
                _push_mode(mode)
        self._is_kept = False


def _may_hold_tensors(values: Sequence[Any]) -> bool:
    """A long list of anything else, samples say that become a tensor, is not looked through."""
    return len(values) <= SHORT or isinstance(values[0], torch.Tensor | list | tuple)


def _can_wait(func: Any, value: Any, owed: Owed) -> bool:
    """After `optimizer.step()` a gradient may be looked for, and zeroed, as `zero_grad()` does."""
    if func == _GET_GRADIENT:
        return owed.update is not None
    return func in _ZEROING and isinstance(value, StandIn)


class Deferral:
    """The deferred exchanges of a run.

    Args:
        exchanges: Them, in the order in which they are to end.
        model: The root module.
        optimizer: What updates their parameters.
        lookout: Tells when something needs the parameters.
        wait: Blocks until a transfer of the last exchange has ended.
        on_ended: Told of the transfers that have ended since.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lookout: Lookout,
        wait: Callable[[Transfer], None],
        on_ended: Callable[[Iterable[Transfer]], None],
    ) -> None:
        self._all = [Owed(exchange, self._settle) for exchange in exchanges]
        self._optimizer = optimizer
        self._wait = wait
        self._on_ended = on_ended
        self._lookout = lookout
        self._handles: list[Removable] = [
            model.get_submodule(name).register_forward_pre_hook(ModuleHook(self._forward_hook(owed)))
            for owed in self._all
            for name in owed.exchange.layers
        ]
        self._handles.append(optimizer.register_state_dict_pre_hook(lambda _: self.settle()))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()))

    @staticmethod
    def _forward_hook(owed: Owed) -> Callable[..., None]:
        def before_forward(*_: Any) -> None:
            if owed.is_open:
                owed.settle()

        return before_forward

    def postpone(self) -> list[Transfer]:
        """Backward has ended; what is under way may go on.

        Returns:
            The transfers that have not ended.
        """
        for owed in self._all:
            owed.open()
            self._lookout.add(owed)
            owed.noted = {transfer for transfer in owed.exchange.transfers if transfer.done.is_set()}
            self._on_ended(owed.noted)
        return [t for owed in self._all for t in owed.exchange.transfers if t not in owed.noted]

    def settle(self) -> None:
        """Everything is paid: gradients are final, parameters up to date."""
        for owed in self._all:
            if owed.is_open:
                self._settle(owed)

    def _settle(self, owed: Owed) -> None:
        self._lookout.remove(owed)  # what follows touches the parameters
        with undisturbed():
            for transfer in owed.exchange.transfers:
                self._wait(transfer)
            self._on_ended(t for t in owed.exchange.transfers if t not in owed.noted)
            owed.finish()
        owed.exchange.reset()

    def before_step(self, args: Sequence[Any], kwargs: dict[str, Any], *, is_last: bool) -> None:
        """`optimizer.step()` begins.

        Args:
            args: Given to it, itself first.
            kwargs: Given to it.
            is_last: Whether no other hook comes between this and the step.
        """
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None or not is_last or any(owed.update for owed in self._all):
            self.settle()
        still_open = [owed for owed in self._all if owed.is_open]
        if not still_open:
            return
        groups = self._optimizer.param_groups
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        settings = [{key: _kept(value) for key, value in group.items() if key != "params"} for group in groups]
        with torch._C.DisableTorchFunction():
            for owed in still_open:
                owed.withhold(Update(self._optimizer, settings), group_of)

    def after_step(self) -> None:
        """`optimizer.step()` has ended."""
        for owed in self._all:
            owed.hand_back()

    def close(self, *, failed: bool) -> None:
        """Takes out what was put into model and optimizer.

        Args:
            failed: Whether nothing is exchanged any more: then what is owed cannot be paid.
        """
        try:
            if not failed:
                self.settle()
        finally:
            for owed in self._all:
                self._lookout.remove(owed)
                if owed.is_open:
                    owed.drop()
            for handle in self._handles:
                handle.remove()


def _kept(value: Any) -> Any:
    """A hyperparameter as it is now: a learning rate may be a tensor that a scheduler fills."""
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def undisturbed() -> Iterator[None]:
    """As in the loop itself, wherever the model is being called from: no graph, no inference mode, no autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def check_deferred(scheme: CommScheme, layers: Sequence[BoundLayer], model: nn.Module) -> None:
    """Raises InfeasibleError with the first reason why one of these layers cannot be deferred."""
    deferred = [layer for layer in layers if layer.deferred]
    if not deferred:
        return
    shared = shared_parameters(model)
    compiled = any(_is_compiled(module) for module in model.modules())
    for layer in deferred:
        reason = _reason_against(layer, scheme, shared) or (
            "a part of the model is compiled, which would not notice when the layer is needed" if compiled else ""
        )
        if reason:
            raise InfeasibleError(f"layer {layer.name!r} cannot be deferred: {reason}; take it out of plan.deferred")


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _reason_against(layer: BoundLayer, scheme: CommScheme, shared: set[int]) -> str:
    optimizer = layer.optimizer
    if scheme.kind == "sharded_server":
        return "sharded_server gathers its parameters at the end of optimizer.step()"
    if optimizer is None:
        return "its update would be applied later, but distribute() was given no optimizer"
    if type(optimizer) not in ELEMENTWISE:
        return (
            f"{type(optimizer).__name__} is not known to update each number from that number's own gradient and state "
            "alone, so it cannot be run for some parameters later than for others"
        )
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in layer.parameters.items():
        if id(parameter) in shared:
            return f"another module uses its {name} too"
        if id(parameter) not in updated:
            return f"the optimizer does not update its {name}"
    if getattr(layer.module, "sparse", False) is True:
        return "its gradients are sparse"
    return ""
