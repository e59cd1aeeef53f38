"""Models of `transformers`, tiny, with random weights: 20 steps on three ranks are those of one process on the union.

Each rank has other numbers of samples and of tokens that count, the loss comes out of the model, and so do the outputs.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import poseidon
from support.exactness import STEPS, assert_close, make_plan
from support.ranks import preload, run_ranks

preload(*(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "bert", "vit", "resnet", "t5", "llama")))
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

RANKS = 3
SAMPLES = 11
"""Of all ranks together in a step: the ranks have 4, 4 and 3."""

Batch = dict[str, torch.Tensor]


def make_tokens(generator: torch.Generator, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and which of them are there: the samples have different lengths."""
    lengths = torch.randint(3, length + 1, (count, 1), generator=generator)
    return torch.randint(2, 61, (count, length), generator=generator), torch.arange(length) < lengths


def language(generator: torch.Generator, count: int) -> Batch:
    tokens, mask = make_tokens(generator, count, 9)
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def sentences(generator: torch.Generator, count: int) -> Batch:
    tokens, mask = make_tokens(generator, count, 9)
    labels = torch.randint(0, 5, (count,), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}


def translations(generator: torch.Generator, count: int) -> Batch:
    tokens, mask = make_tokens(generator, count, 9)
    answers, answer_mask = make_tokens(generator, count, 6)
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": answers.masked_fill(~answer_mask, -100)}


def images(generator: torch.Generator, count: int) -> Batch:
    labels = torch.randint(0, 5, (count,), generator=generator)
    return {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator), "labels": labels}


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    return GPT2LMHeadModel(config)


def make_gpt2_checkpointed(use_reentrant: bool) -> nn.Module:
    model = make_gpt2()
    newer = getattr(model, "activation_checkpointing_enable", None)  # the name since transformers 5
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
    return model


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )
    )


def make_resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    )


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=61,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=12,
        )
    )


def count_samples(batch: Batch) -> int:
    return len(batch["labels"])


def count_labels(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


def count_next_tokens(batch: Batch) -> int:
    """The first token of a text is predicted from nothing."""
    return int((batch["labels"][:, 1:] != -100).sum())


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator, int], Batch]
    count: Callable[[Batch], int]
    """What the loss is a mean over."""
    special: frozenset[str] = frozenset()
    """The kinds of scheme, beside those for dense gradients, that some of its layers can have."""
    passes: int = 1
    """Backward passes per step: on each rank over parts of its batch."""


ROWS = frozenset({"sparse_rows"})
FACTORS = frozenset({"sufficient_factor"})
CASES = {
    "gpt2": Case(make_gpt2, language, count_next_tokens, ROWS),
    "gpt2_in_two_passes": Case(make_gpt2, language, count_next_tokens, ROWS, passes=2),
    "gpt2_checkpointed": Case(lambda: make_gpt2_checkpointed(use_reentrant=False), language, count_next_tokens, ROWS),
    "gpt2_reentrant": Case(lambda: make_gpt2_checkpointed(use_reentrant=True), language, count_next_tokens, ROWS),
    "bert": Case(make_bert, sentences, count_samples, ROWS | FACTORS),
    "vit": Case(make_vit, images, count_samples, FACTORS),
    "resnet": Case(make_resnet, images, count_samples, FACTORS),
    "t5": Case(make_t5, translations, count_labels, ROWS | FACTORS),
    "llama": Case(make_llama, language, count_next_tokens, ROWS | FACTORS),
}
Parameters = dict[str, torch.Tensor]


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.manual_seed(0)
    model = case.make()
    with torch.no_grad():
        for parameter in model.parameters():  # none starts at zero: differences are relative to its length
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def make_batches(case: Case) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [case.make_batch(generator, SAMPLES) for _ in range(STEPS)]


def part_of(batch: Batch, index: int, count: int) -> Batch:
    return {name: tensor.tensor_split(count)[index] for name, tensor in batch.items()}


def train_alone(rank: int, world_size: int, name: str) -> Parameters:
    """One process on whole batches."""
    model, optimizer = build(CASES[name])
    for batch in make_batches(CASES[name]):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_on_a_part(rank: int, world_size: int, name: str, choice: str) -> tuple[Parameters, set[str]]:
    """One rank on its part of each batch; returns the kinds of scheme that were last in use, too."""
    case = CASES[name]
    model, optimizer = build(case)
    batches = make_batches(case)
    first = part_of(batches[0], 0, world_size)
    plan = choice if choice == "auto" else make_plan(model, choice, world_size, SAMPLES, lambda: model(**first).loss)
    run = poseidon.distribute(model, optimizer, plan)
    run.sync_batch_norm()
    for batch in batches:
        optimizer.zero_grad()
        mine = part_of(batch, rank, world_size)
        for index in range(case.passes):
            some = part_of(mine, index, case.passes)
            with run.no_sync() if index < case.passes - 1 else nullcontext():
                run.weight(case.count(some))
                (model(**some).loss / case.passes).backward()
        optimizer.step()
    run.check_replicas()
    assert choice != "auto" or run.rates is not None, "no plan has been chosen"
    kinds = {scheme.kind for scheme in run.plan.schemes.values()}
    run.detach()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, kinds


CHOSEN = ("gpt2", "bert", "vit", "resnet", "t5", "llama")
"""Which of them train under the plan that is chosen while training, too."""


USUAL = ("gpt2", "t5")
"""The others are like one of these."""


def train_on_parts(rank: int, world_size: int, name: str, choices: list[str]) -> list[tuple[Parameters, set[str]]]:
    return [train_on_a_part(rank, world_size, name, choice) for choice in choices]


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_as_one_process(name: str) -> None:
    """Under the plan that is chosen while training, and with every scheme that a layer can have."""
    choices = ["auto", "mix"] if name in CHOSEN else ["mix"]
    (alone,) = run_ranks(1, train_alone, name)
    results = run_ranks(RANKS, train_on_parts, name, choices, timeout=150.0)
    for of_rank in results:
        for parameters, _ in of_rank:
            assert_close(parameters, alone)
    _, kinds = results[0][-1]
    assert kinds >= CASES[name].special
