"""Which gradients are dense, which are outer products, which are touched rows: by looking, then by watching a step.

What a module is says what its gradient could be. Whether it is so shows only when it runs: a weight may be used
outside its module too, or the module's forward may never be called. So `StepWatch` watches one backward pass, counts
rows, and compares a few rows of each weight's gradient with what the factors, or the looked up rows, alone would give.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from poseidon.errors import ProfileError
from poseidon.profile.graph import GradientStructure, LayerSpec, ModelProfile, TensorSpec
from poseidon.profile.hook import GradientHook, has_gradient_hooks, inside_backward

SAMPLED_ROWS = 8
"""Rows of a weight gradient that are compared with what the factors give."""


def owned_parameters(
    model: nn.Module, *, trained: Container[int] = (), ignored: Container[str] = ()
) -> dict[str, dict[str, nn.Parameter]]:
    """The trainable parameters of each layer: of a module that owns some, by module name.

    A parameter that several modules share belongs to the first of them in `named_modules` order.

    Args:
        model: The root module.
        trained: `id`s of parameters that count as trainable even while they are frozen.
        ignored: Names of parameters that belong to no layer.

    Raises:
        ProfileError: A lazy module has not been given its parameters yet.
    """
    seen: set[int] = set()
    owned: dict[str, dict[str, nn.Parameter]] = {}
    for name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            is_trained = parameter.requires_grad or id(parameter) in trained
            is_ignored = (f"{name}.{own_name}" if name else own_name) in ignored
            if isinstance(parameter, UninitializedParameter) and not is_ignored:
                raise ProfileError(
                    f"parameter {own_name!r} of layer {name!r} has no shape yet: run a forward pass on a sample batch "
                    "first, which gives a lazy module its parameters"
                )
            if is_trained and not is_ignored and id(parameter) not in seen:
                seen.add(id(parameter))
                owned.setdefault(name, {})[own_name] = parameter
    return owned


def compiled_blocks(model: nn.Module) -> list[str]:
    """Names of the modules that `torch.compile` or `module.compile()` has made one thing of; none inside another."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        if _is_compiled(module) and block_of(name, blocks) is None:
            blocks.append(name)
    return blocks


def say_compiled(model: nn.Module) -> str:
    """What compiling costs a run, in words; nothing where no part is compiled."""
    blocks = compiled_blocks(model)
    if not blocks:
        return ""
    first = blocks[0] or "the model"
    what = f"{first} and {len(blocks) - 1} more parts are" if len(blocks) > 1 else f"{first} is"
    return f"{what} compiled: {COMPILED}"


COMPILED = (
    "what is inside gets its gradients together, at the end of its own backward pass, so that their transfers overlap "
    "only with what backward reaches after it; and they travel dense"
)
"""What that means for a run."""


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def block_of(name: str, blocks: list[str]) -> str | None:
    """The compiled block that a module is, or is a part of."""
    return next((block for block in blocks if name == block or not block or name.startswith(f"{block}.")), None)


def visible_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose calls tell layers apart, by name.

    These are the modules that own trainable parameters, leaf modules without any, and compiled blocks, into which
    nobody can look.
    """
    owned, blocks = owned_parameters(model), compiled_blocks(model)
    return {
        name: module
        for name, module in model.named_modules()
        if name in blocks
        or (block_of(name, blocks) is None and (name in owned or next(module.children(), None) is None))
    }


def visible_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters, each with the visible layer in whose backward its gradient is computed."""
    blocks = compiled_blocks(model)
    return [
        (name if (block := block_of(name, blocks)) is None else block, parameter)
        for name, parameters in owned_parameters(model).items()
        for parameter in parameters.values()
    ]


def possible_structure(module: nn.Module, *, shared: set[int]) -> tuple[GradientStructure, str]:
    """What the gradient of a module's weight could be, and why it is dense where the kind of module allows more.

    Args:
        module: A module that owns parameters.
        shared: `id`s of the parameters that more than one module owns.
    """
    if type(module) is nn.Linear or hasattr(module, "factor_math"):
        return _unless(GradientStructure.OUTER_PRODUCT, _reason_against(module, shared))
    if type(module) in (nn.Embedding, nn.EmbeddingBag):
        return _unless(GradientStructure.ROWS, _reason_against(module, shared) or _reason_against_rows(module))
    return GradientStructure.DENSE, ""


def _unless(structure: GradientStructure, reason: str) -> tuple[GradientStructure, str]:
    return (GradientStructure.DENSE, reason) if reason else (structure, "")


def _reason_against(module: nn.Module, shared: set[int]) -> str:
    weight = module.weight
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from other parameters"
    if id(weight) in shared:
        return "its weight is tied: another module uses it too"
    if not weight.requires_grad:
        return "its weight is frozen"
    if weight.is_complex():
        return "its weight is complex"
    if getattr(module.forward, "__func__", None) is not type(module).forward:
        return "its forward has been replaced on the instance"
    for name, parameter in module.named_parameters(recurse=False):
        if has_gradient_hooks(parameter):
            return f"its {name} has gradient hooks, which would not see a gradient of this rank"
    return ""


def _reason_against_rows(module: nn.Module) -> str:
    assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
    if module.max_norm is not None:
        return "max_norm changes the rows that this rank looks up, and so the replicas would drift apart"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts the lookups of one rank only"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "mode 'max' has no sparse gradient"
    return ""


def shared_parameters(model: nn.Module) -> set[int]:
    """`id`s of the parameters that more than one module owns."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in set(module._parameters.values()):
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {key for key, count in owners.items() if count > 1}


def profile_structure(model: nn.Module, *, trained: Container[int] = (), ignored: Container[str] = ()) -> ModelProfile:
    """What can be said of a model without running it: layers in module order, possible structures, no rows.

    Args:
        model: The root module.
        trained: As for `owned_parameters`.
        ignored: As for `owned_parameters`.
    """
    shared, blocks = shared_parameters(model), compiled_blocks(model)
    layers = [
        layer_spec(name, model.get_submodule(name), parameters, shared)
        for name, parameters in owned_parameters(model, trained=trained, ignored=ignored).items()
    ]
    return ModelProfile(
        model=type(getattr(model, "_orig_mod", model)).__name__,
        batch_size=0,
        layers=tuple(layer if block_of(layer.name, blocks) is None else _as_compiled(layer) for layer in layers),
        is_compiled=bool(blocks),
    )


def layer_spec(name: str, module: nn.Module, parameters: dict[str, nn.Parameter], shared: set[int]) -> LayerSpec:
    """One layer as data."""
    structure, reason = possible_structure(module, shared=shared)
    if structure is not GradientStructure.DENSE:
        parameters = dict(sorted(parameters.items(), key=lambda item: item[0] != "weight"))
    return LayerSpec(
        name=name,
        kind=type(module).__name__,
        parameters=tuple(
            TensorSpec(
                name=key,
                shape=tuple(p.shape),
                dtype=str(p.dtype).removeprefix("torch."),
                num_bytes=p.numel() * p.element_size(),
            )
            for key, p in parameters.items()
        ),
        structure=structure,
        reason=reason,
        is_sparse=getattr(module, "sparse", False) is True,
        is_shared=any(id(parameter) in shared for parameter in parameters.values()),
        factor_num_bytes=next(iter(parameters.values())).element_size(),
    )


@dataclass
class _Seen:
    """What the backward passes before an exchange showed of one layer."""

    rows: int = 0
    itemsize: int = 0
    expected: torch.Tensor | None = None
    """What the factors give for the sampled rows of the weight gradient."""
    actual: torch.Tensor | None = None
    """What stands in the gradient for them after backward."""
    before: torch.Tensor | None = None
    """What stood there when forward began; the loop may have zeroed it since, or not."""
    sample: torch.Tensor | None = None
    looked_up: list[torch.Tensor] = field(default_factory=list)
    """Of an embedding: the row numbers of each call."""
    has_other_rows: bool = False
    """Whether autograd gave something for rows that no call looked up."""
    is_compared: bool = False
    """Whether a whole backward pass lies behind: what further ones add to the gradient may come in another unit."""
    tolerance: float = 1e-3

    def begin_call(self) -> None:
        """The layer is called; once more after a backward pass if several are accumulated."""
        self.is_compared = self.is_compared or (self.actual is not None and not inside_backward())


@dataclass
class StepWatch:
    """Watches forward and backward of a model until `profile` is called.

    Install it before anything that changes gradients in autograd's hooks.
    """

    model: nn.Module
    ignored: Container[str] = ()
    """As for `owned_parameters`."""
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _forward_order: list[str] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)
    _batch_size: int = 0

    def __post_init__(self) -> None:
        base = profile_structure(self.model, ignored=self.ignored)
        self._model_name, self._is_compiled = base.model, base.is_compiled
        self._layers = {layer.name: layer for layer in base.layers}
        blocks = compiled_blocks(self.model)
        for layer in base.layers:
            if block_of(layer.name, blocks) is not None:
                continue  # it would be compiled again, with the hooks
            module = self.model.get_submodule(layer.name)
            self._handles.append(module.register_forward_pre_hook(lambda *_, n=layer.name: self._note_order(n)))
            if layer.structure is GradientStructure.DENSE:
                continue
            seen = self._seen[layer.name] = _Seen()
            watch = self._watch_factors if layer.structure is GradientStructure.OUTER_PRODUCT else self._watch_rows
            hook = lambda m, a, k, y, w=watch, s=seen: w(m, a, k, y, s)  # noqa: E731
            # Before hooks that may change the output.
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True, prepend=True))
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            taking = GradientHook(partial(self._take_actual, seen=seen))
            self._handles.append(weight.register_post_accumulate_grad_hook(taking))

    def _note_order(self, name: str) -> None:
        if name not in self._forward_order:
            self._forward_order.append(name)

    def _watch_factors(self, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor, seen: _Seen) -> None:
        if not output.requires_grad:
            return
        seen.begin_call()
        x = (args[0] if args else kwargs["input"]).detach()
        out_features = output.shape[-1]
        if seen.sample is None:
            step = max(1, out_features // SAMPLED_ROWS)
            seen.sample = torch.arange(0, out_features, step, device=output.device)[:SAMPLED_ROWS]
            self._note_before(module.weight, seen)

        def take(gradient: torch.Tensor) -> None:
            seen.rows += gradient.numel() // out_features
            seen.itemsize = gradient.element_size()
            if hasattr(module, "factor_math") or gradient.is_meta or seen.is_compared:
                return  # its numbers mean nothing, or enough was compared
            factor = gradient.reshape(-1, out_features)[:, seen.sample].float()
            part = factor.t() @ x.reshape(-1, x.shape[-1]).float()
            seen.expected = part if seen.expected is None else seen.expected + part
            seen.tolerance = _tolerance(gradient)

        output.register_hook(take)

    def _watch_rows(self, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor, seen: _Seen) -> None:
        if not output.requires_grad:
            return
        seen.begin_call()
        indices = (args[0] if args else kwargs["input"]).detach()
        weight: Any = module.weight
        if indices.is_meta:  # which rows they are is not known: at most as many as there are lookups
            rows = indices.new_empty(min(indices.numel(), module.num_embeddings))
        else:
            rows = torch.unique(indices)
            if not seen.looked_up and weight.grad is not None:
                seen.looked_up.append(_rows_not_zero(weight.grad))
            seen.looked_up.append(rows)
        if seen.sample is None and type(module) is nn.Embedding and not indices.is_meta:
            padding = -1 if module.padding_idx is None else module.padding_idx
            seen.sample = rows[rows != padding][:SAMPLED_ROWS].long()
            self._note_before(weight, seen)

        def take(gradient: torch.Tensor) -> None:
            seen.rows += rows.numel()
            seen.itemsize = gradient.element_size()
            seen.tolerance = _tolerance(gradient)
            if seen.sample is not None and not gradient.is_meta and not seen.is_compared:
                hits = indices.reshape(1, -1) == seen.sample.view(-1, 1)
                part = hits.float() @ gradient.reshape(hits.shape[1], -1).float()
                seen.expected = part if seen.expected is None else seen.expected + part

        output.register_hook(take)

    @staticmethod
    def _note_before(weight: Any, seen: _Seen) -> None:
        if weight.grad is not None and seen.sample is not None and not weight.is_meta:
            seen.before = _sampled(weight.grad, seen.sample)

    @staticmethod
    def _take_actual(parameter: torch.Tensor, seen: _Seen) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_meta:
            return
        if seen.looked_up:
            seen.has_other_rows = not bool(torch.isin(_rows_not_zero(gradient), torch.cat(seen.looked_up)).all())
        if seen.sample is not None and not seen.is_compared:
            seen.actual = _sampled(gradient, seen.sample)

    def profile(self, batch_size: int = 0) -> ModelProfile:
        """Ends the watching; layers in the order in which forward reached them, those it did not reach last."""
        for handle in self._handles:
            handle.remove()
        order = self._forward_order + [name for name in self._layers if name not in self._forward_order]
        return ModelProfile(
            model=self._model_name,
            batch_size=batch_size,
            layers=tuple(self._judge(self._layers[name]) for name in order),
            is_compiled=self._is_compiled,
        )

    def _judge(self, layer: LayerSpec) -> LayerSpec:
        seen = self._seen.get(layer.name)
        if seen is None:
            return layer
        if not seen.rows:
            if layer.structure is GradientStructure.ROWS:
                return layer  # nothing looked up in this step; rows may come
            return _as_dense(layer, "its forward was not called, or no gradient came back through it")
        if not _agrees(seen):
            return _as_dense(layer, "its weight is used outside the module too, or in another way than its kind has it")
        return layer.model_copy(update={"rows": seen.rows, "factor_num_bytes": seen.itemsize})


def _tolerance(gradient: torch.Tensor) -> float:
    """How far sums may be apart that are added up in another order, in numbers of the gradient's width."""
    return 0.1 if gradient.element_size() < torch.float32.itemsize else 1e-3


def _agrees(seen: _Seen) -> bool:
    if seen.has_other_rows or seen.actual is None or seen.expected is None:
        return not seen.has_other_rows
    most = seen.tolerance * torch.linalg.vector_norm(seen.actual) + torch.finfo(torch.float32).tiny
    expectations = [seen.expected] if seen.before is None else [seen.expected, seen.expected + seen.before]
    return any(bool(torch.linalg.vector_norm(seen.actual - expected) <= most) for expected in expectations)


def _as_dense(layer: LayerSpec, reason: str) -> LayerSpec:
    return layer.model_copy(update={"structure": GradientStructure.DENSE, "reason": reason})


def _as_compiled(layer: LayerSpec) -> LayerSpec:
    if layer.structure is GradientStructure.DENSE:
        return layer
    return _as_dense(layer, "it is compiled, and what goes in and out of it cannot be seen")


def _sampled(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return gradient.detach().index_select(0, rows).to_dense().float()


def _rows_not_zero(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.is_sparse:
        return gradient.coalesce().indices()[0]
    rows: torch.Tensor = torch.linalg.vector_norm(gradient, dim=1).nonzero()[:, 0]
    return rows


def merge(profiles: list[ModelProfile]) -> ModelProfile:
    """One profile from those of all ranks: the first one's order, the most rows, dense where any rank says so."""
    merged = []
    for layer in profiles[0].layers:
        same = [next(other for other in profile.layers if other.name == layer.name) for profile in profiles]
        dense = next((other for other in same if other.reason and not other.rows), None)
        rows = max(other.rows for other in same)
        if dense is not None and (rows == 0 or "not called" not in dense.reason):
            merged.append(_as_dense(layer, dense.reason))
        else:
            seen = next((other for other in same if other.rows), layer)
            merged.append(seen.model_copy(update={"rows": rows}))
    accumulate = max(profile.accumulate for profile in profiles)
    return profiles[0].model_copy(update={"layers": tuple(merged), "accumulate": accumulate})
