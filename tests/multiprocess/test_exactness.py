"""Every exact scheme, and their mix, equals one process on the union of the batches, and ranks stay bit-identical."""

import pytest
import torch

from support.exactness import (
    MODELS,
    OPTIMIZERS,
    SCHEME_CHOICES,
    STEPS,
    assert_close,
    make_batches,
    train_alone,
    train_share,
)
from support.ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.thorough]


def train_all(rank, world_size, model_name, batches):
    return {
        (choice, optimizer): train_share(rank, world_size, model_name, optimizer, choice, batches)
        for choice in SCHEME_CHOICES
        for optimizer in OPTIMIZERS
    }


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_one_process_on_the_union(model_name, world_size):
    batches = make_batches(model_name, STEPS, 12)
    expected = {optimizer: train_alone(model_name, optimizer, batches) for optimizer in OPTIMIZERS}
    results = run_ranks(world_size, train_all, model_name, batches)
    for (choice, optimizer), parameters in results[0].items():
        try:
            assert_close(parameters, expected[optimizer])
        except AssertionError as error:
            error.add_note(f"{choice}, {optimizer}")
            raise
        for other in results[1:]:
            for name, value in parameters.items():
                assert torch.equal(other[choice, optimizer][name], value), (choice, optimizer, name)
