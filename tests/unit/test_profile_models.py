"""Models as people have them: what is a layer, what belongs to whom, and nothing of a step is left out."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from poseidon.profile.graph import OUTSIDE, GradientStructure, LayerSpec, ModelProfile
from poseidon.profile.measure import profile_model, scale_to
from poseidon.profile.structure import owned_parameters
from poseidon.profile.virtual import virtual_batch, virtual_loss, virtual_model
from poseidon.tasks.models import GPT

DENSE, OUTER, ROWS = GradientStructure.DENSE, GradientStructure.OUTER_PRODUCT, GradientStructure.ROWS


def profiled(model: nn.Module, sample: Any, loss: Any = None) -> dict[str, LayerSpec]:
    """The layers by name, after checks that hold for any model."""
    profile = profile_model(model, sample, loss or square, num_passes=3)
    layers = {layer.name: layer for layer in profile.layers}
    assert len(layers) == len(profile.layers), "each name once"
    owned = {n: {k: tuple(p.shape) for k, p in ps.items()} for n, ps in owned_parameters(model).items()}
    assert {x.name: {t.name: t.shape for t in x.parameters} for x in profile.trainable} == owned
    assert profile.layers[-1].name == "loss"
    assert profile.layers[-1].forward_seconds > 0
    assert profile.layers[-1].backward_seconds > 0
    assert min(min(x.forward_seconds, x.backward_seconds, x.weight_gradient_seconds) for x in profile.layers) >= 0
    assert ModelProfile.model_validate_json(profile.to_json()) == profile
    virtual = virtual_model(profile)
    virtual_loss(virtual, virtual_batch(profile)).backward()
    assert {tuple(p.shape) for p in virtual.parameters()} == {shape for ps in owned.values() for shape in ps.values()}
    return layers


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def language(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def test_bert() -> None:
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    layers = profiled(BertForMaskedLM(config), torch.randint(0, 50, (2, 8)), language)
    assert layers["bert.embeddings.position_embeddings"].structure is ROWS
    assert layers["bert.embeddings.position_embeddings"].rows == 8
    assert layers["bert.embeddings.word_embeddings"].reason.startswith("its weight is tied")
    query = layers["bert.encoder.layer.0.attention.self.query"]
    assert (query.structure, query.rows, query.calls) == (OUTER, 16, 1)
    assert query.weight_gradient_seconds > 0
    assert query.backward_seconds > 0
    decoder = layers["cls.predictions.decoder"]
    assert decoder.parameters == ()
    assert decoder.backward_seconds > 0
    assert layers["bert.encoder.layer.1.output.dropout"].kind == "Dropout"
    assert layers["before bert.encoder.layer.0.attention.output.dense"].kind == OUTSIDE, "the attention itself"


def test_gpt2_with_its_head_tied() -> None:
    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=None, eos_token_id=None
    )
    layers = profiled(GPT2LMHeadModel(config), torch.randint(0, 50, (2, 8)), language)
    assert layers["transformer.wte"].structure is DENSE
    assert layers["lm_head"].parameters == ()
    assert layers["lm_head"].flops == 2 * 16 * 16 * 50
    attention = layers["transformer.h.0.attn.c_attn"]
    assert (attention.kind, attention.structure, attention.flops) == ("Conv1D", DENSE, 2 * 16 * 16 * 48)
    assert layers["before transformer.h.0.attn.c_proj"].kind == OUTSIDE
    assert layers["before transformer.h.0.attn.c_proj"].flops == 4 * 2 * 8 * 8 * 16, "two products over all heads"


def test_attention_outside_of_modules_has_its_share_of_a_published_step() -> None:
    with torch.device("meta"):
        model = GPT(vocabulary_size=16, context=8, width=8, num_layers=1, num_heads=2)
        profile = profile_model(model, torch.zeros(2, 8, dtype=torch.long), square)
    attention = next(layer for layer in profile.layers if layer.kind == OUTSIDE)
    assert attention.name == "before blocks.0.projection"
    assert attention.flops == 4 * 2 * 8 * 8 * 8
    scaled = scale_to(profile, 1.0, source="a paper")
    assert next(layer for layer in scaled.layers if layer.kind == OUTSIDE).seconds > 0
    assert scaled.seconds == pytest.approx(1.0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.gru = nn.GRU(12, 10, batch_first=True)
        self.head = nn.Linear(10, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.lstm(self.words(x))[0])[0])


def test_lstm_and_gru() -> None:
    layers = profiled(Recurrent(), torch.randint(0, 30, (4, 6)))
    assert (layers["lstm"].structure, layers["gru"].structure) == (DENSE, DENSE)
    assert len(layers["lstm"].parameters) == 8
    assert min(layers["lstm"].backward_seconds, layers["gru"].backward_seconds) > 0
    assert (layers["head"].structure, layers["head"].rows) == (OUTER, 24)
    assert layers["words"].structure is ROWS


def test_frozen_parts_have_seconds_and_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    for index in (0, 2):
        model[index].requires_grad_(False)
    layers = profiled(model, torch.zeros(4, 8))
    assert (layers["0"].parameters, layers["2"].parameters) == ((), ())
    assert layers["2"].forward_seconds > 0
    assert layers["2"].backward_seconds == layers["3"].backward_seconds == 0, "backward does not come down here"
    assert layers["4"].weight_gradient_seconds > 0


def test_a_frozen_part_between_trainable_ones_is_passed_in_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    layers = profiled(model, torch.zeros(4, 8))
    assert layers["1"].parameters == ()
    assert layers["1"].backward_seconds > 0


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(F.relu(self.again(self.first(x))))


def test_a_module_that_is_called_twice_is_one_layer() -> None:
    again = profiled(Twice(), torch.zeros(4, 8))["again"]
    assert (again.calls, again.rows, again.flops) == (2, 8, 2 * (2 * 4 * 8 * 8))
    assert again.activation_num_bytes == 2 * 4 * 4 * 8


class Ways(nn.Module):
    """Two ways out of the same input, one that returns a dictionary, one that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner, self.relu, self.pair, self.same = nn.Linear(8, 8), nn.ReLU(inplace=True), Pair(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.inner(x * self.scale))
        pair = self.pair(x=self.same(x))
        return x + pair["a"] + pair["b"][0]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, *, x: torch.Tensor) -> dict[str, Any]:
        return {"a": x * self.weight, "b": [x * 2, None]}


def test_what_is_in_place_in_dictionaries_and_in_the_root() -> None:
    layers = profiled(Ways(), torch.zeros(4, 8))
    assert layers[""].parameters[0].name == "scale"
    assert layers["relu"].activation_num_bytes == 0, "it writes into what it is given"
    assert layers["relu"].backward_seconds > 0
    assert layers["pair"].backward_seconds > 0
    assert layers["pair"].activation_num_bytes == 2 * 4 * 4 * 8
    assert layers["same"].backward_seconds < layers["inner"].backward_seconds


def test_attention_whose_projection_is_never_called() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    profile = profile_model(model, torch.zeros(2, 4, 16), square, num_passes=2)
    names = [layer.name for layer in profile.layers]
    assert names.index("self_attn.out_proj") < names.index("self_attn"), "its gradient is ready when that one's is"
    layers = profiled(model, torch.zeros(2, 4, 16))
    assert layers["self_attn"].backward_seconds > 0
    assert (layers["self_attn.out_proj"].calls, layers["self_attn.out_proj"].structure) == (0, DENSE)
    assert any("never called: self_attn.out_proj" in note for note in profile.notes)


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.bottom, self.block, self.reentrant = nn.Linear(8, 8), block(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.block, self.bottom(x), use_reentrant=self.reentrant)
        assert isinstance(y, torch.Tensor)
        return y


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_in_backward_counts_there(reentrant: bool) -> None:
    layers = profiled(Recomputed(reentrant), torch.ones(4, 8))
    assert layers["block.2"].forward_seconds > 0
    assert layers["block.2"].backward_seconds > 0, "its input needs a gradient, as recomputing shows"
    assert (layers["block.2"].calls, layers["block.2"].rows) == (1, 4)
    assert layers["bottom"].weight_gradient_seconds > 0


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at its inputs
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_part_is_one_block(in_place: bool) -> None:
    middle = block()
    if in_place:
        middle.compile(backend="eager")
    else:
        middle = torch.compile(middle, backend="eager")  # type: ignore[assignment]
    model = nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8))
    compiled = middle._compiled_call_impl
    profile = profile_model(model, torch.zeros(4, 8), square, num_passes=2)
    assert middle._compiled_call_impl is compiled
    assert profile.notes[0].startswith("1 is compiled and counts as one block")
    layers = profiled(model, torch.zeros(4, 8))
    inside = [layer for name, layer in layers.items() if name.startswith("1.")]
    assert len(inside) == 2
    assert all(layer.structure is DENSE and layer.reason.startswith("it is compiled") for layer in inside)
    assert layers["1"].forward_seconds > 0
    assert layers["1"].backward_seconds > 0
    assert (layers["0"].structure, layers["2"].structure) == (OUTER, OUTER)


def test_a_model_that_is_compiled_as_a_whole() -> None:
    profile = profile_model(torch.compile(block(), backend="eager"), torch.zeros(4, 8), square, num_passes=2)  # type: ignore[arg-type]
    assert profile.model == "Sequential"
    assert [layer.name for layer in profile.trainable] == ["_orig_mod.0", "_orig_mod.2"]
    whole = next(layer for layer in profile.layers if layer.name == "")
    assert whole.kind == "OptimizedModule"
    assert whole.backward_seconds > 0
    assert profile.notes[0].startswith("the model is compiled")


def test_meta_has_the_same_layers_but_no_seconds() -> None:
    real = profile_model(Recurrent(), torch.randint(0, 30, (4, 6)), square, num_passes=1)
    with torch.device("meta"):
        meta = profile_model(Recurrent(), torch.zeros(4, 6, dtype=torch.long), square)
    assert (meta.seconds, meta.step_seconds, meta.device) == (0.0, 0.0, None)
    modules = [layer for layer in real.layers if layer.kind != OUTSIDE]
    for one, other in zip(meta.layers, modules, strict=True):
        assert one.name == other.name
        assert one.parameters == other.parameters
        assert (one.structure, one.flops, one.calls) == (other.structure, other.flops, other.calls)
        assert one.activation_num_bytes == other.activation_num_bytes
