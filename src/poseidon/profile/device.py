"""How fast this device computes and copies, measured in a moment: seconds are carried to another device by these."""

import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from poseidon.profile.clock import clock_of
from poseidon.profile.graph import ComputeRates
from poseidon.units import BYTES_PER_FLOAT32, MIB

MATRIX_SIZE = 1024
"""Rows and columns of the matrices that are multiplied: large enough for every processor to be at its best."""
MATRIX_SIZE_GPU = 8192
COPIED_NUM_BYTES = 64 * MIB
"""Of the tensor that is read, and of the one that is written: more than any cache holds."""
COPIED_NUM_BYTES_GPU = 1024 * MIB
SECONDS_EACH = 0.15
"""How long either is repeated, at least twice."""


def measure_compute(device: torch.device | None = None) -> ComputeRates:
    """Multiplies and copies large tensors for about a third of a second.

    The rates are those of whatever else runs at the same time: to know what several ranks of a host get, let all of
    them call this at once.

    Args:
        device: The processor if left out.
    """
    device = device or torch.device("cpu")
    large = device.type == "cuda"
    size = MATRIX_SIZE_GPU if large else MATRIX_SIZE
    count = (COPIED_NUM_BYTES_GPU if large else COPIED_NUM_BYTES) // BYTES_PER_FLOAT32
    with torch.no_grad():
        left, right = (torch.ones(size, size, device=device) for _ in range(2))
        product = torch.empty_like(left)
        product_seconds = seconds_of(lambda: torch.mm(left, right, out=product), device)
        source, target = torch.ones(count, device=device), torch.ones(count, device=device)
        copy_seconds = seconds_of(lambda: torch.mul(source, 2.0, out=target), device)
    return ComputeRates(
        name=device_name(device),
        threads=torch.get_num_threads(),
        flops_per_s=2 * size**3 / product_seconds,
        memory_bandwidth=2 * count * BYTES_PER_FLOAT32 / copy_seconds,
    )


def seconds_of(work: Callable[[], object], device: torch.device, *, seconds: float = SECONDS_EACH) -> float:
    """Median seconds of one call, repeated for so many seconds; the first call, which only warms up, excepted."""
    clock = clock_of(device)
    work()
    clock.settle()
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < 2 or time.perf_counter() - begun < seconds:
        start = clock.read()
        work()
        end = clock.read()
        clock.settle()
        found.append(clock.between(start, end))
    return median(found)


def device_name(device: torch.device) -> str:
    """What the processor or the GPU calls itself."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _processor_name() or platform.processor() or platform.machine() or "unknown processor"


def _processor_name() -> str:
    """On Linux, where `platform.processor` is silent."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
