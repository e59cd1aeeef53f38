"""Batch normalization as one rank alone computes it, against torch's own."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from poseidon.errors import CommError, InfeasibleError
from poseidon.runtime.batch_norm import BatchNormLayer

CHANNELS = 5
KINDS = [
    (nn.BatchNorm1d, (6, CHANNELS)),
    (nn.BatchNorm1d, (6, CHANNELS, 3)),
    (nn.BatchNorm2d, (4, CHANNELS, 3, 2)),
    (nn.BatchNorm3d, (2, CHANNELS, 3, 2, 2)),
]
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_close(found: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> None:
    assert found is not None
    assert expected is not None
    assert found.dtype == expected.dtype
    length = expected.detach().double().norm().clamp_min(1e-12)
    assert (found.detach().double() - expected.detach().double()).norm() <= tolerance * length


def put_in(module: nn.Module, items: float = 3.0) -> BatchNormLayer:
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    return BatchNormLayer("norm", module, lambda: items)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"momentum": 0.0}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_as_torch_computes_it(
    kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    ours = kind(CHANNELS, **options)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    ours = ours.double() if dtype is torch.float64 else ours
    torchs = copy.deepcopy(ours)
    put_in(ours)
    tolerance = TOLERANCES[dtype]
    for _ in range(3):
        x = (torch.randn(shape) * 2 + 5).to(dtype).requires_grad_()
        y = x.detach().clone().requires_grad_()
        gradient = torch.randn(shape).to(dtype)
        found, expected = ours(x), torchs(y)
        found.backward(gradient)
        expected.backward(gradient)
        assert_close(found, expected, tolerance)
        assert_close(x.grad, y.grad, tolerance)
    for mine, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert_close(mine.grad, other.grad, tolerance)
    for mine, other in zip(ours.buffers(), torchs.buffers(), strict=True):
        assert_close(mine, other, tolerance)


def test_a_channels_last_batch_stays_so() -> None:
    module = nn.BatchNorm2d(CHANNELS)
    put_in(module)
    x = torch.randn(2, CHANNELS, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    output = module(x)
    output.square().sum().backward()
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_an_empty_batch_changes_nothing() -> None:
    module = nn.BatchNorm2d(CHANNELS)
    put_in(module, items=0.0)
    before = copy.deepcopy(dict(module.named_buffers()))
    x = torch.randn(0, CHANNELS, 2, 2, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(torch.equal(before[name], buffer) for name, buffer in module.named_buffers())
    assert all(not parameter.grad.any() for parameter in module.parameters() if parameter.grad is not None)


def test_one_value_per_channel_is_refused_as_torch_does() -> None:
    module = nn.BatchNorm1d(CHANNELS)
    put_in(module)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(torch.randn(1, CHANNELS))


def test_a_loss_that_counts_nothing_cannot_reach_shared_statistics() -> None:
    module = nn.BatchNorm1d(CHANNELS)
    layer = put_in(module, items=0.0)
    layer.hold_backward = lambda part: {0: part, 1: torch.ones_like(part)}
    x = torch.randn(4, CHANNELS, requires_grad=True)
    with pytest.raises(CommError, match="empty_step"):
        module(x).sum().backward()


def test_another_number_of_channels_is_refused() -> None:
    module = nn.BatchNorm2d(CHANNELS, affine=False, track_running_stats=False)
    put_in(module)
    with pytest.raises(InfeasibleError, match=r"5 channels, and the input has 7"):
        module(torch.randn(2, 7, 3, 3))


def test_copies_have_torchs_own_forward() -> None:
    module = nn.BatchNorm1d(CHANNELS)
    layer = put_in(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert getattr(other.forward, "__func__", None) is nn.BatchNorm1d.forward
    layer.remove()
    assert "forward" not in module.__dict__
